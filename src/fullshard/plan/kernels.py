"""Attention on the meta device as one operation, as the kernels of devices compute it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode


class DeviceKernels(TorchFunctionMode):
    """A mode that computes attention on the meta device in one operation, as devices do.

    Without this mode, PyTorch would store scores, whose memory no device needs. A CPU has no such
    kernel for dropout, or for heads of queries and values that differ in size.
    """

    def __init__(self, *, on_cpu: bool) -> None:
        super().__init__()
        self._on_cpu = on_cpu

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Replace attention."""
        kwargs = kwargs or {}
        if function is F.scaled_dot_product_attention:
            found = self._attend(*args, **kwargs)
            if found is not None:
                return found
        return function(*args, **kwargs)

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor | None:
        whole = type(query) is Tensor and query.is_meta and query.dim() == 4
        alike = query.shape[-1] == value.shape[-1]
        if not whole or (self._on_cpu and (dropout_p or not alike)):
            return None
        if attn_mask is not None and attn_mask.dtype is torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype)
        if enable_gqa and (self._on_cpu or not alike):  # these kernels need repeated heads
            key, value = (
                one.repeat_interleave(query.shape[1] // one.shape[1], 1) for one in (key, value)
            )
        out: Tensor
        if alike:
            out, _ = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
            )
        else:
            out, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
                query, key, value, attn_mask, True, dropout_p, is_causal, scale=scale
            )
        return out
