"""Saves in the background."""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # noqa: F401 - it registers the end of executors
import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from torch import nn
from torch.optim import Optimizer

from fullshard.checkpoint.format import Place
from fullshard.checkpoint.saving.write import Writing
from fullshard.engine import Unit
from fullshard.errors import UnsupportedError

log = logging.getLogger(__name__)


class _Wait:
    """A hook that waits for copies; copied or pickled along with a model, it waits for nothing."""

    def __init__(self, writing: Writing | None = None) -> None:
        self._writing = writing

    def __call__(self, *_: object) -> None:
        if self._writing is not None:
            self._writing.wait_until_copied()

    def __reduce__(self) -> tuple[type[_Wait], tuple[()]]:
        return _Wait, ()


class PendingSave:
    """A save that was begun; at most one of a process goes on at any time.

    Until everything is copied, steps of the optimizer wait, and so do ``load_state_dict`` of the
    model and of the optimizer, and the end of ``unshard_params``.

    Attributes:
        path: the folder or URL of the checkpoint.
    """

    def __init__(self, path: Place) -> None:
        self.path = path
        self._writing: Writing | None = None
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
        global _in_flight
        if self._writing is not None:
            self._writing.hurry()
        if self._thread is not None:
            self._thread.join()
        if _in_flight is self:
            _in_flight = None
        self.let_go()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def wait_until_copied(self) -> None:
        """Wait until the parameters and the optimizer's state may be written to by other means."""
        if self._writing is not None:
            self._writing.wait_until_copied()

    def hold(
        self,
        writing: Writing,
        model: nn.Module,
        units: Sequence[Unit],
        optimizer: Optimizer | None,
    ) -> None:
        """Make later writes to the tensors of ``writing`` wait until the tensors are copied.

        Raises:
            UnsupportedError: the optimizer takes no hooks.
        """
        self._writing, wait = writing, _Wait(writing)
        for unit in units:
            unit.readers.append(wait)
            self._undo.append(partial(unit.readers.remove, wait))
        self._undo.append(model.register_load_state_dict_pre_hook(wait).remove)
        if optimizer is None:
            return
        try:
            self._undo.append(optimizer.register_step_pre_hook(wait).remove)
            self._undo.append(optimizer.register_load_state_dict_pre_hook(wait).remove)
        except AttributeError as error:
            raise UnsupportedError(
                f'mode="async": {type(optimizer).__name__} takes no hooks ({error}), so its steps '
                "would not wait for the copies; give the optimizer that it wraps"
            ) from error

    def let_go(self) -> None:
        """Hold nobody any longer."""
        for undo in self._undo:
            undo()
        self._undo = []

    def run(self, writing: Writing, rest: Callable[[], None]) -> None:
        """Begin with ``rest``, which runs ``writing``; return when others may go on writing."""
        global _in_flight
        self._writing = writing
        # Not a daemon: a program that ends waits for it.
        run = partial(self._run, writing, rest)
        self._thread = threading.Thread(target=run, name="fullshard save", daemon=False)
        _in_flight = self
        try:
            self._thread.start()
        except RuntimeError:  # there are too many threads: without one, then
            self._thread = None
            run()
        writing.wait_for_others()

    def _run(self, writing: Writing, rest: Callable[[], None]) -> None:
        try:
            rest()
        except BaseException as error:
            log.warning("%s", error)  # nobody may ever call wait()
            self._failure = error
        finally:
            writing.release()


_in_flight: PendingSave | None = None


def await_save() -> None:
    """Wait for the save that goes on, if there is one.

    Raises:
        FullshardError: that save failed.
    """
    if _in_flight is not None:
        _in_flight.wait()


def _await_at_exit() -> None:
    if _in_flight is not None and not _in_flight.is_done:  # a forked process has no such thread
        with suppress(Exception):  # ``_run`` has logged it; Ctrl-C ends the wait
            _in_flight.wait()


# Clients of object stores use executors, which CPython ends before it joins threads. Exit functions
# run in reverse order, so ``_await_at_exit`` runs before the executors end. ``atexit`` runs too
# late for that, but is no private name of CPython.
vars(threading).get("_register_atexit", atexit.register)(_await_at_exit)
