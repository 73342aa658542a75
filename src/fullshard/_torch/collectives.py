"""Collectives of process groups, their backends, options and timeouts.

PyTorch 2.13 deprecates all_gather_into_tensor and reduce_scatter_tensor, and 2.11 lacks their
successors. The methods of a process group are the same in all versions and cost less host time.
Groups written in Python, such as one whose ranks are threads, have only their version's methods.

A backend with streams uses a separate stream per group, of the default priority, and returns work
to wait for. ``in_order`` asks the backend to use the current stream; then nothing is left to wait
for, and the call returns None. A backend that cannot do this returns its work as usual.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor
from torch.distributed import AllreduceOptions, ProcessGroup, ReduceScatterOptions, Work

from fullshard._torch.names import Private

private = Private(__name__, "collectives")

Op = dist.ReduceOp.RedOpType
Tensors = Sequence[Tensor]
_AllgatherOptions = private.get("torch._C._distributed_c10d.AllgatherOptions")
_C10D = "torch.distributed.distributed_c10d"
_group_named = private.get(f"{_C10D}._resolve_process_group", "`fullshard.plan`")


def all_gather(
    group: ProcessGroup, outputs: Tensors, sources: Tensors, *, in_order: bool = False
) -> Work | None:
    """Start the backend's all-gather of every 1-D source into its 1-D output, in one call."""
    if is_of_python(group) and hasattr(group, "all_gather_single_coalesced"):
        return group.all_gather_single_coalesced(list(outputs), list(sources))
    options = _options(_AllgatherOptions, in_order)
    if len(outputs) == 1:
        return group._allgather_base(outputs[0], sources[0], options)
    return group.allgather_into_tensor_coalesced(list(outputs), list(sources), options)


def reduce_scatter(
    group: ProcessGroup, output: Tensor, source: Tensor, op: Op, *, in_order: bool = False
) -> Work | None:
    """Start the backend's reduce-scatter of 1-D ``source`` into 1-D ``output``."""
    options = _options(ReduceScatterOptions, in_order, op)
    if is_of_python(group) and hasattr(group, "reduce_scatter_single"):
        return group.reduce_scatter_single(output, source, options)
    return group._reduce_scatter_base(output, source, options)


def all_reduce(
    group: ProcessGroup, values: Tensor, op: Op, *, in_order: bool = False
) -> Work | None:
    """Start the backend's all-reduce of ``values``, in place."""
    return group.allreduce([values], _options(AllreduceOptions, in_order, op))


@cache
def _options(kind: type[Any], in_order: bool, op: Op | None = None) -> Any:
    options = kind()
    options.asyncOp = not in_order
    if op is not None:
        options.reduceOp = op
    return options


def broadcast(group: ProcessGroup, values: Tensor, root: int) -> Work:
    """Start the backend's broadcast of ``values`` from rank ``root`` of the group, in place."""
    options = dist.BroadcastOptions()
    options.rootRank = root
    return group.broadcast([values], options)


def scatter(group: ProcessGroup, output: Tensor, sources: Sequence[Tensor], root: int) -> Work:
    """Start the backend's scatter of ``sources``, which only rank ``root`` of the group has."""
    options = dist.ScatterOptions()
    options.rootRank = root
    return group.scatter([output], [[*sources]] if sources else [], options)


def all_to_all(
    group: ProcessGroup,
    output: Tensor,
    source: Tensor,
    sizes: Sequence[int] = (),
    lengths: Sequence[int] = (),
    *,
    in_order: bool = False,
) -> Work | None:
    """Start the backend's exchange of slices of 1-D ``source`` into 1-D ``output``.

    ``sizes`` are those of slices that come, ``lengths`` of those that go; equal ones if empty.
    """
    options = _options(dist.AllToAllOptions, in_order)
    return group.alltoall_base(output, source, [*sizes], [*lengths], options)


def break_off(group: ProcessGroup) -> None:
    """Make all waits of this process on the gloo ``group`` raise; it is of no use afterwards.

    A receive that times out makes gloo give up its connections, and nothing else ends its waits.
    A receive from a rank that is gone fails at once, so each rank is tried until one times out.
    """
    rank, size = group.rank(), group.size()
    nothing = torch.empty(1, device="cpu")
    for peer in (*range(rank + 1, size), *range(rank)):
        try:
            group.recv([nothing], peer, _UNUSED_TAG).wait(timedelta(milliseconds=1))
        except RuntimeError as error:
            if "imed out" in str(error):
                return


_UNUSED_TAG = (1 << 31) - 1


def abort(group: ProcessGroup, device_type: str) -> None:
    """End all collectives of ``group`` on devices of that type; the group cannot be used again.

    Only NCCL's and similar backends can; others keep their time-outs. A lock per group keeps two
    threads from aborting at the same time, which would crash ``nccl2``.
    """
    with _locks.setdefault(group, threading.Lock()), suppress(RuntimeError):
        backend_of(group, device_type).abort()


_locks: weakref.WeakKeyDictionary[ProcessGroup, threading.Lock] = weakref.WeakKeyDictionary()
_aborting: list[threading.Thread] = []


def begin_abort(group: ProcessGroup, device_type: str) -> None:
    """Begin to ``abort``, in a thread: aborts of NCCL's groups may wait for each other."""
    thread = threading.Thread(
        target=abort, args=(group, device_type), name="fullshard abort", daemon=True
    )
    _aborting[:] = [one for one in _aborting if one.is_alive()]
    _aborting.append(thread)
    thread.start()


def end_aborts(timeout_s: float) -> bool:
    """Wait for the ends of all aborts that were begun; return whether they came in time."""
    until_s = time.monotonic() + timeout_s
    for thread in tuple(_aborting):
        thread.join(max(0.0, until_s - time.monotonic()))
    return not any(thread.is_alive() for thread in _aborting)


