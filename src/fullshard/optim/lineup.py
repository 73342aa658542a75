"""The runs of a step, and whether they are still right for the step after."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import repeat
from operator import add, attrgetter, is_
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fullshard.optim.groups import Groups, numbered
from fullshard.optim.run import Run, same
from fullshard.optim.runs import Place, find_runs
from fullshard.optim.states import is_placed_like
from fullshard.tensors import FlatPart, flat_part_of, is_ragged, local_part


def gradients(params: Iterable[Tensor]) -> list[Tensor | None]:
    """The gradient of each."""
    return list(map(_grad_of, params))


_grad_of = attrgetter("grad")


@dataclass(frozen=True, slots=True)
class Candidate:
    """A parameter that steps, and where it and its gradient lie.

    Attributes:
        group: the number of its group.
        age: what parameters must have in common to share state.
        local: this rank's part.
        part: where that lies in a buffer, if in one.
        grad_part: the same of the gradient.
    """

    param: Tensor
    group: int
    age: Hashable
    local: Tensor
    part: FlatPart | None
    grad_part: FlatPart | None

    @classmethod
    def of(cls, param: Tensor, grad: Tensor | None, group: int, age: Hashable) -> Candidate:
        """``grad`` None: it will lie as the parameter does."""
        local = local_part(param)
        part = _part_of(local)
        grad_part = part if grad is None else _part_of(local_part(grad))
        return cls(param, group, age, local, part, grad_part)

    def place(self, *, by_grad: bool) -> Place | None:
        """Where this stands; without ``by_grad``, if its gradient lay as well as can be."""
        if not self.local.numel():
            return Place((self.group, self.age, self.local.dtype, self.local.device), None)
        grad_part = self.grad_part if by_grad else self.part
        if self.part is None or grad_part is None:
            return None
        shift = (grad_part.number - self.part.number, grad_part.start - self.part.start)
        line = (self.group, self.age, id(self.part.flat), id(grad_part.flat), *shift)
        return Place(line, self.part.number)


def _place_of_gradient(param: Tensor) -> FlatPart | None:
    return None if param.grad is None else _part_of(local_part(param.grad))


def _part_of(local: Tensor) -> FlatPart | None:
    return flat_part_of(local) if local.layout is torch.strided else None


class Freedom(NamedTuple):
    """Where gradients may lie next time without there being fewer runs, or other ones.

    Attributes:
        anywhere: there are as few runs as if gradients lay like their parameters.
        stray: else a parameter whose gradient is in no buffer, if that is the reason; while it is
            in none, nothing is won by looking again.
    """

    anywhere: bool
    stray: Tensor | None


def line_up(candidates: Sequence[Candidate]) -> tuple[list[Run], Freedom]:
    """New runs, and what may change without changing them."""
    runs = find_runs([one.place(by_grad=True) for one in candidates])
    fewest = find_runs([one.place(by_grad=False) for one in candidates])
    strays = (one.param for one in candidates if one.part and not one.grad_part)
    freedom = Freedom(len(runs) == len(fewest), next(strays, None))
    return [_run_of([candidates[i] for i in run]) for run in runs], freedom


def _run_of(members: Sequence[Candidate]) -> Run:
    first = members[0]
    params = [one.param for one in members]
    if not first.local.numel():
        return Run(params, [0] * len(members))
    if first.part is None and (first.local is first.param or not first.local.is_contiguous()):
        return Run(params, None)
    start = first.part.start if first.part else 0
    return Run(params, [one.part.start - start if one.part else 0 for one in members])


class Lineup:
    """The runs of a step, and the facts that they follow from.

    Attributes:
        runs: one for each tensor that the inner optimizer steps on.
        firsts: for each the number of its first parameter, among those of all groups.
        exposed: parameters that autograd may have saved; others it knows in unsharded copies.
    """

    def __init__(
        self,
        groups: Groups,
        grads: Sequence[Tensor | None],
        runs: Sequence[Run],
        freedom: Freedom,
    ) -> None:
        """
        Args:
            groups: of all parameters.
            grads: the gradient of each.
            runs: of those that have one.
            freedom: where gradients may lie next time.
        """
        self._params = params = [param for _, param in numbered(groups)]
        self._sizes = [len(group["params"]) for group in groups]
        self._absent = list(map(is_, grads, repeat(None)))
        number_of = {id(param): number for number, param in enumerate(params)}
        numbers = [[number_of[id(param)] for param in run.params] for run in runs]
        self.runs = runs
        self.firsts = [those[0] for those in numbers]
        pairs = list(zip(runs, numbers, strict=True))
        self._placed = [n for run, those in pairs if run.parts is not None for n in those]
        self._addresses = self._find(params)
        self._loose = [n for run, those in pairs if not run.is_joined for n in those]
        self.exposed = [params[n] for n in self._loose]
        self._stray = None if freedom.anywhere else freedom.stray
        self._is_free = freedom.anywhere or freedom.stray is not None
        bound = [pair for pair in pairs if pair[0].is_joined or not self._is_free]
        self._chains = _Chains(bound, grads)

    def stands(self, groups: Groups, params: Sequence[Tensor], grads: Sequence[Any]) -> bool:
        """Whether the same runs are right, for all that can be seen from addresses.

        Besides, each run must still find its memory, see ``Run.memory``: addresses say nothing
        once a buffer is gone.
        """
        return (
            same(params, self._params)
            and [len(group["params"]) for group in groups] == self._sizes
            and list(map(is_, grads, repeat(None))) == self._absent
            and self._find(params) == self._addresses
            and (self._stray is None or _place_of_gradient(self._stray) is None)
            and self._chains.hold(grads, anywhere=self._is_free)
            and all(is_ready(params[n], grads[n]) for n in self._loose)
        )

    def _find(self, params: Sequence[Tensor]) -> list[int]:
        return list(map(Tensor.data_ptr, map(local_part, map(params.__getitem__, self._placed))))


class _Chains:
    """Gradients that must be neighbours.

    Only addresses are kept: gradients are let go after each step and come back, perhaps elsewhere,
    with the next. While they lie among each other as before, nothing has to be looked up for each
    of them: all checks are passes over lists in C.
    """

    def __init__(
        self, pairs: Iterable[tuple[Run, Sequence[int]]], grads: Sequence[Tensor | None]
    ) -> None:
        """``pairs``: runs, and the numbers of their parameters."""
        self._numbers: list[int] = []  # run after run
        self._leaders: list[int] = []  # where in that list the first of the run is
        self._nbytes: list[int] = []  # how far behind that one's gradient its own must lie
        for run, numbers in pairs:
            grad = grads[numbers[0]]
            if run.parts is not None and grad is not None:
                self._leaders += [len(self._numbers)] * len(numbers)
                self._nbytes += [part.offset * grad.itemsize for part in run.parts]
                self._numbers += numbers
        self._addresses = self._find(grads)

    def hold(self, grads: Sequence[Any], *, anywhere: bool) -> bool:
        """Whether gradients lie where they did, or ``anywhere`` else in the same way."""
        found = self._find(grads)
        if found is None or found == self._addresses:
            return found is not None
        firsts = map(found.__getitem__, self._leaders)
        return anywhere and found == list(map(add, firsts, self._nbytes))

    def _find(self, grads: Sequence[Any]) -> list[int] | None:
        """Where they begin; None if one is not contiguous or, being sparse, begins nowhere."""
        locals_now = list(map(local_part, map(grads.__getitem__, self._numbers)))
        try:
            all_there = all(map(Tensor.is_contiguous, locals_now))
            return list(map(Tensor.data_ptr, locals_now)) if all_there else None
        except RuntimeError:
            return None


def align(params: Sequence[Tensor], grads: list[Tensor | None]) -> None:
    """Place gradients as their parameters are, in the same order on all ranks, as it communicates.

    A plain optimizer on DTensors leaves this to their operations.
    """
    for number, (param, grad) in enumerate(zip(params, grads, strict=True)):
        if isinstance(param, DTensor) and isinstance(grad, DTensor) and not is_ready(param, grad):
            placed = _placed_like(param, grad)
            grads[number] = placed if type(local_part(placed)) is Tensor else placed.clone()


def _placed_like(param: DTensor, grad: DTensor) -> Tensor:
    if is_ragged(param) and not is_ragged(grad):  # intervals are nothing that DTensor can make
        return torch.empty_like(param, dtype=grad.dtype).copy_(grad)
    return grad.redistribute(param.device_mesh, param.placements)


def is_ready(param: Tensor, grad: Tensor) -> bool:
    """Whether the gradient lies as the parameter does, and need not be waited for."""
    if not isinstance(param, DTensor):
        return True
    return is_placed_like(param, grad) and type(local_part(grad)) is Tensor
