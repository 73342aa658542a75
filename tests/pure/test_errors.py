"""Every exception that fullshard raises on purpose is one of ``fullshard.errors``."""

from __future__ import annotations

import ast
import builtins
import importlib
import pickle
import traceback
from pathlib import Path

import pytest

from fullshard import errors

ROOT = Path(__file__).parents[2] / "src" / "fullshard"
BUILTIN = {
    name
    for name, value in vars(builtins).items()
    if isinstance(value, type) and issubclass(value, BaseException)
}

LOOKUP = "__getattr__"  # the function of a module


def raised_builtins(text: str) -> list[str]:
    """Return lines that raise builtin exceptions; AttributeError in ``__getattr__`` is allowed."""
    found = []
    tree = ast.parse(text)
    lookups = [own for own in tree.body if isinstance(own, ast.FunctionDef) and own.name == LOOKUP]
    due = {node for own in lookups for node in ast.walk(own) if "AttributeError" in ast.dump(node)}
    for node in ast.walk(tree):
        if node in due:
            continue
        if isinstance(node, ast.Raise) and node.exc is not None:
            what = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
            if isinstance(what, ast.Name) and what.id in BUILTIN:
                found.append(f"{node.lineno}: {what.id}")
    return found


def all_classes(base: type) -> list[type]:
    return [base, *(one for own in base.__subclasses__() for one in all_classes(own))]


def test_private_classes_show_as_public_ones() -> None:
    importlib.import_module("fullshard.frontend.explain")
    for error in all_classes(errors.FullshardError):
        one = error("what")
        (text,) = traceback.format_exception_only(one)
        name = text.removeprefix("fullshard.errors.").removesuffix(": what\n")
        assert name in errors.__all__, text
        assert issubclass(error, getattr(errors, name))
        again = pickle.loads(pickle.dumps(one))
        assert (type(again), again.args) == (getattr(errors, name), ("what",))


def test_a_builtin_is_seen() -> None:
    assert raised_builtins("raise ValueError('no')") == ["1: ValueError"]
    assert raised_builtins("def __getattr__(name):\n    raise AttributeError(name)") == []
    assert raised_builtins("def __getattr__(name):\n    raise KeyError(name)") == ["2: KeyError"]
    assert raised_builtins("try:\n    f()\nexcept E:\n    raise\nraise ConfigError") == []


def test_no_builtin_is_raised() -> None:
    found = {
        str(path.relative_to(ROOT)): lines
        for path in sorted(ROOT.rglob("*.py"))
        if (lines := raised_builtins(path.read_text()))
    }
    assert found == {}


@pytest.mark.parametrize("name", [name for name in errors.__all__ if name != "FullshardError"])
def test_each_is_also_what_pytorch_raises(name: str) -> None:
    error = getattr(errors, name)
    assert issubclass(error, errors.FullshardError)
    kinds = (ValueError, TypeError, AssertionError, NotImplementedError, RuntimeError, ImportError)
    assert issubclass(error, kinds)
