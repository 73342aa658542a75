"""Full parameters on demand: lent for the time of a ``with`` block, or one after the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fullshard.device import Kind
from fullshard.engine import (
    Loan,
    Terms,
    Unit,
    gather_full_param,
    is_first,
    is_first_copy,
)
from fullshard.errors import ArgumentTypeError, ConfigError
from fullshard.frontend.hooks import engine_of
from fullshard.frontend.ownership import managed, owner_of, unit_of
from fullshard.frontend.places import Held, Place, held_params, places_of


@contextmanager
def unshard_params(
    module: nn.Module,
    *,
    recurse: bool = True,
    writeback: bool = True,
    rank0_only: bool = False,
    offload_to_cpu: bool = False,
    with_grads: bool = False,
    on_error: Literal["keep", "discard"] = "keep",
    check: bool = False,
) -> Iterator[None]:
    """Within the ``with`` block the modules show full parameters, to be read and edited.

    They are ordinary ``nn.Parameter`` s under their original names, in the dtype of the shards,
    tied ones one object; tensor-parallel ones are DTensors on the tensor-parallel mesh. They are
    tensors of their own: one that is kept beyond the block stays valid, and keeps its memory (in
    general that of its unit). All ranks must enter and leave the block. On exit the modules show
    what they showed before; units that were unsharded stay so.

    Args:
        module: whatever is in it. Units are lent as a whole, also where ``module`` is a part of
            one.
        recurse: False leaves units inside of ``module`` alone.
        writeback: bring edits of the parameters, and of ``requires_grad``, into the shards: each
            rank its own elements. False: they are lost.
        rank0_only: only rank 0 of the data-parallel mesh gets full parameters, the others see
            their shards; with ``writeback`` rank 0's edits reach all of them.
        offload_to_cpu: the full parameters are on the CPU; the device holds one unit at a time.
        with_grads: their ``grad`` s are full too, and edits of them are written back: None where no
            rank has one, zeros for the part of a rank that has none.
        on_error: what becomes of the edits if an exception leaves the block, on this rank, or with
            ``rank0_only`` on rank 0: "keep" writes them back, "discard" does not.
        check: compare what ranks wrote, bit by bit, and raise on all of them if it differs.

    Raises:
        ConfigError, ArgumentTypeError: arguments that cannot work, ``recurse=False`` where that
            leaves nothing to lend, or, on exit, something else in the place of a parameter.
        ProtocolError: inside of a forward or backward; a unit is lent already, or on the meta
            device; or, on exit, ``check`` found differences.

        Whatever is raised, the units are as usable as before.
    """
    terms = _checked_terms(
        writeback=writeback,
        rank0_only=rank0_only,
        offload_to_cpu=offload_to_cpu,
        with_grads=with_grads,
        check=check,
        on_error=on_error,
    )
    units = _units_to_lend(module, recurse=recurse)
    _check_lendable(units, "unshard_params")
    loans: list[Loan] = []
    keep = on_error == "keep"
    try:
        for unit in units:
            loans.append(Loan(unit, terms, engine_of(unit).meter))
        yield
        keep = True
    finally:
        _take_back(loans, keep=keep)


def _take_back(loans: Sequence[Loan], *, keep: bool) -> None:
    """First restore all, then write all or nothing, then raise."""
    problems = [loan.take_back(keep=keep) for loan in loans]
    for loan in loans:
        loan.write(keep=keep and not any(problems))
    for problem in problems:
        if problem is not None:
            raise problem


def _checked_terms(*, check: bool, on_error: str, **flags: bool) -> Terms:
    for name, value in (*flags.items(), ("check", check)):
        if not isinstance(value, bool):
            raise ArgumentTypeError(f"unshard_params({name}={value!r}): expected a bool")
    if on_error not in ("keep", "discard"):
        raise ConfigError(
            f'unshard_params(on_error={on_error!r}): expected "keep" or "discard", what to do with '
            "edits when an exception leaves the block"
        )
    if check and (flags["rank0_only"] or not flags["writeback"]):
        raise ConfigError(
            "unshard_params(check=True): compares what ranks write back; with rank0_only=True only "
            "rank 0 writes, and with writeback=False nobody does. Leave check out"
        )
    return Terms(check=check, **flags)


def _units_to_lend(module: nn.Module, *, recurse: bool) -> list[Unit]:
    """The units that own parameters in ``module``; those of inner units only with ``recurse``.

    Raises:
        ArgumentTypeError: it is no module.
        ConfigError: without ``recurse`` there is none, but there are inner units.
    """
    if not isinstance(module, nn.Module):
        raise ArgumentTypeError(
            f"got {type(module).__name__}, expected a module: a sharded one, or one with sharded "
            "modules inside, or a part of one"
        )
    everywhere = _owners_in(list(module.modules()))
    if recurse:
        return everywhere
    own = unit_of(module)
    if own is not None:
        return [own]
    found = _owners_in(managed([module]))
    if everywhere and not found:
        inner = ", ".join(unit.name or "(root)" for unit in everywhere[:8])
        raise ConfigError(
            f"unshard_params(recurse=False): {type(module).__name__} was not given to fully_shard, "
            f"and all its sharded parameters belong to units inside of it ({inner}); leave out "
            "recurse=False, or pass one of these"
        )
    return found


def _owners_in(modules: Sequence[nn.Module]) -> list[Unit]:
    """Units of which one of ``modules`` is a member, or holds a parameter; outermost first."""
    found: dict[Unit, None] = {}
    for module in modules:
        places = (Place(module, name) for name in module._parameters)
        for unit in (unit_of(module), *map(owner_of, places)):
            if unit is not None:
                found[unit] = None
    return list(found)


def units_at_rest(module: nn.Module, what: str) -> list[Unit]:
    """The units that own parameters in ``module``, with values that can be read and written.

    Raises:
        ArgumentTypeError: it is no module.
        ProtocolError: inside of a forward or backward, lent, or on the meta device.
    """
    units = _units_to_lend(module, recurse=True)
    _check_lendable(units, what)
    return units


def _check_lendable(units: Sequence[Unit], what: str) -> None:
    """Raises before anything is changed."""
    for unit in units:
        engine_of(unit).check_not_running(what)
        unit.check_not_lent(what)
    for unit in units:
        engine_of(unit).look_after([unit])


def iter_full_params(
    module: nn.Module, *, rank0_only: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """Names and full values of the parameters of ``module``, one after the other.

    Names and order are those of ``named_parameters()`` of the unsharded model. Each tensor is
    gathered when it is asked for, and is the caller's: at most two parameters exist at a time for
    this (the one at hand, and what it is made from). Tensor-parallel parameters are full as well.
    What is not sharded is given as it is, detached.

    All ranks must go through it to the end, each at its own pace within the process group's
    time-out, and not change parameters meanwhile.

    Args:
        module: a sharded module, one with sharded modules inside, or a part of one.
        rank0_only: other ranks take part, but get nothing: their loop has no turns. Rank 0 is the
            first of all that the parameters lie on, tensor-parallel ranks included.

    Raises:
        ProtocolError: inside of a forward or backward, while ``unshard_params()`` lends a unit, or
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
        with engine_of(held.unit).meter.holding(Kind.FULL, full.nbytes):
            yield name, full


