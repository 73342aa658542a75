"""Fine-tuning: adapters and frozen weights of four bits."""

from __future__ import annotations

from fullshard.train.tune.adapters import add_adapters, check_peft, merge_adapters, save_adapters
from fullshard.train.tune.quantized import check_bitsandbytes, conversions, quantize_linears
