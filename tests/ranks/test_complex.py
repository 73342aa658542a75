"""Complex parameters: both interfaces and both layouts, beside the unsharded model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fullshard
from fullshard.comm import C10d, Collectives, wrapped
from fullshard.comm.c10d import Transport
from tests.ranks.pool import RankPool, on_ranks


class Waves(nn.Module):
    """A model of real and complex parameters with a real loss."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)

        def param(*shape: int, dtype: torch.dtype) -> nn.Parameter:
            return nn.Parameter(torch.randn(shape, dtype=dtype, generator=generator))

        self.filters = param(5, 6, dtype=torch.complex128)
        self.phase = param(5, dtype=torch.complex128)
        self.scale = param(7, dtype=torch.float64)
        self.unused = param(3, dtype=torch.complex128)

    def forward(self, x: Tensor) -> Tensor:
        y = self.filters @ torch.complex(x, x * 2) + self.phase
        return (y.abs() ** 2).sum() * self.scale.sum() + (y * 1j).real.sum()


def native(_: Collectives) -> Collectives:
    assert dist.group.WORLD is not None
    return C10d(dist.group.WORLD, "cpu", Transport.NATIVE)


def sharded(face: str, **options: Any) -> Any:
    if face == "flat":
        return fullshard.FullyShardedDataParallel(
            Waves(), use_orig_params=True, device_id=torch.device("cpu")
        )
    layout = fullshard.Ragged() if face == "ragged" else fullshard.PerParameter()
    return fullshard.fully_shard(Waves(), layout=layout, **options)


def apart(face: str, is_native: bool) -> float:
    """Return how far the parameters are from the unsharded model's after three steps."""
    options: dict[str, Any] = {}
    if face == "mixed":  # only real gradients are cast for the reduction
        options["mp_policy"] = fullshard.MixedPrecisionPolicy(reduce_dtype=torch.float64)
    if is_native:
        with wrapped(native):
            model = sharded(face, **options)
    else:
        model = sharded(face, **options)
    whole = Waves()
    pairs = [torch.optim.SGD(m.parameters(), lr=1e-3) for m in (model, whole)]
    for step in range(3):
        for optimizer in pairs:
            optimizer.zero_grad()
        x = torch.arange(6.0, dtype=torch.float64)
        model(x + dist.get_rank() + step).backward()
        for rank in range(dist.get_world_size()):
            (whole(x + rank + step) / dist.get_world_size()).backward()
        for optimizer in pairs:
            optimizer.step()
    assert whole.unused.grad is None
    if face == "flat":
        with fullshard.FullyShardedDataParallel.summon_full_params(model):
            values = [param.detach().clone() for param in model.parameters()]
    else:
        assert model.unused.grad is None
        values = [param.full_tensor() for param in model.parameters()]
    return max(
        (value.view_as(param) - param).abs().max().item()
        for value, param in zip(values, whole.parameters(), strict=True)
    )


@pytest.mark.parametrize("is_native", [False, True])
@pytest.mark.parametrize("face", ["per-parameter", "mixed", "ragged", "flat"])
def test_complex_parameters_train_as_unsharded(pool: RankPool, face: str, is_native: bool) -> None:
    assert max(pool.run(2, apart, face, is_native)) < 1e-12


@on_ranks(4)
def test_complex_gradients_are_reduced_over_replicas() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = fullshard.fully_shard(Waves(), mesh=mesh)
    whole = Waves()
    x = torch.arange(6.0, dtype=torch.float64)
    model(x + dist.get_rank()).backward()
    for rank in range(4):
        (whole(x + rank) / 4).backward()
    assert model.phase.grad is not None and whole.phase.grad is not None
    grad: Any = model.phase.grad
    assert (grad.full_tensor() - whole.phase.grad).abs().max().item() < 1e-12
