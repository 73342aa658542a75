"""The plan of a step: which neighbours in memory are stepped together."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from itertools import pairwise, repeat
from operator import attrgetter, eq, is_, sub
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fullshard._torch import dtensor as _dtensor
from fullshard.optim.flat.run import Run, same
from fullshard.optim.flat.scalars import is_placed_like
from fullshard.optim.inner import Groups, numbered
from fullshard.tensors import FlatPart, flat_part_of, is_ragged, local_part, local_parts


class Position(NamedTuple):
    """The position of a parameter in memory.

    Attributes:
        line: everything that members of a run have in common: their group, the buffers of
            parameters and of gradients, the shift between the two, and the key of their state.
        number: the index in memory order; neighbors have consecutive numbers. None for a parameter
            without elements, which is a neighbor of all parameters on its line.
    """

    line: Hashable
    number: int | None


def find_runs(positions: Sequence[Position | None]) -> list[tuple[int, ...]]:
    """Split all parameters into the fewest runs whose members are neighbors on one line.

    Args:
        positions: one per parameter; None for a parameter without neighbors. On any one line either
            all numbers are None or none is.

    Returns:
        Runs of indices into ``positions``; each run is in memory order, runs by first member.
    """
    lines: dict[Hashable, list[tuple[int, int]]] = {}
    runs: list[tuple[int, ...]] = []
    for index, position in enumerate(positions):
        if position is None:
            runs.append((index,))
            continue
        line = lines.setdefault(position.line, [])
        line.append((len(line) if position.number is None else position.number, index))
    for line in lines.values():
        line.sort()
        cuts = [i for i, (one, two) in enumerate(pairwise(line), 1) if one[0] + 1 != two[0]]
        runs += [tuple(index for _, index in line[a:b]) for a, b in pairwise((0, *cuts, len(line)))]
    return sorted(runs)


def gradients(params: Iterable[Tensor]) -> list[Tensor | None]:
    """Return the gradient of each parameter."""
    return list(map(_grad_of, params))


_grad_of = attrgetter("grad")


class Candidate:
    """A parameter to step, with the positions of its memory and of its gradient's.

    Attributes:
        local: its local tensor.
        part: position of ``local`` in a flat buffer; None if it is in none.
        grad_part: the same for the gradient.
    """

    def __init__(
        self,
        param: Tensor,
        grad: Tensor | None,
        group: int,
        state_key: Hashable,
        on_host: bool | None = None,
    ) -> None:
        """Describe ``param``; without ``grad``, assume a gradient laid out like the parameter.

        Args:
            param: the parameter.
            grad: its gradient.
            group: number of its parameter group.
            state_key: the value that parameters must have in common to share state.
            on_host: see ``Run``.
        """
        self.param, self.group, self.state_key, self.on_host = param, group, state_key, on_host
        self.local = local_part(param)
        self.part = _part_of(self.local)
        self.grad_part = self.part if grad is None else _part_of(local_part(grad))

    def position(self, grad_part: FlatPart | None) -> Position | None:
        """Return the position with the gradient at ``grad_part``; None if either has no buffer."""
        if not self.local.numel():
            kind = (self.local.dtype, self.local.device, self.on_host)
            return Position((self.group, self.state_key, *kind), None)
        if self.part is None or grad_part is None:
            return None
        shift = (grad_part.number - self.part.number, grad_part.start - self.part.start)
        line = (self.group, self.state_key, id(self.part.flat), id(grad_part.flat), *shift)
        return Position(line, self.part.number)


def _part_of(local: Tensor) -> FlatPart | None:
    return flat_part_of(local) if local.layout is torch.strided else None


def plan_runs(candidates: Sequence[Candidate]) -> list[Run]:
    """Return new runs of all candidates."""
    runs = find_runs([one.position(one.grad_part) for one in candidates])
    return [_run_of([candidates[i] for i in run]) for run in runs]


def _run_of(members: Sequence[Candidate]) -> Run:
    first = members[0]
    params = [one.param for one in members]
    if not first.local.numel():
        return Run(params, [0] * len(members), first.on_host)
    if first.part is None and (first.local is first.param or not first.local.is_contiguous()):
        return Run(params, None, first.on_host)
    start = first.part.start if first.part else 0
    offsets = [one.part.start - start if one.part else 0 for one in members]
    return Run(params, offsets, first.on_host)


class StepPlan:
    """The runs of a step, and the facts from which they were computed.

    Attributes:
        runs: one run for each tensor that the inner optimizer steps.
        exposed: parameters that autograd may have saved; it saves unsharded copies of the rest.
    """

    def __init__(
        self,
        groups: Groups,
        grads: Sequence[Tensor | None],
        runs: Sequence[Run],
        candidates: Sequence[Candidate],
    ) -> None:
        """Record the facts on which ``runs`` depend.

        Args:
            groups: the groups of all parameters.
            grads: the gradient of each parameter, or None.
            runs: the runs of all parameters with gradients.
            candidates: the facts from which ``runs`` were made.
        """
        self._params = params = [param for _, param in numbered(groups)]
        self._sizes = [len(group["params"]) for group in groups]
        self._absent = list(map(is_, grads, repeat(None)))
        number_of = {id(param): number for number, param in enumerate(params)}
        self.runs = runs
        self._firsts = [number_of[id(run.params[0])] for run in runs]
        self._placed = [param for run in runs if run.parts is not None for param in run.params]
        self._addresses = self._find()
        self.exposed = [param for run in runs if not run.is_coalesced for param in run.params]
        self._loose = [number_of[id(param)] for param in self.exposed]
        # Parameters that could be one run. Gradients are freed after each step and may come back at
        # other addresses; the run stays whole while their distances stay the same.
        self._mates: list[int] = []
        self._distances: list[int | None] = []  # from the mate before, None for a run's first
        self._outside: int | None = None  # a mate whose gradient is in no buffer
        for those in find_runs([one.position(one.part) for one in candidates]):
            mates = [(number_of[id(candidates[n].param)], candidates[n]) for n in those]
            starts = [(grads[n], one.part.start) for n, one in mates if one.part]
            if len(starts) > 1:
                nbytes = [start * grad.itemsize for grad, start in starts if grad is not None]
                self._mates += [n for n, _ in mates]
                self._distances += [None, *(stop - start for start, stop in pairwise(nbytes))]
                outside = (n for n, one in mates if one.grad_part is None)
                self._outside = next(outside, self._outside)
        self._layout = self._layout_of(grads)

    def is_valid(self, groups: Groups, params: Sequence[Tensor], grads: Sequence[Any]) -> bool:
        """Return whether the runs are still right as far as addresses tell.

        The caller must also ``bind`` memory to them, because addresses prove nothing once a buffer
        has been freed.
        """
        return (
            same(params, self._params)
            and [len(group["params"]) for group in groups] == self._sizes
            and list(map(is_, grads, repeat(None))) == self._absent
            and self._find() == self._addresses
            and self._layout is not None
            and self._layout == self._layout_of(grads)
            and (self._outside is None or _part_of(local_part(grads[self._outside])) is None)
            and _are_ready(self.exposed, [grads[n] for n in self._loose])
        )

    def bind(self, grads: Sequence[Any]) -> bool:
        """Bind memory to all runs; if one run's memory is not found, bind none and return False."""
        memories: list[tuple[Tensor, Tensor]] = []
        for run, first in zip(self.runs, self._firsts, strict=True):
            memory, grad = (run.memory(local_part(one)) for one in (run.params[0], grads[first]))
            if memory is None or grad is None:
                return False
            memories.append((memory, grad))
        for run, bound in zip(self.runs, memories, strict=True):
            run.bind(*bound)
        return True

    def _find(self) -> list[int]:
        return list(map(Tensor.data_ptr, local_parts(self._placed)))

    def _layout_of(self, grads: Sequence[Any]) -> list[bool] | None:
        """Return flags: gradients that are contiguous, then those at the distance they had.

        None if a gradient has no address, such as a sparse one.
        """
        locals_now = list(map(local_part, map(grads.__getitem__, self._mates)))
        try:
            addresses = list(map(Tensor.data_ptr, locals_now))
            contiguous = map(Tensor.is_contiguous, locals_now)
            return [*contiguous, *map(eq, map(sub, addresses[1:], addresses), self._distances[1:])]
        except RuntimeError:
            return None


