"""Weights of ``transformers`` in sharded models and back, equal to the bit."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fullshard
from fullshard import FullyShardedDataParallel, Ragged, checkpoint
from fullshard.checkpoint.format import NewFile
from fullshard.checkpoint.weights import load as importing
from fullshard.checkpoint.weights import save as exporting
from fullshard.checkpoint.weights.names import StoredReader, stored_tensors
from fullshard.errors import (
    CheckpointError,
    ConfigError,
    FailedRankError,
    FullshardError,
    UnsupportedError,
)
from fullshard.progress import Progress, on_progress
from tests.kit.weights import KINDS, SIZES, TOKENS, built
from tests.ranks.pool import RankPool, on_ranks


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(TOKENS).logits
    return found


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save each kind of model with transformers, in several files; return the folder."""
    root = tmp_path_factory.mktemp("saved")
    for kind in KINDS:
        model = built(kind, "cpu")
        for param in model.parameters():  # values that no initialization gives
            param.data.add_(torch.linspace(-0.01, 0.01, param.numel()).view_as(param))
        model.save_pretrained(root / kind, max_shard_size="60KB")
        torch.save(logits(model), root / kind / "logits.pt")
    return root


def tensor_parallel(model: Any, mesh: Any) -> None:
    for layer in model.model.layers:
        plan = {f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
        plan |= {"mlp.gate_proj": ColwiseParallel(), "mlp.up_proj": ColwiseParallel()}
        plan |= {"mlp.down_proj": RowwiseParallel(), "self_attn.o_proj": RowwiseParallel()}  # type: ignore[dict-item]
        parallelize_module(layer, mesh, plan)


def sharded(kind: str, way: str) -> Any:
    """Build a model and shard it; on the meta device, except for a flat one."""
    model = built(kind, "cpu" if way == "flat" else "meta")
    world = dist.get_world_size()
    if way == "flat":
        return FullyShardedDataParallel(model)
    if way == "tp":
        mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
        tensor_parallel(model, mesh["tp"])
        fullshard.shard_blocks(model, mesh["dp"])
    elif way == "hsdp":
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
        fullshard.shard_blocks(model, mesh)
    elif way != "plain":
        layout = Ragged() if way == "ragged" else fullshard.PerParameter()
        fullshard.shard_blocks(model, layout=layout)
    return model


def there_and_back(folder: Path, out: Path, kind: str, way: str) -> float:
    """Load, compare logits, and save; return the largest difference from transformers' logits."""
    model = sharded(kind, way)
    loaded = checkpoint.load_weights(model, folder)
    assert loaded == ([], [])
    apart = (logits(model) - torch.load(folder / "logits.pt")).abs().max().item()
    checkpoint.save_weights(model, out, max_file_nbytes=60_000)
    return apart


WAYS = [
    *[(kind, "ragged", 4) for kind in KINDS],
    *[("llama", way, 4) for way in ("tp", "hsdp", "flat", "plain")],
    ("tied llama", "flat", 2),
    *[(kind, "rows", 1) for kind in KINDS],
    *[("mixtral", way, 4) for way in ("rows", "hsdp", "flat")],
    ("gpt2", "rows", 4),
]


@pytest.mark.parametrize(("kind", "way", "world"), WAYS)
def test_weights_go_there_and_back(
    pool: RankPool, saved: Path, tmp_path: Path, kind: str, way: str, world: int
) -> None:
    from transformers import AutoModelForCausalLM

    apart = pool.run(world, there_and_back, saved / kind, tmp_path / "ours", kind, way)
    assert max(apart) <= (1e-6 if way == "tp" else 0)
    family: Any = AutoModelForCausalLM
    theirs = family.from_pretrained(tmp_path / "ours", dtype=torch.float32).eval()
    assert torch.equal(logits(theirs), torch.load(saved / kind / "logits.pt"))
    assert type(theirs) is type(built(kind, "meta"))
    assert everything_in(tmp_path / "ours").keys() == everything_in(saved / kind).keys()


def loaded_from(folder: Path, kind: str, extra: dict[str, Any]) -> Any:
    """Load a file with additional tensors; return the loaded names, and the difference."""
    altered = folder.parent / "altered"
    if dist.get_rank() == 0:
        altered.mkdir()
        save_file(everything_in(folder) | extra, altered / "model.safetensors")
    dist.barrier()
    model = sharded(kind, "ragged")
    try:
        loaded = checkpoint.load_weights(model, altered)
    except ConfigError as error:
        return str(error), 0.0
    return loaded, (logits(model) - torch.load(folder / "logits.pt")).abs().max().item()


OLD = {
    "llama": [f"model.layers.{n}.self_attn.rotary_emb.inv_freq" for n in range(2)],
    "gpt2": [f"transformer.h.{n}.attn.masked_bias" for n in range(2)],
    "gpt_neox": [f"gpt_neox.layers.{n}.attention.masked_bias" for n in range(2)],
}


@pytest.mark.parametrize("kind", list(OLD))
def test_buffers_that_old_files_hold_are_not_asked_for(
    pool: RankPool, saved: Path, tmp_path: Path, kind: str
) -> None:
    extra = {name: torch.tensor([-1e9]) for name in OLD[kind]}
    folder = Path(shutil.copytree(saved / kind, tmp_path / kind))
    for loaded, apart in pool.run(2, loaded_from, folder, kind, extra):
        assert loaded == ([], []) and apart == 0


def test_names_of_earlier_versions_are_understood(tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForMaskedLM

    config = AutoConfig.for_model("bert", **SIZES)
    family: Any = AutoModelForMaskedLM
    theirs, ours = family.from_config(config), family.from_config(config)
    tensors = {}
    for name, value in theirs.state_dict().items():
        old = name.replace("LayerNorm.weight", "LayerNorm.gamma")
        if not name.startswith("cls.predictions.decoder"):  # a tied weight
            tensors[old.replace("LayerNorm.bias", "LayerNorm.beta")] = value.clone() + 0.01
    save_file(tensors, tmp_path / "model.safetensors")
    assert checkpoint.load_weights(ours, tmp_path) == ([], [])
    config.save_pretrained(tmp_path)
    theirs = family.from_pretrained(tmp_path, dtype=torch.float32)
    for name, value in ours.state_dict().items():
        assert torch.equal(value, theirs.state_dict()[name]), name


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("row", [0, 64])
def test_a_tie_whose_two_tensors_differ_in_the_files_is_refused(
    pool: RankPool, saved: Path, tmp_path: Path, world: int, row: int
) -> None:
    folder = Path(shutil.copytree(saved / "tied llama", tmp_path / "tied llama"))
    head = everything_in(folder)["model.embed_tokens.weight"].clone()
    extra = {"lm_head.weight": head}
    for loaded, apart in pool.run(world, loaded_from, folder, "tied llama", extra):
        assert loaded == ([], []) and apart == 0
    shutil.rmtree(folder.parent / "altered")
    head[row, 3] += 0.5
    for said, _ in pool.run(world, loaded_from, folder, "tied llama", extra):
        assert "model.embed_tokens.weight and lm_head.weight differ in the files" in said
        assert "tie_word_embeddings=False" in said


def everything_in(folder: Path) -> dict[str, Tensor]:
    return {
        name: value
        for file in folder.glob("*.safetensors")
        for name, value in load_file(file).items()
    }


def experts_in_parallel(folder: Path, out: Path) -> bool:
    """Place half of the experts, or of their columns, on each half of the ranks; load and save."""
    from transformers import AutoModelForCausalLM

    family: Any = AutoModelForCausalLM
    whole = family.from_pretrained(folder, dtype=torch.float32)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = built("mixtral", "meta")
    for number, layer in enumerate(model.model.layers):
        experts = layer.mlp.experts
        for name, param in list(experts.named_parameters()):
            placed = distribute_tensor(param.data, mesh["tp"], [Shard(number * 2)])
            setattr(experts, name, nn.Parameter(placed))
    fullshard.shard_blocks(model, mesh["dp"], layout=Ragged())
    checkpoint.load_weights(model, folder)
    found = checkpoint.full_state_dict(model, rank0_only=False)
    same = all(torch.equal(found[name], value) for name, value in whole.state_dict().items())
    checkpoint.save_weights(model, out, max_file_nbytes=30_000)
    return same


def test_experts_may_be_cut_in_any_way(pool: RankPool, saved: Path, tmp_path: Path) -> None:
    assert all(pool.run(4, experts_in_parallel, saved / "mixtral", tmp_path / "ours"))
    ours, theirs = everything_in(tmp_path / "ours"), everything_in(saved / "mixtral")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())


def in_small_pieces(folder: Path, out: Path) -> tuple[float, int]:
    """Load and save with small buffers; return bytes read per byte kept, and the largest buffer."""
    read: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        whole = StoredReader.read

        def counted(*args: Any) -> Tensor:
            found = whole(*args)
            read.append(found.nbytes)
            return found

        patch.setattr(StoredReader, "read", counted)
        patch.setattr(importing, "_BUFFER_NBYTES", 1 << 12)
        patch.setattr(exporting, "_BUFFER_NBYTES", 1 << 12)
        model = sharded("mixtral", "rows")
        checkpoint.load_weights(model, folder)
        kept = sum(param.to_local().nbytes for param in model.parameters())
        pack, largest = exporting.pack, 0

        def weighed(parts: Any, message: Tensor, dtypes: Any) -> None:
            nonlocal largest
            largest = max(largest, message.nbytes)
            pack(parts, message, dtypes)

        patch.setattr(exporting, "pack", weighed)
        checkpoint.save_weights(model, out)
    return sum(read) / kept, max(*read, largest)


def test_no_rank_has_more_than_its_part_and_a_buffer(
    pool: RankPool, saved: Path, tmp_path: Path
) -> None:
    for ratio, largest in pool.run(3, in_small_pieces, saved / "mixtral", tmp_path / "ours"):
        assert ratio == 1
        assert largest <= (1 << 12) + 64
    ours, theirs = everything_in(tmp_path / "ours"), everything_in(saved / "mixtral")
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())


