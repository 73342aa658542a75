"""Make and load full and sharded state dicts of models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard.checkpoint.state.agreement import mismatch, refused_by_all
from fullshard.checkpoint.state.rows import Key, Row, Source, Tree, full, sharded
from fullshard.comm.text import listed
from fullshard.frontend.sharded import taken_as_it_is
from fullshard.tensors import local_part, taken_by
from fullshard.tensors.form import clean_name


def full_state_dict(
    module: nn.Module, *, rank0_only: bool = True, cpu: bool = True, copies: bool = True
) -> dict[str, Any]:
    """Return the state dict that the unsharded model would have: same names, same order.

    Values are full plain tensors. Parameters, tensor-parallel ones too, are gathered one at a
    time: a rank that gets no result holds only one full parameter. All ranks must call this.

    Inside of ``unshard_params`` values are those of the lent parameters, as they are there; with
    its ``rank0_only`` rank 0 may call this alone, and others get {}.

    Args:
        module: a sharded model, or a part of one.
        rank0_only: return the state dict on the first rank only, and {} on all other ranks.
        cpu: return tensors on the CPU instead of the device.
        copies: False: buffers, and parameters in no unit or lent, share the model's memory, as in
            ``module.state_dict()``, unless they are moved to the CPU.

    Raises:
        ProtocolError: during a forward or a backward, or on the meta device.
    """
    tree = Tree(module, "full_state_dict", may_be_lent=True)
    if tree.is_lent_elsewhere:
        return {}
    rows = full(tree, list(tree.rows()), rank0_only=rank0_only, cpu=cpu, copies=copies)
    return {row.name: value for row, value in rows}


def sharded_state_dict(
    module: nn.Module, *, plain_shards: bool = False, whole_mesh: bool = False
) -> dict[str, Any]:
    """Return a state dict with this rank's shards, as DTensors and RaggedTensors.

    Names lack the prefixes of wrappers. By default nothing is communicated, and tensors have the
    memory and the placements of the parameters, as with PyTorch's ``fully_shard``. With both
    options placements are those of FSDP1's sharded state dicts.

    Args:
        module: a sharded model, or a part of one.
        plain_shards: use only ``Shard`` and ``Replicate``, for readers that know neither strided
            nor ragged shards. Other tensors are gathered and cut again, one at a time.
        whole_mesh: in a model with tensor parallelism, put every tensor on the model's largest
            mesh, replicated over the mesh dims that its own mesh lacks, without communication. A
            tensor whose mesh has its dims in another order stays on that mesh; with
            ``plain_shards`` it is gathered and cut again.

    Raises:
        ProtocolError: as for ``full_state_dict``, and during ``unshard_params``.
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
    """Load a full state dict; each rank copies its part, whatever the layout and the mesh.

    All ranks must call this, each with the whole ``state`` unless ``broadcast_from_rank0`` is True.
    Inside of ``unshard_params`` it is loaded into the lent parameters.

    Args:
        module: a sharded model, or a part of one.
        state: full tensors by name; of tied parameters one name is enough.
        broadcast_from_rank0: send the ``state`` of the first rank to all ranks, one tensor at a
            time; the ``state`` of other ranks is ignored and may be {}.
        strict: refuse names that are missing in ``state`` or in the model.

    Raises:
        ConfigError: on all ranks, if names or shapes do not fit; nothing was changed.
        ProtocolError: as for ``full_state_dict``, and while another rank has full parameters on
            loan.
    """
    load_into(module, state, "load_full_state_dict", send=broadcast_from_rank0, strict=strict)


def load_sharded_state_dict(
    module: nn.Module, state: Mapping[str, Any], *, strict: bool = True
) -> None:
    """Load a sharded state dict, with any placements; see ``load_full_state_dict``.

    Ranks first agree that all of them can load. A DTensor is then copied without communication if
    its mesh and placements are the parameter's, or if it has a larger mesh and is replicated over
    the other mesh dims. Any other DTensor is gathered, one at a time. Plain tensors are taken to
    be whole.

    Raises:
        ConfigError, ProtocolError: as for ``load_full_state_dict``.
    """
    load_into(module, state, "load_sharded_state_dict", strict=strict)


@torch.no_grad()
def load_into(
    module: nn.Module,
    state: Mapping[str, Any],
    what: str,
    *,
    send: bool = False,
    strict: bool,
    agrees: bool = True,
) -> None:
    """Load ``state`` for the call ``what``; see ``load_full_state_dict``.

    Args:
        module: as there.
        state: with full tensors or DTensors.
        what: for messages.
        send: as ``broadcast_from_rank0`` there.
        strict: as there.
        agrees: False: the caller tells the other ranks of errors.
    """
    tree = Tree(module, what, may_be_lent=not send)
    for unit in tree.units:
        unit.check_shown(what)
        unit.wait_for_readers()
    rows = list(tree.rows())
    is_lent = any(unit.is_lent for unit in tree.units)  # the first rank may then load on its own
    with refused_by_all(what, tree.mesh if agrees and not is_lent else None, sends=send):
        values: dict[Key, Any] = {clean_name(name): value for name, value in (state or {}).items()}
        if not send:
            source = Source(values, mesh=None, device=tree.device)
            _check(what, rows, source, strict=strict)
    if send:
        source = Source(values, mesh=tree.mesh, device=tree.device)
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
    # Buffers, parameters in no unit and extra state: PyTorch's way runs their modules' own hooks.
    with taken_as_it_is():
        nn.Module.load_state_dict(module, by_torch, strict=False)
    tree.rewritten()


def _check(what: str, rows: Sequence[Row], source: Source, *, strict: bool) -> None:
    """Refuse names and shapes that the unsharded model would refuse."""
    problems = []
    names = {row.name for row in rows}
    given = {row.identity for row in rows if row.name in source.announced}
    missing = [row.name for row in rows if row.identity not in given]
    unexpected = [str(key) for key in source.announced if key not in names]
    if strict and missing:
        problems.append(f"missing: {listed(missing)}")
    if strict and unexpected:
        problems.append(f"unexpected: {listed(unexpected)}")
    for row in rows:
        if row.name in source.announced and not row.is_free:
            shape = source.announced[row.name].shape
            if shape != row.value.shape:
                got = "no tensor" if shape is None else tuple(shape)
                problems.append(f"{row.name}: got {got}, expected {tuple(row.value.shape)}")
    if problems:
        raise mismatch(f"{what}: the state dict does not fit the model; " + "; ".join(problems))
