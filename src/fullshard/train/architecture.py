"""Which model ``--model`` names: one of our sizes, or any causal one of ``transformers``."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fullshard.errors import ConfigError

from .config import HF, SIZES, ModelConfig, TrainConfig
from .data import LEAST_TOKENS, MOST_TOKENS
from .hf import load_hf
from .model import GPT


class Architecture(Protocol):
    """A causal language model that can be built, and what must be known of it before."""

    @property
    def vocab_size(self) -> int:
        """Rows of its embedding."""

    @property
    def max_seq(self) -> int | None:
        """The longest sequence that it can read, if there is a limit."""

    def description(self) -> dict[str, Any]:
        """What makes it this model and no other; goes into checkpoints, as JSON."""

    def build(self, *, seq: int, checkpoint_activations: bool) -> nn.Module:
        """The model with new weights in fp32, from torch's default generator."""


@dataclass(frozen=True, slots=True)
class _Ours:
    config: ModelConfig

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def max_seq(self) -> int | None:
        return None  # rotary positions have a row for each token that --seq asks for

    def description(self) -> dict[str, Any]:
        sizes = asdict(self.config)
        del sizes["lr"]
        return sizes

    def build(self, *, seq: int, checkpoint_activations: bool) -> nn.Module:
        return GPT(self.config, max_seq=seq, checkpoint_activations=checkpoint_activations)


def choose_architecture(config: TrainConfig) -> Architecture:
    """What ``config.model`` names, if it fits the rest of ``config``.

    Raises:
        ConfigError: if its file is missing or unknown to transformers, transformers is not
            installed, or ``config.seq`` is too long for it.
    """
    name = config.model
    chosen = _Ours(SIZES[name]) if name in SIZES else load_hf(name.removeprefix(HF))
    if chosen.max_seq is not None and config.seq > chosen.max_seq:
        raise ConfigError(
            f"--seq is {config.seq}, but --model {name} reads at most {chosen.max_seq} tokens: "
            f"give --seq {chosen.max_seq} or less"
        )
    if chosen.vocab_size < LEAST_TOKENS:
        raise ConfigError(
            f"--model {name} has a vocabulary of {chosen.vocab_size}: bytes need {LEAST_TOKENS}"
        )
    return chosen


def num_tokens(architecture: Architecture) -> int:
    """How large a vocabulary to train for it: its own, within what the text and 16 bits bear."""
    return min(architecture.vocab_size, MOST_TOKENS)


def count_parameters(architecture: Architecture, config: TrainConfig) -> int:
    """Elements of all its parameters, without the memory for them.

    Raises:
        ConfigError: if it cannot be built, or cannot recompute its activations.
    """
    with torch.device("meta"):
        model = architecture.build(
            seq=config.seq, checkpoint_activations=config.checkpoint_activations
        )
    return sum(parameter.numel() for parameter in model.parameters())


def next_token_logits(model: nn.Module, tokens: Tensor) -> Tensor:
    """Logits ``[B, T, V]`` in fp32 of what follows each of ``tokens`` ``[B, T]``.

    Here alone it matters whether the model is ours or of ``transformers``, which wraps them up.
    """
    output = model(tokens)
    logits: Tensor = output if isinstance(output, Tensor) else output.logits
    return logits.float()
