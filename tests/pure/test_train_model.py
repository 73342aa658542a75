"""The trainer's model, learning rates, configuration and metrics file."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fullshard import checkpoint
from fullshard.errors import ConfigError
from fullshard.train.architecture import choose_architecture, count_parameters
from fullshard.train.config import (
    SIZES,
    Dtype,
    LrSchedule,
    ModelConfig,
    OptimizerName,
    TrainConfig,
    default_lr,
)
from fullshard.train.evaluation import label_losses
from fullshard.train.model import GPT
from fullshard.train.optimizer import (
    build_optimizer,
    described,
    learning_rate,
    set_learning_rate,
    set_options,
)
from fullshard.train.run.folder import RunDir
from fullshard.train.run.metrics import StepRecord, drop_after, read_metrics

TINY = ModelConfig(dim=16, num_layers=2, num_heads=2, ffn_dim=32, vocab_size=50, lr=1e-3)


def tiny_gpt(*, checkpoint_activations: bool = False) -> GPT:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return GPT(TINY, max_seq=12, checkpoint_activations=checkpoint_activations)


def some_tokens(num_rows: int, length: int) -> torch.Tensor:
    return torch.arange(num_rows * length).view(num_rows, length) * 7 % TINY.vocab_size


@pytest.mark.parametrize(
    ("size", "numel"),
    [("2m", 2_557_632), ("10m", 10_059_840), ("125m", 124_275_456), ("1b", 1_041_836_032)],
)
def test_a_size_is_what_its_name_says(size: str, numel: int) -> None:
    config = TrainConfig(model=size)
    assert count_parameters(choose_architecture(config), config) == numel


def test_larger_models_learn_slower() -> None:
    rates = [default_lr(size) for size in SIZES]
    assert rates == sorted(rates, reverse=True)
    assert default_lr("hf:config.json") < rates[0]


def test_logits_have_a_row_for_every_token() -> None:
    assert tiny_gpt()(some_tokens(3, 12)).shape == (3, 12, TINY.vocab_size)
    assert tiny_gpt()(some_tokens(3, 5)).shape == (3, 5, TINY.vocab_size)


def test_a_token_sees_no_later_one() -> None:
    model, tokens = tiny_gpt(), some_tokens(1, 12)
    changed = tokens.clone()
    changed[0, 8:] = 1
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :8], after[:, :8])
    assert not torch.allclose(before[:, 8], after[:, 8])


def test_a_token_knows_where_it_stands() -> None:
    model, tokens = tiny_gpt(), torch.tensor([[3, 4, 5], [4, 3, 5]])
    logits = model(tokens)
    assert not torch.allclose(logits[0, 2], logits[1, 2])


def test_checkpointing_activations_changes_no_gradient() -> None:
    plain, recomputing = tiny_gpt(), tiny_gpt(checkpoint_activations=True)
    tokens = some_tokens(2, 13)
    for model in (plain, recomputing):
        label_losses(model, tokens[:, :-1], tokens[:, 1:]).mean().backward()
    pairs = zip(plain.parameters(), recomputing.parameters(), strict=True)
    for left, right in pairs:
        assert torch.equal(left.grad, right.grad)


def test_only_matrices_decay() -> None:
    model = tiny_gpt()
    matrices, vectors = build_optimizer(model, TrainConfig()).param_groups
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.1, 0.0)
    assert {parameter.dim() for parameter in vectors["params"]} == {1}
    assert len(matrices["params"]) + len(vectors["params"]) == len(list(model.parameters()))


def test_muon_steps_the_matrices_of_blocks_with_a_rate_of_its_own() -> None:
    model = tiny_gpt()
    config = TrainConfig(optimizer=OptimizerName.MUON, lr=0.25, muon_lr=0.5)
    optimizer = build_optimizer(model, config)
    muon, *others = optimizer.param_groups
    assert {group["algorithm"] for group in others} == {"adamw"}
    assert [group["weight_decay"] for group in others] == [0.1, 0.0]
    assert all(".blocks." in f".{name}" for name in muon["param_names"])
    assert {parameter.dim() for parameter in muon["params"]} == {2}
    rate = set_learning_rate(optimizer, 20, config)
    assert rate == learning_rate(20, config) == 0.125
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.125, 0.125]


def test_the_learning_rate_warms_up_and_falls_to_its_floor() -> None:
    config = TrainConfig(steps=600, lr=4e-3)
    rates = [learning_rate(step, config) for step in range(1, 601)]
    assert rates[0] == pytest.approx(1e-4)
    assert rates[39] == max(rates) == 4e-3
    assert rates[:40] == sorted(rates[:40])
    assert rates[39:] == sorted(rates[39:], reverse=True)
    assert rates[-1] == pytest.approx(2e-4)
    assert rates[319] == pytest.approx(4e-3 * 0.525)  # half-way down


HALF_A_PEAK = {
    LrSchedule.COSINE: 0.525,  # 0.05 + 0.95 / 2
    LrSchedule.LINEAR: 0.525,
    LrSchedule.CONSTANT: 1.0,
    LrSchedule.WSD: 1.0,
}


@pytest.mark.parametrize("schedule", list(LrSchedule))
def test_a_schedule_warms_up_alike_and_then_goes_its_way(schedule: LrSchedule) -> None:
    config = TrainConfig(steps=600, lr=4e-3, lr_schedule=schedule)
    rates = [learning_rate(step, config) for step in range(1, 601)]
    assert rates[:40] == [learning_rate(step, TrainConfig()) for step in range(1, 41)]
    assert max(rates) == rates[39] == 4e-3
    assert rates[39:] == sorted(rates[39:], reverse=True)
    assert rates[319] == pytest.approx(4e-3 * HALF_A_PEAK[schedule])
    assert rates[-1] == pytest.approx(4e-3 if schedule is LrSchedule.CONSTANT else 2e-4)


def test_a_straight_line_is_straight_and_wsd_falls_in_its_last_fifth() -> None:
    linear = TrainConfig(steps=600, lr=1.0, lr_schedule=LrSchedule.LINEAR)
    drops = [learning_rate(n, linear) - learning_rate(n + 1, linear) for n in range(40, 600)]
    assert drops == pytest.approx([0.95 / 560] * 560)
    wsd = TrainConfig(steps=600, lr=1.0, lr_schedule=LrSchedule.WSD)
    rates = [learning_rate(step, wsd) for step in range(1, 601)]
    assert set(rates[39:480]) == {1.0}
    assert rates[539] == pytest.approx(1 - 0.95 / 2)  # half-way between 480 and 600
    assert rates[480] < 1.0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "rises to 0.004 over 40 steps, then falls to 0.0002 along a cosine"),
        (
            {"lr_schedule": LrSchedule.LINEAR, "steps": 9},
            "rises to 0.004 over 1 step, then falls to 0.0002 in a line",
        ),
        ({"lr_schedule": LrSchedule.CONSTANT, "warmup": 0}, "begins at 0.004, then stays"),
        (
            {"lr_schedule": LrSchedule.WSD, "lr": 1.0, "warmup": 10},
            "rises to 1 over 10 steps, stays to step 480, then falls to 0.05 in a line",
        ),
    ],
)
def test_a_schedule_is_told_in_words(options: dict[str, Any], words: str) -> None:
    assert described(TrainConfig(**options)) == words


@pytest.mark.parametrize("schedule", list(LrSchedule))
@pytest.mark.parametrize("steps", [1, 2, 3, 6])
def test_every_schedule_of_few_steps_has_learning_rates(schedule: LrSchedule, steps: int) -> None:
    for warmup in (0, 1, 40):
        config = TrainConfig(steps=steps, lr_schedule=schedule, warmup=warmup)
        rates = [learning_rate(step, config) for step in range(1, steps + 1)]
        assert max(rates) <= 4e-3 and min(rates) >= 2e-4


def test_betas_are_those_of_the_option_also_for_a_state_with_others() -> None:
    model = tiny_gpt()
    for name in OptimizerName:
        optimizer = build_optimizer(model, TrainConfig(optimizer=name))
        adamw = [group for group in optimizer.param_groups if "betas" in group]
        assert adamw and {group["betas"] for group in adamw} == {(0.9, 0.95)}
        set_options(optimizer, TrainConfig(optimizer=name, betas="0.8,0.99"))
        assert {group["betas"] for group in adamw} == {(0.8, 0.99)}


def test_weight_decay_of_matrices_is_that_of_the_option_also_for_a_state_with_another() -> None:
    model = tiny_gpt()
    for name in OptimizerName:
        optimizer = build_optimizer(model, TrainConfig(optimizer=name))
        set_options(optimizer, TrainConfig(optimizer=name, weight_decay=0.25))
        for group in optimizer.param_groups:
            dims = {param.dim() for param in group["params"]}
            assert group["weight_decay"] == (0.25 if 2 in dims else 0.0), dims


def test_stopping_early_leaves_the_learning_rate_alone() -> None:
    whole = TrainConfig(steps=600)
    stopped = dataclasses.replace(whole, stop_after=50)
    assert stopped.last_step == 50
    assert learning_rate(50, stopped) == learning_rate(50, whole)


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_a_run_of_few_steps_still_has_a_learning_rate(steps: int) -> None:
    rates = [learning_rate(step, TrainConfig(steps=steps)) for step in range(1, steps + 1)]
    assert rates[0] == 4e-3
    assert min(rates) > 0


def test_a_configuration_survives_json() -> None:
    config = TrainConfig(data="/x", stop_after=3, dtype=Dtype.BF16, model="10m", lr=1e-3)
    config = dataclasses.replace(config, keep=2, betas="0.9,0.99", lr_schedule=LrSchedule.WSD)
    assert TrainConfig.from_json(config.to_json()) == config
    assert TrainConfig.from_json('{"dtype": "fp32"}') == TrainConfig()  # from an earlier version


@pytest.mark.parametrize(
    "text", ["{}", "nonsense", '{"dtype": "fp8"}', '{"model": {}, "dtype": "fp32"}', "[]"]
)
def test_a_file_that_is_no_configuration_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"config\.json: not the configuration of a run"):
        TrainConfig.load(path)


def record(step: int, bits: float | None = None) -> StepRecord:
    return StepRecord(
        step=step,
        loss=1.0 / step,
        tokens_per_s=10.0,
        lr=0.1,
        grad_norm=1.0,
        seconds=0.5,
        peak_memory_nbytes=100,
        shard_nbytes=10,
        waiting=0.1,
        eval_bits_per_byte=bits,
    )


def test_metrics_are_one_object_a_step(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(f"{record(1).to_json()}\n{record(2, bits=2.5).to_json()}\n")
    first, second = (json.loads(line) for line in path.read_text().splitlines())
    learning = {"step", "loss", "tokens_per_s", "lr", "grad_norm", "seconds"}
    assert set(first) == learning | {"peak_memory_nbytes", "shard_nbytes", "waiting"}
    assert second["eval_bits_per_byte"] == 2.5


def test_resuming_drops_later_steps_and_a_line_cut_short(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    complete = [f"{record(step).to_json()}\n" for step in range(1, 6)]
    path.write_text("".join(complete) + '{"step": 6, "lo')
    drop_after(path, 3)
    with path.open("a") as metrics:
        metrics.write(complete[3])
    assert [each["step"] for each in read_metrics(path)] == [1, 2, 3, 4]


def test_only_finished_checkpoints_count(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    assert run.newest_checkpoint() is None
    for step in (20, 100):
        checkpoint.save(run.checkpoints / f"step-{step}", nn.Linear(1, 1), step=step)
    (run.checkpoints / "step-200").mkdir()
    assert run.newest_checkpoint() == run.checkpoints / "step-100"
