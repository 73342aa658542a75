"""The options of ``fullshard train``, each with its type and help; ``fullshard plan`` shares some.

Defaults are those of ``TrainConfig``.
"""

from __future__ import annotations

from typing import Annotated

import typer

from . import config

Model = Annotated[
    str,
    typer.Option(
        help=f"{', '.join(config.SIZES)}, or a configuration of transformers.",
        metavar="SIZE|hf:CONFIG.json",
    ),
]
Data = Annotated[
    str | None,
    typer.Option(
        help="Text or chats: files, JSONL or parquet; default: Python's standard library.",
        metavar="PATH",
    ),
]
SkipBad = Annotated[bool, typer.Option(help="Leave out bad records of --data, and count them.")]
Init = Annotated[
    str | None,
    typer.Option(
        help="Begin with these weights, and their tokenizer; --model is then hf:FOLDER.",
        metavar="FOLDER",
    ),
]
Lora = Annotated[
    int | None,
    typer.Option(help="Train adapters of this rank (peft) beside frozen weights.", min=1),
]
Quantize = Annotated[
    config.Quantize | None, typer.Option(help="Hold frozen weights in four bits (bitsandbytes).")
]
Export = Annotated[
    str | None,
    typer.Option(
        help="Write the trained model, or the adapters, to this new folder at the end.",
        metavar="FOLDER",
    ),
]
SaveDtype = Annotated[
    config.SaveDtype | None,
    typer.Option(help="Dtype of exported weights; default: fp32, as they are trained."),
]
Merge = Annotated[bool, typer.Option(help="Export the model with the adapters in it.")]
ConfigFile = Annotated[
    str | None,
    typer.Option(
        "--config", help="Options from a file; those given here win.", metavar="FILE.toml"
    ),
]
Name = Annotated[str, typer.Option(help="The run lies in runs/NAME.")]
Out = Annotated[
    str | None, typer.Option(help="Folder of the run, instead of runs/NAME.", metavar="DIR")
]
Resume = Annotated[
    bool, typer.Option("--resume", help="Go on from the newest checkpoint, same options.")
]
Nproc = Annotated[int | None, typer.Option(help="Local workers; default: one per GPU, 2 on CPU.")]
MinWorkers = Annotated[
    int | None, typer.Option(help="Continue after losing workers while at least N remain; 0: end.")
]
Steps = Annotated[int, typer.Option(help="Steps of the whole schedule.")]
Epochs = Annotated[
    float | None,
    typer.Option(help="Instead of --steps: how often to read the whole text.", metavar="E"),
]
StopAfter = Annotated[
    int | None, typer.Option(help="Stop early after this step, the schedule unchanged.")
]
Batch = Annotated[int, typer.Option(help="Sequences per worker.")]
Seq = Annotated[int, typer.Option(help="Tokens per sequence.")]
Accumulate = Annotated[int, typer.Option(help="Microbatches per step.")]
Lr = Annotated[
    float | None, typer.Option(help="Peak learning rate; default: by the size of the model.")
]
LrSchedule = Annotated[
    config.LrSchedule,
    typer.Option(help="The learning rate after its warm-up; wsd: stay, fall in the last fifth."),
]
Warmup = Annotated[int, typer.Option(help="Steps of the warm-up, at most a tenth of all.")]
Betas = Annotated[str, typer.Option(help="Betas of AdamW.", metavar="B1,B2")]
Optimizer = Annotated[
    config.OptimizerName,
    typer.Option(help="What steps the matrices; AdamW steps everything else."),
]
MuonLr = Annotated[float | None, typer.Option(help="Peak learning rate of Muon; default: --lr.")]
MaxSkipped = Annotated[
    int, typer.Option(help="Steps in a row to skip if loss or gradients are not finite.")
]
Dtype = Annotated[config.Dtype, typer.Option(help="Dtype of forward and backward.")]
Layout = Annotated[config.LayoutName, typer.Option(help="How parameters lie in the shards.")]
Replicas = Annotated[int, typer.Option(help="Copies of the shards; workers of one copy share it.")]
Wire = Annotated[
    str | None,
    typer.Option(
        help="How parameters and gradients travel: bf16, int8, fp8, or int4 (gradients only).",
        metavar="gather=KIND,reduce=KIND",
    ),
]
Reshard = Annotated[bool, typer.Option(help="Free full parameters between forward and backward.")]
CheckpointActivations = Annotated[bool, typer.Option(help="Recompute blocks in backward.")]
Seed = Annotated[int, typer.Option(help="Of weights and data order.")]
SaveEvery = Annotated[int, typer.Option(help="Steps between checkpoints.")]
Keep = Annotated[
    int | None,
    typer.Option(help="Keep the newest N checkpoints, and the best; 0: all.", metavar="N"),
]
MemoryEvery = Annotated[
    int | None,
    typer.Option(
        help="Steps between checkpoints in memory, with a copy on another machine; 0: none."
    ),
]
EvalEvery = Annotated[int, typer.Option(help="Steps between evaluations.")]
Patience = Annotated[
    int | None,
    typer.Option(
        help="End after N evaluations without a lower held-out loss; 0: never.", metavar="N"
    ),
]
Sample = Annotated[
    str, typer.Option(help="Tokens of the sample at the end of the run.", metavar="off|N")
]
Hardware = Annotated[
    str | None,
    typer.Option(
        help="Plan the time of a step, too, for a preset or a file of fullshard doctor.",
        metavar="NAME|FILE",
    ),
]
Trace = Annotated[bool, typer.Option(help="Record what workers do, for fullshard trace.")]
