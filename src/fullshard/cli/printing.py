"""Print the output of commands: JSON and tables."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


def print_json(value: Any) -> None:
    """Print ``value`` as JSON, and values that JSON lacks by their ``repr``."""
    print(json.dumps(value, indent=2, default=repr))


def print_table(columns: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> None:
    """Print a table without lines."""
    table = Table(*columns, box=None, pad_edge=False)
    for row in rows:
        table.add_row(*row)
    # Without a terminal, lines may have any length. Names are printed unchanged, with brackets.
    width = None if Console().is_terminal else 1000
    Console(width=width, markup=False, emoji=False).print(table)
