"""``fullshard train``: options to a configuration, a configuration to a job."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from fullshard.errors import ConfigError, FullshardError

from .config import Dtype, TrainConfig
from .launch import default_nproc, launch
from .rundir import RunDir
from .worker import work
from .world import is_worker

__all__ = ["run_app", "train_command"]

_DEFAULT = TrainConfig()


def train_command(
    context: typer.Context,
    *,
    data: Annotated[
        str | None,
        typer.Option(
            help="Text file or folder; default: Python's standard library.", metavar="PATH"
        ),
    ] = _DEFAULT.data,
    name: Annotated[str, typer.Option(help="The run lies in runs/NAME.")] = "default",
    out: Annotated[
        str | None, typer.Option(help="Folder of the run, instead of runs/NAME.", metavar="DIR")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the newest checkpoint, same options.")
    ] = _DEFAULT.resume,
    nproc: Annotated[
        int | None, typer.Option(help="Local workers; default: one per GPU, 2 on CPU.")
    ] = None,
    steps: Annotated[int, typer.Option(help="Steps of the whole schedule.")] = _DEFAULT.steps,
    stop_after: Annotated[
        int | None, typer.Option(help="Stop early after this step, the schedule unchanged.")
    ] = _DEFAULT.stop_after,
    batch: Annotated[int, typer.Option(help="Sequences per worker.")] = _DEFAULT.batch,
    seq: Annotated[int, typer.Option(help="Tokens per sequence.")] = _DEFAULT.seq,
    accumulate: Annotated[int, typer.Option(help="Microbatches per step.")] = _DEFAULT.accumulate,
    lr: Annotated[float, typer.Option(help="Peak learning rate.")] = _DEFAULT.lr,
    dtype: Annotated[Dtype, typer.Option(help="Dtype of forward and backward.")] = _DEFAULT.dtype,
    reshard: Annotated[
        bool, typer.Option(help="Free full parameters between forward and backward.")
    ] = _DEFAULT.reshard,
    checkpoint_activations: Annotated[
        bool, typer.Option("--checkpoint-activations", help="Recompute blocks in backward.")
    ] = _DEFAULT.checkpoint_activations,
    seed: Annotated[int, typer.Option(help="Of weights and data order.")] = _DEFAULT.seed,
    save_every: Annotated[
        int, typer.Option(help="Steps between checkpoints.")
    ] = _DEFAULT.save_every,
    eval_every: Annotated[
        int, typer.Option(help="Steps between evaluations.")
    ] = _DEFAULT.eval_every,
) -> int:
    """Train a small GPT on real text, fully sharded over local workers.

    Under torchrun the same command is one worker of its job:
    torchrun --nproc-per-node 2 -m fullshard.train
    """
    config = resolve(context)
    if is_worker():
        work(config, prepared=False)
    return launch(config)


def resolve(context: typer.Context) -> TrainConfig:
    """The configuration that the options ask for.

    With ``--resume`` it is the run's own, except for what was given by hand; how an earlier start
    ended (``stop_after``) is never taken over.

    Raises:
        ConfigError: if a value cannot work, or there is no run to resume.
    """
    options = dict(context.params)
    name, out = options.pop("name"), options.pop("out")
    if Path(name).name != name:
        raise ConfigError(f"--name {name}: must be a plain name; --out takes a folder")
    folder = out or str(Path("runs") / name)
    given = {key for key in options if _is_given(context, key)}
    if options["resume"]:
        saved = RunDir(Path(folder)).config
        if not saved.exists():
            raise ConfigError(f"{folder} holds no run to resume: start without --resume")
        base = dataclasses.replace(TrainConfig.load(saved), stop_after=None)
    else:
        base = TrainConfig(nproc=default_nproc())
    changes: dict[str, Any] = {key: options[key] for key in given}
    if "data" in changes:
        changes["data"] = str(Path(changes["data"]).absolute())
    return dataclasses.replace(base, **changes, out=folder)


def run_app(app: typer.Typer, program: str, arguments: Sequence[str] | None = None) -> int:
    """Runs a command line; what the user can mend is one line on stderr and exit code 2."""
    try:
        outcome = app(args=arguments, prog_name=program, standalone_mode=False)
    except FullshardError as error:
        message = str(error)
    except Exception as error:
        # A usage error of click's, which some versions of typer carry and others depend on; they
        # share no public name, but all of them say it this way.
        if not hasattr(error, "format_message"):
            raise
        message = error.format_message()
    else:
        return int(outcome or 0)
    if os.environ.get("RANK", "0") == "0":  # under torchrun every worker refuses alike
        print(f"fullshard: error: {message}", file=sys.stderr)
    return 2


def _is_given(context: typer.Context, option: str) -> bool:
    source = context.get_parameter_source(option)
    return source is not None and source.name != "DEFAULT"
