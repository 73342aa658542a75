"""The configuration of a run: one frozen value, saved as JSON in the folder of the run."""

# ruff: noqa: RUF009 - fields get their options from calls
from __future__ import annotations

import dataclasses
import enum
import json
import math
import typing
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from fullshard import WirePolicy
from fullshard.errors import ConfigError
from fullshard.train.files import appear
from fullshard.train.published import PUBLISHED

LOCK = "fullshard.lock"
"""Name of the file in the folder of a run that its job locks."""


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


def choices_of(kind: Any) -> type[enum.Enum] | None:
    """Return the enumeration in ``kind``, such as ``Dtype | None``; None: it has none."""
    for each in typing.get_args(kind) or (kind,):
        if isinstance(each, type) and issubclass(each, enum.Enum):
            return each
    return None


class Option(NamedTuple):
    """How an attribute of ``TrainConfig`` is given on the command line.

    Attributes:
        help: one sentence that describes the option.
        group: the section of the help.
        metavar: name of the value in the help; None: derived from the type.
        kind: the type on the command line; None: the type of the attribute.
        default: the default of the command line; ...: the default of the attribute.
    """

    help: str
    group: str
    metavar: str | None = None
    kind: Any = None
    default: Any = ...


def _option(value: Any, help: str, group: str, metavar: str | None = None, **shown: Any) -> Any:
    """Return a field of a dataclass with a default ``value``, and the rest as its ``Option``."""
    metadata = {"option": Option(help, group, metavar, **shown)}
    return dataclasses.field(default=value, metadata=metadata)


