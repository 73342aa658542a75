"""Short names of models: their sizes, counted by ``transformers``, are the published ones."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from fullshard.cli import main
from fullshard.train.architecture import choose_architecture
from fullshard.train.config import TrainConfig
from fullshard.train.published import PUBLISHED

pytest.importorskip("transformers", reason="the extra hf is not installed")

# Elements of all tensors in the published files; for DeepSeek-V3, those of the main model.
NUMEL = {
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "qwen3-30b-a3b": 30_532_122_624,
    "deepseek-v3": 671_026_404_352,
}
ACTIVE = {"qwen3-30b-a3b": (3.3e9, 128, 8), "deepseek-v3": (37e9, 256, 8)}  # as published


def on_meta(name: str) -> Any:
    """Build the model with transformers alone, from the published fields."""
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    fields = dict(PUBLISHED[name])
    config = CONFIG_MAPPING[fields.pop("model_type")](**fields)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("name", list(PUBLISHED))
def test_they_have_as_many_parameters_as_published(name: str) -> None:
    model = on_meta(name)
    assert sum(own.numel() for own in model.parameters()) == NUMEL[name]
    if name in ACTIVE:
        active, experts, chosen = ACTIVE[name]
        routed = sum(own.numel() for path, own in model.named_parameters() if ".experts." in path)
        found = NUMEL[name] - routed + routed * chosen / experts
        assert found == pytest.approx(active, rel=0.02)


@pytest.mark.parametrize("name", list(PUBLISHED))
def test_the_trainer_builds_the_model_that_transformers_builds(name: str) -> None:
    architecture = choose_architecture(TrainConfig(model=name))
    with torch.device("meta"):
        ours = architecture.build(seq=16, checkpoint_activations=False)
    shapes = {path: own.shape for path, own in ours.named_parameters()}
    assert shapes == {path: own.shape for path, own in on_meta(name).named_parameters()}
    assert architecture.vocab_size == PUBLISHED[name]["vocab_size"]


def test_deepseek_is_what_transformers_has_by_default() -> None:
    from transformers import DeepseekV3Config

    default = DeepseekV3Config()
    for field, value in PUBLISHED["deepseek-v3"].items():
        if field != "rope_theta":  # part of rope_parameters there
            assert getattr(default, field) == value, field


def test_a_plan_counts_the_parameters(capfd: pytest.CaptureFixture[str]) -> None:
    command = ["plan", "llama3-8b", "--world-size", "64", "--seq", "128"]
    assert main(command) == 0
    first = capfd.readouterr().out.splitlines()[0]
    assert first == "rank 0 of replicate 1 x shard 64 on h100, 8,030,261,248 parameters"
    assert main([*command, "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["num_parameters"] == NUMEL["llama3-8b"]
