"""Full and sharded state dicts on several meshes: names, values, memory, placements, files."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode

import fullshard
from fullshard import checkpoint, errors
from fullshard._torch import dtensor as _dtensor
from fullshard.frontend.ownership import unit_of, units_below
from tests.kit.checkpoint_files import adamw, sharded_adamw, trained
from tests.kit.tensor_parallel import Net, parallelize
from tests.kit.unshard_params import LAYOUTS, WORLDS, full, plain_net, sharded_net
from tests.ranks.models import OddModel, fill, full_parameters, shard_units, shared_folder
from tests.ranks.net import make
from tests.ranks.net import shard as shard_net
from tests.ranks.pool import RankPool, on_ranks

MESHES = pytest.mark.parametrize("mesh", ["1d", "hsdp", "2d"])


def same(one: Any, other: Any) -> None:
    """Check that two nested dictionaries are equal bit for bit and in the same order."""
    assert list(one) == list(other)
    for key, value in one.items():
        if isinstance(value, dict):
            same(value, other[key])
        elif isinstance(value, Tensor):
            assert type(value) is Tensor and value.device.type == "cpu"
            assert value.shape == other[key].shape and torch.equal(value, other[key]), key


class WithMore(nn.Module):
    """A model with buffers, an ignored parameter, a wrapper, extra state and a tie."""

    def __init__(self) -> None:
        super().__init__()
        from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

        self.odd = OddModel()
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("table", torch.arange(4.0))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)
        self.alone = nn.Parameter(torch.ones(3))
        self.inner = checkpoint_wrapper(nn.Linear(3, 4))
        self.count = 0

    def forward(self, x: Tensor) -> Tensor:
        return x

    def get_extra_state(self) -> Any:
        return {"count": self.count}

    def set_extra_state(self, state: Any) -> None:
        self.count = state["count"]


@on_ranks(3)
def test_state_dicts_are_those_of_the_unsharded_model() -> None:
    plain = fill(WithMore())
    plain.count = 7
    names = [name.replace("_checkpoint_wrapped_module.", "") for name in plain.state_dict()]
    expected = dict(zip(names, plain.state_dict().values(), strict=True))
    for layout in (fullshard.PerParameter(), fullshard.Ragged()):
        model: Any = copy.deepcopy(plain)
        fullshard.fully_shard(model.odd.back, layout=layout)
        fullshard.fully_shard(model.inner, layout=layout)
        fullshard.fully_shard(model, layout=layout, ignored_params={model.alone})
        model.unshard()  # state dicts do not depend on the registered parameters
        state = checkpoint.full_state_dict(model, rank0_only=False)
        same({**state, "_extra_state": {}}, {**expected, "_extra_state": {}})
        assert state["_extra_state"] == {"count": 7}
        assert state["odd.head.weight"] is state["odd.embed.weight"]
        first = checkpoint.full_state_dict(model)
        assert list(first) == (names if dist.get_rank() == 0 else [])
        model.reshard()
        for value in state.values():
            if isinstance(value, Tensor):
                value.zero_()  # the tensors are copies
        again = checkpoint.full_state_dict(model, rank0_only=False)
        same({**again, "_extra_state": {}}, {**expected, "_extra_state": {}})
        other: Any = WithMore()
        fullshard.fully_shard(other, layout=layout)
        other.unshard()
        del again["odd.head.weight"]  # tied: one name is enough, as in safetensors files
        before = other.odd.embed.weight
        checkpoint.load_full_state_dict(
            other, again if dist.get_rank() == 0 else {}, broadcast_from_rank0=True
        )
        assert other.odd.embed.weight is before and other.count == 7  # still unsharded, and new
        assert torch.equal(other.odd.embed.weight, expected["odd.embed.weight"])
        other.reshard()
        loaded = checkpoint.full_state_dict(other, rank0_only=False)
        same({**loaded, "_extra_state": {}}, {**expected, "_extra_state": {}})
        sharded = checkpoint.sharded_state_dict(other)
        assert list(sharded) == names
        assert isinstance(sharded["odd.embed.weight"], DTensor)
        checkpoint.load_sharded_state_dict(model, sharded)


@on_ranks(2)
def test_what_does_not_fit_is_refused_before_anything_is_changed() -> None:
    model: Any = shard_net(make())
    state = checkpoint.full_state_dict(model, rank0_only=False)
    before = full_parameters(model)
    wrong = {**state, "scale": torch.ones(7), "more": torch.ones(1)}
    del wrong["head.bias"]
    for sent in (False, True):
        source = wrong if dist.get_rank() == 0 or not sent else {}
        match = r"missing: head\.bias.*unexpected: more.*scale: got \(7,\)"
        with pytest.raises(errors.ConfigError, match=match):
            checkpoint.load_full_state_dict(model, source, broadcast_from_rank0=sent)
    with pytest.raises(RuntimeError, match="does not fit the model"):
        checkpoint.load_sharded_state_dict(model, wrong)
    given = {"blocks.0.bias": state["blocks.0.bias"] + 1}
    sharded = checkpoint.sharded_state_dict(model)
    with pytest.raises(errors.ConfigError, match="rank 0 gave DTensors"):
        checkpoint.load_full_state_dict(model, sharded, broadcast_from_rank0=True)
    assert all(torch.equal(full(p), before[n]) for n, p in model.named_parameters())
    checkpoint.load_full_state_dict(model, given, strict=False)
    assert torch.equal(full(model.blocks[0].bias), before["blocks.0.bias"] + 1)
    optimizer = adamw(model)
    with pytest.raises(errors.ConfigError, match="is not in the FSDPLinear"):
        checkpoint.full_optim_state_dict(model.blocks[0], optimizer)
    loose = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    with pytest.raises(errors.ConfigError, match="parameter number 0"):
        checkpoint.sharded_optim_state_dict(model, loose)
    saved = checkpoint.full_optim_state_dict(model, optimizer, rank0_only=False)
    saved["param_groups"][0]["params"].remove("scale")
    saved["state"]["gone"] = {"step": torch.ones(())}
    with pytest.raises(errors.ConfigError, match=r"lacks: \['scale'\], .* lacks: \['gone'\]"):
        checkpoint.load_full_optim_state_dict(model, optimizer, saved)


def round_trip(mesh: str) -> None:
    """Load full and sharded state of model and optimizer into all layouts; train on."""
    plain = plain_net()
    its = adamw(plain)
    trained(plain, its)
    source = sharded_net(mesh, "per_param")
    optimizer = sharded_adamw(source)
    trained(source, optimizer)
    state = checkpoint.full_state_dict(source)
    optim = checkpoint.full_optim_state_dict(source, optimizer)
    if dist.get_rank() == 0:
        assert all((state[n] - p).abs().max() < 1e-12 for n, p in plain.state_dict().items())
        for name, param in plain.named_parameters():
            for key, value in its.state.get(param, {}).items():
                found = optim["state"][name][key]
                assert type(found) is Tensor and found.shape == value.shape
                assert (found - value).abs().max() < 1e-12, (name, key)
    else:
        assert state == optim == {}
    ends = []
    for layout, make_optimizer in zip(LAYOUTS, (adamw, sharded_adamw) * 2, strict=True):
        model = sharded_net(mesh, layout)
        fresh = make_optimizer(model)
        if layout in ("row", "per_param"):
            checkpoint.load_full_state_dict(model, state, broadcast_from_rank0=True)
            checkpoint.load_full_optim_state_dict(model, fresh, optim, broadcast_from_rank0=True)
        else:
            placed = {"plain_shards": layout == "element", "whole_mesh": layout == "element"}
            parts = checkpoint.sharded_state_dict(source, **placed)
            optim_parts = checkpoint.sharded_optim_state_dict(source, optimizer, **placed)
            checkpoint.load_sharded_state_dict(model, parts)
            checkpoint.load_sharded_optim_state_dict(model, fresh, optim_parts)
        trained(model, fresh, 1)
        ends.append(full_parameters(model))
    trained(plain, its, 1)
    for end in ends:
        for name, param in plain.named_parameters():
            assert (end[name] - param).abs().max() < 1e-12, name


@MESHES
def test_they_go_on_with_any_layout(pool: RankPool, mesh: str) -> None:
    """Full and sharded state resumes in any layout.

    PyTorch's own full state dicts know no ragged placement and raise.
    """
    pool.run(WORLDS[mesh], round_trip, mesh)


@on_ranks(4)
@pytest.mark.parametrize("shape", [(1, 2, 2), (2, 1, 2), (2, 2, 1)])
def test_on_three_dims_each_tensor_is_where_it_belongs(shape: tuple[int, int, int]) -> None:
    """A parameter without tensor parallelism is replicated over "tp" in the state dict."""
    names = ("rep", "dp", "tp")
    grid = init_device_mesh("cpu", shape, mesh_dim_names=names)
    for layout in ("per_param", "element"):
        model = fill(Net(8, 16).double())
        expected = {name: value.clone() for name, value in model.state_dict().items()}
        parallelize(model, grid["tp"])
        shard_units(model, model.blocks, mesh=grid["rep", "dp"], layout=LAYOUTS[layout])
        with CommDebugMode() as counted:
            placed = checkpoint.sharded_state_dict(model, whole_mesh=True)
        assert counted.get_total_counts() == 0
        if layout == "per_param":
            assert placed["gain"].placements == (Replicate(), Shard(0), Replicate())
            assert placed["blocks.0.down.weight"].placements == (Replicate(), Shard(0), Shard(1))
            strided = placed["blocks.0.up.weight"].placements
            assert shape[2] == 1 or isinstance(strided[1], _dtensor.StridedShard)
        assert all(set(v.device_mesh.mesh_dim_names) == set(names) for v in placed.values())
        simple = checkpoint.sharded_state_dict(model, whole_mesh=True, plain_shards=True)
        for name, value in simple.items():
            assert type(value) is DTensor and value.device_mesh.mesh_dim_names == names
            assert all(type(one) in (Shard, Replicate) for one in value.placements)
            assert torch.equal(value.full_tensor(), expected[name])
            assert torch.equal(placed[name].full_tensor(), expected[name])
        assert simple["gain"].placements == (Replicate(), Shard(0), Replicate())
        for values in (placed, simple):
            changed = {name: value * 2 for name, value in values.items()}
            with CommDebugMode() as counted:
                checkpoint.load_sharded_state_dict(model, changed)
            agreement = 2 * grid.ndim  # ranks agree that all can load, once for all tensors
            assert counted.get_total_counts() == agreement or values is simple
            checkpoint.load_full_state_dict(model, expected)
        assert all(torch.equal(full(p), expected[n]) for n, p in model.named_parameters())


def through_files(mesh: str, layout: str) -> None:
    model = sharded_net(mesh, layout)
    optimizer = sharded_adamw(model)
    trained(model, optimizer)
    folder = shared_folder()
    saved = {
        "model": checkpoint.sharded_state_dict(model),
        "optim": checkpoint.sharded_optim_state_dict(model, optimizer),
    }
    dcp.save(saved, checkpoint_id=folder)
    other = sharded_net(mesh, "per_param")
    fresh = adamw(other)
    before = full_parameters(other)
    state = {
        "model": checkpoint.sharded_state_dict(other),
        "optim": checkpoint.sharded_optim_state_dict(other, fresh, template=True),
    }
    assert all(torch.equal(full(p), before[n]) for n, p in other.named_parameters())
    assert all(group["lr"] == 1e-2 for group in fresh.param_groups)
    assert all(param.grad is None for param in other.parameters())
    dcp.load(state, checkpoint_id=folder)
    checkpoint.load_sharded_state_dict(other, state["model"])
    checkpoint.load_sharded_optim_state_dict(other, fresh, state["optim"])
    for one, its in ((model, optimizer), (other, fresh)):
        trained(one, its, 1)
    mine, theirs = full_parameters(other), full_parameters(model)
    assert all((mine[name] - theirs[name]).abs().max() < 1e-12 for name in mine)


def test_files_of_distributed_checkpoint(pool: RankPool) -> None:
    pool.run(3, through_files, "1d", "element")
    pool.run(4, through_files, "2d", "per_param")


@on_ranks(2)
@pytest.mark.parametrize("layout", list(LAYOUTS.values()), ids=list(LAYOUTS))
def test_a_full_state_dict_of_20_units_takes_one_unit_above_the_shards(layout: Any) -> None:
    """The peak memory of a full state dict is at most the largest unit."""
    pairs = (nn.Sequential(nn.Linear(16, 24), nn.Linear(24, 16)) for _ in range(20))
    model = fill(nn.Sequential(*pairs))
    shard_units(model, model, layout=layout)
    units = units_below([model])
    meter: Any = unit_of(model).engine.meter  # type: ignore[union-attr]
    state = checkpoint.full_state_dict(model)
    assert len(state) == (80 if dist.get_rank() == 0 else 0)
    assert sum(meter.held_nbytes.values()) == 0  # between calls, only shards remain
    largest = max(unit.nbytes for unit in units)
    held, unit, total = sum(meter.peak_nbytes.values()), largest, sum(unit.nbytes for unit in units)
    assert 0 < held <= unit < total / 19
