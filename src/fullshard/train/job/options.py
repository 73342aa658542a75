"""The options of ``fullshard train`` on the command line and in a TOML file."""

from __future__ import annotations

import enum
import tomllib
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from fullshard.errors import ConfigError
from fullshard.train import config
from fullshard.train.published import PUBLISHED

Model = Annotated[
    str,
    typer.Option(
        help=f"{', '.join((*config.SIZES, *PUBLISHED))}, or a configuration of transformers.",
        metavar="NAME|hf:CONFIG.json",
        rich_help_panel="Model",
    ),
]
Data = Annotated[
    str | None,
    typer.Option(
        help="Text or chats: files, JSONL or parquet; default: Python's standard library.",
        metavar="PATH",
        rich_help_panel="Text",
    ),
]
SkipBad = Annotated[
    bool,
    typer.Option(help="Leave out bad records of --data, and count them.", rich_help_panel="Text"),
]
Init = Annotated[
    str | None,
    typer.Option(
        help="Begin with these weights, and their tokenizer; --model is then hf:FOLDER.",
        metavar="FOLDER",
        rich_help_panel="Model",
    ),
]
Lora = Annotated[
    int | None,
    typer.Option(
        help="Train adapters of this rank (peft) beside frozen weights.",
        min=1,
        rich_help_panel="Model",
    ),
]
Quantize = Annotated[
    config.Quantize | None,
    typer.Option(help="Hold frozen weights in four bits (bitsandbytes).", rich_help_panel="Model"),
]
Export = Annotated[
    str | None,
    typer.Option(
        help="Write the trained model, or the adapters, to this new folder at the end.",
        metavar="FOLDER",
        rich_help_panel="Model",
    ),
]
SaveDtype = Annotated[
    config.SaveDtype | None,
    typer.Option(
        help="Dtype of exported weights; default: fp32, as they are trained.",
        rich_help_panel="Model",
    ),
]
Merge = Annotated[
    bool, typer.Option(help="Export the model with the adapters in it.", rich_help_panel="Model")
]
ConfigFile = Annotated[
    str | None,
    typer.Option(
        "--config",
        help="Options from a file; those given here win.",
        metavar="FILE.toml",
        rich_help_panel="Run",
    ),
]
Name = Annotated[str, typer.Option(help="The run lies in runs/NAME.", rich_help_panel="Run")]
Out = Annotated[
    str | None,
    typer.Option(
        help="Folder of the run, instead of runs/NAME.", metavar="DIR", rich_help_panel="Run"
    ),
]
Resume = Annotated[
    bool,
    typer.Option(
        "--resume", help="Go on from the newest checkpoint, same options.", rich_help_panel="Run"
    ),
]
Nproc = Annotated[
    int | None,
    typer.Option(help="Local workers; default: one per GPU, 2 on CPU.", rich_help_panel="Sharding"),
]
MinWorkers = Annotated[
    int | None,
    typer.Option(
        help="Continue after losing workers while at least N remain; 0: end.",
        rich_help_panel="Sharding",
    ),
]
Steps = Annotated[int, typer.Option(help="Steps of the whole schedule.", rich_help_panel="Run")]
Epochs = Annotated[
    float | None,
    typer.Option(
        help="Instead of --steps: how often to read the whole text.",
        metavar="E",
        rich_help_panel="Run",
    ),
]
StopAfter = Annotated[
    int | None,
    typer.Option(help="Stop early after this step, the schedule unchanged.", rich_help_panel="Run"),
]
Batch = Annotated[int, typer.Option(help="Sequences per worker.", rich_help_panel="Text")]
Seq = Annotated[int, typer.Option(help="Tokens per sequence.", rich_help_panel="Text")]
Accumulate = Annotated[int, typer.Option(help="Microbatches per step.", rich_help_panel="Memory")]
Lr = Annotated[
    float | None,
    typer.Option(
        help="Peak learning rate; default: by the size of the model.", rich_help_panel="Steps"
    ),
]
LrSchedule = Annotated[
    config.LrSchedule,
    typer.Option(
        help="The learning rate after its warm-up; wsd: stay, fall in the last fifth.",
        rich_help_panel="Steps",
    ),
]
Warmup = Annotated[
    int, typer.Option(help="Steps of the warm-up, at most a tenth of all.", rich_help_panel="Steps")
]
Betas = Annotated[
    str, typer.Option(help="Betas of AdamW.", metavar="B1,B2", rich_help_panel="Steps")
]
Optimizer = Annotated[
    config.OptimizerName,
    typer.Option(
        help="What steps the matrices; AdamW steps everything else.", rich_help_panel="Steps"
    ),
]
MuonLr = Annotated[
    float | None,
    typer.Option(help="Peak learning rate of Muon; default: --lr.", rich_help_panel="Steps"),
]
MaxSkipped = Annotated[
    int,
    typer.Option(
        help="Steps in a row to skip if loss or gradients are not finite.", rich_help_panel="Steps"
    ),
]
Dtype = Annotated[
    config.Dtype, typer.Option(help="Dtype of forward and backward.", rich_help_panel="Memory")
]
Layout = Annotated[
    config.LayoutName,
    typer.Option(help="How parameters lie in the shards.", rich_help_panel="Sharding"),
]
Replicas = Annotated[
    int,
    typer.Option(
        help="Copies of the shards; workers of one copy share it.", rich_help_panel="Sharding"
    ),
]
Wire = Annotated[
    str | None,
    typer.Option(
        help="How parameters and gradients travel: bf16, int8, fp8, or int4 (gradients only).",
        metavar="gather=KIND,reduce=KIND",
        rich_help_panel="Sharding",
    ),
]
Reshard = Annotated[
    bool,
    typer.Option(
        help="Free full parameters between forward and backward.", rich_help_panel="Memory"
    ),
]
CheckpointActivations = Annotated[
    bool, typer.Option(help="Recompute blocks in backward.", rich_help_panel="Memory")
]
Seed = Annotated[int, typer.Option(help="Of weights and data order.", rich_help_panel="Run")]
SaveEvery = Annotated[int, typer.Option(help="Steps between checkpoints.", rich_help_panel="Run")]
Keep = Annotated[
    int | None,
    typer.Option(
        help="Keep the newest N checkpoints, and the best; 0: all.",
        metavar="N",
        rich_help_panel="Run",
    ),
]
MemoryEvery = Annotated[
    int | None,
    typer.Option(
        help="Steps between checkpoints in memory, with a copy on another machine; 0: none.",
        rich_help_panel="Run",
    ),
]
EvalEvery = Annotated[int, typer.Option(help="Steps between evaluations.", rich_help_panel="Run")]
Patience = Annotated[
    int | None,
    typer.Option(
        help="End after N evaluations without a lower held-out loss; 0: never.",
        metavar="N",
        rich_help_panel="Run",
    ),
]
Sample = Annotated[
    str,
    typer.Option(
        help="Tokens of the sample at the end of the run.", metavar="off|N", rich_help_panel="Run"
    ),
]
Log = Annotated[
    config.LogTo,
    typer.Option(help="Log the figures of each step there, too.", rich_help_panel="To look at"),
]
Hardware = Annotated[
    str | None,
    typer.Option(
        help="Plan the time of a step, too, for a preset or a file of fullshard doctor.",
        metavar="NAME|FILE",
        rich_help_panel="To look at",
    ),
]
Trace = Annotated[
    bool,
    typer.Option(help="Record what workers do, for fullshard trace.", rich_help_panel="To look at"),
]


