"""``Microbatches``: steps that all ranks repeat in smaller parts when memory runs out."""

from __future__ import annotations

import enum
import logging
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fullshard import watch
from fullshard.comm import Label, all_reduce
from fullshard.comm.fault_domain import fault_domain
from fullshard.comm.text import counted, named_ranks
from fullshard.device import empty_cache
from fullshard.errors import ArgumentTypeError, ConfigError, LostRankError, PeerError
from fullshard.tensors import find_tensors, map_tensors

__all__ = ["Microbatches"]

log = logging.getLogger("fullshard")


class _Outcome(enum.IntEnum):
    """The outcome of a try at a step on one rank."""

    DONE = 0
    DROPPED = 1
    """The rank dropped the step because another rank failed."""
    NO_MEMORY = 2
    """The rank ran out of memory."""
    FAILED = 3
    """The rank raised another exception."""


_Found = tuple[_Outcome, int]
"""The outcome of a try on one rank, and the rank's number of rows."""

_WORDS = {
    _Outcome.DROPPED: "dropped the step",
    _Outcome.NO_MEMORY: "ran out of memory",
    _Outcome.FAILED: "failed",
}


class _Try(NamedTuple):
    """A try at a step on this rank.

    Attributes:
        rows: this rank's number of rows; 0 if unknown.
    """

    rows: int
    outcome: _Outcome
    loss: Tensor | None
    error: Exception | None


