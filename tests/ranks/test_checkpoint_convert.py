"""PyTorch checkpoints convert to ours and back bit for bit, and no code in them runs."""

from __future__ import annotations

import copy
import importlib
import os
import pickle
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from typer.testing import CliRunner

from fullshard import PerParameter, Ragged, checkpoint, fully_shard
from fullshard.checkpoint import convert
from fullshard.cli import app
from fullshard.errors import CheckpointError, ConfigError, FullshardError, UnsupportedError
from tests.kit.checkpoint_files import built, everything, plain, same, saves, stepped
from tests.ranks.pool import RankPool

PATIENCE_S = 240.0  # a busy machine is slow
pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:.*parse.* invariant"),
]


class Extended(nn.Linear):
    """A linear layer with extra state."""

    def get_extra_state(self) -> Any:
        return {"scale": 2.5, "names": ["a", "b"]}

    def set_extra_state(self, state: Any) -> None:
        assert state == {"scale": 2.5, "names": ["a", "b"]}


class Tied(nn.Module):
    """A model with a tied head and tensors of many kinds."""

    def __init__(self, *, is_tied: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, 24)
        self.inner = Extended(24, 24)
        self.head = nn.Linear(24, 40, bias=False)
        if is_tied:
            self.head.weight = self.embedding.weight
        self.register_buffer("small", torch.randn(3, 5).to(torch.bfloat16))
        self.register_buffer("turn", torch.randn(4, dtype=torch.complex128))
        self.register_buffer("nothing", torch.empty(0, 7))
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("scalar", torch.tensor(3))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden: Tensor = self.head(self.inner(self.embedding(tokens)))
        return hidden


def torchs(seed: int, shard: Callable[..., Any] = torch_fully_shard) -> tuple[Any, Any]:
    """Return a model sharded by PyTorch, and its optimizer."""
    model = plain(seed)
    for block in model.blocks:
        shard(block)
    shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def trained(model: Any, optimizer: Any) -> dict[str, Any]:
    """Step twice; return the full state, as PyTorch gathers it."""
    stepped(model, optimizer)
    return gathered(model, optimizer)


def gathered(model: Any, optimizer: Any) -> dict[str, Any]:
    state, optim = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
    found = dict(state)
    for name, kept in optim["state"].items():
        found |= {f"{name}/{key}": value for key, value in kept.items()}
    return found


def torch_saves(path: Path, *, flat: bool) -> dict[str, Any]:
    model, optimizer = torchs(1)
    whole = trained(model, optimizer)
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    state, optim = get_state_dict(model, optimizer, options=options)
    dcp.save({"model": state, "optim": optim, "step": 7, "rates": [0.5, 1]}, checkpoint_id=path)
    return whole


def loads(way: str, path: Path) -> tuple[Any, dict[str, Any]]:
    model, optimizer = built(way, 2)
    extra = checkpoint.load(path, model, optimizer)
    found = everything(model, optimizer)
    rates = [group["lr"] for group in found.pop("groups")]
    return (extra, rates), found


@pytest.mark.parametrize("flat", [False, True])
def test_a_folder_of_pytorch_is_loaded_in_any_layout(
    pool: RankPool, tmp_path: Path, flat: bool
) -> None:
    whole, _ = pool.run(2, torch_saves, tmp_path / "dcp", flat=flat, timeout_s=PATIENCE_S)
    convert(tmp_path / "dcp", tmp_path / "ours")
    info = checkpoint.verify(tmp_path / "ours")
    assert (info.step, info.extra, info.world) == (7, {"step": 7, "rates": [0.5, 1]}, 1)
    for world, way in ((1, "plain"), (2, "ragged"), (3, "one flat"), (4, "tp")):
        for (extra, rates), found in pool.run(
            world, loads, way, tmp_path / "ours", timeout_s=PATIENCE_S
        ):
            assert extra == info.extra and set(rates) == {1e-2}
            assert same(found, whole)


def torch_loads(path: Path) -> dict[str, Any]:
    model, optimizer = torchs(2)
    trained(model, optimizer)  # dcp loads only into existing state
    # The file has no state of parameters that never step; PyTorch makes state for all.
    state, optim = get_state_dict(model, optimizer)
    optim["state"] = {name: kept for name, kept in optim["state"].items() if "spare" not in name}
    found = {"model": state, "optim": optim}
    dcp.load(found, checkpoint_id=path)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=found["model"],
        optim_state_dict=found["optim"],
        options=StateDictOptions(strict=False),
    )
    return gathered(model, optimizer)


