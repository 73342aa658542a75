"""Functions that Dynamo does not compile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from fullshard._torch.names import Private

Function = TypeVar("Function", bound=Callable[..., Any])

private = Private(__name__, "frames of ours that `torch.compile` skips")
_EVAL_FRAME = "torch._C._dynamo.eval_frame"
_Action = private.get(f"{_EVAL_FRAME}._FrameAction", instead=())
_Strategy = private.get(f"{_EVAL_FRAME}._FrameExecStrategy", instead=())
_set_strategy = private.get(f"{_EVAL_FRAME}.set_code_exec_strategy", instead=())


def never_compiled(function: Function) -> Function:
    """Return ``function``, marked so that Dynamo skips it and everything that it calls.

    ``torch.compiler.disable`` does the same, but its wrapper costs host time at each call, and it
    imports the compiler.
    """
    marked: Any = function
    marked._torchdynamo_disable = True
    marked._torchdynamo_disable_msg = "fullshard moves parameters here"
    return _skipped(function, "SKIP")


def not_compiled(function: Function) -> Function:
    """Return ``function``, marked so that Dynamo skips it, but not what it calls."""
    return _skipped(function, "DEFAULT")


def _skipped(function: Function, within: str) -> Function:
    if _Action and _Strategy and _set_strategy:
        strategy = _Strategy(_Action.SKIP, getattr(_Action, within))
        _set_strategy(function.__code__, strategy)
    return function