class Microbatches:
    """Forward and backward of a step, in as many parts of the batch as memory requires.

    Use it instead of forward and ``loss.backward()``, on all ranks::

        microbatches = fullshard.Microbatches(model)
        loss = microbatches.backward(lambda part: loss_of(model(part.x), part.y), batch)
        guard.step(loss)
        optimizer.zero_grad()

    If a rank runs out of memory, all ranks drop the step and repeat it in twice as many parts; rank
    0 logs a warning that names the ranks without memory. Later steps start with the new number of
    parts. Gradients are those of the whole batch, up to rounding. In each step the ranks exchange
    their outcomes in one small collective, and the host waits for its result.

    Attributes:
        parts: the number of parts of the next step, the same on all ranks.
        repeated: the number of repeated tries so far.
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
        """Create the ``Microbatches`` of ``model``.

        Args:
            model: the sharded model, or an unsharded one in a single process.
            parts: the number of parts of the first step.
            sums: False if a loss is the mean over the rows of its part: it is weighted by their
                number. True if a loss is a sum: losses are added as they are.
            reduces_each: True to reduce gradients after each part, which needs the least memory.
                False to reduce once, after the last part: until then each rank holds unsharded
                gradients of all units.
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

        New gradients are added to those that parameters have. If the step fails, both are lost.

        Args:
            compute: returns the loss, with one element, of a part of the batch. A repeated step
                calls ``compute`` again on the same rows; random number generators and buffers are
                not reset.
            batch: tensors with at least one row, in lists, tuples, mappings or dataclasses; the
                first dim of each is that of the rows. Tensors without dims and other values are
                passed on unchanged. Ranks may have different numbers of rows.

        Raises:
            ConfigError: this rank's ``batch`` has no rows, or its tensors have different numbers.
            PeerError: another rank failed, or ran out of memory with one row in each part.
            LostRankError: another rank was lost.
            Exception: the exception of ``compute``; if memory ran out, only with one row in each
                part.
        """
        earlier = [
            (param, param.grad) for param in self.model.parameters() if param.grad is not None
        ]
        for param, _ in earlier:
            param.grad = None
        while True:
            try:
                done = self._try(compute, batch)
                repeats = self._must_repeat(done)
            except BaseException:
                self._step.end(failed=False)
                raise
            self._step.end(failed=False, trained=not repeats)
            if not repeats:
                break
            del done
            self._drop()
        for param, grad in earlier:
            param.grad = grad if param.grad is None else grad.add_(param.grad)
        assert done.loss is not None
        return done.loss

    def _try(self, compute: Callable[[Any], Tensor], batch: Any) -> _Try:
        """Compute all parts; return an exception, to be raised once all ranks know the outcome."""
        rows, begun_s, has_begun = 0, time.monotonic(), False
        try:
            self._step.begin()
            has_begun = True  # otherwise an earlier fault was raised, which the other ranks know
            rows = _num_rows(batch)
            with self._step.around():
                loss = self._compute(compute, batch, rows)
            self._step.check()
            return _Try(rows, _Outcome.DONE, loss, None)
        except LostRankError:  # on every rank: the lost rank could not join the agreement below
            raise
        except Exception as error:
            if isinstance(error, PeerError) or not has_begun:
                return _Try(rows, _Outcome.DROPPED, None, error)
            self._report(error, begun_s)
            outcome = _Outcome.NO_MEMORY if _is_out_of_memory(error) else _Outcome.FAILED
            return _Try(rows, outcome, None, error)

    def _compute(self, compute: Callable[[Any], Tensor], batch: Any, rows: int) -> Tensor:
        total: Tensor | None = None
        try:
            for number, (start, end, weight) in enumerate(_parts(rows, self.parts)):
                with self._synced(self.reduces_each or number == self.parts - 1):
                    loss = compute(_rows_of(batch, rows, start, end))
                    share = float(weight > 0) if self.sums else weight
                    loss = loss if share == 1 else loss * share
                    loss.backward()
                total = loss.detach() if total is None else total + loss.detach()
        finally:
            self._synced(True)  # also after an exception
        assert total is not None
        return total

    def _synced(self, reduces: bool) -> AbstractContextManager[object]:
        """Reduce the gradients of the backward in the context, or accumulate them unreduced."""
        model: Any = self.model
        if hasattr(model, "set_requires_gradient_sync"):
            model.set_requires_gradient_sync(reduces)
        elif not reduces and hasattr(model, "no_sync"):
            unsynced: AbstractContextManager[object] = model.no_sync()
            return unsynced
        return nullcontext()

    def _report(self, error: Exception, begun_s: float) -> None:
        """Report ``error`` to the waiting ranks, unless an engine has, in the try begun then.

        The other ranks may know it by now: told again, it would be a second failure.
        """
        if all(step.failed_at_s < begun_s for step in watch.steps()):
            self._step.left("outside of forward and backward")
            self._step.end(error, failed=True)

    def _must_repeat(self, done: _Try) -> bool:
        """Agree on the outcome of a try; return True if all ranks repeat the step.

        Raises:
            Exception: a rank failed and would fail again.
        """
        found = self._found(done)
        fault_domain().era.clear_deferred()
        worst, most = max(one for one, _ in found), max(rows for _, rows in found)
        if worst is _Outcome.DONE:
            return False
        what = f"{named_ranks(self._ranks(found, worst))} {_WORDS[worst]}"
        if worst is not _Outcome.NO_MEMORY or self.parts >= most:
            self._drop()
            size = f"{counted(most, 'row')} a rank, computed in {counted(self.parts, 'part')}"
            raise done.error or PeerError(f"{what} in a step of at most {size}")
        if done.error is not None:
            traceback.clear_frames(done.error.__traceback__)  # frames hold activations
        self.parts = min(2 * self.parts, most)
        self.repeated += 1
        if not dist.is_initialized() or dist.get_rank() == 0:
            log.warning("%s; all ranks repeat the step in %d parts", what, self.parts)
        return True

    def _ranks(self, found: list[_Found], outcome: _Outcome) -> list[int]:
        """Return the ranks with this ``outcome``, numbered as in the job."""
        group = self._group
        ranks = [0] if group is None else dist.get_process_group_ranks(group)
        return [rank for rank, (one, _) in zip(ranks, found, strict=True) if one is outcome]

    @property
    def _group(self) -> dist.ProcessGroup | None:
        return dist.group.WORLD if self._process_group is None else self._process_group

    def _found(self, done: _Try) -> list[_Found]:
        """Gather the outcome and the number of rows of all ranks."""
        rows, outcome = done.rows, done.outcome
        group = self._group
        if group is None:
            return [(outcome, rows)]
        while True:
            values = torch.zeros(group.size(), 2, dtype=torch.int64, device="cpu")
            values[group.rank()] = torch.tensor([int(outcome), rows])
            try:
                all_reduce(values, group, is_max=False, label=_LABEL)
            except LostRankError:
                raise
            except PeerError:  # a rank failed before this collective
                outcome = max(outcome, _Outcome.DROPPED)
                continue
            return [(_Outcome(one), rows) for one, rows in values.tolist()]

    def _drop(self) -> None:
        """Drop the gradients and the state of the step."""
        for module in self.model.modules():
            reset: Any = getattr(module, "reset_iter_state", None)
            if reset is not None:
                reset()
        for param in self.model.parameters():
            param.grad = None
        empty_cache()


_LABEL = Label("an agreement on microbatches")


def _num_rows(batch: Any) -> int:
    sizes = {tensor.shape[0] for tensor in find_tensors(batch) if tensor.ndim}
    if len(sizes) != 1 or 0 in sizes:
        raise ConfigError(
            f"Microbatches.backward: the tensors of the batch have {sorted(sizes)} rows; expected "
            "the same number in all of them, at least 1, as their first dim"
        )
    (rows,) = sizes
    return rows


def _parts(rows: int, parts: int) -> Iterator[tuple[int, int, float]]:
    """Yield start, end and weight of ``parts`` parts; an empty part is row 0 with weight 0."""
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
    """Return whether memory ran out: of a device, or of the host if its allocator fails."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator: " in str(error)
