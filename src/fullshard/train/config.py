"""What a run is: one frozen value, saved as JSON beside everything the run produces."""

from __future__ import annotations

import dataclasses
import enum
import json
import os
from pathlib import Path
from typing import Any

from fullshard.errors import ConfigError

__all__ = ["Dtype", "ModelConfig", "TrainConfig"]


class Dtype(enum.StrEnum):
    """The dtype a forward and backward compute in; parameters and AdamW always keep fp32."""

    FP32 = "fp32"
    BF16 = "bf16"


@dataclasses.dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes of the GPT. The defaults make 2.6M parameters, which two CPU cores train in minutes."""

    dim: int = 192
    num_layers: int = 4
    num_heads: int = 4
    ffn_dim: int = 512
    vocab_size: int = 2048


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """Everything that decides what a run computes.

    Attributes:
        out: folder of the run: ``config.json``, ``metrics.jsonl``, ``checkpoints/``, ``loss.png``.
        data: a text file or a folder of them; ``None`` reads Python's own standard library.
        nproc: local workers to start; under torchrun its ``--nproc-per-node`` counts instead.
        steps: optimizer steps of the whole schedule.
        stop_after: step after which to stop early; the schedule stays that of ``steps``.
        batch: sequences per worker and microbatch.
        seq: tokens per sequence.
        accumulate: microbatches per optimizer step.
        lr: peak learning rate, reached after ``warmup`` steps; a cosine takes it down to
            ``lr_floor`` of itself.
        reshard: free each block's full parameters between its forward and its backward.
        eval_sequences: how many held-out sequences, evenly spread, an evaluation reads.
        resume: continue from the newest complete checkpoint of ``out``.

    Raises:
        ConfigError: if a value cannot work.
    """

    out: str = "runs/default"
    data: str | None = None
    nproc: int = 2
    steps: int = 600
    stop_after: int | None = None
    batch: int = 8
    seq: int = 128
    accumulate: int = 1
    lr: float = 4e-3
    lr_floor: float = 0.05
    warmup: int = 40
    weight_decay: float = 0.1
    clip: float = 1.0
    dtype: Dtype = Dtype.FP32
    reshard: bool = True
    checkpoint_activations: bool = False
    seed: int = 0
    save_every: int = 100
    eval_every: int = 100
    eval_sequences: int = 256
    resume: bool = False
    model: ModelConfig = ModelConfig()

    def __post_init__(self) -> None:
        for name in ("nproc", "steps", "batch", "seq", "accumulate", "save_every", "eval_every"):
            _at_least(name, getattr(self, name), 1)
        if self.stop_after is not None:
            _at_least("stop_after", self.stop_after, 1)
        if not self.lr > 0:
            raise ConfigError(f"--lr is {self.lr}, it must be greater than 0")

    @property
    def last_step(self) -> int:
        """The step after which this start of the run ends."""
        return self.steps if self.stop_after is None else min(self.steps, self.stop_after)

    def to_json(self) -> str:
        """The text that ``from_json`` reads."""
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> TrainConfig:
        """Reads ``to_json``'s text; raises ``ConfigError`` if it is not that."""
        try:
            fields: dict[str, Any] = json.loads(text)
            fields["model"] = ModelConfig(**fields["model"])
            fields["dtype"] = Dtype(fields["dtype"])
            return cls(**fields)
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigError(f"not the configuration of a run: {error}") from error

    def save(self, path: Path) -> None:
        """Writes the configuration to ``path``, at no moment half of it."""
        unfinished = path.with_name(path.name + ".tmp")
        unfinished.write_text(self.to_json(), encoding="utf-8")
        os.replace(unfinished, path)

    @classmethod
    def load(cls, path: Path) -> TrainConfig:
        """Reads what ``save`` wrote; raises ``ConfigError`` naming the path if it cannot."""
        try:
            return cls.from_json(path.read_text(encoding="utf-8"))
        except (OSError, ConfigError) as error:
            raise ConfigError(f"{path}: {error}") from error


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        option = "--" + name.replace("_", "-")
        raise ConfigError(f"{option} is {value}, it must be at least {least}")
