"""Print the output of commands: JSON and tables."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.table import Table


def print_json(value: Any) -> None:
    """Print ``value`` as JSON, and values that JSON lacks by their ``repr``."""
    print(json.dumps(value, indent=2, default=repr))


def print_table(columns: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> None:
    """Print a table without lines."""
    table = Table(*columns, box=None, pad_edge=False)
    for row in rows:
        table.add_row(*row)
    console_for_tables().print(table)


def console_for_tables() -> Console:
    """Return a console that prints names unchanged, brackets included."""
    # Without a terminal, lines may have any length.
    width = None if Console().is_terminal else 1000
    return Console(width=width, markup=False, emoji=False)
