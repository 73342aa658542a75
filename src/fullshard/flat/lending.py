"""``summon_full_params``: whole parameters for a while, with what PyTorch's promises beside it."""

from __future__ import annotations

from contextlib import AbstractContextManager

from torch import nn

from fullshard.errors import AssertedProtocolError
from fullshard.frontend.contexts import unshard_params
from fullshard.frontend.hooks import engine_of
from fullshard.frontend.ownership import units_below


def summon(
    module: nn.Module,
    *,
    recurse: bool,
    writeback: bool,
    rank0_only: bool,
    offload_to_cpu: bool,
    with_grads: bool,
) -> AbstractContextManager[None]:
    """``fullshard.unshard_params``.

    Where nothing is sharded, and lent where it is, edits stay whatever ``writeback`` is: programs
    for PyTorch's FSDP1 write into the shards themselves then.

    Raises:
        AssertedProtocolError: a forward or backward is running.
    """
    units = units_below([module])
    if any(engine_of(unit).is_running for unit in units):
        raise AssertedProtocolError(
            "Cannot manually unshard parameters during forward/backward: summon_full_params was "
            f"called for {type(module).__name__} in the middle of one; call it between steps, or "
            "call reset_iter_state() on the root after an exception"
        )
    specs = [bucket.spec for unit in units for bucket in unit.buckets]
    is_whole = all(spec.comm.world == 1 and spec.offload is None for spec in specs)
    stays = is_whole and not rank0_only and not offload_to_cpu
    return unshard_params(
        module,
        recurse=recurse,
        writeback=writeback or stays,
        rank0_only=rank0_only,
        offload_to_cpu=offload_to_cpu,
        with_grads=with_grads,
    )
