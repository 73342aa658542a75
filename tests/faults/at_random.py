"""Jobs with a random fault, each drawn from a number; ``python -m tests.faults random``."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from fullshard import checkpoint
from fullshard.errors import FullshardError
from tests.faults.jobs import Result
from tests.faults.judge import Verdict
from tests.faults.rank import NUM_BLOCKS, ON_CPUS, Engine, Job, Model
from tests.faults.rows import EXPECTED, Fault, Phase, What
from tests.faults.strike import Strike
from tests.faults.table import seen

_STEPS = 5
_STALL_S = 4.0  # longer than the patience of the watch


def drawn(seed: int, number: int) -> Job:
    """Return the job with this number."""
    draw = random.Random(f"{seed} {number}")
    what = draw.choice([*EXPECTED])
    phase = draw.choice(EXPECTED[what].phases)
    last = NUM_BLOCKS - (2 if what is What.SWAP else 1)
    fault = Fault(what, phase, draw.randint(0, last), _STALL_S)
    world = draw.randint(2, 4)
    last_step = _STEPS - (phase is Phase.OPTIMIZER)  # after the last step no rank waits for another
    return Job(
        fault,
        draw.choice([Engine.UNITS, Engine.UNITS, Engine.FLAT]),
        draw.choice(ON_CPUS),
        world,
        victim=draw.randrange(world),
        at_step=1 if phase is Phase.BUILD else draw.randint(1, last_step),
        steps=_STEPS,
        # a save notices by itself that one rank has stepped and the others have not
        saves=what is not What.CAUGHT_ALONE and draw.random() < 0.5,
    )


def saved(job: Job) -> Callable[[Path], str]:
    """Return a function that verifies and loads the checkpoints which ``job`` must have written."""

    def look(folder: Path) -> str:
        if not job.saves:
            return ""
        complete = checkpoint.list_checkpoints(folder / "checkpoints")
        if len(complete) < job.at_step - 1:
            return f"{job.at_step - 1} checkpoints, of which {len(complete)} are there"
        for info in complete:
            model = Model(Strike()).double()
            try:
                checkpoint.verify(info.path)
                checkpoint.load(info.path, model, torch.optim.AdamW(model.parameters()))
            except FullshardError as error:
                return f"a checkpoint that loads ({error})"
        return ""

    return look


def run_random(
    seed: int, numbers: range, at_once: int, tell: Callable[[int, Result, Verdict], None]
) -> Counter[str]:
    """Run the jobs with these numbers; return the number of jobs by verdict."""
    found: Counter[str] = Counter()

    def one(number: int) -> tuple[int, Result, Verdict]:
        job = drawn(seed, number)
        return number, *seen(job, saved(job))

    with ThreadPoolExecutor(at_once) as threads:
        for number, result, verdict in threads.map(one, numbers):
            found[verdict.kind.value] += 1
            tell(number, result, verdict)
    return found