def refused(folder: Path, **options: Any) -> str:
    model = built("llama", "cpu")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(FullshardError) as found:
        checkpoint.load_weights(model, folder, **options)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    return f"{type(found.value).__name__}: {found.value}"


def test_what_does_not_fit_is_told_at_once(saved: Path, tmp_path: Path) -> None:
    tensors = everything_in(saved / "llama")
    missing = tensors.pop("model.norm.weight")
    tensors["model.extra"] = missing.clone()
    save_file(tensors, tmp_path / "model.safetensors")
    said = refused(tmp_path)
    assert "the files lack model.norm.weight; the model lacks model.extra" in said
    tensors["model.norm.weight"] = missing[1:].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    shapes = "model.norm.weight has shape (31,) in the files and (32,) here"
    assert shapes in refused(tmp_path) and shapes in refused(tmp_path, strict=False)
    assert "no-such-folder" in refused(tmp_path / "no-such-folder")


@pytest.mark.parametrize("fault", ["cut off", "gone", "not in the file", "elsewhere", "pickled"])
def test_damaged_files_are_named(saved: Path, tmp_path: Path, fault: str) -> None:
    folder = Path(shutil.copytree(saved / "llama", tmp_path / "llama"))
    index = folder / "model.safetensors.index.json"
    file = sorted(folder.glob("*.safetensors"))[1]
    if fault == "cut off":
        os.truncate(file, file.stat().st_size - 10)
    elif fault == "gone":
        file.unlink()
    elif fault == "pickled":
        index.unlink()
        (folder / "pytorch_model.bin").write_bytes(b"")
    else:
        stored = json.loads(index.read_text())
        where = stored["weight_map"]
        key = next(name for name in where if where[name] != file.name)
        where[key] = "../x.safetensors" if fault == "elsewhere" else file.name
        index.write_text(json.dumps(stored))
    said = refused(folder)
    assert said.startswith("CheckpointError") and str(folder) in said
    assert ("pickles" in said) == (fault == "pickled")


