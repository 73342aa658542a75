"""Small modules of the kinds that users shard, with data to train them on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard
from torch.nn.utils import parametrizations

from tests.ranks.models import ids, noise

__all__ = ["ZOO", "Specimen"]


@dataclass(frozen=True)
class Specimen:
    """A model and its training; ``units`` are the submodules that are sharded first."""

    make: Callable[[], nn.Module]
    data: Callable[[int], Tensor] = lambda batch: noise(batch, 6, seed=3)
    units: Sequence[str] = ()
    options: dict[str, Any] = field(default_factory=dict)
    same_data: bool = False
    """Each rank gets the full batch, since the model mixes the samples of a batch."""
    tolerance: float = 1e-12


class Recurrent(nn.Module):
    def __init__(self, cls: type[nn.RNNBase]) -> None:
        super().__init__()
        self.rnn = cls(6, 5, num_layers=2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(10, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0])


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.norm = nn.LayerNorm(6)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.attention(x, x, x, need_weights=False)[0])


class Lists(nn.Module):
    """Parameters in a ParameterList and a ParameterDict."""

    def __init__(self) -> None:
        super().__init__()
        self.matrices = nn.ParameterList([torch.ones(6, 6), torch.ones(6, 5)])
        self.vectors = nn.ParameterDict({"gain": torch.ones(5), "bias": torch.ones(5)})

    def forward(self, x: Tensor) -> Tensor:
        for matrix in self.matrices:
            x = torch.tanh(x @ matrix)
        return x * self.vectors["gain"] + self.vectors["bias"]


class WithEmpty(nn.Module):
    """Parameters without elements, at the start, in the middle and at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.zeros(0, 6))
        self.layer = nn.Linear(6, 3)
        self.middle = nn.Parameter(torch.zeros(6, 0))
        self.gain = nn.Parameter(torch.ones(3))
        self.last = nn.Parameter(torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:
        nothing = (x @ self.first.t()).sum() + (x @ self.middle).sum() + self.last.sum()
        return self.layer(x) * self.gain + nothing


class SeveralDtypes(nn.Module):
    """fp64, fp32 and frozen integers in one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(6, 5).double()
        self.narrow = nn.Linear(5, 5)
        self.shift = nn.Parameter(torch.arange(5), requires_grad=False)
        self.mask = nn.Parameter(torch.tensor([True, False, True]), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.wide(x))
        x = self.narrow(x.float()).double() + self.shift
        return x[:, :3] * self.mask


class Tied(nn.Module):
    """One parameter in four places, one module in two."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.middle = nn.Sequential(nn.Linear(6, 11, bias=False), nn.Linear(11, 6))
        self.again = self.middle[1]
        self.head = nn.Linear(6, 11)
        self.weight = self.embed.weight
        self.middle[0].weight = self.embed.weight
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        return self.head(self.again(self.middle(x) @ self.weight.t()))


def tokens(batch: int) -> Tensor:
    return ids(batch, 4, vocab=11, seed=5)


def sequences(batch: int) -> Tensor:
    return noise(batch, 4, 6, seed=7)


def images(batch: int) -> Tensor:
    return noise(batch, 3, 8, 8, seed=9)


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 5, 3, stride=2),
        nn.BatchNorm2d(5),
        nn.ReLU(),
        nn.Conv2d(5, 6, 3, groups=1, bias=False),
        nn.Flatten(),
        nn.Linear(6, 2),
    )


def weight_norm() -> nn.Module:
    inner = parametrizations.weight_norm(nn.Linear(6, 5))
    return nn.Sequential(inner, nn.Tanh(), parametrizations.weight_norm(nn.Linear(5, 3)))


def spectral_norm() -> nn.Module:
    inner = parametrizations.spectral_norm(nn.Linear(6, 5))
    return nn.Sequential(inner, nn.Tanh(), parametrizations.spectral_norm(nn.Linear(5, 3)))


def embedding(**options: Any) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Embedding(11, 6, **options), nn.Linear(6, 3))


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1))


def placed(dim: int) -> dict[str, Any]:
    """Return options that shard matrices over ``dim``, which no number of ranks divides evenly."""
    return {"shard_placement_fn": lambda p: Shard(dim) if p.dim() > 1 else None}


def by_hidden_dim(param: nn.Parameter) -> Shard | None:
    return Shard(param.dim() - 1) if param.dim() == 4 else None


ZOO: dict[str, Specimen] = {
    "lstm": Specimen(lambda: Recurrent(nn.LSTM), sequences, ["rnn"]),
    "lstm_in_root": Specimen(lambda: Recurrent(nn.LSTM), sequences),
    "gru": Specimen(lambda: Recurrent(nn.GRU), sequences, ["rnn"]),
    "attention": Specimen(Attending, sequences, ["attention"]),
    "attention_in_root": Specimen(Attending, sequences),
    "transformer_layer": Specimen(
        lambda: nn.TransformerEncoderLayer(6, 2, 9, dropout=0.0, batch_first=True), sequences
    ),
    "weight_norm": Specimen(weight_norm, units=["0"]),
    "spectral_norm": Specimen(spectral_norm, units=["0"]),
    "convolutions": Specimen(convolutions, images, ["0", "1"], same_data=True),
    "convolutions_on_last_dim": Specimen(
        convolutions, images, options={"shard_placement_fn": by_hidden_dim}, same_data=True
    ),
    "padding": Specimen(embedding(padding_idx=2), tokens, ["0"]),
    "sparse": Specimen(embedding(sparse=True), tokens, ["0"]),
    "tied": Specimen(Tied, tokens),
    "empty": Specimen(WithEmpty),
    "no_parameters": Specimen(perceptron, units=["1", "2", "3"]),
    "lists": Specimen(Lists),
    "several_dtypes": Specimen(SeveralDtypes, tolerance=2e-6),
    "shard_dim_1": Specimen(perceptron, units=["0"], options=placed(1)),
    "shard_dim_minus_1": Specimen(perceptron, options=placed(-1)),
    "shard_dim_minus_2": Specimen(perceptron, options=placed(-2)),
}