def align(params: Sequence[Tensor], grads: list[Tensor | None]) -> None:
    """Give gradients in the list ``grads`` the placements of their parameters.

    This communicates, so parameters are taken in the same order on all ranks. A plain optimizer
    leaves such redistribution to the operations of DTensor.
    """
    for number, (param, grad) in enumerate(zip(params, grads, strict=True)):
        if isinstance(param, DTensor) and isinstance(grad, DTensor) and not is_ready(param, grad):
            placed = _placed_like(param, grad)
            grads[number] = placed if type(local_part(placed)) is Tensor else placed.clone()


def _placed_like(param: DTensor, grad: DTensor) -> Tensor:
    if is_ragged(param) and not is_ragged(grad):  # DTensor cannot redistribute to ragged intervals
        return torch.empty_like(param, dtype=grad.dtype).copy_(grad)
    return grad.redistribute(param.device_mesh, param.placements)


def _are_ready(params: Sequence[Tensor], grads: Sequence[Tensor]) -> bool:
    """Return whether ``is_ready`` holds for all pairs; passes in C if they share placements."""
    if _dtensor.share_specs(params, grads):
        return set(map(type, _dtensor.locals_of(grads))) <= {Tensor}
    return all(map(is_ready, params, grads))


def is_ready(param: Tensor, grad: Tensor) -> bool:
    """Return whether the gradient has the parameter's placements and no pending collective."""
    if not isinstance(param, DTensor):
        return True
    return is_placed_like(param, grad) and type(local_part(grad)) is Tensor
