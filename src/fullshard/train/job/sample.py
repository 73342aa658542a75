"""Sampling of text from the model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from fullshard.train.architecture import next_token_logits
from fullshard.train.config import TrainConfig
from fullshard.train.data import TokenizedText
from fullshard.train.world import World

_PROMPT = "    def __init__(self"  # suits the default text; for other text the prompt is empty
_TOP_K = 40  # number of the most likely tokens to draw from


def sample(model: nn.Module, config: TrainConfig, text: TokenizedText, world: World) -> str | None:
    """Return a sample of the model's text; None if samples are off. All workers must call this.

    Every forward all-gathers the sharded weights, so every worker must run all forwards. So the
    number of tokens is fixed, and all workers draw the same tokens from the same seed. Text after
    the end of an answer to a question is left out.
    """
    if config.sample is None:
        return None
    tokenizer, question = text.tokenizer, text.question()
    code = tokenizer.encode(_PROMPT if config.data is None else "", add_special_tokens=False)
    prompt = question or [text.end, *code.ids]
    tokens = continued(
        model,
        prompt,
        device=world.device,
        known=tokenizer.get_vocab_size(),
        context=config.seq,
        num_tokens=config.sample,
    )
    if question and text.end in tokens[len(prompt) :]:
        tokens = tokens[: tokens.index(text.end, len(prompt))]
    return str(tokenizer.decode(tokens, skip_special_tokens=not question))


@torch.no_grad()
def continued(
    model: nn.Module,
    prompt: Sequence[int],
    *,
    device: torch.device,
    known: int,
    context: int,
    num_tokens: int,
    temperature: float = 0.7,
    seed: int = 0,
    end: int | None = None,
) -> list[int]:
    """Return ``prompt`` and ``num_tokens`` more tokens.

    Args:
        model: on ``device``, sharded or not.
        prompt: one token or more.
        device: device of the model.
        known: size of the tokenizer's vocabulary; the model may have more logits.
        context: number of last tokens that the model sees.
        num_tokens: number of tokens to add.
        temperature: divisor of the logits; 0: take the most likely token.
        seed: seed of the draw.
        end: the token after which to stop; None: never.
    """
    was_training = model.training
    model.eval()
    generator = torch.Generator().manual_seed(seed)
    tokens = list(prompt)
    for _ in range(num_tokens):
        window = torch.tensor([tokens[-context:]], device=device)
        logits = next_token_logits(model, window)[0, -1, :known].cpu()
        best, ids = logits.topk(min(_TOP_K, known) if temperature else 1)
        chances = (best / (temperature or 1)).softmax(-1)
        tokens.append(int(ids[torch.multinomial(chances, 1, generator=generator)]))
        if tokens[-1] == end:
            break
    model.train(was_training)
    return tokens
