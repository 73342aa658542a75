"""Module hooks, as far as they work without a process group."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fullshard.engine import MixedPrecisionPolicy
from fullshard.frontend.hooks import _ForwardHooks


class Copies(TorchDispatchMode):
    """Records for each copy to another device whether it is non-blocking."""

    def __init__(self) -> None:
        super().__init__()
        self.non_blocking: list[bool] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op is torch.ops.aten._to_copy.default:
            self.non_blocking.append((kwargs or {}).get("non_blocking", False))
        return op(*args, **(kwargs or {}))


def test_inputs_are_read_when_the_forward_begins() -> None:
    """The copy blocks, because a data loader may refill a pinned batch right after the call."""
    unit: Any = SimpleNamespace(device=torch.device("meta"))
    hooks = _ForwardHooks(unit, 0, MixedPrecisionPolicy())
    with Copies() as copies:
        assert hooks._move(torch.ones(2)).is_meta
    assert copies.non_blocking == [False]