def named_sharded(
    module: nn.Module, units: Sequence[Unit]
) -> Iterator[tuple[str, nn.Parameter, Held | None]]:
    """``named_parameters()`` as they are sharded, whatever the modules show, tied ones once.

    Names are clean; None stands with parameters that none of ``units`` owns.
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
    """The full value of a sharded parameter, in memory of its own; a collective.

    With ``rank0_only`` None on all ranks but the first of its mesh, which may be several where a
    plain parameter stands beside tensor-parallel ones.
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
    """A tensor that no unit owns, detached; whole if it is a DTensor, which is a collective."""
    with torch.no_grad():
        detached = value.detach()
        return detached.full_tensor() if isinstance(detached, DTensor) else detached


def is_first_rank(units: Sequence[Unit]) -> bool:
    """Whether this rank is the first of all those that ``units`` lie on, or of all there are."""
    held = held_params(units).values()
    if not held:
        return not dist.is_initialized() or dist.get_rank() == 0
    return not any(any(one.coordinate) for one in held)


WRAPPED = "_fsdp_wrapped_module"
"""What ``FullyShardedDataParallel`` calls the module inside, and so adds to names."""

_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.", f"{WRAPPED}.")


def clean_name(name: str) -> str:
    """``name`` without what wrappers add: of activation checkpoints, of the compiler, ours."""
    for prefix in _WRAPPERS:
        name = name.replace(prefix, "")
    return name