@pytest.mark.parametrize(("world", "way"), [(1, "plain"), (3, "ragged"), (4, "ragged tp")])
def test_pytorch_loads_what_was_ours(pool: RankPool, tmp_path: Path, world: int, way: str) -> None:
    pool.run(world, saves, way, tmp_path / "ours", timeout_s=PATIENCE_S)
    whole = torch.load(tmp_path / "ours.pt")
    whole.pop("groups")
    convert(tmp_path / "ours", tmp_path / "dcp", to="dcp")
    for found in pool.run(2, torch_loads, tmp_path / "dcp", timeout_s=PATIENCE_S):
        for name, value in whole.items():
            assert torch.equal(torch.as_tensor(found[name]), torch.as_tensor(value)), name
    convert(tmp_path / "ours", tmp_path / "one.pt", to="torch")
    state = torch.load(tmp_path / "one.pt", weights_only=True)
    assert state["step"] == 2
    found = {**state["model"]}
    for name, kept in state["optim"]["state"].items():
        found |= {f"{name}/{key}": value for key, value in kept.items()}
    assert same(found, whole)
    for path in (tmp_path / "dcp", tmp_path / "one.pt"):
        again = path.with_suffix(".again")
        convert(path, again)
        assert not dict(checkpoint.differences(tmp_path / "ours", again))
        assert checkpoint.inspect(again).extra == {"rates": (1, 0.5)}
        assert checkpoint.inspect(again).step == 2
    left = {one.name for one in tmp_path.iterdir()}
    assert left == {"ours", "ours.pt", "dcp", "one.pt", "dcp.again", "one.again", "latest"}


def stepped_once(model: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.arange(40)).square().mean().backward()
    optimizer.step()
    return optimizer


@pytest.mark.parametrize("kind", ["dcp", "torch"])
@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("steps", [True, False])
def test_ties_extra_state_and_every_kind_of_tensor(
    tmp_path: Path, kind: str, is_tied: bool, steps: bool
) -> None:
    torch.manual_seed(0)
    model = Tied(is_tied=is_tied)
    optimizer = stepped_once(model) if steps else None
    state: dict[str, Any] = {"model": model.state_dict()}
    if optimizer is not None:
        state["model"], state["optim"] = get_state_dict(model, optimizer)
    if kind == "torch":
        torch.save(state, tmp_path / "theirs")
    else:
        dcp.save(state, checkpoint_id=tmp_path / "theirs", no_dist=True)
    convert(tmp_path / "theirs", tmp_path / "ours", step=3)
    assert checkpoint.verify(tmp_path / "ours").step == 3
    torch.manual_seed(1)
    other = Tied(is_tied=is_tied)
    its = stepped_once(other) if steps else None
    checkpoint.load(tmp_path / "ours", other, its)
    for name, value in model.state_dict().items():
        if isinstance(value, Tensor):
            assert torch.equal(other.state_dict()[name], value), name
    if optimizer is not None and its is not None:
        kept, own = (one.state_dict()["state"] for one in (optimizer, its))
        assert all(torch.equal(own[n][key], kept[n][key]) for n in kept for key in kept[n])


@pytest.mark.parametrize("kind", ["dcp", "torch"])
def test_tensors_beside_a_model_are_extra(tmp_path: Path, kind: str) -> None:
    rng = torch.get_rng_state()
    state = {"model": nn.Linear(5, 3).state_dict(), "rng": rng, "step": torch.tensor(5)}
    if kind == "torch":
        torch.save(state, tmp_path / "theirs")
    else:
        dcp.save(state, checkpoint_id=tmp_path / "theirs", no_dist=True)
    convert(tmp_path / "theirs", tmp_path / "ours")
    info = checkpoint.inspect(tmp_path / "ours")
    assert info.step == 5 and info.tensors.keys() == {"model/weight", "model/bias"}
    assert torch.equal(info.extra["rng"], rng)


