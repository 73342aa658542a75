"""Writes the tables of PyTorch's private names in ``docs/compat.md`` from the code.

python -m tests.private_names    # writes the tables, and prints names that this PyTorch lacks
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fullshard import _torch
from fullshard._torch.names import PrivateName
from fullshard.compat import flat_states, states
from fullshard.compat.names import OURS, SHOWN
from fullshard.compat.states import View
from tests.hidden_names import PROGRAMS, RESILIENT

PAGE = Path(__file__).parents[1] / "docs" / "compat.md"
BEGIN, END = "<!-- private names -->\n", "<!-- end of private names -->\n"
USED, END_USED = "<!-- used names -->\n", "<!-- end of used names -->\n"
FSDP = "torch.distributed.fsdp."
VIEWS: tuple[type[View], ...] = (
    states.State,
    states.StateContext,
    states.CommContext,
    states.ParamGroup,
    states.Param,
    flat_states.Handle,
)
WRAPPER = "FullyShardedDataParallel"
WIDTH = 105


Row = tuple[str, Sequence[str], str, str]
"""File or class, names, their use here, and the replacement."""


def functions() -> Iterator[Row]:
    """Yield functions and classes of private modules that fullshard replaces."""
    for module, names in (*SHOWN.items(), *OURS.items()):
        if not module.startswith(FSDP + "_"):
            continue
        groups: dict[str, list[str]] = {}
        for name, ours in sorted(names.items()):
            looks = getattr(ours, "__module__", "").startswith("fullshard.compat")
            groups.setdefault("knows ours, too" if looks else "ours", []).append(name)
        for here, found in groups.items():
            yield module.removeprefix(FSDP), found, here, ""


def refused(cls: str, instead: dict[str, str]) -> Iterator[Row]:
    """Yield names that raise, with the replacement."""
    by_text: dict[str, list[str]] = {}
    for name, text in instead.items():
        by_text.setdefault(text, []).append(name)
    for text, names in by_text.items():
        yield cls, names, "raises", text


def rows() -> Iterator[Row]:
    """Yield all rows, in the order of the page."""
    yield from functions()
    for view in VIEWS:
        cls = view.stands_for.rpartition(".")[2]
        yield cls, sorted(view.shown), "to read", ""
        yield from refused(cls, view.instead)
    answered = [n for n in flat_states.WRAPPER_ATTRIBUTES if n not in flat_states.WRAPPER_INSTEAD]
    yield WRAPPER, answered, "to read", ""
    yield from refused(WRAPPER, flat_states.WRAPPER_INSTEAD)


def lines_of(row: Row) -> Iterator[str]:
    """Yield the lines of a row; long lists of names take several."""
    where, names, *rest = row
    fitting: list[str] = []
    for name in [*names, None]:
        longer = [*fitting, name] if name else fitting
        if name is None or len(line_of(where, longer, rest)) > WIDTH:
            yield line_of(where, fitting, rest)
            fitting = []
        fitting.append(name or "")


def line_of(where: str, names: Sequence[str], rest: Sequence[str]) -> str:
    quoted = ", ".join(f"`{name}`" for name in names)
    return f"| `{where}` | {quoted} | {' | '.join(rest)} |"


def table() -> str:
    """Return the lines of the page between ``BEGIN`` and ``END``."""
    lines = ["| file or class | private names | here | instead |", "|---|---|---|---|"]
    return "\n".join([*lines, *(line for row in rows() for line in lines_of(row))]) + "\n"


def hidden_reports(*names: str) -> dict[str, Any]:
    """Return the reports of ``tests/hidden_names.py`` for these names, or all."""
    command = [sys.executable, "-m", "tests.hidden_names", *names]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def uses() -> list[tuple[str, PrivateName]]:
    """Return every private name that fullshard uses, with its module of ``fullshard._torch``."""
    return [
        (module.__name__.rpartition(".")[2], use)
        for module in _torch.MODULES
        for use in module.private.uses
    ]


def used_table(reports: Mapping[str, Any]) -> str:
    """Return the lines of the page between ``USED`` and ``END_USED``, from the reports."""
    groups: dict[tuple[str, str, str, str], list[str]] = {}
    for module, use in uses():
        raising = reports[use.name]["raises"]
        works = [one for one in (*PROGRAMS, RESILIENT) if one not in raising]
        if works == [RESILIENT]:  # it passes its check, but nothing can train
            works = []
        error = "`TorchVersionError`" if use.is_needed else "none"
        key = (module, use.feature, ", ".join(works), error)
        groups.setdefault(key, []).append(use.name.removeprefix("torch."))
    lines = ["| module | names | needed for | still works | error |", "|---|---|---|---|---|"]
    for (module, feature, *rest), names in groups.items():
        quoted = ", ".join(f"`{name}`" for name in sorted(names))
        lines.append(f"| `{module}` | {quoted} | {feature} | {' | '.join(rest)} |")
    return "\n".join(lines) + "\n"


def parts(begin: str = BEGIN, end: str = END) -> tuple[str, str, str]:
    """Return the page before the table between ``begin`` and ``end``, the table, and the rest."""
    before, rest = PAGE.read_text().split(begin)
    inside, after = rest.split(end)
    return before, inside, after


def write(text: str, begin: str, end: str) -> None:
    """Replace the table between ``begin`` and ``end``."""
    first, _, last = parts(begin, end)
    PAGE.write_text(f"{first}{begin}{text}{end}{last}")


if __name__ == "__main__":
    write(table(), BEGIN, END)
    write(used_table(hidden_reports()), USED, END_USED)
    for lacking in _torch.missing():
        print(f"this PyTorch has no {lacking.name}, needed for {lacking.feature}")
