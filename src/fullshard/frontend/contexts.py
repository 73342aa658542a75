"""Full parameters on demand: lent for a ``with`` block, or gathered one after another."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fullshard.comm import gather_over
from fullshard.device import BufferKind
from fullshard.engine import (
    Loan,
    Terms,
    Unit,
    check_lent_alike,
    gather_full_param,
    is_first,
    is_first_copy,
)
from fullshard.errors import ArgumentTypeError, ConfigError, FullshardError, ProtocolError
from fullshard.frontend.hooks import engine_of
from fullshard.frontend.ownership import outside, owner_of, unit_of
from fullshard.frontend.places import Held, Place, held_params, places_of
from fullshard.tensors import local_part, shown_like
from fullshard.tensors.form import clean_name


@contextmanager
def unshard_params(
    module: nn.Module | Sequence[nn.Module],
    *,
    recurse: bool = True,
    writeback: bool = True,
    rank0_only: bool = False,
    offload_to_cpu: bool = False,
    with_grads: bool = False,
    on_error: Literal["keep", "discard"] = "keep",
    check: bool = False,
) -> Iterator[None]:
    """Show full parameters in ``module`` during the ``with`` block, to read and edit them.

    Full parameters are ordinary ``nn.Parameter`` s with their original names, in the dtype of the
    shards. Tied parameters are one object; tensor-parallel parameters are DTensors on the
    tensor-parallel mesh. Full parameters share no memory with the shards. They stay valid after the
    block; each keeps memory allocated, in general that of all parameters of its unit. All ranks
    must enter and leave the block. On exit the modules show the same parameters as before;
    unsharded units stay unsharded.

    Args:
        module: a module that is sharded, contains sharded modules, or is a part of one; or a list
            or tuple of such modules, whose units are lent together. All parameters of a unit are
            shown, even if only some are in ``module``.
        recurse: whether to lend units inside ``module``, too.
        writeback: whether to write edits of parameters, and of their ``requires_grad``, into the
            shards, where each rank writes its own elements. If False, edits are lost.
        rank0_only: only rank 0 of the data-parallel mesh gets full parameters, other ranks see
            their shards; with ``writeback`` the edits of rank 0 reach all ranks.
        offload_to_cpu: put full parameters on the CPU; the device holds one unit at a time.
        with_grads: make ``grad`` full too, and write its edits back. A full ``grad`` is None if no
            rank has a gradient, and zero in the part of a rank that has none.
        on_error: what to do with edits if an exception leaves the block on this rank (with
            ``rank0_only``, on rank 0): "keep" writes them back, "discard" does not.
        check: compare the ranks' edits bit by bit, and raise on all ranks if they differ.

    Forwards in the block run on the lent parameters, in their dtype and without communication;
    ``state_dict()`` returns them and ``load_state_dict()`` writes to them. With ``rank0_only`` only
    rank 0 may do so. Gradients do not come this way: a backward to a lent parameter raises.

    Raises:
        ConfigError, ArgumentTypeError: if arguments cannot work, if ``recurse=False`` leaves no
            unit to lend, or, on exit, if a parameter was replaced by something unusable, or only
            some parameters of a flat parameter were frozen.
        ProtocolError: during a forward or backward, if a unit is already lent or on the meta
            device, or, on exit, if ``check`` found differences here or on tensor-parallel ranks.

    After any of these errors, the units are as usable as before.
    """
    flags = {
        "writeback": writeback,
        "rank0_only": rank0_only,
        "offload_to_cpu": offload_to_cpu,
        "with_grads": with_grads,
    }
    modules = module if isinstance(module, (list, tuple)) else [module]
    with lent(modules, "unshard_params", flags, recurse=recurse, on_error=on_error, check=check):
        yield


@contextmanager
def lent(
    modules: Sequence[Any],
    call: str,
    flags: Mapping[str, bool],
    *,
    recurse: bool,
    on_error: str = "keep",
    check: bool = False,
    may_be_none: bool = False,
) -> Iterator[None]:
    """Do the work of ``unshard_params`` for the public function ``call``.

    With ``may_be_none``, there need not be a unit to lend.
    """
    terms = _checked_terms(call, flags, check=check, on_error=on_error)
    if not modules:
        raise ConfigError(f"{call}: got no module, expected one, or a list of modules")
    found = (_units_to_lend(m, call, recurse=recurse, may_be_none=may_be_none) for m in modules)
    units = list(dict.fromkeys(chain.from_iterable(found)))  # a unit may be in several modules
    _check_lendable(units, call)
    loans: dict[Unit, Loan] = {}
    keep = on_error == "keep"
    try:
        for unit in units:
            loans[unit] = Loan(unit, terms, engine_of(unit).meter)
        yield
        keep = True
    finally:
        _take_back(loans, terms, keep=keep)


def _take_back(loans: Mapping[Unit, Loan], terms: Terms, *, keep: bool) -> None:
    """Restore the modules of all units, then write all or nothing, then raise the first problem."""
    problems = [_tied_across(loans, terms), *(loan.take_back(keep=keep) for loan in loans.values())]
    if terms.check:
        elsewhere = _refused_elsewhere(loans, terms, is_refused=not keep or any(problems))
        problems += [elsewhere] if keep else []  # else the exception of this rank goes on
    if terms.writeback:
        for unit, loan in loans.items():
            loan.write(keep=keep and not any(problems))
            engine_of(unit).rewritten(unit)
    for problem in problems:
        if problem is not None:
            raise problem


def _tied_across(loans: Mapping[Unit, Loan], terms: Terms) -> FullshardError | None:
    """Return an error if a module shows a parameter that another unit lends."""
    if not terms.writeback:
        return None
    lender = {id(param): unit for unit in loans for param in places_of(unit).lent()}
    for unit in loans:
        for slot in places_of(unit).slots():
            other = lender.get(id(slot.params.get(slot.name)), unit)
            if other is not unit:
                return ConfigError(
                    f"parameter {slot.name} of {type(slot.place.module).__name__} in unit "
                    f"{unit.shown_name} was tied inside of {terms.call} to a parameter of "
                    f"unit {other.shown_name}; tied parameters must be in one unit. Nothing "
                    "was written back; tie them before fully_shard"
                )
    return None


def _refused_elsewhere(
    loans: Iterable[Unit], terms: Terms, *, is_refused: bool
) -> FullshardError | None:
    """Return an error if a rank with another part of tensor-parallel parameters keeps no edits.

    A collective of these ranks. Their meshes are dims of one grid, or the same mesh.
    """
    specs = (bucket.spec.parallel or () for unit in loans for bucket in unit.buckets)
    is_anywhere = False
    for mesh in dict.fromkeys(one.mesh for one in chain.from_iterable(specs) if one is not None):
        is_anywhere = any(gather_over(is_refused or is_anywhere, mesh))
    if not is_anywhere:
        return None
    return ProtocolError(
        f"{terms.call} with check=True: edits of another tensor-parallel rank cannot be kept, so "
        "nothing was written back"
    )


def _checked_terms(call: str, flags: Mapping[str, bool], *, check: bool, on_error: str) -> Terms:
    for name, value in (*flags.items(), ("check", check)):
        if not isinstance(value, bool):
            raise ArgumentTypeError(f"{call}({name}={value!r}): expected a bool")
    if on_error not in ("keep", "discard"):
        raise ConfigError(
            f'{call}(on_error={on_error!r}): expected "keep" or "discard", what to do with '
            "edits when an exception leaves the block"
        )
    if check and (flags["rank0_only"] or not flags["writeback"]):
        raise ConfigError(
            f"{call}(check=True): compares what ranks write back; with rank0_only=True only "
            "rank 0 writes, and with writeback=False nobody does. Leave check out"
        )
    return Terms(check=check, call=f"{call}()", **flags)


def _units_to_lend(
    module: nn.Module, call: str, *, recurse: bool, may_be_none: bool = False
) -> list[Unit]:
    """Return the units that own parameters in ``module``; inner units only with ``recurse``.

    Raises:
        ArgumentTypeError: if ``module`` is not a module.
        ConfigError: without ``recurse``, if there are only inner units, unless ``may_be_none``.
    """
    if not isinstance(module, nn.Module):
        raise ArgumentTypeError(
            f"got {type(module).__name__}, expected a module: a sharded one, or one with sharded "
            "modules inside, or a part of one"
        )
    everywhere = _owners_in(module.modules())
    if recurse:
        return everywhere
    own = unit_of(module)
    if own is not None:
        return [own]
    found = _owners_in(outside([module]))
    if everywhere and not found and not may_be_none:
        inner = ", ".join(unit.shown_name for unit in everywhere[:8])
        raise ConfigError(
            f"{call}(recurse=False): {type(module).__name__} was not given to fully_shard, "
            f"and all its sharded parameters belong to units inside of it ({inner}); leave out "
            "recurse=False, or pass one of these"
        )
    return found


def _owners_in(modules: Iterable[nn.Module]) -> list[Unit]:
    """Return the units that have a member or a parameter in ``modules``, outermost first."""
    found: dict[Unit, None] = {}
    for module in modules:
        places = (Place(module, name) for name in module._parameters)
        for unit in (unit_of(module), *map(owner_of, places)):
            if unit is not None:
                found[unit] = None
    return list(found)


def units_at_rest(
    module: nn.Module, what: str, *, without_values: bool = False, may_be_lent: bool = False
) -> list[Unit]:
    """Return the units that own parameters in ``module``, if values can be read and written.

    Raises:
        ArgumentTypeError: if ``module`` is not a module.
        ProtocolError: during a forward or backward. Without ``without_values``, if a unit is on
            the meta device. Without ``may_be_lent``, if a unit is lent. In any case, if some units
            are lent to the first rank and others are not.
    """
    units = _units_to_lend(module, what, recurse=True)
    if may_be_lent:
        check_lent_alike(units, what)
    own = [unit for unit in units if not (may_be_lent and unit.is_lent)]
    (_check_at_rest if without_values else _check_lendable)(own, what)
    return units


def _check_at_rest(units: Sequence[Unit], what: str) -> None:
    for unit in units:
        engine_of(unit).check_not_running(what)
        unit.check_not_lent(what)


def _check_lendable(units: Sequence[Unit], what: str) -> None:
    """Raise if a unit is in use, lent or on the meta device, before anything is changed."""
    _check_at_rest(units, what)
    for unit in units:
        engine_of(unit).prepare([unit])


def iter_full_params(
    module: nn.Module, *, rank0_only: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """Yield names and full values of the parameters of ``module``, one after another.

    Names and order are those of ``named_parameters()`` on the unsharded model. Each tensor is
    gathered when the iterator reaches it, and belongs to the caller. Memory is needed for at most
    two parameters at a time: the yielded one and the tensor that it is made from. Tensor-parallel
    parameters are full as well. Plain parameters that are not sharded are only detached.

    All ranks must iterate to the end, each at its own pace within the process group's time-out, and
    must not change parameters meanwhile.

    Args:
        module: a module that is sharded, contains sharded modules, or is a part of one.
        rank0_only: yield on rank 0 only; other ranks must iterate too, but their loop body never
            runs. Rank 0 is the first of all ranks that hold parameters, tensor-parallel or not.

    Raises:
        ProtocolError: during a forward or backward, while ``unshard_params()`` lends a unit, or if
            parameters are on the meta device.
    """
    units = units_at_rest(module, "iter_full_params")
    return _full_params(module, units, rank0_only=rank0_only)


def _full_params(
    module: nn.Module, units: Sequence[Unit], *, rank0_only: bool
) -> Iterator[tuple[str, Tensor]]:
    is_given = not rank0_only or is_first_rank(units)
    for name, param, held in named_sharded(module, units):
        full = full_value(param) if held is None else full_held(held, rank0_only=rank0_only)
        if full is None or not is_given:
            continue
        if held is None:
            yield name, full
            continue
        with engine_of(held.unit).meter.holding(BufferKind.FULL, full.nbytes):
            yield name, full


def named_sharded(
    module: nn.Module, units: Sequence[Unit]
) -> Iterator[tuple[str, nn.Parameter, Held | None]]:
    """Yield ``named_parameters()`` in sharded form, whatever the modules show; tied ones once.

    Names are those of ``clean_name``. ``Held`` is None for parameters of none of ``units``.
    """
    held_at = held_params(units)
    in_their_place = {place for unit in units for place in places_of(unit).in_their_place()}
    seen: set[object] = set()
    for prefix, inner in module.named_modules():
        for name, shown in inner._parameters.items():
            held = held_at.get(Place(inner, name))
            key = shown if held is None else held
            if key is None or key in seen or Place(inner, name) in in_their_place:
                continue
            seen.add(key)
            full_name = clean_name(f"{prefix}.{name}" if prefix else name)
            yield full_name, shown if held is None else held.param, held


def full_held(held: Held, *, rank0_only: bool = False) -> Tensor | None:
    """Return the full value of a sharded parameter, in new memory; a collective.

    With ``rank0_only``, return None except on the first rank of the parameter's mesh. A plain
    parameter beside tensor-parallel ones has several such meshes, and so several first ranks.
    """
    bucket, spec = held.bucket, held.bucket.spec
    if rank0_only and not is_first_copy(spec):
        return None
    with torch.inference_mode(False), torch.no_grad():
        values, meter = bucket.shards.values(), engine_of(held.unit).meter
        full = gather_full_param(spec, values, held.number, meter)
        if rank0_only and not is_first(spec):
            return None
        if spec.parallel and (parallel := spec.parallel[held.number]) is not None:
            full = parallel.wrap(full).full_tensor()
    return None if rank0_only and any(held.coordinate) else full


def full_value(value: Tensor) -> Tensor:
    """Return ``value``, which no unit owns, detached; gather a DTensor, which is a collective."""
    with torch.no_grad():
        detached = value.detach()
        if not isinstance(detached, DTensor):
            return detached
        local, kind = local_part(detached), detached.device_mesh.device_type
        if local.device.type == "cpu" != kind:  # as optimizer state may be; backends may not be
            moved: Any = shown_like(detached, local.to(kind))
            detached = moved
        return detached.full_tensor()


def is_first_rank(units: Sequence[Unit]) -> bool:
    """Return whether this rank is the first that holds ``units``; rank 0 if there are none."""
    held = held_params(units).values()
    if not held:
        return not dist.is_initialized() or dist.get_rank() == 0
    return not any(any(one.coordinate) for one in held)
