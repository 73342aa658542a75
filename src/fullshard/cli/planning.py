"""``fullshard plan``: predict memory, communication and time of a training step."""

from __future__ import annotations

import importlib
import json
import math
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from fullshard.cli.printing import AsJson
from fullshard.errors import ConfigError
from fullshard.optim import Muon
from fullshard.plan import PRESETS, Plan, draw_plan, plan
from fullshard.train.architecture import choose_architecture
from fullshard.train.config import HF, SIZES, Dtype, LayoutName, OptimizerName, TrainConfig
from fullshard.train.job import flag, plan_of
from fullshard.train.loop import layout_of, policy_of, wire_of
from fullshard.train.published import PUBLISHED
from fullshard.train.showing import showing_progress

_Model = Annotated[
    str,
    typer.Argument(
        help=f"{', '.join((*SIZES, *PUBLISHED))}, a configuration of transformers, or a function "
        "that returns a model, or a model and its batch.",
        metavar="NAME|hf:CONFIG.json|MODULE:FUNCTION",
    ),
]
_WorldSize = Annotated[int | None, typer.Option(help="Number of ranks; all of them shard.")]
_Mesh = Annotated[
    str | None,
    typer.Option(help="Mesh dims instead of --world-size.", metavar="replicate=4,shard=256"),
]
_Hardware = Annotated[
    str,
    typer.Option(help=f"{', '.join(PRESETS)}, cpu, or a file of doctor.", metavar="NAME|FILE"),
]
_Budget = Annotated[
    str | None,
    typer.Option(
        help="Memory of a rank: choose the fastest layout, copies, resharding, recomputation and "
        "budgets that fit.",
        metavar="80GB",
    ),
]
_Batch = Annotated[int, typer.Option(help="Sequences of a rank.", min=1)]
_Seq = Annotated[int, typer.Option(help="Tokens of a sequence.", min=1)]
_Accumulate = Annotated[int, typer.Option(help="Microbatches of a step.", min=1)]
_Layout = Annotated[
    LayoutName | None,
    typer.Option(help="How parameters lie in the shards; default: per parameter, or chosen."),
]
_Reshard = Annotated[
    bool | None,
    typer.Option(
        "--reshard/--no-reshard",
        help="Free full parameters between forward and backward; default: yes, or chosen.",
    ),
]
_Dtype = Annotated[Dtype, flag("dtype")]
_Optimizer = Annotated[OptimizerName, flag("optimizer")]
_Wire = Annotated[str | None, flag("wire")]
_CheckpointActivations = Annotated[bool, flag("checkpoint_activations")]
_Rank = Annotated[int, typer.Option(help="Rank to plan for.", min=0)]
_Measure = Annotated[
    bool,
    typer.Option(
        "--measure",
        help="Run the step with real tensors on the GPU (or CPU) at hand as well: one rank whose "
        "collectives send nothing.",
    ),
]
_Picture = Annotated[
    Path | None,
    typer.Option(help="Draw memory over the step into this file.", metavar="FILE.svg|png"),
]


