"""torchao's tensors and optimizers on sharded parameters (torchao 0.18)."""

from __future__ import annotations

import importlib.util
import warnings
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from fullshard import CPUOffloadPolicy, fully_shard
from fullshard.tensors import local_part
from tests.ranks.models import noise
from tests.ranks.net import apart
from tests.ranks.pool import on_ranks


def torchao(module: str) -> Any:
    """Import a module of torchao without its warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(f"torchao.{module}")


@pytest.fixture(autouse=True)
def needs_torchao() -> None:
    if importlib.util.find_spec("torchao") is None:
        pytest.skip("torchao is not installed: its float8 and NF4 tensors and its optimizers")


def layers() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 48), nn.Tanh(), nn.Linear(48, 16))


def shard(model: nn.Module, **options: Any) -> Any:
    for module in model:  # type: ignore[attr-defined]
        if next(module.parameters(), None) is not None:
            fully_shard(module, **options)
    return fully_shard(model, **options)


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("how", ["resharded", "kept unsharded", "offloaded", "precomputed"])
def test_gathers_in_float8(how: str) -> None:
    """Weights are gathered in float8; the scales follow the weights, which double each step."""
    float8 = torchao("float8")
    models = []
    for gathers in (False, True):
        config = float8.Float8LinearConfig(emulate=True, enable_fsdp_float8_all_gather=gathers)
        models.append(float8.convert_to_float8_training(layers(), config=config))
    options: dict[str, Any] = {
        "kept unsharded": {"reshard_after_forward": False},
        "offloaded": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
    }.get(how, {})
    shard(models[1], **options)
    differences, scales = [], []
    for number in range(3):
        x = noise(16, 32, seed=number, dtype=torch.float32)
        for model in models:
            model(x).square().mean().backward()
            with torch.no_grad():
                for param in model.parameters():
                    param.sub_(0.1 * param.grad)
                    param.mul_(2)
                    param.grad = None
        if how == "precomputed":
            float8.precompute_float8_dynamic_scale_for_fsdp(models[1])
            given = [local_part(models[1][i].weight)._precomputed_scale for i in (0, 2)]
            assert None not in given
            # The next all-gather uses these scales.
            given[0].mul_(0.5)
            models[1][0].unshard()
            assert models[1][0].weight._scale.equal(given[0])
            models[1][0].reshard()
            given[0].mul_(2)
        models[1][0].unshard()
        scales.append(models[1][0].weight._scale.item())
        models[1][0].reshard()
        with torch.no_grad():
            differences.append((models[0](x) - models[1](x)).abs().max().item())
    assert scales[0] > 1.5 * scales[1] > 1.5 * 1.5 * scales[2]
    assert max(differences) < 1e-4


class LowRank(nn.Module):
    """A frozen weight in four bits, with trained low-rank matrices."""

    def __init__(self, num_in: int, num_out: int) -> None:
        super().__init__()
        nf4 = torchao("quantization.quantize_.workflows.nf4.nf4_tensor")
        self.base = nn.Parameter(nf4.to_nf4(torch.randn(num_out, num_in)), requires_grad=False)
        self.down = nn.Linear(num_in, 4, bias=False)
        self.up = nn.Linear(4, num_out, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        nf4 = torchao("quantization.quantize_.workflows.nf4.nf4_tensor")
        return nf4.linear_nf4(x, self.base) / 16 + self.up(self.down(x))


@on_ranks(1, 2)
@pytest.mark.parametrize("reshard", [True, False])
def test_frozen_in_four_bits(reshard: bool) -> None:
    models: list[Any] = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(nn.Sequential(LowRank(256, 512), nn.Tanh(), LowRank(512, 256)))
    shard(models[1], reshard_after_forward=reshard)
    differences = []
    for number in range(3):
        x = noise(4, 256, seed=number, dtype=torch.float32)
        for model in models:
            trained = [param for param in model.parameters() if param.requires_grad]
            optimizer = torch.optim.SGD(trained, lr=1e-2)
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            differences.append((models[0](x) - models[1](x)).abs().max().item())
    assert max(differences) < 1e-5


@on_ranks(1, 2)
@pytest.mark.parametrize("name", ["AdamW8bit", "AdamW4bit", "AdamWFp8"])
def test_optimizer_steps(world: int, name: str) -> None:
    """torchao's optimizers step sharded parameters; on several ranks they round in other blocks.

    Blocks of 256 values are cut from local tensors. The optimizers compile a step for each
    parameter.
    """
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(nn.Sequential(nn.Linear(96, 160), nn.Tanh(), nn.Linear(160, 96)))
    shard(models[1])
    cls = getattr(torchao("optim"), name)
    torch._dynamo.reset()
    with mock.patch("torch.compile", partial(torch.compile, backend="aot_eager")):
        for model in models:
            optimizer = cls(model.parameters(), lr=1e-3)
            for number in range(3):
                model(noise(8, 96, seed=number, dtype=torch.float32)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    assert apart(models[1], models[0]) < (1e-6 if world == 1 else 3e-3)
