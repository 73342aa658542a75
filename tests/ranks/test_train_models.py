"""``--model hf:CONFIG.json`` trains causal models of transformers."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from fullshard.train.architecture import choose_architecture
from fullshard.train.config import TrainConfig
from fullshard.train.evaluation import label_losses
from fullshard.train.loop import build_sharded_model
from fullshard.train.run.folder import RunDir, read_origin
from fullshard.train.world import World
from tests.kit.train_tuning import tuned
from tests.noise import without_noise
from tests.ranks.pool import RankPool
from tests.ranks.train_shell import Shell

pytest.importorskip("transformers", reason="the extra hf is not installed")

SIZES = {"vocab_size": 300, "num_hidden_layers": 2, "max_position_embeddings": 40}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": SIZES
    | {
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "dtype": "bfloat16",  # as in published weights; training keeps fp32
    },
    "gpt2": {"model_type": "gpt2", "vocab_size": 300, "n_embd": 32, "n_layer": 2, "n_head": 2}
    | {"n_positions": 40, "resid_pdrop": 0.1, "tie_word_embeddings": True},
    "mixtral": SIZES
    | {
        "model_type": "mixtral",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_local_experts": 4,
    },
}
every_model = pytest.mark.parametrize("name", CONFIGS)


def write_config(folder: Path, name: str, **changes: Any) -> Path:
    path = folder / f"{name}.json"
    path.write_text(json.dumps(CONFIGS[name] | changes))
    return path


def test_the_command_trains_one(shell: Shell) -> None:
    write_config(shell.folder, "mixtral")
    options = "--data text --steps 6 --batch 2 --seq 32 --lr 0.01".split()
    outcome = shell.train("--model", "hf:mixtral.json", "--out", "hub", *options)
    assert outcome.exitcode == 0, outcome.err
    assert without_noise(outcome.err) == ""
    losses = [record["loss"] for record in shell.metrics("hub")]
    assert len(losses) == 6
    assert losses[-1] < losses[0] - 0.2
    run = RunDir(shell.folder / "hub")
    info = read_origin(run.checkpoints / "step-000006")
    assert info.model["model_type"] == "mixtral"
    assert info.model["vocab_size"] == 300
    assert "a sample of what it writes now:" in outcome.out.splitlines()


@every_model
def test_a_run_with_dropout_and_recomputation_goes_on_exactly(
    pool: RankPool, shell: Shell, tmp_path: Path, name: str
) -> None:
    drop = {"attention_dropout": 0.3} if name != "gpt2" else {"resid_pdrop": 0.3}
    config = TrainConfig(
        model=f"hf:{write_config(tmp_path, name, **drop)}",
        data=str(shell.folder / "text"),
        out=str(tmp_path / "run"),
        steps=4,
        batch=2,
        seq=32,
        checkpoint_activations=True,
    )
    whole = pool.run(2, tuned, config, 4, None)[0][0]
    half = replace(config, out=str(tmp_path / "half"))
    first = pool.run(2, tuned, half, 2, None)[0][0]
    rest = pool.run(2, tuned, replace(half, resume=True), 4, None)[0][0]
    assert first + rest == whole


@every_model
def test_a_checkpoint_of_2_workers_goes_on_with_4(
    pool: RankPool, shell: Shell, tmp_path: Path, name: str
) -> None:
    drop = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0} if name == "gpt2" else {}
    config = TrainConfig(
        model=f"hf:{write_config(tmp_path, name, **drop)}",
        data=str(shell.folder / "text"),
        out=str(tmp_path / "run"),
        steps=4,
        batch=2,
        seq=32,
    )
    pool.run(2, tuned, config, 2, None)
    expected = pool.run(2, tuned, replace(config, resume=True), 4, None)[0][0]
    shutil.rmtree(RunDir(Path(config.out)).checkpoints / "step-000004")
    found = pool.run(4, tuned, replace(config, resume=True, batch=1), 4, None)[0][0]
    assert found == pytest.approx(expected, rel=1e-5)


def deviation(config: TrainConfig) -> float:
    """Return the largest difference of a gradient from the unsharded model's on the full batch."""
    architecture = choose_architecture(config)
    build = {"seq": config.seq, "checkpoint_activations": config.checkpoint_activations}
    whole = architecture.build(**build)
    torch.manual_seed(config.seed)
    with torch.no_grad():
        architecture.initialise(whole)
    rank, world = dist.get_rank(), dist.get_world_size()
    sharded = build_sharded_model(config, architecture, World(rank, world, torch.device("cpu")))
    tokens = torch.arange(world * 17).view(world, 17) * 7 % 300
    label_losses(whole, tokens[:, :-1], tokens[:, 1:]).mean().backward()
    mine = tokens[rank : rank + 1]
    label_losses(sharded, mine[:, :-1], mine[:, 1:]).mean().backward()
    names = dict(whole.named_parameters())
    worst = 0.0
    for name, parameter in sharded.named_parameters():
        assert isinstance(parameter, DTensor) and isinstance(parameter.grad, DTensor), name
        difference = parameter.grad.full_tensor() - names[name].grad
        worst = max(worst, difference.abs().max().item())
    return worst


@every_model
@pytest.mark.parametrize("checkpoint_activations", [False, True], ids=["kept", "recomputed"])
def test_its_gradients_are_those_of_the_unsharded_model(
    pool: RankPool, tmp_path: Path, name: str, checkpoint_activations: bool
) -> None:
    drop = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0} if name == "gpt2" else {}
    config = TrainConfig(
        model=f"hf:{write_config(tmp_path, name, **drop)}",
        seq=16,
        checkpoint_activations=checkpoint_activations,
    )
    assert max(pool.run(2, deviation, config)) < 1e-5
