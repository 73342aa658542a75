"""The command ``fullshard train``: turns options into a configuration and starts the job."""

from __future__ import annotations

import dataclasses
import os
import sys
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from fullshard.errors import ConfigError, FullshardError

from .config import HF, SIZES, Dtype, LayoutName, OptimizerName, Quantize, TrainConfig, default_lr
from .launch import default_nproc, launch
from .options import read_options
from .rundir import RunDir
from .worker import work
from .world import is_worker, num_local_workers

_DEFAULT = TrainConfig()


def train_command(
    context: typer.Context,
    *,
    model: Annotated[
        str,
        typer.Option(
            help=f"{', '.join(SIZES)}, or a configuration of transformers.",
            metavar="SIZE|hf:CONFIG.json",
        ),
    ] = _DEFAULT.model,
    data: Annotated[
        str | None,
        typer.Option(
            help="Text or chats: files, JSONL or parquet; default: Python's standard library.",
            metavar="PATH",
        ),
    ] = _DEFAULT.data,
    init: Annotated[
        str | None,
        typer.Option(
            help="Begin with these weights, and their tokenizer; --model is then hf:FOLDER.",
            metavar="FOLDER",
        ),
    ] = _DEFAULT.init,
    lora: Annotated[
        int | None,
        typer.Option(help="Train adapters of this rank (peft) beside frozen weights.", min=1),
    ] = _DEFAULT.lora,
    quantize: Annotated[
        Quantize | None, typer.Option(help="Hold frozen weights in four bits (bitsandbytes).")
    ] = _DEFAULT.quantize,
    export: Annotated[
        str | None,
        typer.Option(
            help="Write the trained model, or the adapters, to this new folder at the end.",
            metavar="FOLDER",
        ),
    ] = _DEFAULT.export,
    merge: Annotated[
        bool, typer.Option("--merge", help="Export the model with the adapters in it.")
    ] = _DEFAULT.merge,
    config_file: Annotated[
        str | None,
        typer.Option(
            "--config", help="Options from a file; those given here win.", metavar="FILE.toml"
        ),
    ] = None,
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
    min_workers: Annotated[
        int | None,
        typer.Option(help="Go on without workers that are lost, while so many are left."),
    ] = _DEFAULT.min_workers,
    steps: Annotated[int, typer.Option(help="Steps of the whole schedule.")] = _DEFAULT.steps,
    stop_after: Annotated[
        int | None, typer.Option(help="Stop early after this step, the schedule unchanged.")
    ] = _DEFAULT.stop_after,
    batch: Annotated[int, typer.Option(help="Sequences per worker.")] = _DEFAULT.batch,
    seq: Annotated[int, typer.Option(help="Tokens per sequence.")] = _DEFAULT.seq,
    accumulate: Annotated[int, typer.Option(help="Microbatches per step.")] = _DEFAULT.accumulate,
    lr: Annotated[
        float | None, typer.Option(help="Peak learning rate; default: by the size of the model.")
    ] = None,
    optimizer: Annotated[
        OptimizerName, typer.Option(help="What steps the matrices; AdamW steps everything else.")
    ] = _DEFAULT.optimizer,
    muon_lr: Annotated[
        float | None, typer.Option(help="Peak learning rate of Muon; default: --lr.")
    ] = _DEFAULT.muon_lr,
    max_skipped: Annotated[
        int, typer.Option(help="Steps in a row to skip if loss or gradients are not finite.")
    ] = _DEFAULT.max_skipped,
    dtype: Annotated[Dtype, typer.Option(help="Dtype of forward and backward.")] = _DEFAULT.dtype,
    layout: Annotated[
        LayoutName, typer.Option(help="How parameters lie in the shards.")
    ] = _DEFAULT.layout,
    replicas: Annotated[
        int, typer.Option(help="Copies of the shards; workers of one copy share it.")
    ] = _DEFAULT.replicas,
    wire: Annotated[
        str | None,
        typer.Option(
            help="How parameters and gradients travel: bf16, int8 or fp8, fp32 if left out.",
            metavar="gather=KIND,reduce=KIND",
        ),
    ] = _DEFAULT.wire,
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
    hardware: Annotated[
        str | None,
        typer.Option(
            help="Plan the time of a step, too, for a preset or a file of fullshard doctor.",
            metavar="NAME|FILE",
        ),
    ] = _DEFAULT.hardware,
    trace: Annotated[
        bool, typer.Option(help="Record what workers do, for fullshard trace.")
    ] = _DEFAULT.trace,
) -> int:
    """Train a language model on real text, fully sharded over local workers.

    Under torchrun the same command is one worker of its job:
    torchrun --nproc-per-node 2 -m fullshard.train
    """
    config = resolve(context)
    if is_worker():
        work(config, prepared=False)
    return launch(config)


