"""Each framework's programs, run on PyTorch's own FSDP and on ours, and the table of results.

The programs lie in ``programs``; they know nothing of fullshard and are never edited for it.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tests.versions import TORCH

ROOT = Path(__file__).parents[2]
PROGRAMS = Path(__file__).parent / "programs"
PAGE = ROOT / "docs" / "frameworks.md"
BEGIN, END = "<!-- frameworks -->\n", "<!-- end of frameworks -->\n"
TIMEOUT_S = 300.0
TOLERANCE = 2e-6
"""Between the losses and weights of two engines, which add up the same numbers."""

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
FROM_A_LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class Entry(NamedTuple):
    """A program of a framework, and what it shows."""

    framework: str
    """The package whose version counts."""
    what: str
    face: str
    program: str
    arguments: tuple[str, ...]
    needs: tuple[str, ...] = ()
    """Other packages, as imported."""
    everywhere: bool = False
    """Runs in the normal suite, if it can."""
    by_torchrun: bool = True
    ranks: int = 2
    since: tuple[int, int] | None = None
    """The oldest PyTorch whose own FSDP runs it, if the row is not of the pinned PyTorch."""

    @property
    def missing(self) -> list[str]:
        """The packages that are not installed, or too old."""
        names = (self.framework.replace("-", "_"), *self.needs)
        return [name for name in names if find_spec(name) is None] + self.too_old

    @property
    def too_old(self) -> list[str]:
        return [f"PyTorch {self.since}"] if self.since and self.since > TORCH else []


def entries() -> list[Entry]:
    """All of them, in the order of the table."""
    full, sharded = "FULL_STATE_DICT", "SHARDED_STATE_DICT"
    transformers, trl, alone = "transformers_trainer.py", "trl_sft.py", "accelerate_alone.py"
    saves = "`Accelerator`, `save_state` and `load_state`"
    flat = "`use_orig_params=False`"
    trains, sft = "`Trainer`, resumed", "`SFTTrainer`, resumed"
    lora = "LoRA in the `Trainer` of transformers, resumed"
    lightning, fabric = "lightning_trainer.py", "fabric.py"
    two, one = "`ModelParallelStrategy`", "`FSDPStrategy`"
    titan, titans = "`Trainer`, Llama debug model, resumed by DCP", "torchtitan_trainer.py"
    both = ("transformers", "accelerate")

    def typed(what: str, *arguments: str, ranks: int = 2) -> Entry:
        """torchtitan's default, which PyTorch's own FSDP runs since 2.14."""
        what, given = f"{titan}, `spmd_types`, {what}", ("spmd_types", *arguments)
        return Entry(
            "torchtitan", what, "FSDP2", titans, given, ("spmd_types",), ranks=ranks, since=(2, 14)
        )

    return [
        Entry("accelerate", f"{saves}, sharded", "FSDP2", alone, ("2", sharded), (), True),
        Entry("accelerate", f"{saves}, full", "FSDP2", alone, ("2", full)),
        Entry("accelerate", f"{saves}, sharded", "FSDP1", alone, ("1", sharded, "orig"), (), True),
        Entry("accelerate", f"{saves}, full", "FSDP1", alone, ("1", full, "orig")),
        Entry("accelerate", f"{saves}, sharded, {flat}", "FSDP1", alone, ("1", sharded)),
        Entry("transformers", f"{trains}, full", "FSDP2", transformers, ("2", full), both, True),
        Entry("transformers", f"{trains}, sharded", "FSDP2", transformers, ("2", sharded), both),
        Entry("transformers", f"{trains}, full", "FSDP1", transformers, ("1", full), both),
        Entry("transformers", f"{trains}, sharded", "FSDP1", transformers, ("1", sharded), both),
        Entry(
            "transformers",
            f"{trains}, sharded, {flat}",
            "FSDP1",
            transformers,
            ("1", sharded, "flat"),
            both,
        ),
        Entry(
            "transformers",
            "`DistributedConfig(fsdp_size=2)`, saved and loaded",
            "FSDP2",
            "transformers_distributed.py",
            (),
            (),
            True,
        ),
        Entry("lightning-fabric", f"{two}, sharded", "FSDP2", fabric, ("2", "sharded"), (), True),
        Entry("lightning-fabric", f"{two}, full", "FSDP2", fabric, ("2", "full")),
        Entry("lightning-fabric", one, "FSDP1", fabric, ("1", "sharded")),
        Entry("lightning", f"`Trainer`, {two}, sharded", "FSDP2", lightning, ("2", "sharded")),
        Entry("lightning", f"`Trainer`, {two}, full", "FSDP2", lightning, ("2", "full")),
        Entry("lightning", f"`Trainer`, {one}", "FSDP1", lightning, ("1", "sharded")),
        Entry("trl", f"{sft}, full", "FSDP2", trl, ("2", full), both),
        Entry("trl", f"{sft}, sharded", "FSDP2", trl, ("2", sharded), both),
        Entry("trl", f"{sft}, sharded", "FSDP1", trl, ("1", sharded), both),
        Entry("peft", f"{lora}, full", "FSDP2", "peft_trainer.py", ("2", full), both),
        Entry("peft", f"{lora}, sharded", "FSDP2", "peft_trainer.py", ("2", sharded), both),
        Entry("peft", f"{lora}, sharded", "FSDP1", "peft_trainer.py", ("1", sharded), both),
        Entry("peft", f"{lora}, {flat}", "FSDP1", "peft_trainer.py", ("1", sharded, "flat"), both),
        Entry(
            "peft",
            "`get_peft_model`, `set_peft_model_state_dict`, `merge_and_unload`",
            "FSDP2",
            "peft_alone.py",
            ("2",),
            both,
            True,
        ),
        Entry("peft", "`get_peft_model`, saved and loaded", "FSDP1", "peft_alone.py", ("1",), both),
        Entry(
            "torchtune",
            "`shard_model`, full state dicts gathered and loaded",
            "FSDP2",
            "torchtune_full.py",
            (),
            ("torchao",),
        ),
        Entry("torchtitan", f"{titan}, fp32", "FSDP2", titans, ("fp32",), ("spmd_types",)),
        Entry(
            "torchtitan",
            f"{titan}, bf16, selective activation checkpoints",
            "FSDP2",
            titans,
            ("bf16",),
            ("spmd_types",),
        ),
        Entry(
            "torchtitan",
            f"{titan}, two microbatches a step",
            "FSDP2",
            titans,
            ("accumulates",),
            ("spmd_types",),
        ),
        typed("fp32", "fp32"),
        typed("bf16, selective activation checkpoints", "bf16"),
        typed("fp32, types checked", "fp32", "checked"),
        typed("fp32, HSDP on 4 processes", "fp32", "hsdp", ranks=4),
        typed("fp32, tensor parallelism on 4 processes", "fp32", "tp", ranks=4),
        Entry(
            "verl",
            "`apply_fsdp2`, `fsdp2_load_full_state_dict`, offloaded between steps",
            "FSDP2",
            "verl_fsdp2.py",
            (),
            ("transformers", "ray", "tensordict"),
        ),
        Entry(
            "nemo-automodel",
            "`FSDP2Manager`, deferred gradient sync",
            "FSDP2",
            "automodel_fsdp2.py",
            (),
            ("transformers",),
        ),
        Entry("ray", "Ray Train, `fully_shard`", "FSDP2", "ray_train.py", ("2",), (), False, False),
        Entry(
            "ray",
            'Ray Train, `prepare_model(parallel_strategy="fsdp")`',
            "FSDP1",
            "ray_train.py",
            ("1",),
            (),
            False,
            False,
        ),
    ]


class Run(NamedTuple):
    """What one run of a program told, or the error that ended it."""

    facts: dict[str, Any]
    weights: dict[str, torch.Tensor]
    error: str


class Result(NamedTuple):
    """The two runs of an entry."""

    theirs: Run
    ours: Run
    reference: Run
    """``theirs``, or where that fails what the framework does without FSDP: DDP."""

    @property
    def is_equal(self) -> bool:
        """Whether losses and weights are those of the reference."""
        one, other = self.ours, self.reference
        if one.facts.get("engines") != ["fullshard"]:
            return False
        if one.error or other.error or one.weights.keys() != other.weights.keys():
            return False
        apart = [
            (value.double() - other.weights[name].double()).abs().max().item()
            for name, value in one.weights.items()
            if value.numel()
        ]
        apart.append(distance(one.facts["losses"], other.facts["losses"]))
        apart.append(distance(one.facts["again"], other.facts["again"]))
        return max(apart) <= TOLERANCE

    @property
    def goes_on(self) -> bool:
        """Whether training went on from what was loaded as if nothing had been in between."""
        again = self.ours.facts["again"]
        return distance(self.ours.facts["losses"][-len(again) :], again) <= TOLERANCE


def distance(one: Sequence[float], other: Sequence[float]) -> float:
    if len(one) != len(other):
        return float("inf")
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


def start(entry: Entry, folder: Path, how: str) -> subprocess.Popen[bytes]:
    """Start a program on an engine: ``fullshard``, ``torch``, or ``plain`` (nobody interferes)."""
    runner = {
        "fullshard": ("-m", "fullshard.compat"),
        "torch": ("-m", "tests.frameworks.on_torch"),
        "plain": (),
    }[how]
    command = [sys.executable, str(PROGRAMS / entry.program), *entry.arguments, how]
    if entry.by_torchrun:
        command[1:1] = [*TORCHRUN, str(entry.ranks), *runner]
    environment = {k: v for k, v in os.environ.items() if k not in FROM_A_LAUNCHER}
    paths = (str(ROOT / "src"), str(ROOT), environment.get("PYTHONPATH", ""))
    environment |= {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    folder.mkdir()
    with (folder / "stderr").open("w") as errors:
        return subprocess.Popen(
            command, cwd=folder, env=environment, stdout=subprocess.DEVNULL, stderr=errors
        )


def end(process: subprocess.Popen[bytes], folder: Path) -> Run:
    """Wait for a program."""
    try:
        process.wait(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.terminate()  # the launcher takes its workers with it
        process.wait(timeout=TIMEOUT_S)
    if not (folder / "told.json").exists():
        return Run({}, {}, error_in((folder / "stderr").read_text()))
    facts = json.loads((folder / "told.json").read_text())
    return Run(facts, torch.load(folder / "weights.pt"), "")


def error_in(printed: str) -> str:
    """The error that ended a program, of the rank that failed first."""
    printed = re.sub(r"\x1b\[[\d;]*m|\[repeated.*\]", "", printed)
    signal = re.search(r"exitcode  : (-\d+) \(pid: \d+\)\s+\((SIG(?!TERM)\w+)\)", printed)
    raised = re.findall(r"^.*?\b(\w*(?:Error|Exception)): (.+)$", printed, re.MULTILINE)
    own = [one for one in raised if one[0] != "ChildFailedError" and "gloo" not in one[1]]
    if own:
        text = f"{own[-1][0]}: {own[-1][1]}"
    else:
        text = signal[2] if signal else "no end" if not raised else f"{raised[0][0]}"
    text = text.strip()
    return text if len(text) < 160 else text[:157] + "..."


def run(entry: Entry, folder: Path) -> Result:
    """Run a program on both engines at once; on DDP as well if only PyTorch's own cannot run it."""
    ours, theirs = folder / "fullshard", folder / "torch"
    started = [start(entry, where, where.name) for where in (ours, theirs)]
    done = [end(process, where) for process, where in zip(started, (ours, theirs), strict=True)]
    reference = done[1]
    if reference.error and not done[0].error:
        plain = folder / "plain"
        reference = end(start(entry, plain, "plain"), plain)
    return Result(done[1], done[0], reference)


