"""``Microbatches``: steps that all ranks compute again in smaller parts, if memory runs out."""

from __future__ import annotations

import enum
import logging
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fullshard import watch
from fullshard.comm import collectives_of_group, served_by
from fullshard.comm.ledger import now
from fullshard.comm.protocol import Label
from fullshard.device import empty_cache
from fullshard.errors import ArgumentTypeError, ConfigError, LostRankError, PeerError
from fullshard.tensors import find_tensors, map_tensors

__all__ = ["Microbatches"]

log = logging.getLogger("fullshard")


@runtime_checkable
class _Resettable(Protocol):
    def reset_iter_state(self) -> None: ...


@runtime_checkable
class _Synced(Protocol):
    def set_requires_gradient_sync(self, requires_gradient_sync: bool) -> None: ...


@runtime_checkable
class _Unsynced(Protocol):
    def no_sync(self) -> AbstractContextManager[object]: ...


class _Outcome(enum.IntEnum):
    """What came of an attempt on one rank."""

    DONE = 0
    DROPPED = 1
    """Another rank failed."""
    NO_MEMORY = 2
    FAILED = 3
    """Another exception."""


_Found = tuple[_Outcome, int]
"""What came of an attempt on one rank, and the number of its rows."""

_SAID = {
    _Outcome.DROPPED: "dropped the step",
    _Outcome.NO_MEMORY: "ran out of memory",
    _Outcome.FAILED: "failed",
}


class _Attempt(NamedTuple):
    rows: int
    outcome: _Outcome
    loss: Tensor | None
    error: Exception | None


