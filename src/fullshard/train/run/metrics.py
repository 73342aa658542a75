"""``metrics.jsonl`` with one JSON object per step, its measurements, and the loss curve."""

from __future__ import annotations

import dataclasses
import json
import math
import resource
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import fullshard
from fullshard.train.config import TrainConfig
from fullshard.train.files import appear
from fullshard.train.run.folder import RunDir


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """The figures of one step; loss (nats per token) and tokens cover all workers together.

    Attributes:
        peak_memory_nbytes: peak memory of a worker since its start, maximum over workers.
        shard_nbytes: parameters kept by a worker, maximum over workers.
        waiting: fraction of the step spent waiting for communication, mean over workers.
        loss: mean over the workers whose loss is finite; nan without such a worker.
        gather_error, reduce_error: norm of the encoding errors divided by the norm of the sent
            values, maximum over workers. None: without an evaluation, or if nothing is encoded.
        skipped: steps skipped since the start because a value was not finite; None for 0.
        repeated: steps repeated since the start because memory ran out; None for 0.
        bad_records: records of the data that were left out; None for 0.
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
    eval_loss: float | None = None
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
    kept = [json.dumps(record) + "\n" for record in records if record["step"] <= step]
    appear(path, lambda to: to.write_text("".join(kept), encoding="utf-8"))


def peak_memory_nbytes(device: torch.device) -> int:
    """Return this worker's peak memory so far: of tensors on a GPU, of the process on CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB


def device_nbytes(device: torch.device) -> int | None:
    """Return the size of a GPU's memory; None for a CPU."""
    return torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else None


def shard_nbytes(model: nn.Module) -> int:
    """Return the bytes of this worker's parameters between steps; gradients are as large."""
    return sum(
        (parameter.to_local() if isinstance(parameter, DTensor) else parameter).nbytes
        for parameter in model.parameters()
    )


def end_wire_check(model: Any) -> tuple[float, float]:
    """Stop measuring, and return this worker's relative errors for parameters and gradients.

    A relative error is the norm of the errors divided by the norm of the values; nan without data.
    """
    model.set_wire_check(False)
    gathered, reduced = (math.nan if one is None else one for one in model.wire_errors())
    return gathered, reduced


def recording(config: TrainConfig, run: RunDir, model: nn.Module) -> AbstractContextManager[Any]:
    """Return a context that traces the model if ``config.trace``, compared with the run's plan.

    The trace covers the whole start, because a failure may come late. Its memory has a bound.
    """
    if not config.trace:
        return nullcontext()
    plan = read_plan(run.plan)
    if plan is not None and not plan["has_times"]:
        del plan["step_s"]
    return fullshard.trace(model, run.trace, plan=plan)


def planned_flops(run: RunDir) -> float | None:
    """Return the FLOPs of a worker's step, from the plan of the run; None without a plan."""
    plan = read_plan(run.plan)
    return None if plan is None else float(plan["flops"])


def read_plan(path: Path) -> dict[str, Any] | None:
    """Return the plan of a run; None without one."""
    found: dict[str, Any] | None = None
    if path.exists():
        found = json.loads(path.read_text(encoding="utf-8"))
    return found


def draw_loss(metrics: Path, picture: Path) -> bool:
    """Draw training and held-out loss in nats per token; return False if matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    records = read_metrics(metrics)
    steps = np.array([record["step"] for record in records])
    losses = np.array([record.get("loss", math.nan) for record in records])
    steps, losses = steps[np.isfinite(losses)], losses[np.isfinite(losses)]
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot(title=metrics.absolute().parent.name)
    axes.plot(steps, losses, color="#0072b2", alpha=0.3, linewidth=1, label="training, each step")
    window = max(1, len(steps) // 30)
    sums = np.cumsum(losses)
    means = (sums[window:] - sums[:-window]) / window
    axes.plot(steps[window:], means, color="#0072b2", label=f"training, running mean over {window}")
    evaluated = [record for record in records if "eval_loss" in record]
    at, held_out = ([one[key] for one in evaluated] for key in ("step", "eval_loss"))
    axes.plot(at, held_out, "o-", color="#d55e00", label="held-out text")
    axes.set(xlabel="step", ylabel="loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(picture, dpi=120)
    return True
