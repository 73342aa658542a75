"""An explicit end of a step's backwards, which need not wait for the reductions."""

from __future__ import annotations

from fullshard.engine import Engine, Unit
from fullshard.errors import ArgumentTypeError, ProtocolError
from fullshard.frontend.hooks import engine_of
from fullshard.schedule import triggers as when


class GradientReductionHandle:
    """A handle that ``finalize_backward(async_op=True)`` returns."""

    def __init__(self, engine: Engine | None = None) -> None:
        """Take the engine whose reductions are under way; None if there is nothing to wait for."""
        self._engine = engine
        self._number = None if engine is None else engine.scheduler.reductions.awaited

    def wait(self) -> None:
        """Put the reduced gradients where the optimizer reads them; further calls do nothing.

        Raises:
            ProtocolError: if ``reset_iter_state`` or a failed backward ended the reductions.
        """
        engine = self._engine
        if engine is None:
            return
        if engine.scheduler.reductions.awaited != self._number:
            raise ProtocolError(
                "this handle of finalize_backward(async_op=True) was invalidated: "
                "reset_iter_state(), or a backward that failed, ended its reductions"
            )
        engine.trigger(when.AwaitReductions())
        self._engine = None


def check_mode_may_change(unit: Unit, enabled: bool) -> None:
    """Refuse ``set_manual_backward_finalization(enabled)`` where it cannot work.

    Raises:
        ArgumentTypeError: if ``enabled`` is not a bool.
        ProtocolError: if the module is not the root, or a backward began and was not finalized.
    """
    what = f"set_manual_backward_finalization({enabled!r})"
    if not isinstance(enabled, bool):
        raise ArgumentTypeError(f"{what}: expected a bool")
    _check_root(unit, what)
    engine = engine_of(unit)
    if enabled != engine.scheduler.policy.manual_finalization and engine.scheduler.reductions.open:
        raise ProtocolError(
            f"{what} would change the mode after a backward began; end that first, by "
            "finalize_backward() and wait() of its handle, by a backward with "
            "set_is_last_backward(True), or by reset_iter_state()"
        )


def finalize(unit: Unit, *, async_op: bool) -> GradientReductionHandle | None:
    """Reduce all pending gradients in the tree with root ``unit``; see ``FSDPModule``."""
    engine = engine_of(unit)
    if engine.scheduler.last_use < 0:
        return GradientReductionHandle() if async_op else None
    _check_may_finalize(unit, engine)
    engine.trigger(when.Finalize(waits=not async_op))
    return GradientReductionHandle(engine) if async_op else None


def check_ends_by_itself(unit: Unit) -> None:
    """Refuse to put ``unit`` below a new root if the user chose manual finalization.

    Raises:
        ProtocolError: if the backward of ``unit`` ends by ``finalize_backward``.
    """
    if engine_of(unit).scheduler.policy.manual_finalization:
        raise ProtocolError(
            f"fully_shard: set_manual_backward_finalization(True) was called on a module with unit "
            f"{unit.name or '(root)'}, which would not be the root any more; call it after "
            "fully_shard on the root"
        )


def _check_root(unit: Unit, what: str) -> None:
    if unit is not engine_of(unit).units[-1]:
        raise ProtocolError(
            f"{what} was called on unit {unit.name or '(root)'}, expected the root: backward ends "
            "for the whole tree at once"
        )


def _check_may_finalize(unit: Unit, engine: Engine) -> None:
    engine.check_idle("finalize_backward()")
    _check_root(unit, "finalize_backward()")
    if not engine.scheduler.policy.manual_finalization:
        raise ProtocolError(
            "finalize_backward(): backward ends by itself here; call "
            "set_manual_backward_finalization(True) before the forward"
        )
    for state in engine.scheduler.residents.units.values():
        policy = state.policy
        waits = state.partial or (state.pending and policy.requires_gradient_sync)
        if waits and state.replicated and not policy.requires_all_reduce:
            raise ProtocolError(
                f"finalize_backward(): unit {engine.units[state.key].name or '(root)'} does not "
                "reduce over its replicas; call set_requires_all_reduce(True) before, or let "
                "backward end by itself"
            )
