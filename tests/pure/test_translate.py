"""``fullshard translate``: each key of DeepSpeed or Accelerate becomes code or a remark."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

from fullshard.cli import main
from fullshard.cli.translating import translated
from fullshard.errors import ConfigError

ZERO_3 = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 8,
    "gradient_clipping": 1.0,
    "bf16": {"enabled": True},
    "fp16": {"enabled": False},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1},
    },
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 100}},
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": True,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "stage3_prefetch_bucket_size": 1000,
    },
}

PROGRAM = '''"""Made from ds.json by fullshard translate."""

import torch

import fullshard


def train(model, batches, loss_of):
    """Train on the batches of this rank; `loss_of(model, batch)` is a mean."""
    fullshard.shard_blocks(
        model,
        mp_policy=fullshard.MixedPrecisionPolicy(torch.bfloat16, torch.float32),
    )
    model.set_prefetch_budget(2_000)  # bytes, for 1,000 elements in bf16
    optimizer = fullshard.optim.ShardedOptimizer(
        model.parameters(),
        torch.optim.AdamW,
        lr=0.0003,
        betas=(0.9, 0.95),
        eps=1e-08,
        weight_decay=0.1,
        host_fraction=1.0,
    )
    for number, batch in enumerate(batches, start=1):
        (loss_of(model, batch) / 8).backward()
        if number % 8:
            continue
        fullshard.optim.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


# Notes on other settings:
# - train_micro_batch_size_per_gpu: batches of a rank decide it
# - scheduler: use a class of torch.optim.lr_scheduler with the optimizer
# - zero_optimization.overlap_comm: nothing to do: fullshard always does this
'''


def lines_of(config: dict[str, Any]) -> str:
    text = translated(config, "config.json")
    ast.parse(text)
    return text


def zero(**options: Any) -> dict[str, Any]:
    return {"zero_optimization": options}


def fsdp(**options: Any) -> dict[str, Any]:
    return {"fsdp_config": {f"fsdp_{name}": value for name, value in options.items()}}


def test_a_configuration_of_deepspeed_becomes_a_program(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(ZERO_3))
    assert main(["translate", str(tmp_path / "ds.json")]) == 0
    assert capsys.readouterr().out == PROGRAM


@pytest.mark.parametrize(
    ("config", "line"),
    [
        (zero(stage=3), "shard_blocks(model)"),
        (zero(stage=2), "shard_blocks(model, reshard_after_forward=False)"),
        (zero(stage=1), "shard_blocks(model, reshard_after_forward=False)"),
        (zero(stage=0), 'sizes = int(os.environ["WORLD_SIZE"]), shards'),
        (zero(stage=3, zero_hpz_partition_size=8), "reshard_after_forward=8"),
        (zero(stage=3, mics_shard_size=4), "shards = 4"),
        (zero(offload_param={"device": "cpu"}), "offload_policy=fullshard.CPUOffloadPolicy()"),
        (zero(offload_optimizer={"device": "cpu", "ratio": 0.3}), "host_fraction=0.3"),
        (zero(reduce_bucket_size=5e8), "model.set_reduction_budget(1_000_000_000)"),
        (zero(zero_quantized_weights=True), "wire=fullshard.WirePolicy(gather='int8')"),
        (
            zero(zero_quantized_weights=True, zero_quantized_gradients=True),
            "wire=fullshard.WirePolicy(gather='int8', reduce='int4')",
        ),
        ({"fp16": {"enabled": True, "initial_scale_power": 12}}, "init_scale=2.0**12"),
        ({"fp16": {"enabled": True, "loss_scale_window": 500}}, "growth_interval=500"),
        ({"fp16": {"enabled": True}, "gradient_clipping": 1}, "scaler.unscale_(optimizer)"),
        ({"optimizer": {"type": "Adam"}}, "torch.optim.AdamW"),
        ({"optimizer": {"type": "Adam", "params": {"adam_w_mode": False}}}, "torch.optim.Adam)"),
        ({"optimizer": {"type": "SGD", "params": {"momentum": 0.9}}}, "momentum=0.9"),
        ({"optimizer": {"type": "Muon", "params": {"lr": 0.02}}}, "optim.Muon(model, lr=0.02)"),
        (
            {"activation_checkpointing": {"cpu_checkpointing": True}},
            "fullshard.checkpoint_blocks(model, offload=True)",
        ),
        (fsdp(sharding_strategy="FULL_SHARD"), "shard_blocks(model)"),
        (fsdp(sharding_strategy=2), "reshard_after_forward=False"),
        (fsdp(sharding_strategy="NO_SHARD"), 'sizes = int(os.environ["WORLD_SIZE"]), shards'),
        (fsdp(sharding_strategy="HYBRID_SHARD"), 'shards = int(os.environ["LOCAL_WORLD_SIZE"])'),
        (fsdp(sharding_strategy="_HYBRID_SHARD_ZERO2"), "reshard_after_forward=False"),
        (fsdp(reshard_after_forward=False), "reshard_after_forward=False"),
        (fsdp(offload_params=True), "CPUOffloadPolicy()"),
        (fsdp(activation_checkpointing=True), "fullshard.checkpoint_blocks(model)"),
        (fsdp() | {"mixed_precision": "bf16"}, "MixedPrecisionPolicy(torch.bfloat16, torch."),
        (fsdp() | {"mixed_precision": "fp16"}, "ShardedGradScaler()"),
        ({"deepspeed_config": {"zero_stage": 2}}, "reshard_after_forward=False"),
        ({"deepspeed_config": {"offload_optimizer_device": "cpu"}}, "host_fraction=1.0"),
    ],
)
def test_a_key_becomes_code(config: dict[str, Any], line: str) -> None:
    text = lines_of(config)
    assert line in text and "Notes on other" not in text, text


@pytest.mark.parametrize(
    ("config", "line"),
    [
        (
            zero(offload_param={"device": "nvme"}),
            "offload_param: fullshard offloads to host memory, not to NVMe",
        ),
        (zero(sub_group_size=1e9), "zero_optimization.sub_group_size: each unit is stepped"),
        (zero(stage3_max_magic=2), "zero_optimization.stage3_max_magic: 2 is not known here"),
        (
            {"sparse_attention": {"mode": "fixed"}},
            "sparse_attention: {'mode': 'fixed'} is not known",
        ),
        ({"gradient_clipping": "auto"}, "gradient_clipping: the Trainer chose it"),
        ({"bf16": {"enabled": "auto"}}, "bf16: the Trainer chose it; choose it here"),
        (zero(offload_param={"device": "auto"}), "offload_param: the Trainer chose it"),
        ({"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}, "optimizer.params.lr: the Tr"),
        (
            zero(offload_optimizer={"device": "cpu"}) | {"optimizer": {"type": "Muon"}},
            "zero_optimization.offload_optimizer: Muon keeps its state on the device",
        ),
        ({"optimizer": {"type": "OneBitAdam"}}, "optimizer.type: OneBitAdam has no counterpart"),
        ({"fp16": {"enabled": True, "hysteresis": 2}}, "fp16.hysteresis: ShardedGradScaler has no"),
        (fsdp(auto_wrap_policy="TRANSFORMER_BASED_WRAP"), "shard_blocks finds the blocks"),
        (fsdp() | {"mixed_precision": "fp8"}, "mixed_precision: 'fp8': see docs/recipes/float8.md"),
        (fsdp() | {"num_processes": 8}, "num_processes: torchrun --nproc-per-node"),
    ],
)
def test_what_is_left_out_is_named(config: dict[str, Any], line: str) -> None:
    text = " ".join(lines_of(config).replace("\n#  ", "").split())
    assert line in text.partition("# Notes on other settings:")[2], text


@pytest.mark.parametrize(
    ("config", "what"),
    [
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "choose one"),
        (zero(stage=4), "zero_optimization.stage is 4, expected 0, 1, 2 or 3"),
        (zero(reduce_bucket_size="large"), "reduce_bucket_size is 'large', expected a number"),
        ({"zero_optimization": 3}, "zero_optimization is 3, expected keys and values"),
        ({"distributed_type": "FSDP", "fsdp_config": [1]}, r"fsdp_config is \[1\], expected keys"),
        (fsdp(sharding_strategy="SHARD"), "sharding_strategy is 'SHARD', expected one of FULL"),
    ],
)
def test_values_without_meaning_are_refused(config: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        translated(config, "config.json")


def test_offloaded_parameters_have_their_state_on_the_host_already() -> None:
    offload = {"device": "cpu"}
    for names in (("offload_param", "offload_optimizer"), ("offload_optimizer", "offload_param")):
        text = lines_of(zero(**dict.fromkeys(names, offload)))
        assert "host_fraction" not in text and "CPUOffloadPolicy" in text


def test_a_file_of_accelerate_is_yaml_and_may_name_one_of_deepspeed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("yaml")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ds.json").write_text(json.dumps(ZERO_3))
    (tmp_path / "accelerate.yaml").write_text(
        "distributed_type: DEEPSPEED\nnum_machines: 1\n"
        "deepspeed_config:\n  deepspeed_config_file: ds.json\n"
    )
    assert main(["translate", "accelerate.yaml"]) == 0
    out = capsys.readouterr().out
    assert out.partition("\n")[2].startswith(PROGRAM.partition("\n")[2])
    assert "# - num_machines: torchrun --nnodes" in out


@pytest.mark.parametrize("content", [None, "[1]", "{"])
def test_a_file_that_holds_no_configuration_is_refused(
    content: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "ds.json"
    if content is not None:
        path.write_text(content)
    assert main(["translate", str(path)]) == 2
    assert capsys.readouterr().err.startswith(f"fullshard: error: {path}: ")
