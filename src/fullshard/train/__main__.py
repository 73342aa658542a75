"""Entry point of ``python -m fullshard.train`` and of torchrun's ``-m fullshard.train``."""

import sys

import typer

from fullshard.train.job import GroupedCommand, run_app, train_command

app = typer.Typer(add_completion=False, rich_markup_mode=None)
app.command(cls=GroupedCommand)(train_command)

if __name__ == "__main__":
    sys.exit(run_app(app, "fullshard train"))