class Microbatches:
    """Forward and backward of a step, in as many parts of the batch as memory needs.

    In place of forward and ``loss.backward()``, on all ranks::

        microbatches = fullshard.Microbatches(model)
        loss = microbatches.backward(lambda part: loss_of(model(part.x), part.y), batch)
        guard.step(loss)
        optimizer.zero_grad()

    If a rank runs out of memory, all ranks drop what they have computed of the step and begin it
    again in twice as many parts; the first rank logs a warning that names who ran out. Later steps
    begin with as many parts. Gradients are those of the whole batch, up to rounding. One small
    collective a step tells how the others fared, for which the host waits.

    Attributes:
        parts: the number of parts of the next step, the same on all ranks.
        repeated: how many times steps were begun again.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        parts: int = 1,
        sums: bool = False,
        reduces_each: bool = True,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        """Create what runs the steps of ``model``.

        Args:
            model: the sharded model, or an unsharded one in a single process.
            parts: the number of parts to begin with.
            sums: False if a loss is the mean over the rows of its part, which is then weighted by
                their number; True if it is a sum, over whatever.
            reduces_each: True if gradients are reduced after each part, which takes the least
                memory; False to do so once, after the last, which takes whole gradients of all
                units until then.
            process_group: the ranks that train ``model`` together; None: all ranks.

        Raises:
            ArgumentTypeError, ConfigError: ``parts`` is not an int, or below 1.
        """
        if isinstance(parts, bool) or not isinstance(parts, int):
            raise ArgumentTypeError(f"Microbatches(parts={parts!r}): expected an int")
        if parts < 1:
            raise ConfigError(f"Microbatches(parts={parts}): expected 1 or more")
        self.model = model
        self.parts = parts
        self.sums = sums
        self.reduces_each = reduces_each
        self.repeated = 0
        self._process_group = process_group
        self._step = watch.Step()

    def backward(self, compute: Callable[[Any], Tensor], batch: Any) -> Tensor:
        """Compute the gradients of a step and return this rank's loss, detached.

        Gradients that parameters have already are added to. If the step fails, they are lost.

        Args:
            compute: returns the loss, with one element, of a part of the batch. It may run more
                than once on the same rows, so random numbers and buffers go on from there.
            batch: tensors, in lists, tuples, mappings or dataclasses, whose first dim is that of
                the rows, at least one; those without dims, and anything else, are passed on as
                they are. Ranks may have differently many rows.

        Raises:
            ConfigError: this rank's ``batch`` has no rows, or tensors of differently many.
            PeerError: another rank failed, or ran out of memory with one row a part.
            LostRankError: another rank was lost.
            Exception: what ``compute`` raised, out of memory included, with one row a part.
        """
        kept = [(param, param.grad) for param in self.model.parameters() if param.grad is not None]
        for param, _ in kept:
            param.grad = None
        while True:
            try:
                attempt = self._attempt(compute, batch)
                repeats = self._must_repeat(attempt)
            except BaseException:
                self._step.end(failed=False)
                raise
            self._step.end(failed=False, trained=not repeats)
            if not repeats:
                break
            del attempt
            self._drop()
        for param, grad in kept:
            param.grad = grad if param.grad is None else grad.add_(param.grad)
        assert attempt.loss is not None
        return attempt.loss

    def _attempt(self, compute: Callable[[Any], Tensor], batch: Any) -> _Attempt:
        """Compute all parts; an exception is kept until all ranks know of it."""
        rows = 0
        try:
            self._step.begin()
            rows = _num_rows(batch)
            with self._step.around():
                loss = self._compute(compute, batch, rows)
            self._step.check()
            return _Attempt(rows, _Outcome.DONE, loss, None)
        except LostRankError:  # all raise it, as whom they lost would come to no agreement
            raise
        except PeerError as error:
            return _Attempt(rows, _Outcome.DROPPED, None, error)
        except Exception as error:
            self._tell(error)
            outcome = _Outcome.NO_MEMORY if _is_out_of_memory(error) else _Outcome.FAILED
            return _Attempt(rows, outcome, None, error)

    def _compute(self, compute: Callable[[Any], Tensor], batch: Any, rows: int) -> Tensor:
        total: Tensor | None = None
        for number, (start, end, weight) in enumerate(_parts(rows, self.parts)):
            with self._synced(self.reduces_each or number == self.parts - 1):
                loss = compute(_rows_of(batch, rows, start, end))
                share = float(weight > 0) if self.sums else weight
                loss = loss if share == 1 else loss * share
                loss.backward()
            total = loss.detach() if total is None else total + loss.detach()
        assert total is not None
        return total

    def _synced(self, reduces: bool) -> AbstractContextManager[object]:
        """Have the backward in the context reduce gradients, or keep them."""
        if isinstance(self.model, _Synced):
            self.model.set_requires_gradient_sync(reduces)
        elif not reduces and isinstance(self.model, _Unsynced):
            return self.model.no_sync()
        return nullcontext()

    def _tell(self, error: Exception) -> None:
        """Have the others told, who wait for this rank, unless the engine does so."""
        if not any(step.failure for step in watch.steps()):
            self._step.left("outside of forward and backward")
            self._step.end(error, failed=True)

    def _must_repeat(self, attempt: _Attempt) -> bool:
        """Agree on what came of an attempt; return True if all ranks begin again.

        Raises:
            Exception: a rank failed, and will again.
        """
        found = self._found(attempt)
        now().clear_deferred()
        worst, most = max(one for one, _ in found), max(rows for _, rows in found)
        if worst is _Outcome.DONE:
            return False
        said = f"rank(s) {self._named(found, worst)} {_SAID[worst]}"
        if worst is not _Outcome.NO_MEMORY or self.parts >= most:
            self._drop()
            raise attempt.error or PeerError(f"{said}, with {self.parts} part(s) of {most} row(s)")
        if attempt.error is not None:
            traceback.clear_frames(attempt.error.__traceback__)  # they hold activations
        self.parts = min(2 * self.parts, most)
        self.repeated += 1
        if not dist.is_initialized() or dist.get_rank() == 0:
            log.warning("%s; all ranks begin the step again in %d parts", said, self.parts)
        return True

    def _named(self, found: list[_Found], outcome: _Outcome) -> str:
        """Return the ranks, in the job, of which ``outcome`` came."""
        group = self._group
        ranks = [0] if group is None else dist.get_process_group_ranks(group)
        these = [str(rank) for rank, (one, _) in zip(ranks, found, strict=True) if one is outcome]
        return ", ".join(these[:8]) + (f" and {len(these) - 8} more" if len(these) > 8 else "")

    @property
    def _group(self) -> dist.ProcessGroup | None:
        return dist.group.WORLD if self._process_group is None else self._process_group

    def _found(self, attempt: _Attempt) -> list[_Found]:
        """Return what came of the attempt, and the number of rows, of all ranks."""
        rows, outcome = attempt.rows, attempt.outcome
        group = self._group
        if group is None or group.size() == 1:
            return [(outcome, rows)]
        device = served_by(group, torch.device("cpu"))
        wire = collectives_of_group(group, device.type).labelled(_LABEL)
        while True:
            values = torch.zeros(group.size(), 2, device=device)
            values[group.rank()] = torch.tensor([float(outcome), float(rows)])
            try:
                wire.all_reduce_mean(values.view(-1)).wait()
            except LostRankError:
                raise
            except PeerError:  # a rank failed that had not come here
                outcome = max(outcome, _Outcome.DROPPED)
                continue
            told = (values * group.size()).round().int().tolist()
            return [(_Outcome(one), rows) for one, rows in told]

    def _drop(self) -> None:
        """Forget all that was computed of the step."""
        for module in self.model.modules():
            if isinstance(module, _Resettable):
                module.reset_iter_state()
        for param in self.model.parameters():
            param.grad = None
        empty_cache()


_LABEL = Label("an agreement on microbatches")


def _num_rows(batch: Any) -> int:
    sizes = {tensor.shape[0] for tensor in find_tensors(batch) if tensor.ndim}
    if len(sizes) != 1 or 0 in sizes:
        raise ConfigError(
            f"Microbatches.backward: the tensors of the batch have {sorted(sizes)} rows; expected "
            "one number, at least 1, as the first dim of each"
        )
    (rows,) = sizes
    return rows


def _parts(rows: int, parts: int) -> Iterator[tuple[int, int, float]]:
    """Return start, end and weight of ``parts`` parts; where rows lack, row 0 without weight."""
    for number in range(parts):
        start, end = number * rows // parts, (number + 1) * rows // parts
        yield (start, end, (end - start) / rows) if start < end else (0, 1, 0.0)


def _rows_of(batch: Any, rows: int, start: int, end: int) -> Any:
    if end - start == rows:
        return batch
    return map_tensors(
        lambda tensor: tensor[start:end] if tensor.ndim else tensor, batch, must_copy=True
    )


def _is_out_of_memory(error: Exception) -> bool:
    """Return whether memory ran out, of a device or, as far as its allocator tells, of the host."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator: " in str(error)
