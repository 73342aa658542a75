"""``StepGuard``: optimizer steps that all ranks skip together, if anything is not finite."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import NamedTuple, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from fullshard.comm import all_reduce, gather_objects
from fullshard.comm.text import listed
from fullshard.errors import ArgumentTypeError, ConfigError, NonFiniteError
from fullshard.optim.clip import NormedGradients
from fullshard.tensors import local_part

log = logging.getLogger("fullshard")


@runtime_checkable
class Searchable(Protocol):
    """A sharded module, which sees gradients before they are reduced."""

    def set_gradient_check(self, enabled: bool) -> None:
        """Set whether this rank's gradients are looked at before they are reduced."""

    def nonfinite_gradients(self) -> list[str]:
        """Return and forget which of them were not finite, in words, in the model's order."""


class _Report(NamedTuple):
    """The facts that one rank has about a skipped step."""

    rank: int
    reduced: list[tuple[int, str]]
    """Numbers and names of parameters whose reduced gradient is not finite in this rank's part."""
    own: list[str]
    """Gradients that this rank computed and that are not finite, if anybody looked."""


class StepGuard:
    """A guard of an optimizer, whose steps all ranks skip together if anything is not finite.

    In place of ``clip_grad_norm_`` and ``optimizer.step()``::

        guard = StepGuard(model, optimizer, max_norm=1.0)
        loss.backward()
        guard.step(loss)
        optimizer.zero_grad()

    A step takes one small all-reduce beside that of the gradient norm, and the host waits for the
    device once. If a rank's loss or the norm is not finite, no rank steps: parameters and state
    stay, the gradients are dropped, and the first rank logs a warning that names ranks and
    parameters. From then on each rank looks at its own gradients before they are reduced, until a
    step is taken, so that the next warning also says where they came from.

    With a grad scaler, call ``scaler.unscale_(optimizer)`` before, and leave out ``scaler.step``.

    Attributes:
        skipped: the number of steps that were skipped.
        in_a_row: how many of them came after the last step that was taken.
        norm: the gradient norm of the last call, before clipping; a 0-dim tensor.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        max_norm: float | None = None,
        max_skipped: int = 10,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        """Create a guard.

        Args:
            model: the model, whose parameters are named in warnings.
            optimizer: any optimizer of its parameters.
            max_norm: the largest norm of the gradients, see ``clip_grad_norm_``; None: any.
            max_skipped: the number of steps that may be skipped in a row.
            process_group: the ranks that skip together; None: all ranks.

        Raises:
            ArgumentTypeError, ConfigError: ``max_skipped`` is not an int, or below 0.
        """
        if isinstance(max_skipped, bool) or not isinstance(max_skipped, int):
            raise ArgumentTypeError(f"StepGuard(max_skipped={max_skipped!r}): expected an int")
        if max_skipped < 0:
            raise ConfigError(f"StepGuard(max_skipped={max_skipped}): expected 0 or more")
        self.model = model
        self.optimizer = optimizer
        self.max_norm = max_norm
        self.max_skipped = max_skipped
        self.process_group = process_group
        self.skipped = self.in_a_row = 0
        self.norm = torch.tensor(0.0)

    @torch.no_grad()
    def step(self, loss: Tensor | float | None = None) -> bool:
        """Clip the gradients and step, or skip the step; return whether the optimizer stepped.

        All ranks of the process group must call this.

        Args:
            loss: this rank's loss of any shape, to be finite as well; None: look at gradients only.

        Raises:
            NonFiniteError: more than ``max_skipped`` steps in a row were skipped; on all ranks.
        """
        params = [param for group in self.optimizer.param_groups for param in group["params"]]
        grads = NormedGradients(params)
        self.norm = grads.norm
        bad = self._flags(loss, grads.norm)
        if not any(bad):
            if self.in_a_row:
                self._search(enabled=False)
            self.in_a_row = 0
            if self.max_norm is not None:
                grads.clip(self.max_norm)
            self.optimizer.step()
            return True
        self.skipped += 1
        self.in_a_row += 1
        ranks, reports = self._ranks(), self._gather()
        losses = [rank for rank, is_bad in zip(ranks, bad[:-1], strict=True) if is_bad]
        what = _described(losses, reports)
        self.optimizer.zero_grad()
        self.model.zero_grad()
        if self.in_a_row > self.max_skipped:
            raise NonFiniteError(
                f"{what}. This is number {self.in_a_row} in a row, max_skipped is "
                f"{self.max_skipped}; no parameter was changed by these steps. Lower the learning "
                "rate, or look at the data of these steps"
            )
        if reports[0].rank == self._rank():
            log.warning("step skipped on all ranks, number %d: %s", self.skipped, what)
        self._search(enabled=True)
        return False

    def _flags(self, loss: Tensor | float | None, norm: Tensor) -> list[bool]:
        """Return for each rank whether its loss is not finite, and at the end whether the norm is.

        The same on all ranks.
        """
        group, ranks = self._group(), self._ranks()
        row = torch.zeros(len(ranks) + 1, device=norm.device)
        if loss is not None:
            local = local_part(torch.as_tensor(loss))
            row[ranks.index(self._rank())] = local.isfinite().logical_not().any()
        row[-1] = norm.isfinite().logical_not()
        if group is not None:
            all_reduce(row, group, is_max=True)
        return [flag > 0 for flag in row.tolist()]

    def _group(self) -> dist.ProcessGroup | None:
        return dist.group.WORLD if self.process_group is None else self.process_group

    def _ranks(self) -> list[int]:
        group = self._group()
        return [0] if group is None else dist.get_process_group_ranks(group)

    def _rank(self) -> int:
        return 0 if self._group() is None else dist.get_rank()

    def _gather(self) -> list[_Report]:
        """Return what each rank knows; a collective."""
        bad = [
            (number, name)
            for number, (name, param) in enumerate(self.model.named_parameters())
            if param.grad is not None and not bool(local_part(param.grad).isfinite().all())
        ]
        own = [text for module in self._searchable() for text in module.nonfinite_gradients()]
        group, report = self._group(), _Report(self._rank(), bad, own)
        return [report] if group is None else gather_objects(report, group)

    def _search(self, *, enabled: bool) -> None:
        for module in self._searchable():
            module.set_gradient_check(enabled)

    def _searchable(self) -> Iterator[Searchable]:
        return (module for module in self.model.modules() if isinstance(module, Searchable))


def _described(losses: list[int], reports: list[_Report]) -> str:
    """Say what is not finite, and on which ranks; ``losses`` are ranks whose loss is not."""
    parts = [f"the loss of rank(s) {listed(losses)} is not finite"] if losses else []
    names = {number: name for report in reports for number, name in report.reduced}
    if names:
        last = names[max(names)]
        parts.append(
            f"the gradients of {len(names)} parameter(s) are not finite, the last is {last}"
        )
    elif not losses:
        parts.append("the norm of the gradients is not finite, though each of them is")
    parts += [
        f"rank {report.rank} computed {len(report.own)} of them, the last is {report.own[-1]}"
        for report in reports
        if report.own
    ]
    return "; ".join(parts)