_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a string"}


def read_options(path: Path, kinds: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options in a TOML file by parameter name.

    Args:
        path: a file whose keys are names of options, with ``-`` or ``_``.
        kinds: the type, such as ``int | None``, of each existing option.

    Raises:
        ConfigError: the file cannot be read, a key is not an option, or a value has a wrong type.
    """
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--config {path}: cannot be read ({error.strerror})") from error
    except ValueError as error:  # from tomllib, or because of text that is not UTF-8
        raise ConfigError(f"--config {path}: not TOML ({error})") from error
    options = {}
    for key, value in table.items():
        name = key.replace("-", "_")
        if name not in kinds:
            known = ", ".join(option.replace("_", "-") for option in kinds)
            raise ConfigError(f"--config {path}: unknown option {key!r}; known are {known}")
        options[name] = _checked(value, kinds[name], f"--config {path}: {key}")
    return options


def _checked(value: Any, kind: Any, where: str) -> Any:
    """Return ``value`` as ``kind``; TOML distinguishes numbers, strings and booleans."""
    kinds = [each for each in typing.get_args(kind) or (kind,) if each is not type(None)]
    if issubclass(kinds[0], enum.Enum):
        choices = [member.value for member in kinds[0]]
        if value in choices:
            return kinds[0](value)
        expected = f"one of {', '.join(choices)}"
    else:
        if type(value) in kinds:  # not isinstance: a bool is an int
            return value
        if float in kinds and type(value) is int:
            return float(value)
        expected = " or ".join(_WORDS[each] for each in kinds)
    raise ConfigError(f"{where} is {value!r}, expected {expected}")
