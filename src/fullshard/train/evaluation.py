"""The loss of a model on batches, and its evaluation on held-out text."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fullshard.progress import Operation
from fullshard.train.architecture import logits_and_added_loss, next_token_logits
from fullshard.train.config import TrainConfig
from fullshard.train.data import IGNORED, TokenizedText
from fullshard.train.world import World


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
    def run(self) -> tuple[float, float]:
        """Return the loss of held-out text, in bits per byte and in nats per token.

        Windows do not depend on the number of workers.
        """
        config, world, model = self._config, self._world, self._model
        available = len(self._rows)
        count = min(config.eval_sequences, available)
        rows = torch.arange(count) * available // count  # evenly spread
        per_round = config.batch * world.size
        nats, nbytes, num_tokens = 0.0, 0.0, 0
        work = Operation("evaluating", count, "sequences")
        model.eval()
        for start in range(0, count, per_round):
            # Each worker evaluates its share of the round. Forward all-gathers weights, so a worker
            # without a share must run it too, on a row that is then not counted.
            mine = rows[start + world.rank * config.batch :][: config.batch]
            read = mine if len(mine) else rows[:1]
            batch = self._rows.read(read.numpy()).tensors()
            losses, labels = label_losses(model, *map(world.put, batch)), batch[1].flatten()
            if len(mine):
                nats += losses.double().sum().item()
                learned = labels[labels != IGNORED]
                nbytes += float(self._bytes_per_token[learned].sum())
                num_tokens += len(learned)
            work.add(min(per_round, count - start))
        model.train()
        nats, nbytes, count = world.rows(nats, nbytes, num_tokens).sum(dim=0).tolist()
        return nats / math.log(2) / nbytes, nats / count


def training_loss(
    model: nn.Module, batch: Sequence[Tensor], world: World, *, of_label: float, of_row: float
) -> Tensor:
    """Return the training loss of a batch.

    The loss is ``of_label`` times the sum of the label losses, plus ``of_row`` times the number of
    rows times the model's own loss, for example to balance experts.
    """
    tokens, labels, *positions = map(world.put, batch)
    logits, added = logits_and_added_loss(model, tokens, *positions)
    loss = _cross_entropy(logits, labels).sum() * of_label
    return loss if added is None else loss + added * (len(tokens) * of_row)


def label_losses(
    model: nn.Module, tokens: Tensor, labels: Tensor, positions: Tensor | None = None
) -> Tensor:
    """Return the cross entropy (nats) of each label, 0 where it is ``IGNORED``, ``[B * T]``.

    All arguments are ``[B, T]``; see ``Batch``.
    """
    return _cross_entropy(next_token_logits(model, tokens, positions), labels)


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="none"
    )