def resolve(context: typer.Context) -> TrainConfig:
    """Return the configuration that the options ask for; options override ``--config``.

    With ``--resume``, options that are not given keep the values of the resumed run, except for
    ``stop_after``, which is never taken over.

    Raises:
        ConfigError: a value cannot work, or there is no run to resume.
    """
    given = {key: value for key, value in context.params.items() if _is_given(context, key)}
    file = given.pop("config_file", None)
    from_file = {} if file is None else read_options(Path(file), _kinds())
    folder = _folder(given, from_file)
    asked = {key: v for key, v in {**from_file, **given}.items() if key not in ("name", "out")}
    if "init" in asked:
        asked.setdefault("model", f"{HF}{asked['init']}")
    if asked.get("resume"):
        saved = RunDir(Path(folder)).config
        if not saved.exists():
            raise ConfigError(f"{folder} holds no run to resume: start without --resume")
        base = dataclasses.replace(TrainConfig.load(saved), stop_after=None)
        if asked.get("optimizer", base.optimizer) != base.optimizer:
            raise ConfigError(
                f"--optimizer {asked['optimizer'].value}: {folder} is trained by "
                f"{base.optimizer.value}, whose state another optimizer cannot go on with; leave "
                "--optimizer out, or start anew without --resume"
            )
    else:
        model = TrainConfig(model=asked.get("model", _DEFAULT.model)).model
        base = TrainConfig(
            nproc=default_nproc(), lr=default_lr(model, tuned="init" in asked, lora="lora" in asked)
        )
    if is_worker():
        if asked.get("min_workers") is not None:
            raise ConfigError(
                "--min-workers is for workers that fullshard train starts; torchrun ends all of "
                "them and starts them again, see its --max-restarts: leave --min-workers out"
            )
        asked["nproc"] = _nproc_of_launcher(given)
    for key in ("data", "init", "export"):
        if key in asked:
            asked[key] = str(Path(asked[key]).absolute())
    if asked.get("model", "").startswith(HF):
        asked["model"] = HF + str(Path(asked["model"].removeprefix(HF)).absolute())
    return dataclasses.replace(base, **asked, out=folder)


def _kinds() -> dict[str, Any]:
    """Return names and types of options for a file: all of the command but ``--config``."""
    hints = typing.get_type_hints(train_command)
    return {key: hints[key] for key in hints if key not in ("context", "config_file", "return")}


def _folder(given: dict[str, Any], from_file: dict[str, Any]) -> str:
    """Return the run's folder by ``--out``, else ``--name``; ``given`` overrides the file."""
    for options in (given, from_file):
        if "out" in options:
            return str(options["out"])
        if "name" in options:
            name: str = options["name"]
            if Path(name).name != name:
                raise ConfigError(f"--name {name}: must be a plain name; --out takes a folder")
            return str(Path("runs") / name)
    return _DEFAULT.out


def _nproc_of_launcher(given: dict[str, Any]) -> int:
    """Return the number of workers that torchrun started here; ``--nproc`` may not differ."""
    started = num_local_workers()
    if given.get("nproc", started) != started:
        raise ConfigError(
            f"--nproc is {given['nproc']}, but torchrun started {started} workers on this "
            "machine: leave --nproc out"
        )
    return started


def run_app(app: typer.Typer, program: str, arguments: Sequence[str] | None = None) -> int:
    """Run a command line; a user error prints one line on stderr and returns exit code 2."""
    try:
        outcome = app(args=arguments, prog_name=program, standalone_mode=False)
    except FullshardError as error:
        message = str(error)
    except Exception as error:
        # A usage error of click. Some versions of typer bundle click, some depend on it, so its
        # classes share no public name, but all have this method.
        if not hasattr(error, "format_message"):
            raise
        message = error.format_message()
    else:
        return int(outcome or 0)
    if os.environ.get("RANK", "0") == "0":  # under torchrun all workers refuse alike
        print(f"fullshard: error: {message}", file=sys.stderr)
    return 2


def _is_given(context: typer.Context, option: str) -> bool:
    source = context.get_parameter_source(option)
    return source is not None and source.name != "DEFAULT"
