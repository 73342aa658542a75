"""The configuration of a run: one frozen value, saved as JSON in the folder of the run."""

from __future__ import annotations

import dataclasses
import enum
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from fullshard import WirePolicy
from fullshard.errors import ConfigError
from fullshard.train.published import PUBLISHED


class Dtype(enum.StrEnum):
    """The dtype of forward and backward; parameters and AdamW state are always fp32."""

    FP32 = "fp32"
    BF16 = "bf16"


class SaveDtype(enum.StrEnum):
    """The dtype of exported weights."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"


class LogTo(enum.StrEnum):
    """A tracker of experiments, beside ``metrics.jsonl``."""

    NONE = "none"
    TENSORBOARD = "tensorboard"
    WANDB = "wandb"
    MLFLOW = "mlflow"


class LayoutName(enum.StrEnum):
    """The layout of parameters in the shards."""

    PER_PARAMETER = "per-parameter"
    RAGGED = "ragged"


class OptimizerName(enum.StrEnum):
    """The optimizer of the matrices of a model; AdamW steps everything else."""

    ADAMW = "adamw"
    MUON = "muon"


class LrSchedule(enum.StrEnum):
    """The course of the learning rate after its warm-up; "wsd": warm up, stay, decay."""

    COSINE = "cosine"
    LINEAR = "linear"
    CONSTANT = "constant"
    WSD = "wsd"


class Quantize(enum.StrEnum):
    """How frozen weights are stored."""

    NF4 = "nf4"


@dataclasses.dataclass(frozen=True, slots=True)
class ModelConfig:
    """The sizes of our GPT, with a peak learning rate suited to them."""

    dim: int
    num_layers: int
    num_heads: int
    ffn_dim: int
    vocab_size: int
    lr: float


SIZES: Mapping[str, ModelConfig] = MappingProxyType(
    {  # for two CPU cores and minutes; for patience; for a GPU; for several
        "2m": ModelConfig(192, 4, 4, 512, vocab_size=2048, lr=4e-3),
        "10m": ModelConfig(320, 6, 5, 864, vocab_size=4096, lr=2e-3),
        "125m": ModelConfig(768, 12, 12, 2048, vocab_size=25_600, lr=6e-4),
        "1b": ModelConfig(2048, 18, 16, 5504, vocab_size=32_000, lr=3e-4),
    }
)
HF = "hf:"  # prefix of the path of a transformers configuration file
_HF_LR = 1e-3
_TUNED_LR, _LORA_LR = 2e-5, 2e-4


def default_lr(model: str, *, tuned: bool = False, lora: bool = False) -> float:
    """Return the peak learning rate of a run that does not set one.

    Args:
        model: as in ``TrainConfig``.
        tuned: whether the run begins with weights.
        lora: whether only adapters are trained.
    """
    if tuned:
        return _LORA_LR if lora else _TUNED_LR
    return SIZES[model].lr if model in SIZES else _HF_LR


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """Everything that decides what a run computes.

    Most attributes are options of the command, which ``job/options.py`` describes. Below are those
    with more to say, and those that are no options.

    Attributes:
        out: folder for ``config.json``, ``metrics.jsonl``, ``checkpoints/`` and others.
        lora: rank of the adapters that are trained instead of the weights of ``init``.
        export: a new folder for the trained model, as transformers reads it; of ``lora`` the
            adapters, as peft reads them.
        save_dtype: dtype of exported weights; None: fp32, as they are trained.
        nproc: local workers to start; under torchrun its ``--nproc-per-node`` is used instead.
        epochs: how many times the whole training text is read; ``prepare`` computes ``steps`` from
            it. None: ``steps`` was given.
        lr: peak learning rate, reached after ``warmup`` steps, or after a tenth of all steps if
            these are fewer. It then follows ``lr_schedule``.
        lr_floor: learning rate of the last step as a fraction of ``lr``.
        betas: of AdamW, two numbers with a comma.
        muon_lr: peak learning rate of Muon, which is scaled as AdamW's are; None: ``lr``.
        layout: layout of the shards; either layout reads checkpoints of the other.
        replicas: copies of the shards, over which gradients are reduced last; must divide the
            number of workers. Checkpoints do not depend on it.
        wire: how parameters and gradients travel, as ``WirePolicy.parse`` reads it, such as
            ``gather=int8,reduce=bf16``; None: as they are.
        trace: record what all workers do, see ``fullshard.trace``, and write it to ``trace/`` of
            ``out`` when the run ends.
        keep: how many checkpoints to keep, the newest, beside the one of the lowest held-out loss;
            None: all.
        patience: evaluations in a row without a lower held-out loss, after which the run ends;
            None: it does not.
        sample: tokens of the sample at the end of the run; None: no sample.
        log: the tracker that gets the figures of ``metrics.jsonl``, too.
        eval_sequences: number of held-out sequences, evenly spread, in an evaluation.

    Raises:
        ConfigError: a value cannot work.
    """

    out: str = "runs/default"
    model: str = "2m"
    init: str | None = None
    lora: int | None = None
    quantize: Quantize | None = None
    export: str | None = None
    save_dtype: SaveDtype | None = None
    merge: bool = False
    data: str | None = None
    skip_bad: bool = False
    nproc: int = 2
    min_workers: int | None = None
    steps: int = 600
    epochs: float | None = None
    stop_after: int | None = None
    batch: int = 8
    seq: int = 128
    accumulate: int = 1
    lr: float = 4e-3
    lr_schedule: LrSchedule = LrSchedule.COSINE
    lr_floor: float = 0.05
    warmup: int = 40
    weight_decay: float = 0.1
    clip: float = 1.0
    betas: str = "0.9,0.95"
    optimizer: OptimizerName = OptimizerName.ADAMW
    muon_lr: float | None = None
    max_skipped: int = 10
    dtype: Dtype = Dtype.FP32
    layout: LayoutName = LayoutName.PER_PARAMETER
    replicas: int = 1
    wire: str | None = None
    reshard: bool = True
    checkpoint_activations: bool = False
    seed: int = 0
    save_every: int = 100
    keep: int | None = None
    memory_every: int | None = None
    eval_every: int = 100
    patience: int | None = None
    eval_sequences: int = 256
    sample: int | None = 120
    log: LogTo = LogTo.NONE
    hardware: str | None = None
    trace: bool = False
    resume: bool = False

    def __post_init__(self) -> None:
        counts = "nproc steps batch seq accumulate replicas save_every eval_every"
        for name in counts.split():
            _at_least(name, getattr(self, name), 1)
        for name in ("min_workers", "memory_every", "keep", "patience", "sample"):
            if getattr(self, name) is not None:
                _at_least(name, getattr(self, name), 1)
        if self.memory_every is not None and not Path("/dev/shm").is_dir():
            raise ConfigError("--memory-every needs /dev/shm, a folder in memory, as Linux has it")
        _at_least("max_skipped", self.max_skipped, 0)
        _at_least("warmup", self.warmup, 0)
        _at_least("seed", self.seed, 0)
        if self.stop_after is not None:
            _at_least("stop_after", self.stop_after, 1)
        if self.model not in (*SIZES, *PUBLISHED) and not self.model.startswith(HF):
            expected = f"{', '.join((*SIZES, *PUBLISHED))} or {HF}CONFIG.json"
            raise ConfigError(f"--model is {self.model}, expected {expected}")
        for option, needed in _NEEDED.items():
            if getattr(self, option) and not getattr(self, needed):
                raise ConfigError(f"--{option.replace('_', '-')} needs --{needed}")
        if self.epochs is not None and not 0 < self.epochs < math.inf:
            raise ConfigError(f"--epochs is {self.epochs:g}, it must be greater than 0")
        if self.wire is not None:
            try:
                WirePolicy.parse(self.wire)
            except ConfigError as error:
                raise ConfigError(f"--wire {self.wire}: {error}") from error
        if self.lora is not None:
            _at_least("lora", self.lora, 1)
        if self.merge and self.quantize is not None:
            raise ConfigError(
                "--merge with --quantize: adapters cannot be merged into weights of four bits; "
                "export the adapters, and merge them with peft into the weights of --init"
            )
        if self.export is not None and not self.model.startswith(HF):
            raise ConfigError(f"--export needs --model {HF}CONFIG.json, whose form it has")
        if not self.lr > 0:
            raise ConfigError(f"--lr is {self.lr}, it must be greater than 0")
        if not all(0 <= beta < 1 for beta in self.adam_betas):
            raise ConfigError(f"--betas is {self.betas}, each must be at least 0 and less than 1")
        is_muon = self.optimizer is OptimizerName.MUON
        if is_muon and self.lora is not None:
            raise ConfigError(
                "--optimizer muon with --lora: Muon steps whole weights, and adapters are thin "
                "factors of changes of them; leave --optimizer out, AdamW trains adapters"
            )
        if self.muon_lr is not None and not is_muon:
            raise ConfigError("--muon-lr needs --optimizer muon")
        if not self.muon_peak_lr > 0:
            raise ConfigError(f"--muon-lr is {self.muon_lr}, it must be greater than 0")

    @property
    def adam_betas(self) -> tuple[float, float]:
        """Betas of AdamW."""
        try:
            first, second = map(float, self.betas.split(","))
        except ValueError as error:
            raise ConfigError(
                f"--betas is {self.betas}, expected two numbers with a comma, such as 0.9,0.95"
            ) from error
        return first, second

    @property
    def muon_peak_lr(self) -> float:
        """Peak learning rate of Muon."""
        return self.lr if self.muon_lr is None else self.muon_lr

    @property
    def last_step(self) -> int:
        """Last step of this start of the run."""
        return self.steps if self.stop_after is None else min(self.steps, self.stop_after)

    def to_json(self) -> str:
        """Return the configuration as JSON text, to be read by ``from_json``."""
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> TrainConfig:
        """Parse the text of ``to_json``; raise ``ConfigError`` if it is invalid."""
        try:
            fields: dict[str, Any] = json.loads(text)
            fields["dtype"] = Dtype(fields["dtype"])
            quantize = fields.get("quantize")
            fields["quantize"] = None if quantize is None else Quantize(quantize)
            save_dtype = fields.get("save_dtype")
            fields["save_dtype"] = None if save_dtype is None else SaveDtype(save_dtype)
            fields["optimizer"] = OptimizerName(fields.get("optimizer", OptimizerName.ADAMW))
            fields["lr_schedule"] = LrSchedule(fields.get("lr_schedule", LrSchedule.COSINE))
            fields["log"] = LogTo(fields.get("log", LogTo.NONE))
            fields["layout"] = LayoutName(fields.get("layout", LayoutName.PER_PARAMETER))
            return cls(**fields)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ConfigError(f"not the configuration of a run: {error}") from error

    def save(self, path: Path) -> None:
        """Write the configuration to ``path`` atomically."""
        unfinished = path.with_name(path.name + ".tmp")
        unfinished.write_text(self.to_json(), encoding="utf-8")
        os.replace(unfinished, path)

    @classmethod
    def load(cls, path: Path) -> TrainConfig:
        """Read a file written by ``save``; on failure raise ``ConfigError`` that names ``path``."""
        try:
            return cls.from_json(path.read_text(encoding="utf-8"))
        except (OSError, ConfigError) as error:
            raise ConfigError(f"{path}: {error}") from error


# Options that do nothing without another.
_NEEDED = {"save_dtype": "export", "lora": "init", "quantize": "lora", "merge": "lora"}


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        option = "--" + name.replace("_", "-")
        raise ConfigError(f"{option} is {value}, it must be at least {least}")