def test_some_weights_and_some_new_ones(saved: Path, tmp_path: Path) -> None:
    """Weights of the base model load without its prefix, and a missing head is initialized."""
    prefix = "model."
    tensors = {
        name.removeprefix(prefix): value
        for name, value in everything_in(saved / "llama").items()
        if name.startswith(prefix)
    }
    save_file({**tensors, "extra": torch.ones(1)}, tmp_path / "model.safetensors")
    model = built("llama", "meta")
    loaded = checkpoint.load_weights(model, tmp_path / "model.safetensors", strict=False)
    assert loaded == (["lm_head.weight"], ["extra"])
    found = model.state_dict()
    assert all(torch.equal(found[f"{prefix}{name}"], value) for name, value in tensors.items())
    head = found["lm_head.weight"]
    assert not head.is_meta and 0 < head.std() < 0.1


def test_dtypes_are_cast(saved: Path, tmp_path: Path) -> None:
    model = built("mixtral", "meta").to(torch.float64)
    checkpoint.load_weights(model, saved / "mixtral")
    assert {value.dtype for value in model.parameters()} == {torch.float64}
    checkpoint.save_weights(model, tmp_path / "half", dtype=torch.bfloat16)
    ours, theirs = everything_in(tmp_path / "half"), everything_in(saved / "mixtral")
    assert all(torch.equal(value, theirs[name].bfloat16()) for name, value in ours.items())
    config = json.loads((tmp_path / "half" / "config.json").read_text())
    assert config["dtype"] == "bfloat16" and config["architectures"] == ["MixtralForCausalLM"]
    with pytest.raises(ConfigError, match="something at this path"):
        checkpoint.save_weights(model, tmp_path / "half")


