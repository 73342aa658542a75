"""``summon_full_params``: ``unshard_params`` with the additional guarantees of FSDP1."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from fullshard.errors import AssertedProtocolError, BusyError
from fullshard.frontend.contexts import lent
from fullshard.frontend.hooks import engine_of
from fullshard.frontend.ownership import units_below


@contextmanager
def summon_full_params(
    module: nn.Module,
    recurse: bool = True,
    writeback: bool = True,
    rank0_only: bool = False,
    offload_to_cpu: bool = False,
    with_grads: bool = False,
) -> Iterator[None]:
    """Show full parameters in a ``with`` block, as ``fullshard.unshard_params`` does.

    With ``recurse=False``, a module above wrappers, which is none itself, shows nothing more.

    If nothing is sharded, and parameters are lent on all ranks and on their device, edits persist
    even with ``writeback=False``, because in this case FSDP1 programs edit the shards themselves.

    Raises:
        AssertedProtocolError: if a forward or backward is running, or in the block of another
            call (also a ``BusyError``).
    """
    units = units_below([module])
    if any(engine_of(unit).is_running for unit in units):
        raise AssertedProtocolError(
            "Cannot manually unshard parameters during forward/backward: summon_full_params was "
            f"called for {type(module).__name__} in the middle of one; call it between steps, or "
            "call reset_iter_state() on the root after an exception"
        )
    for unit in units:
        try:
            unit.check_not_lent("summon_full_params()")
        except BusyError as error:
            raise _LentAlready(str(error)) from None
    warn_of_copies("summon_full_params", rank0_only, offload_to_cpu)
    specs = [bucket.spec for unit in units for bucket in unit.buckets]
    is_whole = all(spec.comm.world == 1 and spec.offload is None for spec in specs)
    stays = is_whole and not rank0_only and not offload_to_cpu
    flags = {
        "writeback": writeback or stays,
        "rank0_only": rank0_only,
        "offload_to_cpu": offload_to_cpu,
        "with_grads": with_grads,
    }
    with lent([module], "summon_full_params", flags, recurse=recurse, may_be_none=True):
        yield


def warn_of_copies(call: str, rank0_only: bool, offload_to_cpu: bool) -> None:
    """Warn if all ranks of a machine are to have full parameters in its memory."""
    if offload_to_cpu and not rank0_only:
        warnings.warn(
            f"{call}(offload_to_cpu=True) without rank0_only=True: each rank puts a copy of the "
            "full parameters into the memory of its machine",
            stacklevel=4,
        )


class _LentAlready(BusyError, AssertedProtocolError):
    """A call in the block of another, where PyTorch fails an assertion."""
