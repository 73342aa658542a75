"""Let a model mark, while it is constructed, which of its modules become units: ``wrap``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from torch import nn

from fullshard.errors import AssertedConfigError, UnsupportedError
from fullshard.wrap.policies import Options


@dataclass(frozen=True)
class _Wrapping:
    """The settings of the ``enable_wrap`` block that is active."""

    wrapper_cls: Callable[..., nn.Module]
    options: Options


_now: ContextVar[_Wrapping | None] = ContextVar("fullshard_wrapping", default=None)


@contextmanager
def enable_wrap(*, wrapper_cls: Any, **wrapper_kwargs: Any) -> Iterator[None]:
    """Make ``wrap(module)`` return ``wrapper_cls(module, **wrapper_kwargs)`` inside the block.

    Args:
        wrapper_cls: a wrapper class, or a function such as ``fully_shard``.
        wrapper_kwargs: options for all modules.

    Raises:
        UnsupportedError: if called inside another ``enable_wrap`` block.
        AssertedConfigError: if ``wrapper_cls`` is not callable.
    """
    if _now.get() is not None:
        raise UnsupportedError(
            "enable_wrap: called in the block of another one; give wrap() the options that differ"
        )
    if not callable(wrapper_cls):
        raise AssertedConfigError(
            f"enable_wrap(wrapper_cls={wrapper_cls!r}): expected a class or a function that takes "
            "a module"
        )
    token = _now.set(_Wrapping(wrapper_cls, wrapper_kwargs))
    try:
        yield
    finally:
        _now.reset(token)


def wrap(module: nn.Module, **wrap_overrides: Any) -> nn.Module:
    """Return ``module``, wrapped if ``wrap`` is called inside an ``enable_wrap`` block.

    Args:
        module: a module that may become a unit.
        wrap_overrides: options that override the options of ``enable_wrap``.
    """
    wrapping = _now.get()
    if wrapping is None:
        return module
    return wrapping.wrapper_cls(module, **{**wrapping.options, **wrap_overrides})
