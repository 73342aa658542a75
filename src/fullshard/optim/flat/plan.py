"""The plan of a step: which neighbours in memory are stepped together."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import pairwise, repeat
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fullshard._torch import dtensor as _dtensor
from fullshard.optim.flat.run import Run, same
from fullshard.optim.flat.scalars import is_placed_like
from fullshard.optim.inner import Groups
from fullshard.tensors import flat_part_of, flat_starts, is_ragged, local_part, local_parts


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
        key, number = position or (("alone", index), 0)
        line = lines.setdefault(key, [])
        line.append((len(line) if number is None else number, index))
    for line in lines.values():
        line.sort()
        cuts = [i for i, (one, two) in enumerate(pairwise(line), 1) if one[0] + 1 != two[0]]
        runs += [tuple(index for _, index in line[a:b]) for a, b in pairwise((0, *cuts, len(line)))]
    return sorted(runs)


class Candidate:
    """A parameter to step, and the facts that decide about its run.

    Attributes:
        local: its local tensor.
        part: position of ``local`` in a flat buffer; None if it is in none.
        position: see ``find_runs``.
    """

    def __init__(
        self,
        group: int,
        param: Tensor,
        grad: Tensor | None,
        state_key: Hashable,
        on_host: bool | None,
    ) -> None:
        """Describe ``param``; without ``grad``, assume a gradient laid out like the parameter.

        Args:
            group: number of its parameter group.
            param: the parameter.
            grad: its gradient.
            state_key: the value that parameters must have in common to share state.
            on_host: see ``Run``.
        """
        self.param, self.group, self.on_host = param, group, on_host
        self.local = local_part(param)
        self.part = flat_part_of(self.local)
        self.position: Position | None = None
        grad_part = self.part if grad is None else flat_part_of(local_part(grad))
        if not self.local.numel():
            kind = (self.local.dtype, self.local.device, on_host)
            self.position = Position((group, state_key, *kind), None)
        elif self.part is not None and grad_part is not None:
            shift = (grad_part.number - self.part.number, grad_part.start - self.part.start)
            line = (group, state_key, id(self.part.flat), id(grad_part.flat), *shift)
            self.position = Position(line, self.part.number)


def plan_runs(candidates: Sequence[Candidate]) -> list[Run]:
    """Return new runs of all candidates."""
    runs = find_runs([one.position for one in candidates])
    return [_run_of([candidates[i] for i in run]) for run in runs]


def _run_of(members: Sequence[Candidate]) -> Run:
    first = members[0]
    offsets: list[int] | None = [0] * len(members)
    if first.part is not None:
        offsets = [one.part.start - first.part.start for one in members if one.part]
    elif first.local.numel() and (first.local is first.param or not first.local.is_contiguous()):
        offsets = None
    return Run([one.param for one in members], offsets, first.on_host, first.group)


class StepPlan:
    """The runs of a step, and the facts from which they were computed.

    Attributes:
        runs: one run for each tensor that the inner optimizer steps.
        exposed: parameters that autograd may have saved; it saves unsharded copies of the rest.
    """

    def __init__(
        self,
        groups: Groups,
        params: Sequence[Tensor],
        grads: Sequence[Tensor | None],
        runs: Sequence[Run],
        candidates: Sequence[Candidate],
    ) -> None:
        """Record the facts on which ``runs`` depend.

        Args:
            groups: the groups of all parameters.
            params: all parameters.
            grads: the gradient of each parameter, or None.
            runs: the runs of all parameters with gradients.
            candidates: the facts about these parameters.
        """
        self.runs = runs
        self._params = params
        self._sizes = [len(group["params"]) for group in groups]
        self._absent = list(map(is_, grads, repeat(None)))
        number_of = {id(param): number for number, param in enumerate(params)}
        self._firsts = [number_of[id(run.params[0])] for run in runs]
        self.exposed = [param for run in runs if not run.is_coalesced for param in run.params]
        self._loose = [number_of[id(param)] for param in self.exposed]
        # In memory order, so that parameters that can be one run follow each other.
        parts = [(number_of[id(one.param)], one.part) for one in candidates]
        placed = sorted((id(part.flat), part.number, number) for number, part in parts if part)
        self._placed = [number for *_, number in placed]
        self._alone = [number for number, part in parts if not part]
        self._places = self._places_now(params, grads)

    def is_valid(self, groups: Groups, params: Sequence[Tensor], grads: Sequence[Any]) -> bool:
        """Return whether the runs are still right."""
        return (
            same(params, self._params)
            and [len(group["params"]) for group in groups] == self._sizes
            and list(map(is_, grads, repeat(None))) == self._absent
            and self._places is not None
            and self._places == self._places_now(params, grads)
            and _are_ready(self.exposed, [grads[n] for n in self._loose])
        )

    def bind(self, grads: Sequence[Any]) -> None:
        """Bind memory to all runs."""
        found = [
            (run.memory(local_part(run.params[0])), run.memory(local_part(grads[first])))
            for run, first in zip(self.runs, self._firsts, strict=True)
        ]
        for run, (param, grad) in zip(self.runs, found, strict=True):
            run.bind(param, grad)

    def _places_now(self, params: Sequence[Tensor], grads: Sequence[Any]) -> list[Any] | None:
        """Return the positions of parameters, and of the gradients of parameters in buffers.

        The list has all starts in buffers, then whether neighbours share a buffer, then whether
        each tensor is contiguous. Return None if a gradient has no memory, such as a sparse one.
        """
        shown = [params[n] for n in (*self._alone, *self._placed)]
        locals_now = local_parts(shown + [grads[n] for n in self._placed])
        try:
            flats, starts = flat_starts(locals_now)
        except RuntimeError:
            return None
        return [*starts, *map(is_, flats, flats[1:]), *map(Tensor.is_contiguous, locals_now)]


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
