"""The model that ``--model`` names: one of our sizes or a causal one of ``transformers``."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fullshard.errors import ConfigError
from fullshard.train.config import HF, SIZES, ModelConfig, TrainConfig
from fullshard.train.data import LEAST_TOKENS, MOST_TOKENS, TokenizedText, load_text
from fullshard.train.hf import HfArchitecture, load_hf, load_published, logits_and_loss
from fullshard.train.model import GPT
from fullshard.train.published import PUBLISHED


@dataclass(frozen=True, slots=True)
class GptArchitecture:
    """One of our sizes; its members are those of ``HfArchitecture``."""

    config: ModelConfig
    max_seq = None  # the rotary table is built with --seq rows
    takes_positions = False

    @property
    def vocab_size(self) -> int:
        """Number of rows of the embedding."""
        return self.config.vocab_size

    def description(self) -> dict[str, Any]:
        """Return the sizes."""
        return {key: size for key, size in asdict(self.config).items() if key != "lr"}

    def build(self, *, seq: int, checkpoint_activations: bool) -> nn.Module:
        """Return the model with new weights."""
        return GPT(self.config, max_seq=seq, checkpoint_activations=checkpoint_activations)

    def initialise(self, model: nn.Module) -> None:
        """Draw weights, and compute the rotary table."""
        assert isinstance(model, GPT)
        model.reset_parameters()


Architecture = GptArchitecture | HfArchitecture
"""A causal language model to build, with the facts that a run needs before that."""


def choose_architecture(config: TrainConfig) -> Architecture:
    """Return the model that ``config.model`` names, if it fits the rest of ``config``.

    Raises:
        ConfigError: its file is missing or unknown to transformers, transformers is not installed,
            ``config.seq`` is too long for it, or its vocabulary is too small.
    """
    name = config.model
    chosen: Architecture
    if name in SIZES:
        chosen = GptArchitecture(SIZES[name])
    else:
        chosen = load_published(name) if name in PUBLISHED else load_hf(name.removeprefix(HF))
    if chosen.max_seq is not None and config.seq > chosen.max_seq:
        raise ConfigError(
            f"--seq is {config.seq}, but --model {name} reads at most {chosen.max_seq} tokens: "
            f"give --seq {chosen.max_seq} or less"
        )
    if chosen.vocab_size < LEAST_TOKENS and config.init is None:
        raise ConfigError(
            f"--model {name} has a vocabulary of {chosen.vocab_size}: bytes need {LEAST_TOKENS}"
        )
    return chosen


def load_text_for(architecture: Architecture, config: TrainConfig) -> TokenizedText:
    """Return the text of a run, in tokens that the model knows.

    Raises:
        ConfigError: see ``load_text``.
    """
    pretrained = None if config.init is None else Path(config.init)
    size = architecture.vocab_size if pretrained else min(architecture.vocab_size, MOST_TOKENS)
    text = load_text(config.data, vocab_size=size, pretrained=pretrained, skip_bad=config.skip_bad)
    if architecture.takes_positions and config.pack:
        return text
    train, held_out = (replace(part, alone=True) for part in (text.train, text.held_out))
    return replace(text, train=train, held_out=held_out)


def count_parameters(architecture: Architecture, config: TrainConfig) -> int:
    """Return the number of elements of all parameters, without allocating them.

    Raises:
        ConfigError: the model cannot be built, or cannot recompute its activations.
    """
    with torch.device("meta"):
        model = architecture.build(
            seq=config.seq, checkpoint_activations=config.checkpoint_activations
        )
    return sum(parameter.numel() for parameter in model.parameters())


def next_token_logits(model: nn.Module, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
    """Return fp32 logits ``[B, T, V]`` of the token after each of ``tokens`` ``[B, T]``.

    In models of ``transformers``, a new sample of a row starts wherever ``positions`` ``[B, T]``
    restart at 0.
    """
    output = model(tokens, **_options(positions))
    logits: Tensor = output if isinstance(output, Tensor) else output.logits
    return logits.float()


def logits_and_added_loss(
    model: nn.Module, tokens: Tensor, positions: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Return ``next_token_logits`` and the loss that the model adds; see ``logits_and_loss``."""
    if not hasattr(getattr(model, "config", None), "model_type"):
        return next_token_logits(model, tokens, positions), None
    logits, added = logits_and_loss(model, tokens, **_options(positions))
    return logits.float(), added


def _options(positions: Tensor | None) -> dict[str, Tensor]:
    return {} if positions is None else {"position_ids": positions}