def as_torchtitan_saves(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the state that torchtitan saves: the model's tensors on top, the rest under keys."""
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    weights, stepped = get_state_dict(model, optimizer, options=options)
    state = {"step": torch.tensor(70, dtype=torch.int32), "ntokens_seen": torch.tensor(1 << 33)}
    beside = {"optimizer": stepped, "lr_scheduler": {"last_epoch": 70}, "train_state": state}
    return {**weights, **beside, "dataloader": {"dp_rank_0": b"rows", "world_size": 1}}


@pytest.mark.parametrize("kind", ["dcp", "torch"])
def test_torchtitan_has_the_training_beside_the_tensors_of_its_model(
    tmp_path: Path, kind: str
) -> None:
    model = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 5))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(5)).sum().backward()
    optimizer.step()
    state = as_torchtitan_saves(model, optimizer)
    if kind == "torch":
        torch.save(state, tmp_path / "theirs")
    else:
        dcp.save(state, checkpoint_id=tmp_path / "theirs", no_dist=True)
    convert(tmp_path / "theirs", tmp_path / "ours")
    info = checkpoint.inspect(tmp_path / "ours")
    of_model = {name for name in info.tensors if name.startswith("model/")}
    assert of_model == {f"model/{name}" for name in model.state_dict()}
    assert (info.step, info.extra["train_state"]["ntokens_seen"].item()) == (70, 1 << 33)
    assert info.extra["dataloader"]["dp_rank_0"] == b"rows"
    other = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 5))
    its = torch.optim.AdamW(other.parameters())
    checkpoint.load(tmp_path / "ours", other, its)
    assert all(torch.equal(its.state[b][key], optimizer.state[a][key])
               for a, b in zip(model.parameters(), other.parameters(), strict=True)
               for key in ("step", "exp_avg", "exp_avg_sq"))  # fmt: skip


@pytest.mark.parametrize("beside", [{}, {"step": 6}])
def test_tensors_of_a_model_are_read_alone_and_beside_a_step(
    tmp_path: Path, beside: dict[str, int]
) -> None:
    model, other = nn.Linear(5, 3), nn.Linear(5, 3)
    torch.save({**model.state_dict(), **beside}, tmp_path / "theirs")
    convert(tmp_path / "theirs", tmp_path / "ours")
    assert checkpoint.inspect(tmp_path / "ours").step == beside.get("step", 0)
    assert checkpoint.load(tmp_path / "ours", other) == (beside or None)
    assert torch.equal(other.weight, model.weight)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (["optimizer"], "has an optimizer, optimizer, and no model: a checkpoint needs a model"),
        (["optimizer", "train_state"], "has an optimizer, optimizer, and no model"),
        (["lr_scheduler", "train_state"], "has no model, its keys are lr_scheduler, train_state:"),
        ([], "has no model, it is empty:"),
    ],
)
def test_without_a_model_it_says_what_is_there(tmp_path: Path, keys: list[str], said: str) -> None:
    model = nn.Linear(5, 3)
    state = as_torchtitan_saves(model, torch.optim.AdamW(model.parameters()))
    torch.save({key: state[key] for key in keys}, tmp_path / "theirs")
    with pytest.raises(ConfigError, match=said):
        convert(tmp_path / "theirs", tmp_path / "ours")
    if keys == ["optimizer"]:
        dcp.save(state["optimizer"], checkpoint_id=tmp_path / "alone", no_dist=True)
        with pytest.raises(ConfigError, match="alone is the state of an optimizer alone"):
            convert(tmp_path / "alone", tmp_path / "ours")


EXTRAS = [None, 0, "", [], {}, {0: "a", 1: "b"}, {"a": {}}, {"a.b": 1, "a": {"b": (2,)}}, 1e-3]


@pytest.mark.parametrize("extra", EXTRAS, ids=repr)
@pytest.mark.parametrize("to", ["dcp", "torch"])
def test_extra_comes_back_as_it_was(tmp_path: Path, extra: Any, to: str) -> None:
    checkpoint.save(tmp_path / "ours", nn.Linear(5, 3), extra=extra, step=3)
    convert(tmp_path / "ours", tmp_path / "theirs", to=to)
    convert(tmp_path / "theirs", tmp_path / "again")
    assert checkpoint.inspect(tmp_path / "again").step == 3
    found = checkpoint.inspect(tmp_path / "again").extra
    assert (type(found), found) == (type(extra), extra)


