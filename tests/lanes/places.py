"""Where in our tree, and in the program, something was issued."""

from __future__ import annotations

import sys
from pathlib import Path
from types import CodeType, FrameType
from typing import NamedTuple

import torch

import fullshard

_SOURCE = str(Path(fullshard.__file__).parent) + "/"
_TESTS = str(Path(__file__).parents[1]) + "/"
_OURS = {str(Path(__file__).parent / f"{name}.py") for name in (
    "booking", "checked", "checker", "clocks", "fake", "nodes", "places", "wire",
)}  # fmt: skip
_roles: dict[CodeType, str] = {}  # how a place calls the file; "": of no interest


class Place(NamedTuple):
    """A line of ours, or of the program; with it the line of the program that led there."""

    inner: str
    outer: str = ""
    node: str = ""
    """The autograd node that ran."""

    def __str__(self) -> str:
        node = f" in backward of {self.node}" if self.node else ""
        return self.inner + node + (f", from {self.outer}" if self.outer else "")


BEFORE = Place("(before the program)")


def here() -> Place:
    """The innermost line of fullshard or of a test, and the innermost of a test."""
    node = torch._C._current_autograd_node()
    name = "" if node is None else node.name()
    inner = ""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        role = _roles.get(code)
        if role is None:
            role = _roles[code] = _role(code)
        if role:
            line = f"{role}:{frame.f_lineno} ({code.co_name})"
            if role.startswith("tests/"):
                return Place(inner, line, name) if inner else Place(line, "", name)
            inner = inner or line
        frame = frame.f_back
    return Place(inner or "(outside)", "", name)


def _role(code: CodeType) -> str:
    path = code.co_filename
    if path in _OURS or path.endswith(("/ranks/strict.py", "/ranks/worker.py", "/ranks/pool.py")):
        return ""
    if path.startswith(_SOURCE):
        return "fullshard/" + path.removeprefix(_SOURCE)
    return "tests/" + path.removeprefix(_TESTS) if path.startswith(_TESTS) else ""
