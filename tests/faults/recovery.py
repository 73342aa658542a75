"""Runs jobs that continue after ranks are killed, and checks their final weights."""

from __future__ import annotations

import random
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch

from tests.faults.jobs import Ranks
from tests.faults.rank import NUM_BLOCKS, ON_CPUS
from tests.faults.resilient_rank import Plan, Stroke, undisturbed, work
from tests.faults.rows import Fault, Phase, What
from tests.faults.strike import fault_s, notes_of

LIMIT_S = 90.0
"""Time limit of a job, on a loaded machine."""
_MOMENTS = [
    Phase.BUILD,
    Phase.DATA,
    Phase.GATHER,
    Phase.FORWARD,
    Phase.BACKWARD,
    Phase.OPTIMIZER,
    Phase.SAVE,
]


class Seen(NamedTuple):
    """The outcome of a job: the problem ("" if none), the diaries of all ranks, and its seconds."""

    wrong: str
    told: str
    seconds: float


def run(plan: Plan) -> Seen:
    """Run a job to its end, or kill it after the time limit; delete its files."""
    folder = Path(tempfile.mkdtemp(prefix="recovery-"))
    began_s = time.monotonic()
    members = Ranks(work, plan, folder)
    try:
        hang = _watched(plan, members, folder)
        return Seen(hang or _wrong(plan, folder), _told(plan, folder), time.monotonic() - began_s)
    finally:
        for member in range(plan.world):
            members.kill(member)
        shutil.rmtree(folder)


def _watched(plan: Plan, members: Ranks, folder: Path) -> str:
    """Wait for the members to end, and kill some as planned; return a complaint or ""."""
    deadline_s = time.monotonic() + LIMIT_S
    later = dict(plan.later)
    stopped = {one.member for one in plan.strokes if one.fault.what is What.STOP}
    while alive := members.alive():
        time.sleep(0.01)
        struck_s = fault_s(folder, plan.world) if later else None
        if struck_s is not None:
            for member in [
                m for m, delay_s in later.items() if time.monotonic() > struck_s + delay_s
            ]:
                del later[member]
                members.send(member, signal.SIGKILL)
        if stopped and not alive - stopped:
            for member in stopped:  # the others have continued without it
                members.send(member, signal.SIGCONT)
            stopped = set()
        if time.monotonic() > deadline_s:
            for member in alive:
                members.abort(member)
            return f"members {sorted(alive)} did not end in {LIMIT_S:g} s"
    return ""


def _wrong(plan: Plan, folder: Path) -> str:
    """Return the first problem in the weights and diaries of the members, or ""."""
    expected = undisturbed(plan.steps)
    lives = set()
    for member in range(plan.world):
        notes = notes_of(folder, member)
        ended = next((note for note in notes if note["what"] == "ended"), None)
        stops = any(s.member == member and s.fault.what is What.STOP for s in plan.strokes)
        if stops and any(note["what"] == "fault" for note in notes):  # if it was ever due
            if ended is None or "go on without this one" not in ended["text"]:
                return f"member {member}, which came back, ended by {ended}"
            continue
        if ended is None or ended["kind"]:
            if member in plan.killed:
                continue
            return f"member {member} ended by {ended}"
        weights = torch.load(folder / f"weights-{member}.pt")
        if not torch.allclose(weights, expected, rtol=1e-9, atol=1e-9):
            off = (weights - expected).abs().max()
            return f"member {member}: weights are off by {off:.1e}"
        lives.add(str(next(note["lost"] for note in notes if note["what"] == "restarts")))
    if len(lives) > 1:
        return f"members tell different restarts: {lives}"
    return ""


def _told(plan: Plan, folder: Path) -> str:
    lines = []
    for member in range(plan.world):
        for note in notes_of(folder, member):
            details = {k: v for k, v in note.items() if k not in ("what", "at_s")}
            lines.append(f"    {member} {note['at_s']:.2f} {note['what']}: {details}")
        with suppress(OSError):
            lines.append((folder / f"printed-{member}").read_text(errors="replace")[-3000:])
    return "\n".join(lines)


def drawn(seed: int, number: int) -> Plan:
    """Return a random plan that depends on the two numbers alone."""
    dice = random.Random(f"{seed} {number}")
    world = dice.choice([2, 3, 3, 4, 4])
    whats = [What.KILL, What.KILL, What.KILL, What.OS_EXIT, What.RAISE, What.STOP]
    victims = dice.sample(range(world), k=min(world - 1, dice.choice([1, 1, 2, 2, 3])))
    strokes, later = [], []
    for life, member in enumerate(victims):
        if life and dice.random() < 0.5:
            later.append((member, dice.uniform(0, 2)))
            continue
        phase = dice.choice(_MOMENTS if life else _MOMENTS[1:])
        what = dice.choice(whats)
        if what is What.RAISE and phase in (Phase.BUILD, Phase.SAVE):
            what = What.KILL
        fault = Fault(what, phase, block=dice.randrange(NUM_BLOCKS))
        step = 2 * dice.randint(1, 3) if phase is Phase.SAVE else dice.randint(1, 7)
        strokes.append(Stroke(member, life, step, fault))
    return Plan(
        world,
        tuple(strokes),
        tuple(later),
        dice.choice(ON_CPUS),
        dice.choice(["sync", "async"]),
        copies=dice.choice([None, None, 2, world]),
        hands_over=dice.choice([False, True]),
        replicas=dice.choice([1, 2]),
    )


def run_random(seed: int, numbers: Sequence[int], tell: Callable[[int, Plan, Seen], None]) -> int:
    """Run random jobs one after the other; return the number of failures."""
    wrong = 0
    for number in numbers:
        plan = drawn(seed, number)
        seen = run(plan)
        wrong += bool(seen.wrong)
        tell(number, plan, seen)
    return wrong
