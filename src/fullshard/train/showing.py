"""Show the progress of operations: a bar on a terminal, lines anywhere else."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

from fullshard.plan import in_bytes
from fullshard.progress import Progress, on_progress

_LINE_S = 5.0  # seconds between two lines


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
    with Bars(
        TextColumn("{task.description}"), BarColumn(bar_width=10), TimeElapsedColumn(),
        TextColumn("{task.fields[words]}"),
        console=console, transient=True, disable=not console.is_terminal,
    ) as bars:  # fmt: skip
        began_s = told_s = 0.0
        bar = None

        def show(progress: Progress) -> None:
            nonlocal began_s, told_s, bar
            now_s = time.monotonic()
            if not progress.done:
                began_s = told_s = now_s
                if bar is not None:
                    bars.remove_task(bar)
                bar = bars.add_task(progress.what, total=progress.total, words="")
            words = _words(progress, now_s - began_s)
            assert bar is not None
            bars.update(bar, completed=progress.done, words=words)
            if not console.is_terminal and now_s - told_s >= _LINE_S:
                told_s = now_s
                print(f"{progress.what}: {words}", file=sys.stderr)

        with on_progress(show):
            yield


def _words(progress: Progress, passed_s: float) -> str:
    """Return words such as "1.2 GB of 3.4 GB, 600 MB/s, 4 s left"."""
    is_bytes = progress.unit == "bytes"
    done = in_bytes(progress.done) if is_bytes else f"{progress.done:,}"
    if progress.total is None:
        unit = progress.unit.removesuffix("s" if progress.done == 1 else "")
        return (done if is_bytes else f"{done} {unit}") if progress.done else ""
    total = in_bytes(progress.total) if is_bytes else f"{progress.total:,} {progress.unit}"
    if not progress.done:
        return f"{done} of {total}"
    rate = progress.done / max(passed_s, 1e-9)
    each = in_bytes(rate) if is_bytes else f"{rate:,.0f}"
    return f"{done} of {total}, {each}/s, {(progress.total - progress.done) / rate:,.0f} s left"
