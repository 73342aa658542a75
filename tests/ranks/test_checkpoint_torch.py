"""State dicts exchanged with PyTorch's FSDP2 and FSDP1, in both directions."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from fullshard import checkpoint
from fullshard.compat import patch_torch
from tests.kit.checkpoint_files import adamw, sharded_adamw, trained
from tests.kit.tensor_parallel import Net, parallelize
from tests.kit.unshard_params import sharded_net
from tests.ranks.models import fill, shard_units
from tests.ranks.pool import RankPool, on_ranks

CASES = [
    (kind, mesh, layout)
    for kind in ("fsdp1", "fsdp2")
    for mesh, layout in (
        *(("1d", "per_param"), ("1d", "element"), ("hsdp", "element")),
        *(("2d", "per_param"), ("2d", "element")),
    )
]


def plain(mesh: str) -> Net:
    """Return an untied, trainable model: FSDP1 unties and unfreezes DTensors.

    On a 2-D mesh all sizes are even, because FSDP2 misreads uneven ones.
    """
    model = Net(*((8, 16) if mesh == "2d" else ())).double()
    if mesh == "2d":
        model.embed = nn.Embedding(16, 8).double()
        model.head = nn.Linear(8, 16, bias=False).double()
    model.requires_grad_(True)
    fill(model)
    return model


def theirs(kind: str, mesh: str) -> Any:
    """Return the same model, sharded by PyTorch."""
    from torch.distributed.fsdp import fully_shard

    model = plain(mesh)
    options: dict[str, Any] = {}
    if mesh == "2d":
        grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        parallelize(model, grid["tp"])
        model.requires_grad_(True)
        options["mesh"] = grid["dp"]
    elif mesh == "hsdp":
        options["mesh"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rep", "dp"))
    else:
        options["mesh"] = init_device_mesh("cpu", (dist.get_world_size(),))
    if kind == "fsdp1":
        return fsdp1(model, options["mesh"])
    return shard_units(model, model.blocks, by=fully_shard, **options)


def fsdp1(model: Net, mesh: Any) -> Any:
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    options: dict[str, Any] = {
        "device_id": torch.device("cpu"),
        "device_mesh": mesh,
        "use_orig_params": True,
    }
    if mesh.ndim == 2:
        options["sharding_strategy"] = ShardingStrategy.HYBRID_SHARD
    warnings.simplefilter("ignore")
    for index, block in enumerate(model.blocks):
        model.blocks[index] = FullyShardedDataParallel(block, **options)
    return FullyShardedDataParallel(model, **options)


def in_form(kind: str, model: Any, *, full: bool) -> Any:
    """Select FSDP1's state dict type in the block."""
    from torch.distributed import fsdp

    if kind != "fsdp1":
        return nullcontext()
    warnings.simplefilter("ignore", FutureWarning)
    cls = fsdp.FullyShardedDataParallel
    if full:
        return cls.state_dict_type(
            model,
            fsdp.StateDictType.FULL_STATE_DICT,
            fsdp.FullStateDictConfig(),
            fsdp.FullOptimStateDictConfig(offload_to_cpu=False),  # else it reads freed CPU memory
        )
    return cls.state_dict_type(
        model,
        fsdp.StateDictType.SHARDED_STATE_DICT,
        fsdp.ShardedStateDictConfig(),
        fsdp.ShardedOptimStateDictConfig(offload_to_cpu=False),
    )


def optim_of_theirs(kind: str, model: Any, optimizer: Any, *, full: bool) -> Any:
    from torch.distributed.fsdp import FullyShardedDataParallel

    if kind == "fsdp1":
        with in_form(kind, model, full=full):
            return FullyShardedDataParallel.optim_state_dict(model, optimizer)
    options = StateDictOptions(full_state_dict=full)
    return get_optimizer_state_dict(model, optimizer, options=options)


def load_theirs(kind: str, model: Any, optimizer: Any, state: Any, optim: Any, full: bool) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    if kind == "fsdp1":
        with in_form(kind, model, full=full):
            model.load_state_dict(state)
            loaded = FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, optim)
        optimizer.load_state_dict(loaded)
        return
    options = StateDictOptions(full_state_dict=full)
    set_model_state_dict(model, state, options=options)
    set_optimizer_state_dict(model, optimizer, optim, options=options)


def whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def same_values(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Check that two state dicts of models or optimizers are equal, sharded or not."""
    assert set(one) == set(other)
    for name, value in one.items():
        if isinstance(value, dict):
            same_values(value, other[name])
        elif isinstance(value, Tensor):
            apart = (whole(value) - whole(other[name])).abs().max()
            assert apart < 1e-12, (name, apart.item())


def ours(mesh: str, layout: str, make_optimizer: Callable[[Any], Any]) -> tuple[Any, Any]:
    model = sharded_net(mesh, layout, model=plain(mesh))
    return model, make_optimizer(model)


def from_theirs(kind: str, mesh: str, layout: str) -> None:
    source = theirs(kind, mesh)
    its_optimizer = adamw(source)
    trained(source, its_optimizer)
    for full, make_optimizer in ((False, adamw), (True, sharded_adamw)):
        with in_form(kind, source, full=full):
            state = {n: whole(v) if full else v for n, v in source.state_dict().items()}
        optim = optim_of_theirs(kind, source, its_optimizer, full=full)
        model, optimizer = ours(mesh, layout, make_optimizer)
        if full:
            checkpoint.load_full_state_dict(model, state)
            checkpoint.load_full_optim_state_dict(model, optimizer, optim)
        else:
            checkpoint.load_sharded_state_dict(model, state)
            checkpoint.load_sharded_optim_state_dict(model, optimizer, optim)
        same_values(checkpoint.full_state_dict(model, rank0_only=False), state)
        got = checkpoint.full_optim_state_dict(model, optimizer, rank0_only=False)
        same_values(got["state"], optim["state"])
        trained(model, optimizer, 1)  # the loaded model trains on like the source
    trained(source, its_optimizer, 1)
    with in_form(kind, source, full=False):
        same_values(checkpoint.full_state_dict(model, rank0_only=False), source.state_dict())


def to_theirs(kind: str, mesh: str, layout: str) -> None:
    model, optimizer = ours(mesh, layout, sharded_adamw)
    trained(model, optimizer)
    for full in (False, True):
        target = theirs(kind, mesh)
        its_optimizer = adamw(target)
        if kind == "fsdp1":
            trained(target, its_optimizer, 1)
        if full and mesh == "2d" and kind == "fsdp1":
            continue  # FSDP1 cannot load full tensors on a 2-D mesh
        if full:
            state = checkpoint.full_state_dict(model, rank0_only=False)
            optim = checkpoint.full_optim_state_dict(model, optimizer, rank0_only=False)
        else:
            placed = {"plain_shards": layout != "per_param" or kind == "fsdp1"}
            placed["whole_mesh"] = kind == "fsdp1"
            state = checkpoint.sharded_state_dict(model, **placed)
            optim = checkpoint.sharded_optim_state_dict(model, optimizer, **placed)
        expected = checkpoint.full_state_dict(model, rank0_only=False)
        load_theirs(kind, target, its_optimizer, state, optim, full)
        with in_form(kind, target, full=False):
            same_values(target.state_dict(), expected)
        trained(target, its_optimizer, 1)
    trained(model, optimizer, 1)
    expected = checkpoint.full_state_dict(model, rank0_only=False)
    if not (mesh == "2d" and kind == "fsdp1"):
        with in_form(kind, target, full=False):
            same_values(target.state_dict(), expected)


@pytest.mark.parametrize(("kind", "mesh", "layout"), CASES)
def test_what_they_save_we_load(pool: RankPool, kind: str, mesh: str, layout: str) -> None:
    pool.run(3 if mesh == "1d" else 4, from_theirs, kind, mesh, layout)


@pytest.mark.parametrize(("kind", "mesh", "layout"), CASES)
def test_what_we_save_they_load(pool: RankPool, kind: str, mesh: str, layout: str) -> None:
    pool.run(3 if mesh == "1d" else 4, to_theirs, kind, mesh, layout)


@on_ranks(3)
@pytest.mark.parametrize(("mesh", "layout"), [("1d", "per_param"), ("1d", "element")])
def test_the_first_rank_reads_for_all(mesh: str, layout: str) -> None:
    """PyTorch's setters broadcast weights and optimizer state from the first rank."""
    alone = plain(mesh)
    own = adamw(alone)
    trained(alone, own)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    is_first = dist.get_rank() == 0
    with patch_torch():
        model, optimizer = ours(mesh, layout, adamw)
        for at_first in (True, False):  # first into no optimizer state, then into other state
            set_model_state_dict(model, alone.state_dict() if is_first else {}, options=options)
            # The optimizer would share its step counts with the given state.
            state = copy.deepcopy(get_optimizer_state_dict(alone, own)) if is_first else {}
            set_optimizer_state_dict(model, optimizer, state, options=options)
            found = checkpoint.full_state_dict(model, rank0_only=False)
            same_values(found, alone.state_dict())
            got = checkpoint.full_optim_state_dict(model, optimizer, rank0_only=False)
            same_values(got["state"], get_optimizer_state_dict(alone, own)["state"])
            if at_first:
                trained(model, optimizer)


@on_ranks(2)
@pytest.mark.parametrize("patched", [False, True], ids=["alone", "patched"])
@pytest.mark.parametrize("layout", ["per_param", "element"])
def test_pytorch_saves_beside_the_training(tmp_path: Path, layout: str, patched: bool) -> None:
    folder = tmp_path / "saved"
    with patch_torch() if patched else nullcontext():
        model, optimizer = ours("1d", layout, adamw)
        trained(model, optimizer)
        state, optim = get_state_dict(model, optimizer)
        before = checkpoint.full_state_dict(model, rank0_only=False)
        store = {"model": state, "optim": optim}
        saving = dcp.async_save(store, checkpoint_id=folder, process_group=dist.new_group())
        saving.result()  # type: ignore[union-attr]
        trained(model, optimizer)
        state, optim = get_state_dict(model, optimizer)
        store = {"model": state, "optim": optim}
        dcp.load(store, checkpoint_id=folder)
        set_state_dict(model, optimizer, model_state_dict=state, optim_state_dict=optim)
        same_values(checkpoint.full_state_dict(model, rank0_only=False), before)
