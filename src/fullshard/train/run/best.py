"""The best checkpoint of a run: the saved step with the lowest held-out loss.

``best.json`` in the folder of the run names this checkpoint. With ``--keep``, ``best/`` holds it
too, so it stays when older checkpoints are removed. The files in ``best/`` are hard links, or
copies on file systems without links.
"""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
import uuid
from dataclasses import dataclass
from pathlib import Path

from fullshard.train.files import appear
from fullshard.train.run.folder import RunDir
from fullshard.train.run.metrics import read_metrics

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Best:
    """The best checkpoint.

    Attributes:
        step: its step.
        bits_per_byte: held-out loss of this step.
        path: folder of the checkpoint.
    """

    step: int
    bits_per_byte: float
    path: Path


def read_best(run: RunDir) -> Best | None:
    """Return the marked checkpoint; None if none is marked, or the marked one is not complete."""
    marked = _marked(run)
    if marked is None:
        return None
    step, bits = marked
    path = run.complete(step)
    return None if path is None else Best(step, bits, path)


class BestMark:
    """The mark of the best checkpoint; only the first worker may change the mark.

    Args:
        run: the folder of the run.
        is_apart: whether to keep the best checkpoint in ``best/`` too.
    """

    def __init__(self, run: RunDir, *, is_apart: bool) -> None:
        self._run = run
        self._is_apart = is_apart
        self._least = math.inf
        self._begun: tuple[int, float] | None = None

    def resume(self, step: int) -> None:
        """Find the best checkpoint up to ``step``, from which the run goes on.

        The evaluations are read from ``metrics.jsonl``, because a killed job may not have marked
        its last checkpoint. A mark of a later step is void: these steps are computed again.
        """
        run = self._run
        records = read_metrics(run.metrics) if run.metrics.exists() else []
        key = "eval_bits_per_byte"
        evaluated = {one["step"]: one[key] for one in records if key in one}
        marked = _marked(run)
        if marked is not None:
            evaluated.setdefault(*marked)
        self._least, self._begun = math.inf, None
        for bits, its in sorted((bits, its) for its, bits in evaluated.items() if its <= step):
            if run.complete(its) is not None:
                self._mark(its, bits)
                return
        run.best_mark.unlink(missing_ok=True)

    def begin(self, step: int, bits_per_byte: float | None) -> None:
        """Record the held-out loss of ``step``; its checkpoint is being written."""
        if bits_per_byte is not None and bits_per_byte < self._least:  # False for nan
            self._begun = step, bits_per_byte

    def end(self) -> None:
        """Mark the checkpoint of the last ``begin``, which is complete now."""
        begun, self._begun = self._begun, None
        if begun is not None and self._run.complete(begun[0]) is not None:
            self._mark(*begun)

    def _mark(self, step: int, bits_per_byte: float) -> None:
        run, path = self._run, self._run.checkpoint(step)
        kept = run.best / path.name
        try:
            if self._is_apart and path.exists():
                _link(path, kept)
            found = path if path.exists() and not self._is_apart else kept
            facts = {"step": step, "eval_bits_per_byte": bits_per_byte}
            text = json.dumps(facts | {"checkpoint": str(found.relative_to(run.path))})
            appear(run.best_mark, lambda to: to.write_text(text + "\n", encoding="utf-8"))
        except OSError as error:
            log.warning("%s is the best checkpoint, and cannot be kept (%s)", path, error)
            return
        self._least = bits_per_byte
        for other in run.best.glob("*") if self._is_apart else ():
            if other != kept:
                shutil.rmtree(other, ignore_errors=True)


def _link(source: Path, target: Path) -> None:
    """Link the files of the folder ``source`` into ``target``, which appears when complete."""
    if _is_same(source, target):
        return
    target.parent.mkdir(exist_ok=True)
    unfinished = target.with_name(f".unfinished-{target.name}-{uuid.uuid4().hex[:8]}")
    unfinished.mkdir()
    try:
        for file in source.iterdir():
            try:
                os.link(file, unfinished / file.name)
            except OSError:  # the file system has no links
                shutil.copyfile(file, unfinished / file.name)
        if target.exists():  # a checkpoint of steps that were computed again
            shutil.rmtree(target)
        unfinished.rename(target)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


def _is_same(source: Path, target: Path) -> bool:
    """Return whether the manifests of two checkpoints are equal; they hold digests of all files."""
    manifest = "manifest.json"
    try:
        return (source / manifest).read_bytes() == (target / manifest).read_bytes()
    except OSError:
        return False


def _marked(run: RunDir) -> tuple[int, float] | None:
    try:
        facts = json.loads(run.best_mark.read_text(encoding="utf-8"))
        return int(facts["step"]), float(facts["eval_bits_per_byte"])
    except (OSError, ValueError, TypeError, KeyError):
        return None
