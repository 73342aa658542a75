"""``--init FOLDER``: training from published weights with their tokenizer."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tokenizers import Tokenizer

from fullshard.errors import ConfigError
from fullshard.tensors import find_tensors
from fullshard.train.architecture import choose_architecture, load_text_for
from fullshard.train.config import TrainConfig
from fullshard.train.job.prepare import prepare
from tests.kit.train_init import VOCAB, write_tokenizer, written
from tests.kit.train_tuning import alone, expected_losses, trainer_of, tuned
from tests.ranks.pool import RankPool
from tests.ranks.train_shell import Shell

pytest.importorskip("transformers", reason="the extra hf is not installed")


def config_of(shell: Shell, folder: Path, out: Path, **options: Any) -> TrainConfig:
    given = {"steps": 4, "batch": 2, "seq": 32, "accumulate": 2, "lr": 1e-3, **options}
    data = str(shell.folder / "text")
    return TrainConfig(model=f"hf:{folder}", init=str(folder), data=data, out=str(out), **given)


def short_of_memory(config: TrainConfig) -> tuple[list[float], list[int | None]]:
    """Train; from step 2 on, the last rank has memory for one row only; return the losses."""
    trainer = trainer_of(config)
    records = [trainer.record(trainer.start(1))]

    def limited(module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        tokens = next(find_tensors((args, kwargs)))
        if module.training and len(tokens) > 1 and dist.get_rank() == dist.get_world_size() - 1:
            raise torch.OutOfMemoryError("no memory")

    trainer.model.register_forward_pre_hook(limited, with_kwargs=True)
    records += [trainer.record(trainer.start(step)) for step in range(2, config.steps + 1)]
    return [record.loss for record in records], [record.repeated for record in records]


def test_losses_are_those_of_transformers_in_one_process(
    pool: RankPool, shell: Shell, tmp_path: Path
) -> None:
    """Losses on plain text equal those of transformers; ``test_train_tuning`` compares chats."""
    config = config_of(shell, written(tmp_path, "qwen3"), tmp_path / "run")
    expected = expected_losses(config, alone(config), 2)
    found, bits = pool.run(2, tuned, config, 4, None)[0]
    assert found == pytest.approx(expected, abs=1e-5)
    assert 1 < bits < 20
    half = replace(config, out=str(tmp_path / "half"))
    first, _ = pool.run(2, tuned, half, 2, None)[0]
    rest, _ = pool.run(2, tuned, replace(half, resume=True), 4, None)[0]
    assert first + rest == found


def test_a_worker_that_runs_out_of_memory_begins_the_step_again_with_the_others(
    pool: RankPool, shell: Shell, tmp_path: Path
) -> None:
    config = config_of(shell, written(tmp_path, "llama"), tmp_path / "run")
    found, repeated = pool.run(2, short_of_memory, config)[0]
    assert found == pytest.approx(expected_losses(config, alone(config), 2), abs=1e-5)
    assert repeated == [None, 1, 1, 1]


def test_the_text_is_in_tokens_of_the_folder(shell: Shell, tmp_path: Path) -> None:
    folder = written(tmp_path, "llama")
    config = config_of(shell, folder, tmp_path / "run")
    text = load_text_for(choose_architecture(config), config)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ends = np.flatnonzero(text.train.tokens == text.end)
    assert text.end == tokenizer.token_to_id("</s>") and ends[0] == 0
    assert text.train.tokens.max() < VOCAB and text.train.tokens.dtype == np.uint16
    document = text.train.tokens[1 : ends[1]].tolist()
    assert tokenizer.encode(tokenizer.decode(document).lstrip()).ids == document
    per_token = text.bytes_per_token()
    assert per_token[text.held_out.tokens].sum() == pytest.approx(text.held_out.nbytes)
    plain = load_text_for(choose_architecture(config), replace(config, init=None))
    assert plain.key != text.key


def test_what_cannot_work_is_refused_before_any_worker_starts(shell: Shell, tmp_path: Path) -> None:
    folder = written(tmp_path, "llama")
    config = config_of(shell, folder, tmp_path / "run")

    def refused(said: str) -> None:
        with pytest.raises(ConfigError, match=said):
            prepare(config, num_workers=1)
        assert not (tmp_path / "run").exists()

    tokenizer = (folder / "tokenizer.json").read_bytes()
    write_tokenizer(folder, end="<nothing>")
    refused("eos_token, '<nothing>', which separates documents, is not in tokenizer.json")
    (folder / "tokenizer.json").write_text("{}")
    refused("its tokenizer cannot be read")
    (folder / "tokenizer.json").unlink()
    refused("there is no tokenizer.json")
    write_tokenizer(folder)
    assert (folder / "tokenizer.json").read_bytes() == tokenizer
    description = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(description | {"vocab_size": 100}))
    refused("tokens, but the model has 100 rows")
    (folder / "config.json").write_text(json.dumps(description))
    for file in folder.glob("model*"):
        file.unlink()
    refused("there is no .*safetensors in it")
