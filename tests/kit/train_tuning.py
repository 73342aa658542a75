"""Runs of the trainer on chats, and the losses of transformers on the same chats."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from fullshard.optim import clip_grad_norm_
from fullshard.train.architecture import choose_architecture, load_text_for
from fullshard.train.config import TrainConfig
from fullshard.train.data.text import RowOrder, TokenizedText
from fullshard.train.job.export import export
from fullshard.train.loop import Trainer
from fullshard.train.optimizer import build_optimizer, learning_rate
from fullshard.train.run.folder import RunDir
from fullshard.train.world import World
from tests.kit.train_chats import write_chats
from tests.kit.train_chats import write_tokenizer as write_chat_tokenizer
from tests.kit.train_init import written

pytest.importorskip("transformers", reason="the extra hf is not installed")


CPU = torch.device("cpu")


def config_of(folder: Path, kind: str, **options: Any) -> TrainConfig:
    model = folder / kind
    if not model.exists():
        longest = "n_positions" if kind == "gpt2" else "max_position_embeddings"
        written(folder, kind, **{longest: 64})
        write_chat_tokenizer(model)
        write_chats(folder / "chats.jsonl", 60)
    given = {"steps": 3, "batch": 2, "seq": 64, "accumulate": 2, "lr": 3e-3, **options}
    paths = {"model": f"hf:{model}", "init": str(model), "data": str(folder / "chats.jsonl")}
    return TrainConfig(**paths, out=str(folder / "run"), **given)


def text_of(config: TrainConfig) -> TokenizedText:
    return load_text_for(choose_architecture(config), config)


def trainer_of(config: TrainConfig) -> Trainer:
    return Trainer(config, text_of(config), World(dist.get_rank(), dist.get_world_size(), CPU))


def tuned(config: TrainConfig, until: int, folder: str | None) -> tuple[list[float], float]:
    """Train until a step, save, and export; return the losses and an evaluation."""
    trainer = trainer_of(config)
    first = trainer.resume(RunDir(Path(config.out))) if config.resume else 0
    records = [trainer.record(trainer.start(step)) for step in range(first + 1, until + 1)]
    trainer.save(until)
    trainer.saves.wait()
    evaluated = trainer.evaluation.run()[0]
    if folder is not None:
        export(trainer.model, config, text_of(config).tokenizer, trainer.world, Path(folder))
        dist.barrier()
    return [record.loss for record in records], evaluated


def alone(config: TrainConfig) -> nn.Module:
    """Return the model that transformers and peft build in one process."""
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    quantized = None
    if config.quantize is not None:
        quantized = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.float32,
        )
    model: Any = AutoModelForCausalLM.from_pretrained(
        config.init, dtype=torch.float32, quantization_config=quantized
    )
    model.config.use_cache = False
    if config.lora is not None:
        from peft import LoraConfig, get_peft_model
        from peft.tuners.tuners_utils import BaseTunerLayer

        adapters = LoraConfig(
            r=config.lora, lora_alpha=2 * config.lora, target_modules="all-linear",
            task_type="CAUSAL_LM",
        )  # fmt: skip
        model = get_peft_model(model, adapters)
        torch.manual_seed(config.seed)
        for layer in model.modules():
            if isinstance(layer, BaseTunerLayer):
                layer.reset_lora_parameters("default", True)  # type: ignore[operator]
    built: nn.Module = model.train()
    return built


def samples_alone(batch: Any, row: int) -> list[tuple[Tensor, Tensor]]:
    """Return the tokens and labels of each sample of a row."""
    if batch.positions is None:  # tokens behind the last learned label change nothing
        size = np.flatnonzero(batch.labels[row] != -100)[-1] + 1
        return [(torch.tensor(batch.tokens[row, :size]), torch.tensor(batch.labels[row, :size]))]
    starts = [n for n, position in enumerate(batch.positions[row]) if position == 0]
    ends = [*starts[1:], len(batch.positions[row])]
    return [
        (torch.tensor(batch.tokens[row, start:end]), torch.tensor(batch.labels[row, start:end]))
        for start, end in zip(starts, ends, strict=True)
    ]


def expected_losses(config: TrainConfig, model: nn.Module, num_workers: int) -> list[float]:
    """Return the losses of the same steps in one process that reads each sample alone."""
    rows = text_of(config).train.rows(config.seq)
    optimizer = build_optimizer(model, config)
    order = RowOrder(len(rows), config.seed, config.batch, config.accumulate, num_workers)
    found = []
    for step in range(1, config.steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, config)
        batch = rows.read(order.rows_of_step(step))
        count = int((batch.labels != -100).sum())
        total = 0.0
        for row in range(len(batch.tokens)):
            for tokens, labels in samples_alone(batch, row):
                if (labels != -100).any():
                    logits = model(input_ids=tokens[None]).logits[0]
                    loss = F.cross_entropy(logits, labels, reduction="sum") / count
                    loss.backward()
                    total += loss.item()
        clip_grad_norm_(model.parameters(), config.clip)
        optimizer.step()
        optimizer.zero_grad()
        found.append(total)
    return found
