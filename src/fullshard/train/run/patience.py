"""The end of a run whose held-out loss no longer improves."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fullshard.train.config import TrainConfig


@dataclass(frozen=True, slots=True)
class HeldOut:
    """The evaluations of a run up to some step, as its checkpoints hold them.

    Attributes:
        step: step of the evaluation with the lowest loss; 0 before the first finite loss.
        bits_per_byte: lowest held-out loss; None before the first finite loss.
        num_worse: number of evaluations since then.
    """

    step: int = 0
    bits_per_byte: float | None = None
    num_worse: int = 0

    def after(self, step: int, bits_per_byte: float) -> HeldOut:
        """Return the state after another evaluation; a loss that is not finite is no better."""
        lowest = float("inf") if self.bits_per_byte is None else self.bits_per_byte
        if bits_per_byte < lowest:
            return HeldOut(step, bits_per_byte)
        return replace(self, num_worse=self.num_worse + 1)

    def why_over(self, config: TrainConfig) -> str | None:
        """Return the reason why the run ends here, for a message; None if the run continues."""
        if config.patience is None or self.num_worse < config.patience:
            return None
        lowest = "was never finite"
        if self.bits_per_byte is not None:
            lowest = f"was lowest at step {self.step} ({self.bits_per_byte:.4f} bits per byte)"
        since = "evaluation" if self.num_worse == 1 else f"{self.num_worse} evaluations"
        return f"--patience {config.patience}: held-out loss {lowest}, not in the last {since}"
