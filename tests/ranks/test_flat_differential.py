"""The flat interface beside PyTorch's FSDP1, with the same model, data and script."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import product
from types import ModuleType
from typing import Any

import torch
import torch.distributed.fsdp as theirs
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import fullshard as ours
from tests.kit.flat_differential import BF16, EXACT, full_values, make, train, wrap
from tests.ranks.pool import RankPool, on_ranks

EACH_STEP = ("s", "s", "s")
ACCUMULATED = ("s", "ss", "ns", "sns")
"""The backwards of each step: "s" reduces, "n" does not."""


@dataclass(frozen=True)
class Case:
    strategy: str
    original: bool
    how: str
    script: tuple[str, ...] = ACCUMULATED
    precision: dict[str, torch.dtype] = field(default_factory=dict)
    dtype: torch.dtype = torch.float64

    def run(self, kit: ModuleType) -> tuple[list[float], dict[str, Tensor]]:
        options: dict[str, Any] = {
            "sharding_strategy": kit.ShardingStrategy[self.strategy],
            "use_orig_params": self.original,
        }
        if self.precision:
            options["mixed_precision"] = kit.MixedPrecision(**self.precision)
        model = wrap(kit, make(self.dtype), self.how, **options)
        losses = train(model, self.script, self.dtype)
        return losses, full_values(kit, model)

    def apart(self) -> float:
        (our_losses, our_params), (their_losses, their_params) = self.run(ours), self.run(theirs)
        assert our_params.keys() == their_params.keys()
        of_losses = (abs(a - b) for a, b in zip(our_losses, their_losses, strict=True))
        of_params = ((our_params[n] - their_params[n]).abs().max().item() for n in our_params)
        return max(*of_losses, *of_params)


STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")


def far_apart(cases: list[Case], tolerance: float) -> list[tuple[Case, float]]:
    found = [(case, case.apart()) for case in cases]
    return [(case, apart) for case, apart in found if not apart <= tolerance]


LOW = {"param_dtype": BF16}
WIDE = {"param_dtype": BF16, "reduce_dtype": torch.float32}
LOW_REDUCE = {"reduce_dtype": BF16}
BUFFERS = {"param_dtype": BF16, "reduce_dtype": torch.float32, "buffer_dtype": BF16}


def test_trains_alike_in_mixed_precision(pool: RankPool) -> None:
    """Values equal PyTorch's, bit for bit unless PyTorch rounds sums of gradients to few bits."""
    exact = [
        Case(strategy, original, "nested", EACH_STEP, precision, torch.float32)
        for (strategy, original), precision in zip(
            product(STRATEGIES, (True, False)), (WIDE, BUFFERS) * 3, strict=True
        )
    ]
    rounded = [
        Case(strategy, strategy != "NO_SHARD", "nested", script, precision, torch.float32)
        for strategy in STRATEGIES
        for script, precision in (
            (EACH_STEP, LOW),
            (EACH_STEP, LOW_REDUCE),
            (ACCUMULATED, WIDE),
        )
    ]
    assert pool.run(2, far_apart, exact, 0.0) == [[]] * 2
    assert pool.run(2, far_apart, rounded, 3e-2) == [[]] * 2


@on_ranks(4)
def test_trains_alike_on_copies() -> None:
    shape = (2, 2)
    found = []
    for strategy, how in (("HYBRID_SHARD", "nested"), ("_HYBRID_SHARD_ZERO2", "policy")):
        losses, params = [], []
        for kit in (ours, theirs):
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=("copies", "shards"))
            model = wrap(
                kit,
                make(torch.float64),
                how,
                sharding_strategy=kit.ShardingStrategy[strategy],
                use_orig_params=how == "nested",
                device_mesh=mesh,
            )
            losses.append(train(model, ACCUMULATED, torch.float64))
            params.append(full_values(kit, model))
        apart = max((params[0][n] - params[1][n]).abs().max().item() for n in params[0])
        found.append((strategy, max(apart, *(abs(a - b) for a, b in zip(*losses, strict=True)))))
    assert max(apart for _, apart in found) < EXACT
