"""Fine-tuning: adapters and frozen weights of four bits."""

from __future__ import annotations

from fullshard.train.tune.adapters import add_adapters, merge_adapters, save_adapters
from fullshard.train.tune.quantized import conversions, quantize_linears
