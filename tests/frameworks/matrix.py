"""Runs each framework's programs on PyTorch's FSDP and on fullshard, and writes a table.

The programs are in ``programs``; they know nothing of fullshard and are never edited for it.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
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
"""Largest difference between the losses and weights of the two engines."""

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
FROM_A_LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class Entry(NamedTuple):
    """A program of a framework, and the row of the table that it fills."""

    framework: str
    """The package whose version is in the table."""
    what: str
    face: str
    program: str
    arguments: tuple[str, ...]
    needs: tuple[str, ...] = ()
    """Other packages that the program imports."""
    everywhere: bool = False
    """True if the program is part of the normal suite, where its packages are installed."""
    by_torchrun: bool = True
    ranks: int = 2
    since: tuple[int, int] | None = None
    """The oldest PyTorch whose own FSDP runs it, if newer than the pinned PyTorch."""

    @property
    def missing(self) -> list[str]:
        """Packages that are not installed, or too old."""
        names = (self.framework.replace("-", "_"), *self.needs)
        return [name for name in names if find_spec(name) is None] + self.too_old

    @property
    def too_old(self) -> list[str]:
        return [f"PyTorch {self.since}"] if self.since and self.since > TORCH else []


def entries() -> list[Entry]:
    """Return all entries, in the order of the table."""
    two, one = "FSDP2", "FSDP1"
    full, sharded = "FULL_STATE_DICT", "SHARDED_STATE_DICT"
    both, typed = ("transformers", "accelerate"), ("spmd_types",)

    def of(framework: str, program: str, *needs: str, **also: Any) -> Callable[..., Entry]:
        def entry(what: str, face: str, *arguments: str, **more: Any) -> Entry:
            return Entry(framework, what, face, program, arguments, needs, **also | more)

        return entry

    accelerate = of("accelerate", "accelerate_alone.py")
    saves = "`Accelerator`, `save_state` and `load_state`"
    transformers = of("transformers", "transformers_trainer.py", *both)
    trains, flat = "`Trainer`, resumed", "`use_orig_params=False`"
    distributed = of("transformers", "transformers_distributed.py")
    fabric = of("lightning-fabric", "fabric.py")
    lightning = of("lightning", "lightning_trainer.py")
    parallel, fsdp = "`ModelParallelStrategy`", "`FSDPStrategy`"
    trl, sft = of("trl", "trl_sft.py", *both), "`SFTTrainer`, resumed"
    peft = of("peft", "peft_trainer.py", *both)
    lora = "LoRA in the `Trainer` of transformers, resumed"
    peft_alone = of("peft", "peft_alone.py", *both)
    merged = "`get_peft_model`, `set_peft_model_state_dict`, `merge_and_unload`"
    torchtune = of("torchtune", "torchtune_full.py", "torchao")
    torchtitan = of("torchtitan", "torchtitan_trainer.py", *typed)
    # torchtitan's default backend, which needs PyTorch 2.14
    since = of("torchtitan", "torchtitan_trainer.py", *typed, since=(2, 14))
    titan = "`Trainer`, Llama debug model, resumed by DCP"
    titans, selective = f"{titan}, `spmd_types`", "bf16, selective activation checkpoints"
    verl = of("verl", "verl_fsdp2.py", "transformers", "ray", "tensordict")
    offloads = "`apply_fsdp2`, `fsdp2_load_full_state_dict`, offloaded between steps"
    automodel = of("nemo-automodel", "automodel_fsdp2.py", "transformers")
    ray = of("ray", "ray_train.py", by_torchrun=False)
    prepares = 'Ray Train, `prepare_model(parallel_strategy="fsdp")`'
    return [
        accelerate(f"{saves}, sharded", two, "2", sharded, everywhere=True),
        accelerate(f"{saves}, full", two, "2", full),
        accelerate(f"{saves}, sharded", one, "1", sharded, "orig", everywhere=True),
        accelerate(f"{saves}, full", one, "1", full, "orig"),
        accelerate(f"{saves}, sharded, {flat}", one, "1", sharded),
        transformers(f"{trains}, full", two, "2", full, everywhere=True),
        transformers(f"{trains}, sharded", two, "2", sharded),
        transformers(f"{trains}, full", one, "1", full),
        transformers(f"{trains}, sharded", one, "1", sharded),
        transformers(f"{trains}, sharded, {flat}", one, "1", sharded, "flat"),
        distributed("`DistributedConfig(fsdp_size=2)`, saved and loaded", two, everywhere=True),
        fabric(f"{parallel}, sharded", two, "2", "sharded", everywhere=True),
        fabric(f"{parallel}, full", two, "2", "full"),
        fabric(fsdp, one, "1", "sharded"),
        lightning(f"`Trainer`, {parallel}, sharded", two, "2", "sharded"),
        lightning(f"`Trainer`, {parallel}, full", two, "2", "full"),
        lightning(f"`Trainer`, {fsdp}", one, "1", "sharded"),
        trl(f"{sft}, full", two, "2", full),
        trl(f"{sft}, sharded", two, "2", sharded),
        trl(f"{sft}, sharded", one, "1", sharded),
        peft(f"{lora}, full", two, "2", full),
        peft(f"{lora}, sharded", two, "2", sharded),
        peft(f"{lora}, sharded", one, "1", sharded),
        peft(f"{lora}, {flat}", one, "1", sharded, "flat"),
        peft_alone(merged, two, "2", everywhere=True),
        peft_alone("`get_peft_model`, saved and loaded", one, "1"),
        torchtune("`shard_model`, full state dicts gathered and loaded", two),
        torchtitan(f"{titan}, fp32", two, "fp32"),
        torchtitan(f"{titan}, {selective}", two, "bf16"),
        torchtitan(f"{titan}, two microbatches a step", two, "accumulates"),
        since(f"{titans}, fp32", two, *typed, "fp32"),
        since(f"{titans}, {selective}", two, *typed, "bf16"),
        since(f"{titans}, fp32, types checked", two, *typed, "fp32", "checked"),
        since(f"{titans}, fp32, HSDP on 4 processes", two, *typed, "fp32", "hsdp", ranks=4),
        since(f"{titans}, fp32, tensor parallelism on 4 processes", two, *typed, "fp32", "tp",
              ranks=4),
        verl(offloads, two),
        automodel("`FSDP2Manager`, deferred gradient sync", two),
        ray("Ray Train, `fully_shard`", two, "2"),
        ray(prepares, one, "1"),
    ]  # fmt: skip


class Run(NamedTuple):
    """The facts and weights that a program wrote, or the error that ended it."""

    facts: dict[str, Any]
    weights: dict[str, torch.Tensor]
    error: str


class Result(NamedTuple):
    """The runs of an entry on both engines, and the run that fullshard is compared with."""

    theirs: Run
    ours: Run
    reference: Run
    """``theirs``; if it failed, a run without FSDP, which the framework does by DDP."""

    @property
    def is_equal(self) -> bool:
        """True if losses and weights equal those of the reference."""
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
        """True if the losses after loading equal those of the uninterrupted training."""
        again = self.ours.facts["again"]
        return distance(self.ours.facts["losses"][-len(again) :], again) <= TOLERANCE


def distance(one: Sequence[float], other: Sequence[float]) -> float:
    if len(one) != len(other):
        return float("inf")
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


def start(entry: Entry, folder: Path, how: str) -> subprocess.Popen[bytes]:
    """Start a program on an engine: ``fullshard``, ``torch``, or ``plain`` (nothing patched)."""
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
    """Wait for a program, and return the facts that it wrote, or its error."""
    try:
        process.wait(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.terminate()  # the launcher ends its workers as well
        process.wait(timeout=TIMEOUT_S)
    if not (folder / "told.json").exists():
        return Run({}, {}, error_in((folder / "stderr").read_text()))
    facts = json.loads((folder / "told.json").read_text())
    return Run(facts, torch.load(folder / "weights.pt"), "")


def error_in(printed: str) -> str:
    """Return the error of the rank that failed first."""
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
    """Run a program on both engines at once; also on DDP if PyTorch's own FSDP alone fails."""
    ours, theirs = folder / "fullshard", folder / "torch"
    started = [start(entry, where, where.name) for where in (ours, theirs)]
    done = [end(process, where) for process, where in zip(started, (ours, theirs), strict=True)]
    reference = done[1]
    if reference.error and not done[0].error:
        plain = folder / "plain"
        reference = end(start(entry, plain, "plain"), plain)
    return Result(done[1], done[0], reference)


# The table.

HEAD = (
    "| framework | version | program | face | PyTorch's own | fullshard | after loading |\n"
    "|---|---|---|---|---|---|---|\n"
)


def static(entry: Entry) -> str:
    """Return the cells of a row that need no run, except the version."""
    return f"{entry.what} | {entry.face}"


def row(entry: Entry, folder: Path) -> str:
    """Run an entry, and return its row of the table."""
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
    """Return the page before the table, the table, and the page after it."""
    before, rest = PAGE.read_text().split(begin)
    inside, after = rest.split(end)
    return before, inside, after


def main(names: Sequence[str]) -> None:
    """Run the programs whose row contains one of ``names``, or all; write their rows."""
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
    """Return the cells that identify a row."""
    framework, _, what, face, *_ = line.removeprefix("| ").split(" | ")
    return framework, f"{what} | {face}"
