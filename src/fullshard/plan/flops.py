"""FLOP of operations: PyTorch's counts, and ours for operations that PyTorch does not count."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry


def flops_of(op: Any, args: Any, kwargs: dict[str, Any], out: Any) -> float:
    """Return the FLOP of a matrix product or of attention; 0 for other operations."""
    packet = op.overloadpacket
    own = _OWN.get(packet)
    if own is not None:
        return float(own(args, kwargs, out))
    count = flop_registry.get(packet)
    return 0.0 if count is None else float(count(*args, **kwargs, out_val=out))


def _grouped_mm(args: Any, kwargs: dict[str, Any], out: Tensor) -> float:
    """Count products of groups of rows: each element of the result, or each row, meets one group.

    (rows, k) x (groups, k, n) and (k, rows) x (rows, n), and their transposes.
    """
    left: Tensor = args[0]
    right: Tensor = args[1]
    if out.dim() == 3 and left.dim() == right.dim() == 2:
        return 2 * left.shape[0] * left.shape[1] * right.shape[1]
    return 2 * out.numel() * left.shape[-1]


def _attention(query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool) -> float:
    """Count scores and their product with values; only half of causal scores is computed."""
    batch_and_heads, queries = prod(query.shape[:2]), query.shape[2]
    scores = batch_and_heads * queries * key.shape[2]
    return 2 * scores * (query.shape[3] + value.shape[3]) / (2 if is_causal else 1)


def _forward(at: int, args: Any, kwargs: dict[str, Any], out: Any) -> float:
    """Count a forward; ``at`` is the position of ``is_causal`` in ``args``."""
    is_causal = args[at] if len(args) > at else kwargs.get("is_causal", False)
    return _attention(*args[:3], is_causal=is_causal)


def _backward(at: int, args: Any, kwargs: dict[str, Any], out: Any) -> float:
    """Count two and a half forwards: one product is recomputed, and four are new."""
    return 2.5 * _forward(at - 1, args[1:], kwargs, out)


_aten = torch.ops.aten
_OWN: dict[Any, Callable[[Any, dict[str, Any], Any], float]] = {
    _aten._grouped_mm: _grouped_mm,
    _aten._scaled_dot_product_flash_attention_for_cpu: partial(_forward, 4),
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: partial(_backward, 7),
    # PyTorch's own count of these ignores ``is_causal``.
    _aten._scaled_dot_product_efficient_attention: partial(_forward, 6),
    _aten._scaled_dot_product_efficient_attention_backward: partial(_backward, 11),
}
