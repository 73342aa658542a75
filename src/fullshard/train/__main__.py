"""``python -m fullshard.train``: the command ``fullshard train``, also for torchrun's ``-m``."""

import sys

import typer

from .command import run_app, train_command

app = typer.Typer(add_completion=False)
app.command()(train_command)

if __name__ == "__main__":
    sys.exit(run_app(app, "fullshard train"))