def public_collectives() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return ``torch.distributed``'s all-gather and reduce-scatter; users may replace them."""
    if hasattr(dist, "all_gather_single"):
        return dist.all_gather_single, dist.reduce_scatter_single
    return dist.all_gather_into_tensor, dist.reduce_scatter_tensor


def is_of_python(group: ProcessGroup) -> bool:
    """Return whether ``group`` is written in Python: it has methods, but no backends."""
    return not group._device_types


def has_peers(group: ProcessGroup, device_type: str) -> bool:
    """Return whether ``group`` gets data of such devices from other processes.

    Not if it does not serve them, is written in Python, or its backend is a fake.
    """
    if is_of_python(group) or device_type not in device_types(group):
        return False
    return backend_name(group, device_type) != "fake"


def device_types(group: ProcessGroup) -> Iterable[str]:
    """Return the device types on which ``group`` can communicate."""
    if is_of_python(group):
        return [part.partition(":")[0] for part in dist.get_backend_config(group).split(",")]
    return [device.type for device in group._device_types]


def backend_name(group: ProcessGroup, device_type: str) -> str:
    """Return the name of the backend that serves ``device_type``."""
    if is_of_python(group):
        return dist.get_backend(group)
    name: str = backend_of(group, device_type).name()
    return name


def backend_of(group: ProcessGroup, device_type: str) -> Any:
    """Return the backend that serves ``device_type``, without what DETAIL wraps around it.

    DETAIL is a value of TORCH_DISTRIBUTED_DEBUG.
    """
    backend = group._get_backend(torch.device(device_type))
    while hasattr(backend, "wrapped_pg"):
        backend = backend.wrapped_pg
    return backend


def is_nccl(group: ProcessGroup, device_type: str) -> bool:
    """Return whether one of PyTorch's NCCL backends serves ``device_type``.

    PyTorch 2.14 and later have several. In 2.15 "nccl" means ``nccl2``, unless the variable
    TORCH_DIST_USE_NCCL2 is 0.
    """
    return not is_of_python(group) and backend_of(group, device_type).name() in NCCL


NCCL = frozenset({"nccl", "nccl2", "nccl-lazy", "nccl-legacy"})
"""Names of NCCL's backends, as programs and the backends themselves call them."""


def nccl_of_programs() -> str:
    """Return the name of the backend that "nccl" selects in this PyTorch and environment."""
    has_two = hasattr(c10d, "ProcessGroupNCCL2")
    chosen = os.environ.get("TORCH_DIST_USE_NCCL2")
    is_second = chosen != "0" if hasattr(c10d, "_nccl2_device") else has_two and chosen == "1"
    return "nccl2" if is_second else "nccl"


def is_on_gloo(group: ProcessGroup) -> bool:
    """Return whether ``group`` gets data of the host from other processes by gloo."""
    return has_peers(group, "cpu") and backend_name(group, "cpu") == "gloo"


def functional_collective(op: Any) -> str | None:
    """Return which method of ``Collectives`` an operation of DTensors is like; None if it is none.

    ``wait_tensor`` is none, because those who count an operation as done have waited.
    """
    if op.namespace != "_c10d_functional":
        return None
    return _FUNCTIONAL.get(op.overloadpacket.__name__)


_FUNCTIONAL = {
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter_mean",
    "all_reduce": "all_reduce_mean",
    "all_reduce_": "all_reduce_mean",
    "broadcast": "broadcast",
    "all_to_all_single": "all_to_all",
}


def ranks_of_group_named(name: Any) -> tuple[int, ...]:
    """Return the ranks of the process group that functional collectives call ``name``."""
    return tuple(dist.get_process_group_ranks(_group_named(name)))


def timeout_of(group: ProcessGroup, device_type: str) -> timedelta:
    """Return how long ``group`` waits for a peer."""
    own = None if is_of_python(group) else group._get_backend(torch.device(device_type))
    if own is None or own.options is None:  # a stand-in backend without peers has none
        return dist.constants.default_pg_timeout
    timeout: timedelta = own.options._timeout
    return timeout


has_average = is_nccl
"""Return whether the backend's reduce-scatter can average every dtype (gloo's cannot)."""


def group_options(group: ProcessGroup, *, connects_later: bool = False) -> Any:
    """Return a copy of the NCCL options of ``group``; None if no NCCL backend serves ``group``.

    Args:
        group: the process group.
        connects_later: make the new group connect at its first use, as the legacy backend does in
            an unbound group.
    """
    for kind in () if is_of_python(group) else device_types(group):
        if is_nccl(group, kind):
            backend = backend_of(group, kind)
            options = options_like(backend.options)
            if connects_later and backend.name() != "nccl" and hasattr(options, "lazy_init"):
                options.lazy_init = True
            return options
    return None


def options_like(given: Any) -> Any:
    """Return a copy of NCCL options, or None for None. PyTorch writes to the options it gets.

    The copy omits the group that ``given`` was split from. The ``timeout`` passed to ``new_group``
    has priority.
    """
    if given is None:
        return None
    options = type(given)(is_high_priority_stream=given.is_high_priority_stream)
    options.config = given.config
    options._timeout = given._timeout
    if hasattr(given, "lazy_init"):  # new in 2.15
        options.lazy_init = given.lazy_init
    return options


private.attributes(
    "torch.distributed.ProcessGroup",
    "_allgather_base _device_types _get_backend _reduce_scatter_base"
    " allgather_into_tensor_coalesced alltoall_base",
)
private.attributes("torch._C._distributed_c10d.Backend.Options", "_timeout")