def plan_command(
    model: _Model,
    *,
    world_size: _WorldSize = None,
    mesh: _Mesh = None,
    hardware: _Hardware = "h100",
    budget: _Budget = None,
    batch: _Batch = 1,
    seq: _Seq = 2048,
    accumulate: _Accumulate = 1,
    dtype: _Dtype = Dtype.BF16,
    optimizer: _Optimizer = OptimizerName.ADAMW,
    layout: _Layout = None,
    reshard: _Reshard = None,
    wire: _Wire = None,
    checkpoint_activations: _CheckpointActivations = False,
    rank: _Rank = 0,
    measure: _Measure = False,
    as_json: AsJson = False,
    picture: _Picture = None,
) -> int:
    """Predict memory and time of a training step; exit code 1 if it does not fit."""
    options: dict[str, Any] = {"hardware": hardware, "rank": rank, "measure": measure}
    if budget is not None:
        options["budget_nbytes"] = nbytes_of(budget)
    sizes = _mesh(world_size, mesh)
    config = TrainConfig(
        batch=batch,
        seq=seq,
        accumulate=accumulate,
        dtype=dtype,
        optimizer=optimizer,
        layout=layout or LayoutName.PER_PARAMETER,
        reshard=reshard is not False,
        wire=wire,
        checkpoint_activations=checkpoint_activations,
    )
    if ":" in model and not model.startswith(HF):
        options |= {"mesh": sizes} if mesh else {"world_size": world_size}
        if layout is not None:
            options["layout"] = layout_of(config)
        if reshard is not None:
            options["reshard_after_forward"] = None if reshard else False
        with showing_progress():
            found = _plan_function(_function(model), config, options)
    else:
        if budget is not None and (mesh or layout or reshard is not None):
            raise ConfigError(
                "--budget chooses mesh, layout and resharding: leave out --mesh, --layout and "
                "--reshard"
            )
        config = replace(config, model=model, replicas=sizes.get("replicate", 1))
        with showing_progress():
            found = _plan_config(config, sizes, options)
    print(json.dumps(found.as_json(), indent=1) if as_json else found)
    if picture is not None:
        draw_plan(found, picture)
    return 0 if found.fits else 1


def _plan_config(config: TrainConfig, sizes: dict[str, int], options: dict[str, Any]) -> Plan:
    unknown = set(sizes) - {"replicate", "shard"}
    if unknown:
        raise ConfigError(
            f"--mesh {unknown.pop()}=...: models of the trainer have the dims replicate and shard; "
            "MODULE:FUNCTION may have any"
        )
    num_workers = math.prod(sizes.values())
    return plan_of(config, choose_architecture(config), num_workers=num_workers, **options)


def _plan_function(make: Callable[[], Any], config: TrainConfig, options: dict[str, Any]) -> Plan:
    """Return the plan of the model that ``make`` returns, alone or with a batch."""
    if config.checkpoint_activations:
        raise ConfigError("--checkpoint-activations: let MODULE:FUNCTION build them in")
    options |= {"accumulate": config.accumulate, "mp_policy": policy_of(config)}
    if config.wire is not None:
        options["wire"] = wire_of(config)
    if config.optimizer is OptimizerName.MUON:
        options["optimizer"] = Muon
    with torch.device("meta"):
        made = make()
        tokens = torch.zeros(config.batch, config.seq, dtype=torch.long)
    model, batch = made if isinstance(made, tuple) else (made, tokens)
    return plan(model, batch=batch, **options)


def _function(name: str) -> Callable[[], Any]:
    module, _, function = name.partition(":")
    if "" not in sys.path:
        sys.path.insert(0, "")  # the current folder, as for python -m
    try:
        found: Callable[[], Any] = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"{name}: no such function ({error}); expected MODULE:FUNCTION, importable from here"
        ) from error
    if not callable(found):
        raise ConfigError(f"{name}: is a {type(found).__name__}, expected a function")
    return found


def _mesh(world_size: int | None, mesh: str | None) -> dict[str, int]:
    if (world_size is None) == (mesh is None):
        raise ConfigError("give either --world-size N or --mesh replicate=4,shard=256")
    if mesh is None:
        return {"shard": world_size or 0}
    parts = [part.partition("=") for part in mesh.split(",")]
    shape = {name: int(size) for name, _, size in parts if name and size.isdigit()}
    if len(shape) < len(parts):  # a name without a size, or a name twice
        raise ConfigError(
            f"--mesh {mesh}: expected each dim once, with its size, such as replicate=4,shard=256"
        )
    return shape


_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_UNITS |= {"ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30, "ti": 1 << 40}


def nbytes_of(text: str) -> int:
    """Return a number of bytes written as "80GB", "64 GiB" or "1000000".

    Raises:
        ConfigError: the text has another form.
    """
    number = r"[0-9]+\.?[0-9]*|\.[0-9]+"
    found = re.fullmatch(rf"({number})\s*((?:[kmgt]i?)?)b?", text.strip().lower())
    if found is None:
        raise ConfigError(f"--budget {text}: expected bytes such as 80GB, 64GiB or 1000000")
    return int(float(found[1]) * _UNITS[found[2]])
