"""State dicts of models."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fullshard.checkpoint.source import Key, Source
from fullshard.checkpoint.tree import Row, Tree, full, sharded
from fullshard.errors import ConfigError
from fullshard.frontend.contexts import clean_name
from fullshard.frontend.sharded import taken_as_it_is
from fullshard.tensors import local_part, taken_by


def full_state_dict(
    module: nn.Module, *, rank0_only: bool = True, cpu: bool = True, copies: bool = True
) -> dict[str, Any]:
    """The state dict of the unsharded model: whole plain tensors, under its names, in its order.

    Parameters are gathered one at a time, tensor-parallel ones too; on ranks that get nothing only
    that one is in memory meanwhile. All ranks must call this.

    Args:
        module: a sharded model, or a part of one.
        rank0_only: only the first rank gets it, the others an empty dictionary.
        cpu: on the CPU, not on the device.
        copies: False: buffers, and parameters that no unit owns, are the model's own, as in
            ``module.state_dict()``, where they need not be moved.

    Raises:
        ProtocolError: inside of a forward or backward, while parameters are lent, or on ``meta``.
    """
    tree = Tree(module, "full_state_dict")
    rows = full(tree, list(tree.rows()), rank0_only=rank0_only, cpu=cpu, copies=copies)
    return {row.name: value for row, value in rows}


def sharded_state_dict(
    module: nn.Module, *, plain_shards: bool = False, whole_mesh: bool = False
) -> dict[str, Any]:
    """What each rank holds, as DTensors and RaggedTensors around the live shards.

    Names are clean. By default nothing is communicated, and tensors are placed as parameters are,
    which is what ``torch.distributed.fsdp.fully_shard`` does. With both options they are placed as
    in FSDP1's sharded state dicts.

    Args:
        module: a sharded model, or a part of one.
        plain_shards: use ``Shard`` and ``Replicate`` only, for readers that know neither strided
            nor ragged shards; what is placed otherwise is gathered, one tensor at a time, and cut.
        whole_mesh: on a model with tensor-parallel parameters let all lie on the whole mesh, the
            others replicated over the tensor-parallel dims. It takes no communication. Parameters
            whose cuts only a mesh in another order can express stay on that; with
            ``plain_shards`` they are gathered and cut anew.

    Raises:
        ProtocolError: as for ``full_state_dict``.
    """
    tree = Tree(module, "sharded_state_dict")
    mesh = tree.mesh if whole_mesh else None
    with torch.no_grad():
        rows = sharded(tree.rows(), mesh, plain_shards=plain_shards)
        return {row.name: value for row, value in rows}


def load_full_state_dict(
    module: nn.Module,
    state: Mapping[str, Any],
    *,
    broadcast_from_rank0: bool = False,
    strict: bool = True,
) -> None:
    """Load whole tensors: each rank takes its part. Any layout, any mesh.

    Args:
        module: a sharded model, or a part of one.
        state: by name. Of tied parameters one name is enough.
        broadcast_from_rank0: only the first rank has ``state``, the others pass anything; tensors
            are sent one at a time.
        strict: refuse names that one side lacks.

    Raises:
        ConfigError: names or shapes that do not fit; on all ranks, before anything was changed.
        ProtocolError: as for ``full_state_dict``.
    """
    _load(module, state, "load_full_state_dict", send=broadcast_from_rank0, strict=strict)


def load_sharded_state_dict(
    module: nn.Module, state: Mapping[str, Any], *, strict: bool = True
) -> None:
    """Load DTensors, placed as ours are or in another way.

    What lies as our parameters do is copied; so is what lies so on a larger mesh, and is
    replicated over the rest of it. Anything else is gathered, one tensor at a time. Plain tensors
    are taken to be whole.

    Raises:
        ConfigError, ProtocolError: as for ``load_full_state_dict``.
    """
    _load(module, state, "load_sharded_state_dict", send=False, strict=strict)


@torch.no_grad()
def _load(
    module: nn.Module, state: Mapping[str, Any], what: str, *, send: bool, strict: bool
) -> None:
    tree = Tree(module, what)
    rows = list(tree.rows())
    values: dict[Key, Any] = {clean_name(name): value for name, value in (state or {}).items()}
    source = Source(values, mesh=tree.mesh if send else None, device=tree.device)
    _check(what, rows, source, strict=strict)
    by_torch: dict[str, Any] = {}
    for row in rows:
        if row.name not in source.announced:
            continue
        value = source.get(row.name)
        if isinstance(row.value, DTensor):
            local_part(row.value).copy_(taken_by(row.value, value))
        else:
            is_spread = isinstance(value, DTensor)
            by_torch[row.own_name] = value.full_tensor() if is_spread else value
    # Buffers, parameters that no unit owns and extra state, with whatever their modules do to them.
    with taken_as_it_is():
        nn.Module.load_state_dict(module, by_torch, strict=False)
    tree.rewritten()


def _check(what: str, rows: Sequence[Row], source: Source, *, strict: bool) -> None:
    """Refuse what does not fit, as the unsharded model would."""
    problems = []
    names = {row.name for row in rows}
    # Of tied ones one name is enough.
    given = {id(row.value) for row in rows if row.name in source.announced}
    missing = [row.name for row in rows if id(row.value) not in given]
    unexpected = [str(key) for key in source.announced if key not in names]
    if strict and missing:
        problems.append(f"missing: {_some(missing)}")
    if strict and unexpected:
        problems.append(f"unexpected: {_some(unexpected)}")
    for row in rows:
        if row.name in source.announced and isinstance(row.value, Tensor):
            shape = source.shape_of(row.name)
            if shape != row.value.shape:
                got = "no tensor" if shape is None else tuple(shape)
                problems.append(f"{row.name}: got {got}, expected {tuple(row.value.shape)}")
    if problems:
        raise _Mismatch(f"{what}: the state dict does not fit the model; " + "; ".join(problems))


def _some(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


class _Mismatch(ConfigError, RuntimeError):
    """PyTorch raises a RuntimeError here."""
