"""``fullshard export`` and ``fullshard generate``: use a trained model, in one process."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer

from fullshard.errors import ConfigError
from fullshard.train.config import SaveDtype
from fullshard.train.job import FinishedRun
from fullshard.train.showing import showing_progress

_Run = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of the run, such as runs/mine.")]
_Step = Annotated[int | None, typer.Option(help="Checkpoint of this step; default: the newest.")]
_Best = Annotated[bool, typer.Option("--best", help="Checkpoint of the lowest held-out loss.")]
_Tokens = Annotated[int, typer.Option(help="Largest number of tokens to write.", min=1)]


def export_command(
    run: _Run,
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A new folder.")],
    *,
    step: _Step = None,
    best: _Best = False,
    dtype: Annotated[
        SaveDtype | None,
        typer.Option(help="Dtype of the weights; default: --save-dtype of the run, else fp32."),
    ] = None,
) -> None:
    """Write the model of a run, or its adapters, in the format of Hugging Face libraries."""
    found = FinishedRun.at(run)
    checkpoint = found.checkpoint(step=step, best=best)
    with showing_progress():
        found.export(checkpoint, folder, dtype)
    what = "model" if found.config.lora is None or found.config.merge else "adapters"
    print(f"{folder} holds the {what} of {checkpoint}")


def generate_command(
    run: _Run,
    text: Annotated[str, typer.Argument(metavar="TEXT", help="The text to continue.")],
    *,
    tokens: _Tokens = 120,
    temperature: Annotated[
        float, typer.Option(help="Higher is more surprising; 0 takes the most likely token.")
    ] = 0.7,
    seed: Annotated[int, typer.Option(help="Seed of the sampling.", min=0)] = 0,
    step: _Step = None,
    best: _Best = False,
) -> None:
    """Print a text and its continuation by the model of a run."""
    if not 0 <= temperature < math.inf:
        raise ConfigError(f"--temperature is {temperature:g}, it must be at least 0")
    found = FinishedRun.at(run)
    checkpoint = found.checkpoint(step=step, best=best)
    with showing_progress():
        written = found.continued(
            checkpoint, text, num_tokens=tokens, temperature=temperature, seed=seed
        )
    print(written)
