"""The rows of the table of faults: the fault of one rank, and the expected reports."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field, replace


class What(enum.Enum):
    """The fault of one rank; the value is its text in the table."""

    NOTHING = "nothing"
    LEFT_OUT = "all ranks leave the step out"
    SKIP = "skips a block"
    DETACH = "skips the backward of a block"
    SWAP = "runs two blocks in the other order"
    EXTRA_STEP = "goes on when the others end"
    EARLY_END = "ends a step before the others"
    MORE_LAYERS = "has one more block"
    OTHER_WIDTH = "has a block of another width"
    OTHER_DTYPE = "has a model of another dtype"
    RAISE = "raises"
    LINGER = "raises, and takes 20 s to end"
    OUT_OF_MEMORY = "runs out of memory"
    CAUGHT = "raises, all ranks catch that and take the next batch"
    CAUGHT_ALONE = "raises, its rank catches that and goes on, in the optimizer"
    SYS_EXIT = "calls `sys.exit(3)`"
    OS_EXIT = "calls `os._exit(3)`"
    KILL = "is killed (SIGKILL)"
    STOP = "is stopped (SIGSTOP)"
    DISK_FULL = "finds the disk full"
    CLIP_ALONE = "clips the norm of the gradients, and the others do not"
    WHOLE_ALONE = "gathers the full state dict, and the others do not"
    SAVE_ALONE = "saves a checkpoint, and the others do not"
    NAN = "has a loss that is not a number"
    STALL = "takes 20 s in user code, then comes back"


class Phase(enum.Enum):
    """The moment of a fault in a step."""

    BUILD = "as the model is built"
    DATA = "in the data loader"
    GATHER = "as a gather has started"
    FORWARD = "in forward"
    BACKWARD = "in backward"
    OPTIMIZER = "in the optimizer"
    CLIP = "before the optimizer steps"
    SAVE = "in a save"
    END = "at the end"


class Who(enum.Enum):
    """A subset of the ranks of a job."""

    VICTIM = "the rank to which it happens"
    OTHERS = "all but that"
    ALL = "all"


class End(enum.Enum):
    """How the judged ranks must end."""

    RAISES = "by an exception"
    GOES_ON = "as if that step had been left out by all"
    IS_TOLD = "normally, but told what happened"


@dataclass(frozen=True)
class Expectation:
    """The messages and endings that are expected of the ranks of a job.

    Attributes:
        phases: the moments at which the fault may happen.
        cause: a regular expression that must match their messages.
        units: a regular expression for the unit, by phase; in other phases no unit must be named.
            ``{block}`` is the number of the fault's block.
        errors: the exception classes that they may raise.
        speak: the ranks whose exceptions and logs are judged.
        named: the ranks of which each judged rank must name at least one.
    """

    phases: tuple[Phase, ...]
    cause: str
    units: Mapping[Phase, str] = field(default_factory=dict)
    errors: tuple[str, ...] = ("PeerError", "LostRankError", "FailedRankError")
    speak: Who = Who.OTHERS
    named: Who = Who.VICTIM
    end: End = End.RAISES


_ANY_UNIT, _THIS_UNIT = r"blocks\.\d|\(?root\)?|\bsaves?\b", r"blocks\.{block}\b"
_EVERYWHERE = dict.fromkeys(Phase, _ANY_UNIT)
_THERE = dict.fromkeys(Phase, _THIS_UNIT)
_WHERE_IT_COMPUTES = {
    Phase.FORWARD: _THIS_UNIT,
    Phase.BACKWARD: _ANY_UNIT,
    Phase.GATHER: _ANY_UNIT,
}
_IN_STEPS = (Phase.DATA, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)
_ANYWHERE = (*_IN_STEPS, Phase.GATHER)
_ENDED = r"ended|exit|finished|died|is gone"
_ENDED_WELL = r"rank \d+ (?:exited|has destroyed its process group)"


def _different(phase: Phase, units: Mapping[Phase, str] = _THERE) -> Expectation:
    """Expect that all ranks report that they run different things."""
    return Expectation(
        (phase,),
        r"differ|other|another|instead|not the same|skip|order|never|without|wait for each other",
        units,
        errors=("ProtocolError", "PeerError"),
        speak=Who.ALL,
    )


def _raised(phases: tuple[Phase, ...], cause: str, end: End = End.RAISES) -> Expectation:
    return Expectation(phases, cause, _WHERE_IT_COMPUTES, end=end)


_INJECTED = r"RuntimeError.*an injected fault"

EXPECTED = {
    What.SKIP: _different(Phase.FORWARD),
    What.DETACH: _different(Phase.BACKWARD),
    What.SWAP: _different(Phase.FORWARD),
    What.EXTRA_STEP: Expectation(
        (Phase.END,), _ENDED_WELL, _EVERYWHERE, speak=Who.VICTIM, named=Who.OTHERS
    ),
    What.EARLY_END: Expectation((Phase.END,), _ENDED_WELL, _EVERYWHERE),
    What.CLIP_ALONE: _different(Phase.CLIP, {}),
    What.WHOLE_ALONE: _different(Phase.SAVE, {}),
    What.SAVE_ALONE: _different(Phase.SAVE, {}),
    What.MORE_LAYERS: _different(Phase.BUILD, {Phase.BUILD: r"blocks\.4\b"}),
    What.OTHER_WIDTH: _different(Phase.BUILD),
    What.OTHER_DTYPE: _different(Phase.BUILD, _EVERYWHERE),
    What.RAISE: _raised(_IN_STEPS, _INJECTED),
    What.LINGER: _raised((Phase.FORWARD,), _INJECTED),
    What.OUT_OF_MEMORY: _raised((Phase.FORWARD, Phase.BACKWARD), "OutOfMemoryError"),
    # Autograd reports no exception that ended a backward, unless the exception ends the program.
    What.CAUGHT: _raised(
        (Phase.FORWARD, Phase.BACKWARD), rf"{_INJECTED}|an exception, in the backward", End.GOES_ON
    ),
    # No hook sees the exception, so the next step of that rank reports it.
    What.CAUGHT_ALONE: Expectation(
        (Phase.OPTIMIZER,),
        "an exception, in the step of AdamW",
        errors=("TornStepError",),
        speak=Who.ALL,
    ),
    What.SYS_EXIT: Expectation(_IN_STEPS, _ENDED),
    What.OS_EXIT: Expectation(_ANYWHERE, _ENDED, _EVERYWHERE),
    What.KILL: Expectation(_ANYWHERE, f"{_ENDED}|SIGKILL|signal 9|killed", _EVERYWHERE),
    What.STOP: Expectation(
        _ANYWHERE, r"SIGSTOP|stopped|silent|no heartbeat|not answer|suspended", _EVERYWHERE
    ),
    What.DISK_FULL: Expectation(
        (Phase.SAVE,), "No space left on device", errors=("CheckpointError",), speak=Who.ALL
    ),
    What.NAN: Expectation(
        (Phase.FORWARD,), "(?i)not finite|non-finite|nan", errors=("NonFiniteError",), speak=Who.ALL
    ),
    What.STALL: Expectation(
        _IN_STEPS, r"user code|outside|waits|waiting|not reached|busy", end=End.IS_TOLD
    ),
}
ALONE_AT_THE_END = replace(EXPECTED[What.EXTRA_STEP], units={})
"""The expectation if one rank runs a collective alone, after the others have ended."""


def without_waits(expected: Expectation) -> Expectation:
    """Change an expectation for hosts that do not wait for collectives.

    A host may have ended the step in which another rank raises, so its weights cannot be used. No
    rank continues with groups that a fault has aborted. A rank that does not call fullshard again
    after the fault ends normally.
    """
    if expected.end is End.GOES_ON:
        return replace(expected, end=End.RAISES, errors=("ProtocolError", "TornStepError"))
    if Phase.END in expected.phases:
        return replace(expected, end=End.IS_TOLD)
    if expected.cause in (_INJECTED, "OutOfMemoryError"):
        return replace(expected, errors=(*expected.errors, "TornStepError"))
    return expected


@dataclass(frozen=True)
class Fault:
    """A fault of one rank, at the first opportunity in a step.

    Attributes:
        block: number of the block in which the fault happens, for faults inside a block.
        stall_s: seconds that a rank stalls, or takes to end.
    """

    what: What
    phase: Phase
    block: int = 1
    stall_s: float = 20.0

    @property
    def title(self) -> str:
        """The name of the fault's row in the table."""
        has_phases = len(EXPECTED[self.what].phases) > 1
        return f"{self.what.value}, {self.phase.value}" if has_phases else self.what.value


def rows() -> list[Fault]:
    """Return the rows of the table, in its order."""
    return [
        Fault(what, phase)
        for what, expected in EXPECTED.items()
        for phase in (expected.phases if what is not What.STALL else (Phase.DATA,))
    ]


ON_FLAT = frozenset(
    {
        Fault(What.SKIP, Phase.FORWARD),
        Fault(What.SWAP, Phase.FORWARD),
        Fault(What.RAISE, Phase.FORWARD),
        Fault(What.RAISE, Phase.BACKWARD),
        Fault(What.CAUGHT, Phase.FORWARD),
        Fault(What.CAUGHT, Phase.BACKWARD),
        Fault(What.KILL, Phase.BACKWARD),
        Fault(What.STOP, Phase.FORWARD),
        Fault(What.STALL, Phase.DATA),
    }
)
"""Rows that also run with ``FullyShardedDataParallel``."""
