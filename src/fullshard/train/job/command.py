"""The command ``fullshard train``: turns options into a configuration and starts the job."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer

from fullshard.errors import ConfigError, FullshardError
from fullshard.plan import hardware_of
from fullshard.train.config import HF, TrainConfig, default_lr
from fullshard.train.job.launch import default_nproc, launch
from fullshard.train.job.options import options, read_options, with_options
from fullshard.train.job.worker import work
from fullshard.train.run import RunDir, say
from fullshard.train.world import check_launched, is_worker, num_local_workers

_DEFAULT = TrainConfig()


@with_options
def train_command(context: typer.Context, **given: Any) -> int:
    """Train a language model on real text, fully sharded over local workers.

    Under torchrun the same command is one worker of its job:
    torchrun --nproc-per-node 2 -m fullshard.train
    """
    config = resolve(context)
    check_launched()
    if is_worker():
        work(config, prepared=False)
    return launch(config)


def resolve(context: typer.Context) -> TrainConfig:
    """Return the configuration that the options ask for; options override ``--config``.

    With ``--resume``, missing options keep the values of the resumed run, except for
    ``stop_after``, which is never kept.

    Raises:
        ConfigError: a value is invalid, or there is no run to resume.
    """
    given = {key: value for key, value in context.params.items() if _is_given(context, key)}
    file = given.pop("config_file", None)
    from_file = {} if file is None else read_options(Path(file), _kinds())
    _choose_length(given, from_file)
    folder = _folder(given, from_file)
    asked = {key: v for key, v in {**from_file, **given}.items() if key not in ("name", "out")}
    if "steps" in asked:
        asked["epochs"] = None
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
        if asked.get("min_workers"):
            raise ConfigError(
                "--min-workers is for workers that fullshard train starts; torchrun ends all of "
                "them and starts them again, see its --max-restarts: leave --min-workers out"
            )
        asked |= {"nproc": _nproc_of_launcher(given), "min_workers": None}
    for key in _ZERO_IS_OFF:
        if asked.get(key) == 0:
            asked[key] = None
    if "sample" in asked:
        asked["sample"] = _sample_of(asked["sample"])
    for key in ("data", "init", "export"):
        if key in asked:
            asked[key] = str(Path(asked[key]).absolute())
    if "hardware" in asked:
        hardware_of(asked["hardware"])
        if Path(asked["hardware"]).is_file():
            asked["hardware"] = str(Path(asked["hardware"]).absolute())
    if asked.get("model", "").startswith(HF):
        asked["model"] = HF + str(Path(asked["model"].removeprefix(HF)).absolute())
    return dataclasses.replace(base, **asked, out=folder)


# For these options, 0 switches off the value of a resumed run.
_ZERO_IS_OFF = ("keep", "patience", "memory_every", "min_workers")


def _kinds() -> dict[str, Any]:
    """Return names and types of the options in a file: all options but ``--config``."""
    kinds = {name: option.kind for name, option in options().items() if name != "config_file"}
    return kinds | {"sample": int | str}


def _choose_length(given: dict[str, Any], from_file: dict[str, Any]) -> None:
    """Remove ``steps`` and ``epochs`` of the file if one of them is ``given`` by hand.

    Raises:
        ConfigError: the command line has both, or the file has both.
    """
    for asked, where in ((given, ""), (from_file, "--config: ")):
        if "steps" in asked and "epochs" in asked:
            raise ConfigError(f"{where}--steps with --epochs: give one of them")
    if "steps" in given or "epochs" in given:
        from_file.pop("steps", None)
        from_file.pop("epochs", None)


def _sample_of(value: str | int) -> int | None:
    """Return the number of tokens of ``--sample``; None if it is off."""
    if value == "off":
        return None
    try:
        return int(value)
    except ValueError as error:
        raise ConfigError(f"--sample is {value}, expected off or a number of tokens") from error


def _folder(given: dict[str, Any], from_file: dict[str, Any]) -> str:
    """Return the run's folder by ``--out``, else ``--name``; ``given`` overrides the file."""
    for asked in (given, from_file):
        if "out" in asked:
            return str(asked["out"])
        if "name" in asked:
            name: str = asked["name"]
            if Path(name).name != name or name == "..":
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
        if type(error).__name__ == "NoArgsIsHelpError":
            print(message)
            return 0
    else:
        return int(outcome or 0)
    if os.environ.get("RANK", "0") == "0":  # under torchrun all workers refuse alike
        say(f"fullshard: error: {message}", sys.stderr)
    return 2


def _is_given(context: typer.Context, option: str) -> bool:
    source = context.get_parameter_source(option)
    return source is not None and source.name != "DEFAULT"
