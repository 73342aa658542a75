"""Sampling of text from the model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from .architecture import next_token_logits
from .data import TokenizedText
from .world import World


@torch.no_grad()
def sample(
    model: nn.Module,
    text: TokenizedText,
    world: World,
    *,
    prompt: Sequence[int],
    is_question: bool,
    context: int,
    num_tokens: int = 120,
    temperature: float = 0.7,
    top_k: int = 40,
    seed: int = 0,
) -> str:
    """Return ``prompt`` and ``num_tokens`` more tokens as text, sampled in step on all workers.

    Every forward all-gathers the sharded weights, so every worker must run all forwards: the number
    of tokens is fixed, sampling never ends early, and all workers draw the same token from the same
    seed. The model sees at most the last ``context`` tokens. What follows the end of an answer to a
    question is left out.
    """
    was_training = model.training
    model.eval()
    generator = torch.Generator().manual_seed(seed)
    tokenizer = text.tokenizer
    tokens = list(prompt)
    known = tokenizer.get_vocab_size()  # may be fewer than the logits, if the text is small
    for _ in range(num_tokens):
        window = torch.tensor([tokens[-context:]], device=world.device)
        logits = next_token_logits(model, window)[0, -1, :known].cpu()
        best, ids = logits.topk(min(top_k, known))
        choice = torch.multinomial((best / temperature).softmax(-1), 1, generator=generator)
        tokens.append(int(ids[choice]))
    model.train(was_training)
    if is_question and text.end in tokens[len(prompt) :]:
        tokens = tokens[: tokens.index(text.end, len(prompt))]
    written: str = tokenizer.decode(tokens, skip_special_tokens=not is_question)
    return written