# the table

HEAD = (
    "| framework | version | program | face | PyTorch's own | fullshard | after loading |\n"
    "|---|---|---|---|---|---|---|\n"
)


def static(entry: Entry) -> str:
    """The part of a row that is known without a run, but for the version."""
    return f"{entry.what} | {entry.face}"


def row(entry: Entry, folder: Path) -> str:
    """A row of the table, from a run."""
    version = "" if entry.missing else metadata.version(entry.framework)
    if entry.since:
        version += f", PyTorch {torch.__version__.partition('+')[0]}"
    first = f"| {entry.framework} | {version} | {static(entry)}"
    if entry.missing:
        return f"{first} | not installed: {', '.join(entry.missing)} | not run | |\n"
    result = run(entry, folder)
    theirs = cell(result.theirs.error) or "runs"
    if result.ours.error:
        same = result.ours.error == result.theirs.error
        return f"{first} | {theirs} | {'the same' if same else cell(result.ours.error)} | |\n"
    against = "PyTorch's own" if not result.theirs.error else "DDP"
    if result.reference.error:
        return f"{first} | {theirs} | runs, nothing to compare with | |\n"
    equal = f"{'equals' if result.is_equal else 'DIFFERS FROM'} {against}"
    goes_on = "goes on" if result.goes_on else "another state"
    if not result.goes_on and result.is_equal:
        goes_on += f", with {against} too"
    return f"{first} | {theirs} | {equal} | {goes_on} |\n"


def cell(text: str) -> str:
    return text.replace("|", "\\|")


def parts(begin: str = BEGIN, end: str = END) -> tuple[str, str, str]:
    """The page before the table, the table, and the page after it."""
    before, rest = PAGE.read_text().split(begin)
    inside, after = rest.split(end)
    return before, inside, after


def main(names: Sequence[str]) -> None:
    """Run all programs, or those whose row has one of ``names`` in it, and write their rows."""
    old = {key(line): line for line in parts()[1].splitlines(keepends=True)[2:]}
    rows = []
    for number, entry in enumerate(entries()):
        kept = old.get((entry.framework, static(entry)))
        is_chosen = not names or any(name in (kept or "") for name in names)
        if kept is None or (is_chosen and not entry.too_old):
            with tempfile.TemporaryDirectory() as folder:
                kept = row(entry, Path(folder))
        print(number, kept, end="", flush=True)
        rows.append(kept)
    before, _, after = parts()
    PAGE.write_text(f"{before}{BEGIN}{HEAD}{''.join(rows)}{END}{after}")


def key(line: str) -> tuple[str, str]:
    """What tells rows apart."""
    framework, _, what, face, *_ = line.removeprefix("| ").split(" | ")
    return framework, f"{what} | {face}"
