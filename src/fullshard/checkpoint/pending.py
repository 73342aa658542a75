"""Saves that go on beside the training."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path

from torch.optim import Optimizer

from fullshard.checkpoint.writing import Writing
from fullshard.engine import Unit

log = logging.getLogger(__name__)


class PendingSave:
    """A save that was begun; at most one of a process goes on at any time.

    Until everything is copied, steps of the optimizer wait, and so do ``load_state_dict`` of the
    model and of the optimizer, and the end of ``unshard_params``.

    Attributes:
        path: the folder of the checkpoint.
    """

    def __init__(self, path: Path, writing: Writing, rest: Callable[[], None]) -> None:
        """Begin.

        Args:
            path: the folder of the checkpoint.
            writing: what is copied and written.
            rest: does everything that is left to do; raises what ``wait`` raises then.
        """
        self.path = path
        self._writing = writing
        self._rest = rest
        self._failure: BaseException | None = None
        self._undo: list[Callable[[], None]] = []
        self._thread: threading.Thread | None = None

    @property
    def is_done(self) -> bool:
        """Return whether the save has ended on this rank, well or not."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> None:
        """Wait for the end; all ranks should.

        Raises:
            FullshardError: the save failed; raised once, here or by the next call of ``save`` or
                ``load``, on all ranks alike.
        """
        self._writing.hurry()
        if self._thread is not None:
            self._thread.join()
        self._let_go()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def wait_until_copied(self) -> None:
        """Wait until the parameters and the optimizer's state may be written to by other means."""
        self._writing.wait_until_copied()

    def run_here(self) -> None:
        """Do what is left before this returns.

        Raises:
            FullshardError: the save failed.
        """
        self._rest()

    def run_aside(self, units: list[Unit], optimizer: Optimizer | None) -> None:
        """Begin to do what is left in a thread; return when what others may change is copied.

        Args:
            units: those of the model.
            optimizer: its steps wait until everything is copied.
        """
        global _in_flight
        for unit in units:
            unit.readers.append(self.wait_until_copied)
            self._undo.append(lambda unit=unit: unit.readers.remove(self.wait_until_copied))  # type: ignore[misc]
        if optimizer is not None:
            for register in (
                optimizer.register_step_pre_hook,
                optimizer.register_load_state_dict_pre_hook,
            ):
                handle = register(lambda *_: self.wait_until_copied())
                self._undo.append(handle.remove)
        # Not a daemon: a program that ends waits for it.
        self._thread = threading.Thread(target=self._run, name="fullshard save", daemon=False)
        self._thread.start()
        _in_flight = self
        self._writing.wait_for_others()

    def _run(self) -> None:
        try:
            self._rest()
        except BaseException as error:
            log.warning("%s", error)  # nobody may ever call wait()
            self._failure = error

    def _let_go(self) -> None:
        for undo in self._undo:
            undo()
        self._undo = []


_in_flight: PendingSave | None = None


def settle() -> None:
    """Wait for the save that goes on, if there is one.

    Raises:
        FullshardError: that save failed.
    """
    global _in_flight
    pending, _in_flight = _in_flight, None
    if pending is not None:
        pending.wait()
