"""What one sees while it trains: a live line on a terminal, plain lines anywhere else."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from .metrics import StepRecord

__all__ = ["Reporter", "plain_console"]

_PLAIN_LINES = 30  # how many lines a run prints where there is no terminal


def plain_console(*, enabled: bool) -> Console:
    """A console that prints text as it is; without ``enabled`` it prints nothing."""
    return Console(quiet=not enabled, markup=False, highlight=False, soft_wrap=True, emoji=False)


class Reporter:
    """Prints the course of a run; on all workers but the first it prints nothing.

    Args:
        total: the step at which this start ends.
        first: the step before the first one it will be shown.
        enabled: whether this worker prints.
    """

    def __init__(self, *, total: int, first: int, enabled: bool) -> None:
        self.console = plain_console(enabled=enabled)
        self._total = total
        self._first = first
        self._every = max(1, total // _PLAIN_LINES)
        self._started_s = time.perf_counter()
        self._live = self._build_live() if enabled and self.console.is_terminal else None
        self._task = self._live.add_task("", total=total, completed=first) if self._live else None

    def show(self, record: StepRecord) -> None:
        """Shows a step that has just ended."""
        left_s = self._left_s(record.step)
        if self._live is not None and self._task is not None:
            text = (
                f"step {record.step}/{self._total}  loss {record.loss:.3f}  "
                f"{record.tokens_per_s:,.0f} tokens/s  grad norm {record.grad_norm:.2f}  "
                f"{_clock(left_s)} left"
            )
            self._live.update(self._task, completed=record.step, description=text)
            if record.eval_bits_per_byte is not None:
                bits = f"{record.eval_bits_per_byte:.3f} bits per byte of held-out text"
                self.console.print(f"step {record.step}: {bits}")
        elif self._is_due(record):
            text = (
                f"step={record.step}/{self._total} loss={record.loss:.4f} "
                f"tokens_per_s={record.tokens_per_s:.0f} grad_norm={record.grad_norm:.3f} "
                f"lr={record.lr:.2e} left_s={left_s:.0f}"
            )
            if record.eval_bits_per_byte is not None:
                text += f" eval_bits_per_byte={record.eval_bits_per_byte:.4f}"
            self.console.print(text)

    def _is_due(self, record: StepRecord) -> bool:
        is_end = record.step in (self._first + 1, self._total)
        return is_end or record.step % self._every == 0 or record.eval_bits_per_byte is not None

    def _left_s(self, step: int) -> float:
        elapsed_s = time.perf_counter() - self._started_s
        return elapsed_s / (step - self._first) * (self._total - step)

    def _build_live(self) -> Progress:
        columns = (BarColumn(bar_width=20), TextColumn("{task.description}", markup=False))
        return Progress(*columns, console=self.console, refresh_per_second=4)

    def __enter__(self) -> Self:
        self._started_s = time.perf_counter()
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}"
