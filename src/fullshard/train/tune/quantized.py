"""Frozen weights of four bits (QLoRA), by ``bitsandbytes``; an optional extra."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fullshard.checkpoint import Conversion

_PER_BYTE = 2


class Nf4Linear(nn.Linear):
    """A frozen linear layer with two numbers per byte of its weight, which any shard may cut.

    Attributes:
        weight: ``[out * in / 2, 1]``, bytes.
        scales: scales of blocks of 64 numbers, in eight bits, unsharded on every rank. None
            before the weight is loaded.
    """

    def __init__(self, like: Any, *, transposed: bool) -> None:
        nn.Module.__init__(self)
        stored = like.weight.shape
        self.out_features, self.in_features = stored[::-1] if transposed else stored
        self.is_transposed = transposed  # orientation in files
        number = like.weight.numel() // _PER_BYTE
        packed = torch.empty(number, 1, dtype=torch.uint8, device=like.weight.device)
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.bias = like.bias
        self.scales: Any = None

    def forward(self, x: Tensor) -> Tensor:
        """Multiply by the weight in the dtype of ``x``."""
        from bitsandbytes.autograd._functions import matmul_4bit

        bias = None if self.bias is None else self.bias.to(x.dtype)
        result: Tensor = matmul_4bit(x, self.weight.t(), bias=bias, quant_state=self.scales)
        return result

    def conversion(self, device: torch.device) -> Conversion:
        """Return the conversion from a stored weight to this weight, on ``device``."""
        from bitsandbytes.functional import quantize_4bit

        shape = (self.out_features, self.in_features)

        def make(stored: Tensor) -> Tensor:
            weight = (stored.t() if self.is_transposed else stored).to(device, torch.float32)
            packed, self.scales = quantize_4bit(
                weight.contiguous(), quant_type="nf4", compress_statistics=True
            )
            return packed.cpu()

        return Conversion(shape[::-1] if self.is_transposed else shape, make)


def quantize_linears(model: Any) -> None:
    """Replace the linear layers of a model on the meta device, but for its head."""
    from transformers.pytorch_utils import Conv1D

    head = model.get_output_embeddings()
    for path, module in list(model.named_modules()):
        if isinstance(module, nn.Linear | Conv1D) and module is not head:
            layer = Nf4Linear(module, transposed=isinstance(module, Conv1D))
            model.set_submodule(path, layer)


def conversions(model: nn.Module, device: torch.device) -> dict[str, Conversion]:
    """Return the conversions from stored to quantised weights, by names in ``model``."""
    return {
        f"{path}.weight": module.conversion(device)
        for path, module in model.named_modules()
        if isinstance(module, Nf4Linear)
    }
