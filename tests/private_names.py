"""The table of PyTorch's private names in ``docs/compat.md``, made from the code.

python -m tests.private_names    # writes it anew
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from fullshard.compat import flat_states, states
from fullshard.compat.names import OURS, SHOWN
from fullshard.compat.views import View

PAGE = Path(__file__).parents[1] / "docs" / "compat.md"
BEGIN, END = "<!-- private names -->\n", "<!-- end of private names -->\n"
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
"""Where, which names, what they are here, what to use instead."""


def functions() -> Iterator[Row]:
    """Names of private modules that are ours: those of users, and functions that look for units."""
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
    """Names that raise, with what to use."""
    by_text: dict[str, list[str]] = {}
    for name, text in instead.items():
        by_text.setdefault(text, []).append(name)
    for text, names in by_text.items():
        yield cls, names, "raises", text


def rows() -> Iterator[Row]:
    """Everything, in the order of the page."""
    yield from functions()
    for view in VIEWS:
        cls = view.stands_for.rpartition(".")[2]
        yield cls, sorted(view.shown), "to read", ""
        yield from refused(cls, view.instead)
    answered = [n for n in flat_states.WRAPPER_ATTRIBUTES if n not in flat_states.WRAPPER_INSTEAD]
    yield WRAPPER, answered, "to read", ""
    yield from refused(WRAPPER, flat_states.WRAPPER_INSTEAD)


def lines_of(row: Row) -> Iterator[str]:
    """As many lines as the names of a row take."""
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
    """The lines of the page between ``BEGIN`` and ``END``."""
    lines = ["| file or class | private names | here | instead |", "|---|---|---|---|"]
    return "\n".join([*lines, *(line for row in rows() for line in lines_of(row))]) + "\n"


def parts() -> tuple[str, str, str]:
    """The page before the table, the table, and the page after it."""
    before, rest = PAGE.read_text().split(BEGIN)
    inside, after = rest.split(END)
    return before, inside, after


if __name__ == "__main__":
    first, _, last = parts()
    PAGE.write_text(f"{first}{BEGIN}{table()}{END}{last}")