def loads_layers(path: Path, layout: Any) -> list[Tensor]:
    model = nn.Sequential(*(nn.Linear(7, 9) for _ in range(3)))
    fully_shard(model, layout=layout)
    checkpoint.load(path, model)
    return [*checkpoint.full_state_dict(model, rank0_only=False).values()]


def test_equal_layers_are_loaded_however_they_are_cut(pool: RankPool, tmp_path: Path) -> None:
    layer = nn.Linear(7, 9)
    model = nn.Sequential(*(copy.deepcopy(layer) for _ in range(3)))
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    convert(tmp_path / "dcp", tmp_path / "ours")
    for layout in (PerParameter(), Ragged()):
        for found in pool.run(2, loads_layers, tmp_path / "ours", layout, timeout_s=PATIENCE_S):
            expected = model.state_dict().values()
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_as_many_tensors_as_there_are_need_one_file(tmp_path: Path) -> None:
    model = nn.ParameterList(torch.randn(32, 32) for _ in range(200))
    checkpoint.save(tmp_path / "ours", model, step=1)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 40, hard))
    try:
        convert(tmp_path / "ours", tmp_path / "one.pt", to="torch")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert same(torch.load(tmp_path / "one.pt")["model"], dict(model.state_dict()))


class Runs:
    """An object that runs code when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self._path),)


def crafted(kind: str, path: Path, marker: Path) -> Path:
    """Return a file or folder that would create the folder ``marker`` if it were trusted."""
    if kind == "a file":
        torch.save({"model": nn.Linear(2, 2).state_dict(), "x": Runs(marker)}, path)
        return path
    value = Runs(marker) if kind == "a value" else 1
    dcp.save({"model": {"w": torch.ones(3)}, "x": value}, checkpoint_id=path, no_dist=True)
    if kind == "metadata":
        (path / ".metadata").write_bytes(pickle.dumps(Runs(marker)))
    return path


@pytest.mark.parametrize("kind", ["a file", "a value", "metadata"])
def test_nothing_that_is_read_is_run(tmp_path: Path, kind: str) -> None:
    source = crafted(kind, tmp_path / "source", tmp_path / "marker")
    with pytest.raises(CheckpointError, match=str(source)):
        convert(source, tmp_path / "target")
    assert {one.name for one in tmp_path.iterdir()} == {"source"}


def building(module: str, name: str, attributes: dict[str, Any]) -> bytes:
    """Return a pickle that sets attributes of a class or a function."""
    state = pickle.dumps((None, attributes), 2)[2:-1]
    return b"\x80\x02" + f"c{module}\n{name}\n".encode() + state + b"b."


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("pathlib", "PosixPath"),
        ("torch", "Size"),
        ("torch.distributed.checkpoint.metadata", "Metadata"),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("collections", "OrderedDict"),
    ],
)
def test_metadata_cannot_change_a_class(tmp_path: Path, module: str, name: str) -> None:
    source = saved_by_torch(tmp_path / "source")
    (source / ".metadata").write_bytes(building(module, name, {"is_relative_to": 5, "_str": "x"}))
    with pytest.raises(CheckpointError, match=str(source)):
        convert(source, tmp_path / "target")
    owner = getattr(importlib.import_module(module), name)
    assert getattr(owner, "_str", None) != "x" and getattr(owner, "is_relative_to", None) != 5


def saved_by_torch(path: Path) -> Path:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 3))
    dcp.save({"model": model.state_dict()}, checkpoint_id=path, no_dist=True)
    return path


def linked(path: Path) -> None:
    (path / "__0_0.distcp").rename(path.parent / "other")
    (path / "__0_0.distcp").symlink_to(path.parent / "other")


def outside(path: Path) -> None:
    file = path / ".metadata"
    metadata = pickle.loads(file.read_bytes())  # a file of this test
    (path / "__0_0.distcp").rename(path.parent / "other")
    for place in metadata.storage_data.values():
        place.relative_path = "../other"
    file.write_bytes(pickle.dumps(metadata))


Chunks = list[tuple[tuple[int, ...], tuple[int, ...]]]  # offsets and sizes


def cut_as(chunks: Chunks, shape: tuple[int, ...]) -> Callable[[Path], object]:
    """Return a function that saves one tensor cut into ``chunks``, which need not fit."""

    def make(path: Path) -> None:
        shutil.rmtree(path)
        dcp.save({"model": {"x": torch.zeros(4)}}, checkpoint_id=path, no_dist=True)
        metadata = pickle.loads((path / ".metadata").read_bytes())  # a file of this test
        stored = metadata.state_dict_metadata["model.x"]
        stored.size = torch.Size(shape)
        metadata.storage_data.clear()
        stored.chunks = []
        for number, (offsets, sizes) in enumerate(chunks):
            file = path / f"chunk-{number}"
            torch.save(torch.full(sizes, float(number + 1)), file)
            stored.chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
            index = MetadataIndex("model.x", torch.Size(offsets))
            place = _StorageInfo(file.name, 0, file.stat().st_size)
            metadata.storage_data[index] = place
        (path / ".metadata").write_bytes(pickle.dumps(metadata))

    return make


DAMAGES: dict[str, Callable[[Path], object]] = {
    "data cut off": lambda path: os.truncate(path / "__0_0.distcp", 500),
    "data gone": lambda path: (path / "__0_0.distcp").unlink(),
    "metadata cut off": lambda path: os.truncate(path / ".metadata", 100),
    "metadata of nothing": lambda path: (path / ".metadata").write_bytes(b""),
    "metadata of something else": lambda path: (path / ".metadata").write_bytes(pickle.dumps(5)),
    "data outside": outside,
    "data behind a link": linked,
    "one chunk twice": cut_as([((0,), (2,)), ((0,), (2,))], (4,)),
    "chunks that overlap": cut_as([((0, 0), (3, 1)), ((2, 0), (1, 2)), ((0, 1), (1, 1))], (3, 2)),
    "chunks that leave a gap": cut_as([((0,), (2,)), ((3,), (1,))], (4,)),
    "chunks beyond the end": cut_as([((0,), (2,)), ((3,), (2,))], (4,)),
    "chunks of other dims": cut_as([((0, 0), (2, 1)), ((2, 0), (2, 1))], (4,)),
    "a chunk of fewer dims": cut_as([((), ())], (1,)),
    "a huge shape": cut_as([((0,), (2,))], (1 << 60,)),
}


@pytest.mark.parametrize("damage", list(DAMAGES))
def test_damaged_folders_are_refused(tmp_path: Path, damage: str) -> None:
    source = saved_by_torch(tmp_path / "source")
    DAMAGES[damage](source)
    with pytest.raises(CheckpointError, match=str(source)):
        convert(source, tmp_path / "target")
    assert not (tmp_path / "target").exists()
    assert not [one for one in tmp_path.iterdir() if one.name.startswith(".")]


def test_chunks_that_tile_a_tensor_are_read(tmp_path: Path) -> None:
    corners: Chunks = [((0, 0), (2, 1)), ((2, 0), (1, 1)), ((0, 1), (1, 2)), ((1, 1), (2, 2))]
    source, target = saved_by_torch(tmp_path / "source"), tmp_path / "target"
    cut_as([*corners, ((3, 0), (0, 3))], (3, 3))(source)
    convert(source, target, to="torch")
    found = torch.load(target)["model"]["x"]
    assert found.tolist() == [[1, 3, 3], [1, 4, 4], [2, 4, 4]]


def test_ours_are_verified_as_they_are_converted(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "ours", nn.Linear(500, 500), step=1)
    file = tmp_path / "ours" / "rank-00000.safetensors"
    data = bytearray(file.read_bytes())
    data[-4000] ^= 1
    file.write_bytes(data)
    for to in ("dcp", "torch", "fullshard"):
        with pytest.raises(CheckpointError, match="are not what was written"):
            convert(tmp_path / "ours", tmp_path / "target", to=to)
    assert {one.name for one in tmp_path.iterdir()} == {"ours", "latest"}


def numbered(path: Path) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    state = {"state_dict": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 2}
    torch.save({**state, "other": optimizer.state_dict()}, path)


def test_what_cannot_be_told_apart_is_refused_and_can_be_left_out(tmp_path: Path) -> None:
    numbered(tmp_path / "a.pt")
    target = tmp_path / "ours"
    with pytest.raises(UnsupportedError, match="several optimizers, optimizer, other"):
        convert(tmp_path / "a.pt", target)
    with pytest.raises(UnsupportedError, match="by numbers of parameters"):
        convert(tmp_path / "a.pt", target, leave_out=["other"])
    model = nn.Linear(4, 4)
    state = {"model": model.state_dict(), "optim": torch.optim.SGD(model.parameters()).state_dict()}
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    with pytest.raises(UnsupportedError, match="by numbers of parameters"):
        convert(tmp_path / "dcp", target)
    torch.save({"a._orig_mod.w": torch.ones(2), "a.w": torch.zeros(2)}, tmp_path / "c.pt")
    with pytest.raises(ConfigError, match=r"two tensors that are a\.w without prefixes"):
        convert(tmp_path / "c.pt", target)
    with pytest.raises(ConfigError, match="has no nothing; it has state_dict, optimizer"):
        convert(tmp_path / "a.pt", target, leave_out=["nothing"])
    convert(tmp_path / "a.pt", target, leave_out=["other", "optimizer"])
    assert checkpoint.inspect(target).extra == {"epoch": 2}
    torch.save({"a": {"w": torch.ones(2)}, "b": {"w": torch.ones(2)}}, tmp_path / "b.pt")
    with pytest.raises(ConfigError, match="no model that can be told from the rest"):
        convert(tmp_path / "b.pt", tmp_path / "two")
    convert(tmp_path / "b.pt", tmp_path / "two", leave_out=["b"])
    assert [*checkpoint.inspect(tmp_path / "two").tensors] == ["model/w"]


@pytest.mark.parametrize(
    ("source", "target", "options", "said"),
    [
        ("model.pt", "x", {"to": "onnx"}, "expected one of fullshard, dcp, torch"),
        ("model.pt", "model.pt", {}, "there is something at this path"),
        ("missing", "x", {}, "there is nothing at this path"),
        ("", "x", {}, "no checkpoint of fullshard or PyTorch is in this folder"),
        ("model.pt", "latest", {}, "is a name with a meaning"),
        ("ours", "x", {"leave_out": ["a"]}, "leave_out is for PyTorch's"),
        ("text", "x", {}, "cannot read it"),
        ("list.pt", "x", {}, "holds a list, expected a state dict"),
        ("sparse.pt", "x", {}, "only plain dense tensors can be converted"),
    ],
)
def test_arguments_are_checked_before_anything_is_written(
    tmp_path: Path, source: str, target: str, options: Any, said: str
) -> None:
    torch.save(nn.Linear(2, 2).state_dict(), tmp_path / "model.pt")
    torch.save([1], tmp_path / "list.pt")
    torch.save({"w": torch.eye(3).to_sparse()}, tmp_path / "sparse.pt")
    (tmp_path / "text").write_text("text")
    checkpoint.save(tmp_path / "ours", nn.Linear(2, 2), step=1)
    before = {one.name for one in tmp_path.iterdir()}
    with pytest.raises(FullshardError, match=said):
        convert(tmp_path / source, tmp_path / target, **options)
    assert {one.name for one in tmp_path.iterdir()} == before


def test_the_command(tmp_path: Path) -> None:
    source = saved_by_torch(tmp_path / "source")
    command = ["checkpoint", "convert", str(source), str(tmp_path / "ours"), "--step", "4"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0 and "ours is written" in done.output
    assert checkpoint.inspect(tmp_path / "ours").step == 4
    again = CliRunner().invoke(app, command)
    assert again.exit_code != 0


def test_a_model_on_ranks_loads_what_was_tied_in_a_folder(pool: RankPool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    state = Tied().state_dict()
    dcp.save({"model": state}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    convert(tmp_path / "dcp", tmp_path / "ours")
    assert all(
        pool.run(2, loads_tied, tmp_path / "ours", state["head.weight"], timeout_s=PATIENCE_S)
    )


def loads_tied(path: Path, expected: Tensor) -> bool:
    model = fully_shard(Tied())
    checkpoint.load(path, model)
    assert model.head.weight is model.embedding.weight
    dist.barrier()
    return torch.equal(model.head.weight.full_tensor(), expected)
