"""The table of ``docs/optimizers.md``: the optimizers that work on each layout."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.optim import Optimizer

from fullshard import FullyShardedDataParallel as FSDP
from fullshard import Ragged, fully_shard
from fullshard.optim import OwnedOptimizer, ShardedOptimizer
from tests.kit.block_states import EAGER, give_grads, sharded
from tests.kit.owned import CLASSES, give, named, same_params
from tests.ranks.block_states import Net, kind_of, kinds
from tests.ranks.models import fill, noise
from tests.ranks.pool import RankPool
from tests.versions import TORCH

PAGE = Path(__file__).parents[2] / "docs" / "optimizers.md"
FACES = ("PerParameter()", "Ragged()", "flat, original parameters")
WAYS = ("itself", "ShardedOptimizer", "OwnedOptimizer")
OPTIMIZERS: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "Adadelta": (optim.Adadelta, {}),
    "Adafactor": (optim.Adafactor, {}),
    "Adagrad": (optim.Adagrad, {}),
    "Adam": (optim.Adam, {}),
    "AdamW": (optim.AdamW, {}),
    "Adamax": (optim.Adamax, {}),
    "ASGD": (optim.ASGD, {}),
    "LBFGS": (optim.LBFGS, {}),
    "Muon": (optim.Muon, {}),
    "NAdam": (optim.NAdam, {}),
    "RAdam": (optim.RAdam, {}),
    "RMSprop": (optim.RMSprop, {}),
    "Rprop": (optim.Rprop, {}),
    "SGD": (optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "SparseAdam": (optim.SparseAdam, {}),
    "a Shampoo of one's own": CLASSES["whitening"],
}


def matrices() -> nn.Sequential:
    """Return a model of two matrices; the ranks' shards of one of them differ in size."""
    model = nn.Sequential(nn.Linear(4, 6, bias=False), nn.Linear(6, 5, bias=False))
    return fill(model.double())  # type: ignore[return-value]


def outcome(face: str, kind: str, way: str) -> str:
    cls, kwargs = OPTIMIZERS[kind]
    net, model = matrices(), matrices()
    if face.startswith("flat"):
        model = FSDP(model, use_orig_params=True)  # type: ignore[assignment]
    else:
        fully_shard(model, layout=Ragged()) if face == "Ragged()" else fully_shard(model)
    loss = torch.tensor(1.0, dtype=torch.float64)
    try:
        reference = cls(net.parameters(), **kwargs)
        make: Any = {"itself": cls, "ShardedOptimizer": ShardedOptimizer}.get(way, OwnedOptimizer)
        args = () if way == "itself" else (cls,)
        optimizer = make(model.parameters(), *args, **kwargs)
        for step in range(3):
            grads = {
                name: noise(*param.shape, seed=step + number)
                for number, (name, param) in enumerate(net.named_parameters())
            }
            give(net, grads)
            give(model, grads)
            if kind != "SparseAdam":
                reference.step(lambda: loss)
            optimizer.step(lambda: loss)
        same_params(model, net)
    except AssertionError:
        return "differs"
    except Exception:
        return "refused"
    return "equal"


def outcomes(face: str) -> dict[str, list[str]]:
    warnings.simplefilter("ignore")
    return {kind: [outcome(face, kind, way) for way in WAYS] for kind in OPTIMIZERS}


def table(pool: RankPool) -> str:
    lines = [f"| class | {' | '.join(FACES)} |", "| --- | --- | --- | --- |"]
    by_face = [pool.run(2, outcomes, face) for face in FACES]
    for kind in OPTIMIZERS:
        cells = []
        for ranks in by_face:
            first, second = (found[kind] for found in ranks)
            both = [a if a == b else "differs" for a, b in zip(first, second, strict=True)]
            cells.append(", ".join(both))
        lines.append(f"| {kind} | {' | '.join(cells)} |")
    return "\n".join(lines)


@pytest.mark.skipif(
    TORCH < (2, 13), reason="PyTorch's optimizers behave differently on DTensors before 2.13"
)
def test_the_page_has_the_table(pool: RankPool) -> None:
    found = table(pool)
    assert found in PAGE.read_text(), found


BLOCK_FACES = ("per_parameter", "ragged", "blocks", "flat")
BLOCK_WAYS = ("itself", "`ShardedOptimizer`", "`OwnedOptimizer`", "`OwnedOptimizer(blocks=)`")


@EAGER
def outcomes_in_blocks(kind: str, face: str) -> list[str]:
    """Return the outcomes of a class: alone, joined, and owned without and with blocks."""
    warnings.simplefilter("ignore")
    cls, _, block = kind_of(kind)
    ways: list[Any] = [
        cls,
        lambda params, **more: ShardedOptimizer(params, cls, **more),
        lambda params, **more: OwnedOptimizer(params, cls, **more),
        lambda params, **more: OwnedOptimizer(params, cls, blocks=block, **more),
    ]
    return [outcome_in_blocks(kind, face, make) for make in ways]


def outcome_in_blocks(kind: str, face: str, make: Any) -> str:
    cls, kwargs, block = kind_of(kind)
    net, model = Net(), sharded(Net(), face, block)
    reference = cls(net.parameters(), **kwargs)
    try:
        optimizer = make([param for _, param in named(model)], **kwargs)
        for step in range(3):
            give_grads(step, net, model)
            reference.step()
            optimizer.step()
        same_params(model, net)
    except AssertionError:
        return "differs"
    except Exception:
        return "refused"
    return "equal"


def row_in_blocks(pool: RankPool, kind: str) -> str:
    by_face = []
    for face in BLOCK_FACES:
        first, second = pool.run(2, outcomes_in_blocks, kind, face)
        by_face.append([a if a == b else "differs" for a, b in zip(first, second, strict=True)])
    by_way = [list(dict.fromkeys(found)) for found in zip(*by_face, strict=True)]
    cells = [
        own[0] if len(own) == 1 else ", ".join(found)
        for own, found in zip(by_way, zip(*by_face, strict=True), strict=True)
    ]
    return f"| {kind} | {' | '.join(cells)} |"


@pytest.mark.skipif(
    TORCH < (2, 13), reason="PyTorch's optimizers behave differently on DTensors before 2.13"
)
@kinds()
def test_the_page_has_the_row(pool: RankPool, kind: str) -> None:
    found = row_in_blocks(pool, kind)
    page = PAGE.read_text()
    assert f"| class | {' | '.join(BLOCK_WAYS)} |" in page
    assert found in page, found
