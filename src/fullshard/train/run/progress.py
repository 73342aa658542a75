"""The progress display: a live view on a terminal, plain lines anywhere else."""

from __future__ import annotations

import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Self, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from fullshard.plan import in_bytes
from fullshard.progress import Progress
from fullshard.train.run.metrics import StepRecord
from fullshard.train.showing import Operations

_PLAIN_LINES = 30  # approximate number of lines of a run without a terminal
_LABEL = 13  # columns of a label such as "checkpoints"


def say(text: str, file: TextIO | None = None) -> None:
    """Print ``text`` to ``file`` (stdout by default); break lines between words on a terminal."""
    file = file or sys.stdout
    if file.isatty():
        text = wrapped(text, shutil.get_terminal_size().columns)
    print(text, file=file)


def wrapped(text: str, width: int) -> str:
    """Break the lines of ``text`` between words, and indent the lines that continue another."""
    wrapper = textwrap.TextWrapper(width, break_long_words=False, break_on_hyphens=False)
    lines = []
    for line in text.split("\n"):
        wrapper.subsequent_indent = " " * (_LABEL if line[:_LABEL].endswith("  ") else 4)
        lines += wrapper.wrap(line) or [""]
    return "\n".join(lines)


@dataclass(kw_only=True)
class Reporter:
    """A printer of a run's progress; on all workers but the first it prints nothing.

    Attributes:
        total: the last step of this start of the run.
        first: the step before the first step of this start.
        enabled: whether this worker prints.
        flops: FLOPs of a worker's step; None if they are not known.
        device_nbytes: memory of a worker's device; None on a CPU.
        console: the console to print to; None for stdout.
        clock: returns seconds since an arbitrary moment.
        saved_step: the step of the last checkpoint that was begun.
    """

    total: int
    first: int
    enabled: bool
    flops: float | None = None
    device_nbytes: int | None = None
    console: Console | None = None
    clock: Callable[[], float] = time.perf_counter
    saved_step: int | None = None

    def __post_init__(self) -> None:
        self._console = self.console or Console(
            quiet=not self.enabled, markup=False, highlight=False, soft_wrap=True, emoji=False
        )
        self._every = max(1, self.total // _PLAIN_LINES)
        self._started_s = self.clock()
        shows_live = self.enabled and self._console.is_terminal
        self._live = Live(console=self._console, refresh_per_second=4) if shows_live else None
        self._step: RenderableType = Text()
        self._operations = Operations(prints=self.enabled and not shows_live)

    def show(self, record: StepRecord) -> None:
        """Show a step that has just ended."""
        elapsed_s, steps = self.clock() - self._started_s, record.step - self.first
        left_s = elapsed_s / steps * (self.total - record.step)
        if self._live is not None:
            self._step = self._frame(record, left_s=left_s)
            self._draw()
            if record.eval_bits_per_byte is not None:
                bits = f"{record.eval_bits_per_byte:.3f} bits per byte of held-out text"
                self._console.print(f"step {record.step}: {bits}")
        elif self._is_due(record):
            self._console.print(_line(record, total=self.total, left_s=left_s))

    def show_operation(self, progress: Progress) -> None:
        """Show the progress of an evaluation or of a save."""
        self._operations.update(progress)
        self._draw()

    def _draw(self) -> None:
        words = list(self._operations.words.items())
        if self._live is not None:
            self._live.update(Group(self._step, *(Text(f"{what}: {its}") for what, its in words)))

    def _is_due(self, record: StepRecord) -> bool:
        is_end = record.step in (self.first + 1, self.total)
        return is_end or record.step % self._every == 0 or record.eval_bits_per_byte is not None

    def _frame(self, record: StepRecord, *, left_s: float) -> Group:
        """Build the live view: progress, quality and cost of the training."""
        head = Table.grid(padding=(0, 2))
        bar = ProgressBar(total=self.total, completed=record.step, width=20)
        passed = _clock(self.clock() - self._started_s)
        head.add_row(bar, f"step {record.step}/{self.total}", f"{passed}, {_clock(left_s)} left")
        pairs = list(self._figures(record))
        width = self._console.width
        per_row = 3 if width >= 80 else 2 if width >= 56 else 1
        figures = Table.grid(padding=(0, 2))
        for _ in range(per_row):
            figures.add_column(style="dim", no_wrap=True)
            figures.add_column(min_width=9)  # else columns move when a number gains a digit
        for at in range(0, len(pairs), per_row):
            figures.add_row(*(text for pair in pairs[at : at + per_row] for text in pair))
        return Group(Text(), head, figures)

    def _figures(self, record: StepRecord) -> Iterator[tuple[str, str]]:
        yield "loss", f"{record.loss:.3f}"
        yield "grad norm", f"{record.grad_norm:.2f}"
        yield "learning rate", f"{record.lr:.2e}"
        yield "tokens/s", f"{record.tokens_per_s:,.0f}"
        if self.flops is not None:
            yield "TFLOP/s each", f"{self.flops / record.seconds / 1e12:.3g}"
        yield "waiting", f"{record.waiting:.0%} of a step"
        peak = record.peak_memory_nbytes
        share = "" if self.device_nbytes is None else f" ({peak / self.device_nbytes:.0%})"
        yield "peak memory", in_bytes(peak) + share
        yield "shards", in_bytes(record.shard_nbytes)
        if self.saved_step is not None:
            yield "checkpoint", f"step {self.saved_step}"

    def __enter__(self) -> Self:
        self._started_s = self.clock()
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()


def _line(record: StepRecord, *, total: int, left_s: float) -> str:
    """Format one line of ``key=value`` pairs, readable by people, ``grep`` and ``cut``."""
    text = (
        f"step={record.step}/{total} loss={record.loss:.4f} "
        f"tokens_per_s={record.tokens_per_s:.0f} grad_norm={record.grad_norm:.3f} "
        f"lr={record.lr:.2e} peak_memory_nbytes={record.peak_memory_nbytes} "
        f"shard_nbytes={record.shard_nbytes} waiting={record.waiting:.3f} left_s={left_s:.0f}"
    )
    if record.skipped:
        text += f" skipped={record.skipped}"
    if record.repeated:
        text += f" repeated={record.repeated}"
    if record.eval_bits_per_byte is not None:
        text += f" eval_bits_per_byte={record.eval_bits_per_byte:.4f}"
    for name in ("gather_error", "reduce_error"):
        error = getattr(record, name)
        text += "" if error is None else f" {name}={error:.2e}"
    return text


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
