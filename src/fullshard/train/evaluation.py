"""The loss of a model on batches, and its evaluation on held-out text."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .architecture import next_token_logits
from .config import TrainConfig
from .data import TokenizedText
from .rows import IGNORED, Batch
from .world import World


class Evaluation:
    """The evaluation of a model on held-out text, by all workers together."""

    def __init__(
        self, model: nn.Module, config: TrainConfig, text: TokenizedText, world: World
    ) -> None:
        self._model = model
        self._config = config
        self._world = world
        self._rows = text.held_out.rows(config.seq)
        self._bytes_per_token = torch.from_numpy(text.bytes_per_token())

    @torch.no_grad()
    def bits_per_byte(self) -> float:
        """Return bits per byte of held-out text; windows do not depend on the number of workers."""
        config, world, model = self._config, self._world, self._model
        available = len(self._rows)
        count = min(config.eval_sequences, available)
        rows = torch.arange(count) * available // count  # evenly spread
        per_round = config.batch * world.size
        nats, nbytes = 0.0, 0.0
        model.eval()
        for start in range(0, count, per_round):
            # Each worker evaluates its share of the round. Forward all-gathers weights, so a worker
            # without a share must run it too, on a row that is then not counted.
            mine = rows[start + world.rank * config.batch :][: config.batch]
            read = mine if len(mine) else rows[:1]
            losses, labels = batch_losses(model, self._rows.read(read.numpy()), world)
            if len(mine):
                nats += losses.double().sum().item()
                nbytes += float(self._bytes_per_token[labels[labels != IGNORED]].sum())
        model.train()
        all_nats, all_nbytes = world.rows(nats, nbytes).sum(dim=0).tolist()
        return float(all_nats / math.log(2) / all_nbytes)


def batch_losses(model: nn.Module, batch: Batch, world: World) -> tuple[Tensor, Tensor]:
    """Return the losses of a batch, ``[B * T]``; and its labels, on the CPU."""
    tokens, labels = torch.from_numpy(batch.tokens), torch.from_numpy(batch.labels)
    positions = None
    if batch.positions is not None:
        positions = world.put(torch.from_numpy(batch.positions))
    losses = label_losses(model, world.put(tokens), world.put(labels), positions)
    return losses, labels.flatten()


def label_losses(
    model: nn.Module, tokens: Tensor, labels: Tensor, positions: Tensor | None = None
) -> Tensor:
    """Return the cross entropy (nats) of each label, 0 where it is ``IGNORED``, ``[B * T]``.

    All arguments are ``[B, T]``; see ``Batch``.
    """
    logits = next_token_logits(model, tokens, positions).flatten(0, 1)
    return F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORED, reduction="none")
