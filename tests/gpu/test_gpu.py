"""What only a CUDA device can show."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import fullshard

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(),
    reason="no CUDA device: overlap of communication and compute on real streams, the caching "
    "allocator's bytes, and NCCL collectives are NOT tested in this run",
)

DIM = 64


@pytest.fixture
def one_gpu() -> Iterator[torch.device]:
    """A world of one on the first device, with NCCL, and without a launcher."""
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=device)
    yield device
    dist.destroy_process_group()


def make_model(device: torch.device) -> nn.Sequential:
    """Two blocks with the same numbers on every call."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(DIM, DIM), nn.GELU()) for _ in range(2)))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / DIM**0.5)
    return model.to(device)


def train_two_steps(model: nn.Module, batches: list[Tensor]) -> list[float]:
    """The losses of two AdamW steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for batch in batches:
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def full(parameter: Tensor) -> Tensor:
    """The whole parameter, which one rank has all of, however it is kept."""
    return (
        parameter.to_local().view(parameter.shape) if isinstance(parameter, DTensor) else parameter
    )


@pytest.mark.parametrize("layout", [fullshard.PerParameter(), fullshard.Ragged()], ids=str)
@pytest.mark.parametrize(
    "offload",
    [
        fullshard.OffloadPolicy(),
        fullshard.CPUOffloadPolicy(),
        fullshard.CPUOffloadPolicy(pin_memory=False),
    ],
    ids=str,
)
def test_two_steps_equal_the_unsharded_model(
    one_gpu: torch.device, offload: fullshard.OffloadPolicy, layout: Any
) -> None:
    reference = make_model(one_gpu)
    sharded = copy.deepcopy(reference)
    for block in sharded:
        fullshard.fully_shard(block, offload_policy=offload, layout=layout)
    fullshard.fully_shard(sharded, offload_policy=offload, layout=layout)
    on_host = isinstance(offload, fullshard.CPUOffloadPolicy)
    assert {p.to_local().is_cuda for p in sharded.parameters()} == {not on_host}  # type: ignore[attr-defined]

    generator = torch.Generator().manual_seed(2)
    batches = [torch.randn(8, DIM, generator=generator).to(one_gpu) for _ in range(2)]
    losses = train_two_steps(sharded, batches)

    assert losses == pytest.approx(train_two_steps(reference, batches), rel=1e-6)
    expected = dict(reference.named_parameters())
    for name, parameter in sharded.named_parameters():
        torch.testing.assert_close(
            full(parameter).to(one_gpu), expected[name], msg=lambda m, n=name: f"{n}: {m}"
        )
