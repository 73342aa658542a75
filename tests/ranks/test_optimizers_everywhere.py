"""Each kind of optimizer trains one run whose steps are all on different meshes."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Adafactor, Optimizer

from fullshard import checkpoint
from fullshard.optim import Muon, OwnedOptimizer
from tests.kit.muon import ADAMW, EXACT, LR, accumulated, gaps, in_fp64, made, sharded
from tests.kit.owned import Whitening, give, named
from tests.ranks.block_states import CodedMomentum
from tests.ranks.models import noise
from tests.ranks.muon import BY_MUON, Reference
from tests.ranks.pool import RankPool


class Kind(NamedTuple):
    """An optimizer class for ``OwnedOptimizer``."""

    cls: type[Optimizer]
    kwargs: dict[str, Any]
    blocks: int | None = None


KINDS: dict[str, Kind | None] = {
    "muon": None,
    "adafactor": Kind(Adafactor, {"lr": 0.05}),
    "whitening": Kind(Whitening, {}),
    "in blocks": Kind(CodedMomentum, {"lr": 0.05, "least": 256}, 16),
}
CELLS = [
    (4, "tp"),
    (4, "hsdp ragged"),
    (4, "tp ragged"),
    (2, "flat"),
    (4, "hsdp flat"),
    (3, "per_parameter"),
    (1, "ragged"),
]
"""World size and layout of each step."""
OTHERS = [
    (1, "per_parameter"),
    (1, "flat"),
    (3, "ragged"),
    (2, "per_parameter"),
    (4, "per_parameter"),
    (4, "flat"),
    (4, "ragged"),
    (4, "hsdp"),
    (2, "ragged"),
    (3, "flat"),
]


def optimizer_of(kind: str, model: nn.Module, exact: bool) -> Any:
    own = KINDS[kind]
    if own is None:
        dtype = {"ns_dtype": torch.float64} if exact else {}
        return Muon(model, lr=LR, adamw=ADAMW, **dtype)
    return OwnedOptimizer(named(model), own.cls, blocks=own.blocks, **own.kwargs)


def reference_of(kind: str, plain: nn.Module) -> Any:
    own = KINDS[kind]
    if own is None:
        return Reference(plain, LR, ADAMW)
    return own.cls(plain.parameters(), **own.kwargs)


def grads_of(step: int, plain: nn.Module) -> dict[str, Tensor]:
    """Return gradients that are equal on all ranks; a bias has none in one of three steps."""
    return {
        name: noise(*param.shape, seed=31 * step + number)
        for number, (name, param) in enumerate(plain.named_parameters())
        if not (name == "layers.0.bias" and step % 3 == 1)
    }


_runs: dict[tuple[str, bool], tuple[int, nn.Module, Any]] = {}
"""The unsharded runs of this process: steps done, model and optimizer."""


def unsharded(kind: str, steps: int, trains: bool) -> nn.Module:
    """Return the unsharded model after ``steps``; continue an earlier call's run if possible."""
    done, plain, optimizer = _runs.pop((kind, trains), (steps + 1, None, None))
    if plain is None or done > steps:
        done, plain = 0, made()
        optimizer = reference_of(kind, plain)
    way = mock.patch("torch.optim._muon._zeropower_via_newtonschulz", in_fp64)
    with way if trains else nullcontext():
        for step in range(done, steps):
            plain.zero_grad()
            if trains:
                accumulated(plain, step)
            else:
                give(plain, grads_of(step, plain))
            optimizer.step()
    _runs[kind, trains] = steps, plain, optimizer
    return plain


def one_step(folder: str, number: int, face: str, trains: bool) -> dict[str, dict[str, float]]:
    """Take step ``number`` with each kind; return distances from the unsharded run by parameter."""
    found = {}
    for kind in KINDS:
        model, rank, world = sharded(face)
        optimizer = optimizer_of(kind, model, trains)
        if number:
            checkpoint.load(f"{folder}/{kind}/{number}", model, optimizer)
        if trains:
            accumulated(model, number, rank, world)
        else:
            give(model, grads_of(number, made()))
        optimizer.step()
        checkpoint.save(f"{folder}/{kind}/{number + 1}", model, optimizer, step=number + 1)
        found[kind] = gaps(model, unsharded(kind, number + 1, trains))
    return found


@pytest.mark.parametrize("cells", [CELLS, OTHERS], ids=["some", "others"])
@pytest.mark.parametrize("trains", [True, False], ids=["trains", "equal gradients"])
def test_a_run_goes_on_wherever_it_is_taken(
    pool: RankPool, tmp_path: Path, trains: bool, cells: list[tuple[int, str]]
) -> None:
    """A run that moves between meshes stays within 1e-12; with equal gradients it is bit-equal.

    AdamW, which steps the parameters that Muon does not, may round differently at the end of a
    vector.
    """
    for number, (world, face) in enumerate(cells):
        for found in pool.run(world, one_step, str(tmp_path), number, face, trains):
            for kind, by_name in found.items():
                for name, gap in by_name.items():
                    adamw = kind == "muon" and name not in BY_MUON
                    most = EXACT if trains else 1e-14 if adamw else 0.0
                    assert gap <= most, (world, face, kind, name, gap)
