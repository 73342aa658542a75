"""``metrics.jsonl``: one JSON object per step, written once the step is done."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from pathlib import Path
from typing import Any, Self


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """The figures of one step; loss (nats per token) and tokens cover all workers together.

    Attributes:
        peak_memory_nbytes: peak memory of a worker since its start, maximum over workers.
        shard_nbytes: parameters kept by a worker, maximum over workers.
        waiting: fraction of the step spent waiting for communication, mean over workers.
        loss: mean over the workers whose loss is finite; not a number if none is.
        gather_error, reduce_error: norm of what was lost on the wire by the norm of what was sent,
            maximum over workers, measured when there is an evaluation; None: nothing was encoded.
        skipped: steps skipped since the start because something was not finite; None: none.
        repeated: steps begun again since the start because memory ran out; None: none.
        bad_records: records of the data that were left out; None: none.
    """

    step: int
    loss: float
    tokens_per_s: float
    lr: float
    grad_norm: float
    seconds: float
    peak_memory_nbytes: int
    shard_nbytes: int
    waiting: float
    eval_bits_per_byte: float | None = None
    skipped: int | None = None
    repeated: int | None = None
    bad_records: int | None = None
    gather_error: float | None = None
    reduce_error: float | None = None

    def known(self) -> dict[str, float]:
        """Return the figures by name, without those that are None or not finite."""
        record = dataclasses.asdict(self)
        return {k: v for k, v in record.items() if v is not None and math.isfinite(v)}

    def to_json(self) -> str:
        """Return one line of JSON with the known figures."""
        return json.dumps(self.known())


class MetricsFile:
    """A file to which records are appended, each as soon as its step is known to be done.

    If not ``enabled``, as on all workers but the first, nothing is written and no file is touched.
    """

    def __init__(self, path: Path, *, enabled: bool = True) -> None:
        self._file = path.open("a", encoding="utf-8") if enabled else None

    def write(self, record: StepRecord) -> None:
        """Append one record."""
        if self._file is not None:
            self._file.write(record.to_json() + "\n")
            self._file.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return all complete records; a last line cut short by an interruption is left out."""
    records = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return records


def drop_after(path: Path, step: int) -> None:
    """Remove records after ``step``, so that a resumed run has one record per step."""
    records = read_metrics(path) if path.exists() else []
    unfinished = path.with_name(path.name + ".tmp")
    kept = [json.dumps(record) + "\n" for record in records if record["step"] <= step]
    unfinished.write_text("".join(kept), encoding="utf-8")
    os.replace(unfinished, path)
