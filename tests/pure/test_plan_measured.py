"""``plan(measure=True)`` runs real steps of one rank, with collectives that send nothing."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fullshard
from fullshard.cli import main
from fullshard.comm import collectives_of, mirror_world
from fullshard.errors import ConfigError
from fullshard.optim import Muon
from fullshard.plan import plan
from fullshard.train.job.planned import drift


class Tokens(nn.Module):
    """An embedding, blocks and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 16)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.register_buffer("scale", torch.ones(16))

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.table(tokens) * self.scale
        for block in self.blocks:
            x = block(x)
        return x


def flat(model: nn.Module, mesh: DeviceMesh, **options: Any) -> nn.Module:
    return fullshard.FullyShardedDataParallel(model, device_mesh=mesh, **options)


CASES: dict[str, dict[str, Any]] = {
    "per parameter": {"world_size": 4},
    "the last of many": {"world_size": 1000, "rank": 999},
    "ragged": {"world_size": 4, "layout": fullshard.Ragged()},
    "replicas": {"mesh": {"replicate": 2, "shard": 3}, "rank": 5},
    "bf16": {
        "world_size": 2,
        "mp_policy": fullshard.MixedPrecisionPolicy(torch.bfloat16, torch.float32),
    },
    "resharded to neighbours": {"world_size": 8, "reshard_after_forward": 2},
    "muon": {"world_size": 3, "optimizer": partial(Muon, lr=0.1)},
    "microbatches": {"world_size": 2, "accumulate": 3, "reduces_once": True},
    "one flat parameter": {"world_size": 3, "shard": flat},
    "original parameters": {"world_size": 3, "shard": partial(flat, use_orig_params=True)},
    "chosen": {"world_size": 4, "budget_nbytes": 10**9},
}


@pytest.mark.parametrize("name", CASES)
def test_a_real_step_runs_beside_the_plan(name: str) -> None:
    model = Tokens()
    tokens = torch.empty(2, 5, dtype=torch.long, device="meta")
    given = {"batch": tokens, "hardware": "cpu", **CASES[name]}
    found = plan(model, measure=True, **given)
    assert found.measured is not None
    assert found.measured.step_s > 0
    assert found.measured.peak_nbytes is None  # not measured on CPUs
    assert "a step on this CPU, nothing sent" in str(found)
    assert not dist.is_initialized()
    assert all(param.device.type == "cpu" for param in model.parameters())
    plain = plan(model, **given)
    assert plain.measured is None and "measured" not in str(plain)
    assert plain.traffic == found.traffic


def test_the_model_runs_with_real_tensors_of_the_batch() -> None:
    seen: list[Any] = []

    def loss(model: nn.Module, tokens: Tensor) -> Tensor:
        value = model(tokens).sum()
        if not value.is_meta:
            seen.append((tokens.tolist(), bool(torch.isfinite(value))))
        return value

    tokens = torch.tensor([[6, 0, 3]])
    plan(Tokens(), batch=tokens, world_size=4, hardware="cpu", loss=loss, measure=True)
    assert seen
    assert all(one == ([[6, 0, 3]], True) for one in seen)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8])
def test_values_fit_the_dtype_of_the_batch(dtype: torch.dtype) -> None:
    class Masked(Tokens):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(300, 16)

        def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
            return super().forward(tokens) * mask[..., None]

    with torch.device("meta"):
        batch = torch.empty(2, 5, dtype=torch.long), torch.empty(2, 5, dtype=dtype)
    assert plan(Masked(), batch=batch, world_size=2, hardware="cpu", measure=True).measured


def test_ranks_of_a_mirrored_world_hold_what_this_one_holds() -> None:
    with mirror_world(4, 2):
        wire = collectives_of(init_device_mesh("cpu", (4,)))
        output = torch.full((8,), -1.0)
        output[4:6] = torch.tensor([1.0, 2.0])
        wire.all_gather([output], [output[4:6]]).wait()
        assert output.tolist() == [1, 2] * 4
        mean = torch.zeros(2)
        wire.reduce_scatter_mean(mean, torch.arange(8.0)).wait()
        assert mean.tolist() == [4, 5]
        exchanged = torch.zeros(8)
        wire.all_to_all(exchanged, torch.arange(8.0)).wait()
        assert exchanged.tolist() == [4, 5] * 4
    assert not dist.is_initialized()


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is available")
def test_without_the_device_it_is_refused_before_anything_is_planned() -> None:
    def shard(model: nn.Module, mesh: DeviceMesh) -> None:
        raise AssertionError("planned")

    with pytest.raises(ConfigError, match="no cuda device is available"):
        plan(Tokens(), batch=torch.ones(1), world_size=2, shard=shard, measure=True)


def test_the_command_prints_both(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "2m", "--hardware", "cpu", "--seq", "16", "--world-size", "4", "--measure"]
    assert main(arguments) == 0
    assert "a step on this CPU, nothing sent; " in capsys.readouterr().out
    assert main([*arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["measured"]["step_s"] > 0


def test_a_run_is_compared_with_its_plan_only_since_it_was_resumed(tmp_path: Path) -> None:
    """Earlier steps may have run with another number of workers, and shards of another size."""
    plan_file, metrics = tmp_path / "plan.json", tmp_path / "metrics.jsonl"
    steps = [{"step": n, "shard_nbytes": 500 if n <= 2 else 300} for n in range(1, 5)]
    metrics.write_text("".join(json.dumps(one) + "\n" for one in steps))
    facts = {"rest": {"parameters": 300}, "has_times": False}
    for after, told in ((2, "300 B, planned 300 B (+0.0%) of parameters"), (4, None)):
        plan_file.write_text(json.dumps(facts | {"after": after}))
        assert drift(plan_file, metrics, on_device=False) == told