class Buffered(nn.Module):
    """A module of no library with a buffer that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 5))
        self.register_buffer("table", torch.arange(4.0), persistent=False)


def test_buffers_that_are_not_saved_need_a_value(tmp_path: Path) -> None:
    checkpoint.save_weights(nn.Sequential(Buffered()), tmp_path / "ours")
    with torch.device("meta"):
        model = nn.Sequential(Buffered())
    with pytest.raises(ConfigError, match=r"0.table is on the meta device .* pass load_weights an"):
        checkpoint.load_weights(model, tmp_path / "ours")
    assert model[0].weight.is_meta
    with pytest.raises(ConfigError, match=r"Buffered left 0.table as it was"):
        checkpoint.load_weights(model, tmp_path / "ours", init=lambda module: None)
    with torch.device("meta"):
        model = nn.Sequential(Buffered())
    checkpoint.load_weights(
        model,
        tmp_path / "ours",
        init=lambda module: module.table.copy_(torch.arange(4.0)),  # type: ignore[union-attr,operator]
    )
    assert torch.equal(model[0].table, torch.arange(4.0))
    assert torch.equal(model[0].weight, torch.ones(3, 5))


class Half(nn.Module):
    """A module with a shared buffer, whose reset initializes one of two parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.other = nn.Parameter(torch.ones(4))
        self.register_buffer("table", torch.arange(4.0))

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight)


def test_only_what_the_files_lack_needs_a_value(tmp_path: Path) -> None:
    full = nn.ModuleList([Half(), Half()])
    full[1].table = full[0].table
    state = {name: value.clone() for name, value in full.state_dict().items()}
    save_file({n: v for n, v in state.items() if "weight" not in n}, tmp_path / "a.safetensors")
    save_file({n: v for n, v in state.items() if "other" not in n}, tmp_path / "b.safetensors")
    for name in "ab":
        with torch.device("meta"):
            model = nn.ModuleList([Half(), Half()])
            model[1].table = model[0].table
        file = tmp_path / f"{name}.safetensors"
        if name == "b":
            with pytest.raises(ConfigError, match=r"Half left 0.other as it was"):
                checkpoint.load_weights(model, file, strict=False)
            continue
        loaded = checkpoint.load_weights(model, file, strict=False)
        assert loaded.missing == ["0.weight", "1.weight"]
        assert torch.equal(model[1].table, torch.arange(4.0))  # type: ignore[arg-type]
        assert model[0].weight.std() > 0  # type: ignore[operator,union-attr]


def new_head(folder: Path, way: str) -> Tensor:
    """Load all but the head into sharded replicas, on ranks with different random generators."""
    torch.manual_seed(dist.get_rank())
    model = sharded("llama", way)
    loaded = checkpoint.load_weights(model, folder, strict=False)
    assert loaded.missing == ["lm_head.weight"]
    return checkpoint.full_state_dict(model, rank0_only=False)["lm_head.weight"]


@pytest.mark.parametrize("way", ["hsdp", "ragged", "plain"])
def test_what_is_missing_is_drawn_alike(
    pool: RankPool, saved: Path, tmp_path: Path, way: str
) -> None:
    tensors = everything_in(saved / "llama")
    del tensors["lm_head.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    first, *others = pool.run(4, new_head, tmp_path, way)
    assert first.std() > 0 and all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.complex64])
