"""``torch.distributed.pipelining`` runs pipelines whose stages are sharded."""

from __future__ import annotations

import copy
import inspect
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, schedules

import fullshard
from fullshard.compat import patch_torch
from tests.ranks.models import fill, full_parameters, noise, shard_units
from tests.ranks.pool import RankPool
from tests.versions import TORCH

EXACT = 1e-12
WIDTH, BATCH, MICROBATCHES, STEPS = 6, 8, 4, 2
SINGLE = ["ScheduleGPipe", "Schedule1F1B"]
SEVERAL = ["ScheduleInterleaved1F1B", "ScheduleLoopedBFS", "ScheduleInterleavedZeroBubble"]
MIRRORED = ["ScheduleZBVZeroBubble", "ScheduleDualPipeV"]


class Part(nn.Module):
    """A pipeline stage: the root owns ``scale``, and the two layers are units.

    Each weight is used once, since PyTorch's split of backward into inputs and weights requires
    that.
    """

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x * self.scale


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def stage_numbers(schedule: str, rank: int) -> list[int]:
    """Return the stages of a rank, in a pipeline of two ranks."""
    if schedule in SINGLE:
        return [rank]
    return [rank, 3 - rank] if schedule in MIRRORED else [rank, rank + 2]


def sharded(part: Part, mesh: Any, **options: Any) -> Part:
    from torch.distributed.fsdp import fully_shard  # as programs written for PyTorch import it

    shard_units(part, part.layers, by=fully_shard, mesh=mesh, **options)
    assert isinstance(part, fullshard.FSDPModule)
    return part


def batch(step: int, replica: int) -> tuple[Tensor, Tensor]:
    seed = 10 * step + 2 * replica
    return noise(BATCH, WIDTH, seed=seed), noise(BATCH, WIDTH, seed=seed + 1)


def reference_step(model: nn.Sequential, step: int) -> None:
    """Compute the gradients of all ranks together, unsharded and without a pipeline."""
    for replica in range(2):
        x, target = batch(step, replica)
        (loss_of(model(x), target) / 2).backward()


def differences(part: nn.Module, plain: nn.Module) -> float:
    grads = {name: param.grad.full_tensor() for name, param in part.named_parameters()}
    expected = {name: param.grad for name, param in plain.named_parameters()}
    assert grads.keys() == expected.keys()
    weights, plain_weights = full_parameters(part), full_parameters(plain)
    return max(
        max((grads[name] - expected[name]).abs().max().item() for name in grads),
        max((weights[name] - plain_weights[name]).abs().max().item() for name in weights),
    )


def pipeline(schedule: str, reshard_after_forward: bool, **options: Any) -> float:
    warnings.simplefilter("ignore")  # of the schedules
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    rank, replica = mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank()
    num_stages = 2 if schedule in SINGLE else 4
    model = fill(nn.Sequential(*(Part() for _ in range(num_stages))).double(), scale=0.4)
    numbers = stage_numbers(schedule, rank)
    with patch_torch():
        parts = [
            sharded(
                copy.deepcopy(model[i]), mesh["dp"], reshard_after_forward=reshard_after_forward
            )
            for i in numbers
        ]
        group = mesh["pp"].get_group()
        stages = [
            PipelineStage(part, number, num_stages, torch.device("cpu"), group=group)
            for part, number in zip(parts, numbers, strict=True)
        ]
        make: Any = getattr(schedules, schedule)
        stage = stages[0] if schedule in SINGLE else stages
        run = make(stage, MICROBATCHES, loss_fn=loss_of, **options)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (*parts, model)]
        worst = 0.0
        for step in range(STEPS):
            x, target = batch(step, replica)
            inputs = (x,) if 0 in numbers else ()
            run.step(*inputs, **({"target": target} if num_stages - 1 in numbers else {}))
            reference_step(model, step)
            for optimizer in optimizers:
                optimizer.step()
            found = (differences(part, model[i]) for part, i in zip(parts, numbers, strict=True))
            worst = max(worst, *found)
            for optimizer in optimizers:
                optimizer.zero_grad()
    return worst


sends_to_itself = pytest.mark.skipif(
    TORCH < (2, 12),
    reason="a rank with two neighboring stages sends to itself, and gloo fails",
)


# With separate backwards of inputs and weights, both read the parameters of forward, which have to
# stay: PyTorch loses gradients there with reshard_after_forward=True.
@pytest.mark.parametrize(
    ("schedule", "reshard_after_forward"),
    [(schedule, False) for schedule in SINGLE + SEVERAL]
    + [pytest.param(schedule, False, marks=sends_to_itself) for schedule in MIRRORED]
    + [(schedule, True) for schedule in [*SINGLE, "ScheduleInterleaved1F1B"]],
)
def test_a_pipeline_of_sharded_stages_has_the_gradients_of_the_whole_model(
    pool: RankPool, schedule: str, reshard_after_forward: bool
) -> None:
    worst = pool.run(4, pipeline, schedule, reshard_after_forward)
    assert max(worst) <= EXACT


DEFERS = "defer_reduce_grad_wait"


@pytest.mark.skipif(
    DEFERS not in inspect.signature(schedules.ScheduleInterleaved1F1B).parameters,
    reason="PyTorch waits later for reductions from 2.15 on",
)
@pytest.mark.parametrize("schedule", [*SEVERAL, *MIRRORED])
def test_reductions_of_stages_may_be_awaited_later(pool: RankPool, schedule: str) -> None:
    assert max(pool.run(4, pipeline, schedule, False, **{DEFERS: True})) <= EXACT
