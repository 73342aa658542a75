"""Check that all ranks can load, and have the same optimizer state, before any of it travels.

Ranks that step apart, say because a step raised on one of them, would gather different tensors, and
wait for each other for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import sha256
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fullshard._torch import dtensor as _dtensor
from fullshard.comm import broadcast_object_from_first, gather_over
from fullshard.comm.text import listed
from fullshard.errors import ConfigError
from fullshard.optim.probe import held_by


@contextmanager
def refused_by_all(what: str, mesh: DeviceMesh | None, *, sends: bool) -> Iterator[None]:
    """Raise on all ranks of ``mesh`` if the block raises on one of them; a collective.

    The block must not communicate. Without this, a rank whose argument is refused would leave, and
    the others would wait for it in their next collective.

    Args:
        what: the call, for messages.
        mesh: None: this rank is alone.
        sends: ``broadcast_from_rank0`` of this rank, which all ranks must give alike.

    Raises:
        ConfigError: on the other ranks, if the block raises on some ranks, or if ``sends`` differs.
        Exception: what the block raised, on the ranks where it did.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    rank = dist.get_rank() if dist.is_initialized() else 0
    own = (rank, sends, "" if failure is None else str(failure))
    found = [own] if mesh is None else sorted(gather_over(own, mesh))
    sending = [str(rank) for rank, sends, _ in found if sends]
    if 0 < len(sending) < len(found):
        raise ConfigError(
            f"{what}: broadcast_from_rank0 is True on {'rank' if len(sending) == 1 else 'ranks'} "
            f"{', '.join(sending)} and False on the others; pass the same value on all ranks"
        )
    failed = [(rank, text) for rank, _, text in found if text]
    if failure is None and failed:
        failure = mismatch(f"rank {failed[0][0]}: {failed[0][1]}")
    if failure is not None and len(failed) < len(found) and not sends:
        failure.add_note(
            f"The state fits on {len(found) - len(failed)} of {len(found)} ranks. If only the "
            "first rank has it, pass broadcast_from_rank0=True on all ranks."
        )
    if failure is not None:
        raise failure


class _Mismatch(ConfigError, RuntimeError):
    """A ``RuntimeError`` as well, because PyTorch raises one for state that does not fit."""


def mismatch(message: str) -> ConfigError:
    """Return the error of state that does not fit, with this message."""
    return _Mismatch(message)


class Item(NamedTuple):
    """State that all ranks must have, in one order."""

    name: str
    """The parameter's name."""
    key: str
    """The optimizer's name of the state."""
    form: str = ""
    """Its value if that is one number, else dtype, shape and placements; empty: any will do."""


def items_of(state: Mapping[str, Mapping[str, Any]], shown: Mapping[str, Tensor]) -> Iterator[Item]:
    """Yield the items of ``state`` that all ranks must have: DTensors and single values.

    Args:
        state: by names of parameters.
        shown: the parameters. Those that are plain are each rank's own affair.
    """
    spread = {name: kept for name, kept in state.items() if isinstance(shown[name], DTensor)}
    singles = {one[:2]: one for one in singles_of(spread)}
    for name, kept in state.items():
        for key, value in kept.items():
            if isinstance(value, DTensor):
                yield Item(name, key, _form(value))
            elif (name, key) in singles:
                yield singles[name, key]


def singles_of(state: Mapping[str, Mapping[str, Any]]) -> Iterator[Item]:
    """Yield the state that is one number for each parameter, such as a step count."""
    found = {
        Item(name, key): value
        for name, kept in state.items()
        for key, value in kept.items()
        if isinstance(value, (int, float)) or _is_single(value)
    }
    alike: dict[tuple[torch.device, torch.dtype], list[Item]] = {}
    for one, value in found.items():
        if isinstance(value, Tensor):
            alike.setdefault((value.device, value.dtype), []).append(one)
    for those in alike.values():  # read together, since each read waits for the device
        numbers = torch.stack([found[one].detach().reshape(()) for one in those]).tolist()
        found |= dict(zip(those, numbers, strict=True))
    for (name, key, _), value in found.items():
        yield Item(name, key, str(value))


def _is_single(value: object) -> bool:
    return isinstance(value, Tensor) and not isinstance(value, DTensor) and value.numel() == 1


def _form(value: DTensor) -> str:
    local = _dtensor.local_of(value)
    wrapped = f" of {type(local).__name__}" if held_by(local) else ""
    dtype = str(value.dtype).removeprefix("torch.")
    return f"{dtype}{wrapped} {tuple(value.shape)} placed as {value.placements}"


def check_alike(
    what: str,
    mesh: DeviceMesh | None,
    items: Iterable[Item],
    failure: Exception | None = None,
    *,
    told: Callable[[], None] | None = None,
) -> None:
    """Check that all ranks of ``mesh`` have the same ``items`` in one order; a collective.

    Args:
        what: what is being done, for messages.
        mesh: None: this rank is alone.
        items: of this rank.
        failure: why this rank has none.
        told: called before all ranks raise that they differ, where this rank has items.

    Raises:
        ConfigError: on all ranks, with one text, if they differ.
        Exception: ``failure``, if all ranks fail for the same reason.
    """
    own = list(items) if failure is None else [Item("", str(failure))]
    digest = sha256(repr(own).encode()).digest()
    if mesh is not None and len({*gather_over(digest, mesh)}) > 1:
        first = broadcast_object_from_first(own, mesh)
        first_failed = bool(first) and not first[0].name
        if told is not None and failure is None:
            told()
        said = str(failure) if failure else "" if first_failed else _difference(own, first)
        raise mismatch(
            f"{what}: ranks have different optimizer state; against the first rank: "
            f"{_joined(gather_over((dist.get_rank(), said), mesh))}. Give the optimizers of all "
            "ranks the same parameters and step all of them alike, or load state into all of them"
        ) from failure
    if failure is not None:
        raise failure


def _difference(own: Sequence[Item], first: Sequence[Item]) -> str:
    """Return how ``own`` differs from the items of the first rank; empty if it does not."""
    mine, its = ({one[:2]: one.form for one in items} for items in (own, first))
    lacks = [f"{key} of {name}" for name, key in its if (name, key) not in mine]
    more = [f"{key} of {name}" for name, key in mine if (name, key) not in its]
    others = [
        f"{key} of {name} as {form}, not {its[name, key]}"
        for (name, key), form in mine.items()
        if its.get((name, key), form) != form
    ]
    found = [f"lacks {listed(lacks)}"] if lacks else []
    found += [f"has {listed(more)} besides"] if more else []
    found += [f"has {listed(others)}"] if others else []
    if not found and list(own) != list(first):
        found = ["has the same in another order"]
    return " and ".join(found)


def _joined(said: Iterable[tuple[int, str]]) -> str:
    """Return what ranks say, equal texts together."""
    ranks: dict[str, list[int]] = {}
    for rank, text in said:
        if text:
            ranks.setdefault(text, []).append(rank)
    texts = (f"rank {listed(map(str, sorted(those)))} {text}" for text, those in ranks.items())
    return listed(sorted(texts), between="; ")