def test_what_was_quantised_is_not_converted(tmp_path: Path, dtype: torch.dtype) -> None:
    save_file({"weight": torch.ones(2, 3).to(dtype)}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"weight is \w+ in the files and torch.float32 here"):
        checkpoint.load_weights(nn.Linear(3, 2, bias=False), tmp_path, strict=False)


@pytest.mark.parametrize(
    "dtype", [torch.int8, torch.complex64, torch.float8_e4m3fnuz, torch.float8_e4m3fn]
)
def test_weights_are_cast_to_what_files_can_hold(tmp_path: Path, dtype: torch.dtype) -> None:
    with pytest.raises(ConfigError, match="expected a floating-point dtype"):
        checkpoint.save_weights(nn.Linear(3, 2), tmp_path / "ours", dtype=dtype)


def test_models_of_models_initialise_their_own_buffers(tmp_path: Path) -> None:
    from transformers import LlavaConfig, LlavaForConditionalGeneration

    vision = {"model_type": "clip_vision_model", "hidden_size": 16, "num_hidden_layers": 1}
    vision |= {"num_attention_heads": 2, "intermediate_size": 24, "image_size": 8, "patch_size": 4}
    text = {**SIZES, "model_type": "llama"}
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_index=64)
    whole = LlavaForConditionalGeneration(config)
    whole.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = LlavaForConditionalGeneration(config)
    assert checkpoint.load_weights(model, tmp_path) == ([], [])
    buffers = dict(model.named_buffers())
    assert all(torch.equal(value, buffers[name]) for name, value in whole.named_buffers())
    found = model.state_dict()
    assert all(torch.equal(value, found[name]) for name, value in whole.state_dict().items())


def saves_with_trouble(path: Path) -> str:
    model = sharded("llama", "plain" if dist.get_world_size() == 1 else "rows")
    model.to_empty(device="cpu")
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:

            def full(*_: Any) -> None:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

            patch.setattr(NewFile, "write", full)
        patch.setattr(exporting, "_BUFFER_NBYTES", 1 << 12)
        patch.setattr(exporting, "_SMALLEST_FILE_NBYTES", 1 << 12)
        with pytest.raises(CheckpointError) as found:
            checkpoint.save_weights(model, path / "ours")
    assert not any(path.iterdir())
    return str(found.value)


def test_a_full_disk_is_told_on_all_ranks(pool: RankPool, tmp_path: Path) -> None:
    said = pool.run(3, saves_with_trouble, tmp_path)
    assert len(set(said)) == 1
    assert "rank 1: OSError: [Errno 28] No space left" in said[0]


def test_what_is_computed_from_weights_is_refused() -> None:
    class Computed(nn.Module):
        base_model_prefix = "model"
        config = None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "transformers.core_model_loading.revert_weight_conversion",
            lambda model, state: {name: value + 1 for name, value in state.items()},
        )
        with pytest.raises(UnsupportedError, match="weight is no box of a parameter"):
            stored_tensors(Computed(), {"weight": (3, 4)})


def test_extra_state_has_no_place(tmp_path: Path) -> None:
    class Stateful(nn.Linear):
        def get_extra_state(self) -> dict[str, int]:
            return {"a": 1}

        def set_extra_state(self, state: dict[str, int]) -> None: ...

    with pytest.raises(UnsupportedError, match="_extra_state, has no place among weights"):
        checkpoint.save_weights(Stateful(2, 2), tmp_path / "ours")


def test_files_say_what_they_hold(tmp_path: Path) -> None:
    checkpoint.save_weights(nn.Linear(3, 2), tmp_path / "ours")
    with safe_open(tmp_path / "ours" / "model.safetensors", framework="pt") as opened:
        assert opened.metadata() == {"format": "pt"}
    assert sorted(one.name for one in (tmp_path / "ours").iterdir()) == ["model.safetensors"]


@pytest.mark.parametrize("at", ["start", "end"])
@on_ranks(2)
def test_a_listener_that_fails_on_one_rank_ends_the_save_on_all(tmp_path: Path, at: str) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    fullshard.fully_shard(model)

    def listen(progress: Progress) -> None:
        if dist.get_rank() == 1 and (progress.done > 0) == (at == "end"):
            raise ValueError("no more")

    with on_progress(listen), pytest.raises(FailedRankError, match="rank 1: ValueError: no more"):
        checkpoint.save_weights(model, tmp_path / "weights")
    assert not (tmp_path / "weights").exists()
    checkpoint.save_weights(model, tmp_path / "weights")
