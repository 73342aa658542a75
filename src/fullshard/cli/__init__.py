"""The ``fullshard`` command."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from fullshard import __version__
from fullshard.cli import checkpoints
from fullshard.cli.completing import completion_command
from fullshard.cli.doctor import doctor_command
from fullshard.cli.planning import plan_command
from fullshard.cli.runs import export_command, generate_command
from fullshard.cli.tracing import trace_command
from fullshard.cli.translating import translate_command
from fullshard.train.job import GroupedCommand, GroupedCommands, run_app, train_command

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    cls=GroupedCommands,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("train", cls=GroupedCommand)(train_command)
app.command("export", cls=GroupedCommand)(export_command)
app.command("generate", cls=GroupedCommand)(generate_command)
app.command("plan", cls=GroupedCommand)(plan_command)
app.command("doctor", cls=GroupedCommand)(doctor_command)
app.command("trace", cls=GroupedCommand)(trace_command)
app.command("translate", cls=GroupedCommand)(translate_command)
app.command("completion", cls=GroupedCommand)(completion_command)
app.add_typer(checkpoints.app, name="checkpoint")


def _tell_version(is_asked: bool) -> None:
    if is_asked:
        print(f"fullshard {__version__}")
        raise typer.Exit


_Version = Annotated[
    bool,
    typer.Option(
        "--version", callback=_tell_version, is_eager=True, help="Show the version and exit."
    ),
]


@app.callback()
def _fullshard(version: _Version = False) -> None:
    """Train PyTorch models too big for one device."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``fullshard ARGUMENTS`` (``sys.argv`` if None) and return the exit code.

    The code is 0 after success, 1 if a worker failed or a check found something, 2 for a user
    error, 130 after Ctrl-C.
    """
    return run_app(app, "fullshard", arguments)
