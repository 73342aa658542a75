"""A small language model and what it learns, for the trainers."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def llama(seed):
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=32,
    )
    return LlamaForCausalLM(config)


def rows():
    generator = torch.Generator().manual_seed(0)
    texts = torch.randint(32, (16, 9), generator=generator)
    return [{"input_ids": text, "labels": text} for text in texts]


def losses_of(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
