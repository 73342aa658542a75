"""Models of transformers, built from configurations."""

from __future__ import annotations

from typing import Any

import torch

SIZES = {
    "vocab_size": 65,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 32,
}


KINDS: dict[str, dict[str, Any]] = {
    "llama": SIZES,
    "tied llama": {**SIZES, "tie_word_embeddings": True},
    "gpt2": {"vocab_size": 65, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32},
    "gpt_neox": {**SIZES, "rotary_pct": 0.5},  # the only kind whose names depend on its class
    "mixtral": {**SIZES, "num_local_experts": 4},
    # its embedding has a buffer, initialized together with a row of the weight
    "gemma2": {**SIZES, "head_dim": 8},
    "qwen3_moe": {
        **SIZES,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "head_dim": 8,
    },
}


TOKENS = torch.arange(24).view(2, 12) * 7 % 65


def built(kind: str, device: str) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        kind.split()[-1], **KINDS[kind], bos_token_id=1, eos_token_id=2, pad_token_id=0
    )
    torch.manual_seed(7)
    with torch.device(device):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return model.eval()
