"""Small models of transformers in folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

pytest.importorskip("transformers", reason="the extra hf is not installed")


VOCAB = 280


SMALL = {"num_hidden_layers": 2, "max_position_embeddings": 40, "vocab_size": 300}


HEADS = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}


CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 2, **SMALL, **HEADS},
    "qwen3": {"num_key_value_heads": 2, "head_dim": 8, **SMALL, **HEADS},
    "mixtral": {"num_key_value_heads": 2, "num_local_experts": 4, **SMALL, **HEADS},
    "gpt2": {"vocab_size": 300, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 40}
    | {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
}


def write_tokenizer(folder: Path, *, end: str = "</s>") -> None:
    """Write a tokenizer whose texts begin with a mark by default, like Llama's."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet,
        show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator(["the a of to in and is that for it"] * 9, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    facts = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": {"__type": "AddedToken", "content": end, "special": True},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(facts))


def written(folder: Path, kind: str, **changes: Any) -> Path:
    """Write a folder with weights, tied and in bf16, as in published models."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, tie_word_embeddings=True, **CONFIGS[kind] | changes)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    path = folder / kind
    model.save_pretrained(path, max_shard_size=20_000)
    write_tokenizer(path)
    return path
