"""Show the progress of operations: a bar on a terminal, lines anywhere else."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

from fullshard.plan import in_bytes
from fullshard.progress import Progress, on_progress

_LINE_S = 5.0  # seconds between two lines


class Operations:
    """The operations that run now, each with its progress in words.

    Args:
        prints: whether to print progress on stderr, at most a line every five seconds.

    Attributes:
        words: such as "1.2 GB of 3.4 GB, 600 MB/s, 4 s left", by the name of the operation.
    """

    def __init__(self, *, prints: bool) -> None:
        self.words: dict[str, str] = {}
        self._prints = prints
        self._began_s: dict[str, float] = {}
        self._told_s: dict[str, float] = {}

    def update(self, progress: Progress) -> str:
        """Note the progress of an operation, and return its words."""
        what, now_s = progress.what, time.monotonic()
        if not progress.done:
            self._began_s[what] = self._told_s[what] = now_s
        words = self.words[what] = _words(progress, now_s - self._began_s[what])
        if self._prints and now_s - self._told_s[what] >= _LINE_S:
            self._told_s[what] = now_s
            print(f"{what}: {words}", file=sys.stderr)
        if progress.done == progress.total:
            del self.words[what]
        return words


@contextmanager
def showing_progress(*, enabled: bool = True) -> Iterator[None]:
    """Show on stderr the progress of operations in the block; with a total, also the time left.

    Args:
        enabled: False shows nothing, as on all workers but the first.
    """
    if not enabled:
        yield
        return
    console = Console(stderr=True, markup=False, highlight=False, soft_wrap=True)
    operations = Operations(prints=not console.is_terminal)
    tasks: dict[str, TaskID] = {}
    with Bars(
        TextColumn("{task.description}"), BarColumn(bar_width=10), TimeElapsedColumn(),
        TextColumn("{task.fields[words]}"),
        console=console, transient=True, disable=not console.is_terminal,
        redirect_stdout=sys.stdout.isatty(),  # else rich sends what is for a pipe to stderr
    ) as bars:  # fmt: skip

        def show(progress: Progress) -> None:
            what, words = progress.what, operations.update(progress)
            if not progress.done and what in tasks:
                bars.remove_task(tasks.pop(what))
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=progress.total, words="")
            is_over = progress.done == progress.total
            bars.update(tasks[what], completed=progress.done, words=words, visible=not is_over)

        with on_progress(show):
            yield


def _words(progress: Progress, passed_s: float) -> str:
    """Return words such as "1.2 GB of 3.4 GB, 600 MB/s, 4 s left"."""
    is_bytes = progress.unit == "bytes"
    done = in_bytes(progress.done) if is_bytes else f"{progress.done:,}"
    if progress.total is None:
        unit = progress.unit.removesuffix("s" if progress.done == 1 else "")
        return (done if is_bytes else f"{done} {unit}") if progress.done else ""
    unit = progress.unit.removesuffix("s" if progress.total == 1 else "")
    total = in_bytes(progress.total) if is_bytes else f"{progress.total:,} {unit}"
    if not progress.done:
        return f"{done} of {total}"
    rate = progress.done / max(passed_s, 1e-9)
    speed = f"{in_bytes(rate) if is_bytes else f'{rate:,.0f}'}/s"
    if rate < 10 and not is_bytes:
        speed = f"{1 / rate:,.1f} s each"
    return f"{done} of {total}, {speed}, {(progress.total - progress.done) / rate:,.0f} s left"
