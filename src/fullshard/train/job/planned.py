"""The plan of a run, from the model, options and loss of the run itself."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import torch

from fullshard.optim import Muon
from fullshard.plan import Plan, in_bytes, in_seconds, plan
from fullshard.train.architecture import Architecture
from fullshard.train.config import OptimizerName, TrainConfig
from fullshard.train.evaluation import label_losses
from fullshard.train.loop import build_on_meta, policy_of, shard_model, wire_of
from fullshard.train.run import read_metrics, say
from fullshard.train.showing import showing_progress


def plan_of(
    config: TrainConfig, architecture: Architecture, *, num_workers: int, **options: Any
) -> Plan:
    """Return the plan of a run of ``num_workers``; other options are those of ``fullshard.plan``.

    With ``budget_nbytes``, the plan chooses layout, copies and resharding, not ``config``.

    Raises:
        ConfigError: the model cannot be built, or an option does not fit.
        UnsupportedError: the model reads values of tensors, see ``fullshard.plan``.
    """
    if options.get("budget_nbytes") is None:
        options["mesh"] = {"replicate": config.replicas, "shard": num_workers // config.replicas}
        options["shard"] = lambda model, mesh: shard_model(model, config, mesh)
    else:
        options |= {"world_size": num_workers, "mp_policy": policy_of(config)}
        options["wire"] = wire_of(config)
    if config.optimizer is OptimizerName.MUON:
        options["optimizer"] = Muon
    tokens = torch.zeros(config.batch, config.seq, dtype=torch.long, device="meta")
    return plan(
        build_on_meta(config, architecture),
        batch=(tokens, tokens),
        loss=lambda model, batch: label_losses(model, *batch).sum(),
        accumulate=config.accumulate,
        reduces_once=True,
        **options,
    )


def tell_plan(
    config: TrainConfig, architecture: Architecture, *, num_workers: int, path: Path, after: int
) -> None:
    """Print one line with memory and time of a worker's steps, and write the plan to ``path``.

    The plan covers the steps after step ``after``, because earlier steps may have had another
    number of workers. A model that cannot be planned is trained too, and the line gives the reason.
    """
    path.unlink(missing_ok=True)
    if config.quantize is not None:
        if config.hardware is not None:
            say("plan: none, as --quantize reads values of weights, which a dry run lacks")
        return
    try:
        with showing_progress():
            found = plan_of(
                config, architecture, num_workers=num_workers, hardware=config.hardware or "cpu"
            )
    except Exception as error:
        why = str(error).partition("\n")[0] or type(error).__name__
        say(f"plan: none, the model cannot be run dry ({why})")
        return
    received = sum(one.received_nbytes for one in found.traffic)
    words = [f"{in_bytes(found.peak.nbytes)} of tensors at the peak"]
    words.append(f"{in_bytes(received)} received in a step")
    if config.hardware is not None:
        words.append(f"{in_seconds(found.step_s)} a step")
    say(f"plan: a worker holds {', '.join(words)}")
    plan_and_purpose = found.as_json() | {
        "has_times": config.hardware is not None,
        "after": after,
    }
    path.write_text(json.dumps(plan_and_purpose), encoding="utf-8")


def drift(path: Path, metrics: Path, *, on_device: bool) -> str | None:
    """Return how the steps of this start differed from its plan; None if there is none.

    On a CPU, memory is not compared, because the peak of a process counts more than tensors.
    """
    if not path.exists():
        return None
    planned = json.loads(path.read_text(encoding="utf-8"))
    records = [one for one in read_metrics(metrics) if one["step"] > planned.get("after", 0)]
    if not records:
        return None
    words = []
    if on_device:
        peak = max(record["peak_memory_nbytes"] for record in records)
        words.append(_against(peak, planned["peak"]["nbytes"], in_bytes) + " at the peak")
    shards = max(record["shard_nbytes"] for record in records)
    words.append(_against(shards, planned["rest"]["parameters"], in_bytes) + " of parameters")
    if planned["has_times"]:
        step_s = statistics.median(record["seconds"] for record in records)
        words.append(_against(step_s, planned["step_s"], in_seconds) + " a step")
    return "; ".join(words)


def _against(seen: float, planned: float, text: Any) -> str:
    return f"{text(seen)}, planned {text(planned)} ({seen / planned - 1:+.1%})"
