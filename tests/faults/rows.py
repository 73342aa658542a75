"""The rows of the table of faults: what goes wrong on one rank, and what the others have to say."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class What(enum.Enum):
    """What one rank does that the others do not; the value is told in the table."""

    NOTHING = "nothing"
    LEFT_OUT = "all ranks leave the step out"
    SKIP = "skips a block in forward"
    DETACH = "skips the backward of a block"
    SWAP = "runs two blocks in the other order"
    EXTRA_STEP = "goes on when the others end"
    EARLY_END = "ends a step before the others"
    MORE_LAYERS = "has one more block"
    OTHER_WIDTH = "has a block of another width"
    OTHER_DTYPE = "has a model of another dtype"
    RAISE = "raises"
    OUT_OF_MEMORY = "runs out of memory"
    CAUGHT = "raises, all ranks catch and take the next batch"
    SYS_EXIT = "calls `sys.exit(3)`"
    OS_EXIT = "calls `os._exit(3)`"
    KILL = "is killed (SIGKILL)"
    STOP = "is stopped (SIGSTOP)"
    DISK_FULL = "finds the disk full"
    NAN = "has a loss that is not a number"
    STALL = "takes 20 s in user code and comes back"


class Phase(enum.Enum):
    """Where in a step it happens."""

    BUILD = "as the model is built"
    DATA = "in the data loader"
    GATHER = "as a gather has started"
    FORWARD = "in forward"
    BACKWARD = "in backward"
    OPTIMIZER = "in the optimizer"
    SAVE = "in a save"
    END = "at the end"


@dataclass(frozen=True)
class Fault:
    """Something that happens on one rank, at the first chance in a step.

    Attributes:
        block: of which block, where that means something.
        stall_s: how long a rank stalls.
    """

    what: What
    phase: Phase
    block: int = 1
    stall_s: float = 20.0


class Who(enum.Enum):
    """Some of the ranks of a job."""

    VICTIM = "the rank to which it happens"
    OTHERS = "all but that"
    ALL = "all"


class End(enum.Enum):
    """How the ranks that have to speak have to end."""

    RAISES = "by an exception"
    GOES_ON = "as if that step had been left out by all"
    IS_TOLD = "normally, but told what happened"


ANY_UNIT = r"blocks\.\d|\(?root\)?"
THIS_UNIT = r"blocks\.{block}\b"
PROTOCOL, PEER = ("ProtocolError",), ("PeerError", "LostRankError", "FailedRankError")


@dataclass(frozen=True)
class Row:
    """A fault and what is expected of it.

    Attributes:
        speak: the ranks whose exceptions and logs are judged.
        named: the ranks of which each of them has to name one.
        unit, cause: regular expressions that have to be found in what they say; ``{block}`` is the
            block of the fault. Empty: nothing is expected.
        errors: the classes that they may raise; of fullshard, empty: any.
        faces: the faces of fullshard that the row is run with, beside PyTorch's FSDP2.
    """

    fault: Fault
    unit: str = ""
    cause: str = ""
    errors: tuple[str, ...] = PEER
    speak: Who = Who.OTHERS
    named: Who = Who.VICTIM
    end: End = End.RAISES
    is_for_flat: bool = False

    @property
    def title(self) -> str:
        """The row's name in the table."""
        what, phase = self.fault.what, self.fault.phase
        return what.value if phase in (Phase.BUILD, Phase.END) else f"{what.value}, {phase.value}"

    def pattern(self, text: str) -> str:
        return text.replace("{block}", str(self.fault.block))


def different(
    what: What, phase: Phase, unit: str, cause: str, *, block: int = 1, is_for_flat: bool = False
) -> Row:
    """A row in which ranks run different things, of which all of them learn."""
    return Row(
        Fault(what, phase, block),
        unit,
        cause,
        errors=(*PROTOCOL, *PEER),
        speak=Who.ALL,
        is_for_flat=is_for_flat,
    )


def rows() -> list[Row]:
    """All of them, in the order of the table."""
    w, p = What, Phase
    differs = r"differ|other|another|instead|not the same|skip|order|never|without"
    ended = r"ended|exited|finished|is gone|closed"
    raised = r"RuntimeError.*(an injected fault)"
    killed = r"SIGKILL|signal 9|killed|died|ended|is gone"
    stopped = r"SIGSTOP|stopped|silent|no sign of life|does not answer|suspended"
    return [
        different(w.SKIP, p.FORWARD, THIS_UNIT, differs, is_for_flat=True),
        different(w.DETACH, p.BACKWARD, THIS_UNIT, differs),
        different(w.SWAP, p.FORWARD, THIS_UNIT, differs, is_for_flat=True),
        Row(
            Fault(w.EXTRA_STEP, p.END),
            ANY_UNIT,
            ended,
            speak=Who.VICTIM,
            named=Who.OTHERS,
        ),
        Row(Fault(w.EARLY_END, p.END), ANY_UNIT, ended),
        different(w.MORE_LAYERS, p.BUILD, r"blocks\.4\b", differs, block=4),
        different(w.OTHER_WIDTH, p.BUILD, THIS_UNIT, differs),
        different(w.OTHER_DTYPE, p.BUILD, ANY_UNIT, differs),
        Row(Fault(w.RAISE, p.FORWARD), THIS_UNIT, raised, is_for_flat=True),
        Row(Fault(w.RAISE, p.BACKWARD), ANY_UNIT, raised, is_for_flat=True),
        Row(Fault(w.RAISE, p.OPTIMIZER), "", raised),
        Row(Fault(w.RAISE, p.DATA), "", raised),
        Row(Fault(w.OUT_OF_MEMORY, p.FORWARD), THIS_UNIT, "OutOfMemoryError"),
        Row(Fault(w.CAUGHT, p.FORWARD), THIS_UNIT, raised, end=End.GOES_ON, is_for_flat=True),
        Row(Fault(w.CAUGHT, p.BACKWARD), ANY_UNIT, raised, end=End.GOES_ON, is_for_flat=True),
        Row(Fault(w.SYS_EXIT, p.DATA), "", r"exit|ended|is gone"),
        Row(Fault(w.OS_EXIT, p.FORWARD), ANY_UNIT, r"exit|ended|died|is gone"),
        *(
            Row(Fault(w.KILL, phase), ANY_UNIT, killed, is_for_flat=phase is p.BACKWARD)
            for phase in (p.DATA, p.GATHER, p.FORWARD, p.BACKWARD, p.OPTIMIZER)
        ),
        *(
            Row(Fault(w.STOP, phase), ANY_UNIT, stopped, is_for_flat=phase is p.FORWARD)
            for phase in (p.DATA, p.GATHER, p.FORWARD, p.BACKWARD, p.OPTIMIZER)
        ),
        Row(
            Fault(w.DISK_FULL, p.SAVE),
            "",
            "No space left on device",
            errors=("CheckpointError",),
            speak=Who.ALL,
        ),
        Row(
            Fault(w.NAN, p.FORWARD),
            "",
            "(?i)not finite|non-finite|nan",
            errors=("NonFiniteError",),
            speak=Who.ALL,
        ),
        Row(
            Fault(w.STALL, p.DATA),
            "",
            r"user code|outside|data|waits|waiting|not come",
            end=End.IS_TOLD,
            is_for_flat=True,
        ),
    ]