_MODEL, _TEXT, _RUN, _SHARDING = "Model", "Text", "Run", "Sharding"
_MEMORY, _STEPS, _LOOK = "Memory", "Steps", "To look at"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """Everything that decides what a run computes.

    Each attribute with an ``Option`` is an option of ``fullshard train``, and a key of its TOML
    file and of ``config.json``. The list below has details of some options, and the attributes
    without an option.

    Attributes:
        out: folder for ``config.json``, ``metrics.jsonl``, ``checkpoints/`` and others.
        export: a new folder for the trained model in the format of transformers. With ``lora``, it
            gets the adapters in the format of peft.
        nproc: local workers to start; under torchrun its ``--nproc-per-node`` is used instead.
        epochs: how many times the whole training text is read; ``prepare`` computes ``steps`` from
            it. None: ``steps`` was given.
        lr: peak learning rate, reached after ``warmup`` steps, or after a tenth of all steps if
            these are fewer. It then follows ``lr_schedule``.
        lr_floor: learning rate of the last step as a fraction of ``lr``.
        clip: largest norm of the gradients; larger gradients are scaled down to it.
        layout: layout of the shards; either layout reads checkpoints of the other.
        replicas: copies of the shards, over which gradients are reduced last; must divide the
            number of workers. Checkpoints do not depend on it.
        wire: how parameters and gradients are encoded for communication, as text for
            ``WirePolicy.parse``; None: not encoded.
        patience: the run ends after this number of evaluations without a lower held-out loss.
        eval_sequences: number of held-out sequences, evenly spread, in an evaluation.

    Raises:
        ConfigError: a value is invalid, or values contradict each other.
    """

    model: str = _option(
        "2m",
        f"{', '.join((*SIZES, *PUBLISHED))}, or a configuration of transformers.",
        _MODEL,
        "NAME|hf:CONFIG.json",
    )
    data: str | None = _option(
        None,
        "Text or chats: files, JSONL or tables; default: Python's standard library.",
        _TEXT,
        "PATH",
    )
    skip_bad: bool = _option(False, "Leave out bad records of --data, and count them.", _TEXT)
    pack: bool = _option(True, "Put several short chats in one sequence.", _TEXT)
    init: str | None = _option(
        None,
        "Begin with these weights, and their tokenizer; --model is then hf:FOLDER.",
        _MODEL,
        "FOLDER",
    )
    lora: int | None = _option(
        None, "Train adapters of this rank (peft) beside frozen weights.", _MODEL
    )
    quantize: Quantize | None = _option(
        None, "Hold frozen weights in four bits (bitsandbytes).", _MODEL
    )
    export: str | None = _option(
        None,
        "Write the trained model, or the adapters, to this new folder at the end.",
        _MODEL,
        "FOLDER",
    )
    save_dtype: SaveDtype | None = _option(
        None, "Dtype of exported weights; default: fp32, as they are trained.", _MODEL
    )
    merge: bool = _option(False, "Export the model with the adapters in it.", _MODEL)
    out: str = _option(
        "runs/default", "Folder of the run, instead of runs/NAME.", _RUN, "DIR", default=None
    )
    resume: bool = _option(False, "Go on from the newest checkpoint, same options.", _RUN)
    nproc: int = _option(
        2, "Local workers; default: one per GPU, 2 on CPU.", _SHARDING, default=None
    )
    min_workers: int | None = _option(
        None, "Continue after losing workers while at least N remain; 0: end.", _SHARDING
    )
    steps: int = _option(600, "Steps of the whole schedule.", _RUN)
    epochs: float | None = _option(
        None, "Instead of --steps: how often to read the whole text.", _RUN, "E"
    )
    stop_after: int | None = _option(
        None, "Stop early after this step, the schedule unchanged.", _RUN
    )
    batch: int = _option(8, "Sequences per worker.", _TEXT)
    seq: int = _option(128, "Tokens per sequence.", _TEXT)
    accumulate: int = _option(1, "Microbatches per step.", _MEMORY)
    lr: float = _option(
        4e-3, "Peak learning rate; default: by the size of the model.", _STEPS, default=None
    )
    lr_schedule: LrSchedule = _option(
        LrSchedule.COSINE,
        "The learning rate after its warm-up; wsd: stay, fall in the last fifth.",
        _STEPS,
    )
    lr_floor: float = 0.05
    warmup: int = _option(40, "Steps of the warm-up, at most a tenth of all.", _STEPS)
    weight_decay: float = _option(0.1, "Weight decay of the matrices.", _STEPS)
    clip: float = _option(1.0, "Largest norm of the gradients.", _STEPS)
    betas: str = _option("0.9,0.95", "Betas of AdamW.", _STEPS, "B1,B2")
    optimizer: OptimizerName = _option(
        OptimizerName.ADAMW, "What steps the matrices; AdamW steps everything else.", _STEPS
    )
    muon_lr: float | None = _option(None, "Peak learning rate of Muon; default: --lr.", _STEPS)
    max_skipped: int = _option(
        10, "Steps in a row to skip if loss or gradients are not finite.", _STEPS
    )
    dtype: Dtype = _option(Dtype.FP32, "Dtype of forward and backward.", _MEMORY)
    layout: LayoutName = _option(
        LayoutName.PER_PARAMETER, "How parameters lie in the shards.", _SHARDING
    )
    replicas: int = _option(1, "Copies of the shards; workers of one copy share it.", _SHARDING)
    wire: str | None = _option(
        None,
        "How parameters and gradients travel: bf16, int8, fp8, or int4 (gradients only).",
        _SHARDING,
        "gather=KIND,reduce=KIND",
    )
    reshard: bool = _option(True, "Free full parameters between forward and backward.", _MEMORY)
    checkpoint_activations: bool = _option(False, "Recompute blocks in backward.", _MEMORY)
    seed: int = _option(0, "Of weights and data order.", _RUN)
    save_every: int = _option(100, "Steps between checkpoints.", _RUN)
    keep: int | None = _option(
        None, "Keep the newest N checkpoints, and the best; 0: all.", _RUN, "N"
    )
    memory_every: int | None = _option(
        None, "Steps between checkpoints in memory, with a copy on another machine; 0: none.", _RUN
    )
    eval_every: int = _option(100, "Steps between evaluations.", _RUN)
    patience: int | None = _option(
        None, "End after N evaluations without a lower held-out loss; 0: never.", _RUN, "N"
    )
    eval_sequences: int = 256
    sample: int | None = _option(
        120, "Tokens of the sample at the end of the run.", _RUN, "off|N", kind=str, default="120"
    )
    log: LogTo = _option(LogTo.NONE, "Log the figures of each step there, too.", _LOOK)
    hardware: str | None = _option(
        None,
        "Plan the time of a step, too, for a preset or a file of fullshard doctor.",
        _LOOK,
        "NAME|FILE",
    )
    trace: bool = _option(False, "Record what workers do, for fullshard trace.", _LOOK)

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is not None and value < least:
                option = "--" + name.replace("_", "-")
                raise ConfigError(f"{option} is {value}, it must be at least {least}")
        if self.memory_every is not None and not Path("/dev/shm").is_dir():
            raise ConfigError("--memory-every needs /dev/shm, a folder in memory, as Linux has it")
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
        if self.merge and self.quantize is not None:
            raise ConfigError(
                "--merge with --quantize: adapters cannot be merged into weights of four bits; "
                "export the adapters, and merge them with peft into the weights of --init"
            )
        if self.export is not None and not self.model.startswith(HF):
            raise ConfigError(f"--export needs --model {HF}CONFIG.json, whose form it has")
        if not self.lr > 0:
            raise ConfigError(f"--lr is {self.lr}, it must be greater than 0")
        if not 0 <= self.weight_decay < math.inf:
            raise ConfigError(f"--weight-decay is {self.weight_decay:g}, it must be at least 0")
        if not self.clip > 0:
            raise ConfigError(f"--clip is {self.clip:g}, it must be greater than 0")
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
            if "dtype" not in fields:
                raise ConfigError("not the configuration of a run: it has no dtype")
            kinds = typing.get_type_hints(cls)
            for name, value in fields.items():
                if (choices := choices_of(kinds.get(name))) and value is not None:
                    fields[name] = choices(value)
            return cls(**fields)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ConfigError(f"not the configuration of a run: {error}") from error

    def save(self, path: Path) -> None:
        """Write the configuration to ``path`` atomically."""
        appear(path, lambda to: to.write_text(self.to_json(), encoding="utf-8"))

    @classmethod
    def load(cls, path: Path) -> TrainConfig:
        """Read a file written by ``save``; on failure raise ``ConfigError`` that names ``path``."""
        try:
            return cls.from_json(path.read_text(encoding="utf-8"))
        except (OSError, ConfigError) as error:
            raise ConfigError(f"{path}: {error}") from error


# Options that do nothing without another.
_NEEDED = {"save_dtype": "export", "lora": "init", "quantize": "lora", "merge": "lora"}

_POSITIVE = (
    "nproc steps batch seq accumulate replicas save_every eval_every min_workers memory_every keep "
    "patience sample stop_after lora"
)
_LEAST = dict.fromkeys(_POSITIVE.split(), 1) | dict.fromkeys(("max_skipped", "warmup", "seed"), 0)
