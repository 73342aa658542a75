"""``metrics.jsonl``: one JSON object a step, written when its figures are there."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from types import TracebackType
from typing import Any, Self


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """What one step showed. Loss (nats per token) and tokens are those of all workers together.

    Attributes:
        peak_memory_nbytes: the most that any worker has needed since its start.
        shard_nbytes: the parameters kept by the worker that keeps most.
        waiting: share of the step that workers waited for communication, on average.
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

    def to_json(self) -> str:
        """One line; an evaluation that did not take place leaves no key."""
        record = dataclasses.asdict(self)
        return json.dumps({key: value for key, value in record.items() if value is not None})


class MetricsFile:
    """Appends records to ``path``, each as soon as its step is known to be done.

    Not ``enabled``, as on all workers but the first, it writes nothing and touches no file.
    """

    def __init__(self, path: Path, *, enabled: bool = True) -> None:
        self._file = path.open("a", encoding="utf-8") if enabled else None

    def write(self, record: StepRecord) -> None:
        """Appends one record."""
        if self._file is not None:
            self._file.write(record.to_json() + "\n")
            self._file.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._file is not None:
            self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All complete records of a run; a last line that an interruption cut short is left out."""
    records = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return records


def drop_after(path: Path, step: int) -> None:
    """Removes the records of later steps, so that a resumed run writes each step once."""
    records = read_metrics(path) if path.exists() else []
    unfinished = path.with_name(path.name + ".tmp")
    kept = [json.dumps(record) + "\n" for record in records if record["step"] <= step]
    unfinished.write_text("".join(kept), encoding="utf-8")
    os.replace(unfinished, path)
