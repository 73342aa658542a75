"""Every private or version-dependent PyTorch name that fullshard uses (2.11 to 2.15).

When a PyTorch release breaks fullshard, look here first: this stays one file, however long.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from datetime import timedelta
from functools import cache, partial
from math import prod
from operator import attrgetter, is_
from types import FrameType
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor, nn
from torch._C._distributed_c10d import (
    AllgatherOptions,
    FakeProcessGroup,
    _register_process_group,
    _set_global_rank,
    _unregister_process_group,
)
from torch._C._dynamo import eval_frame
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import profiler
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.autograd.graph import Node, _engine_run_backward, get_gradient_edge
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Shard, _redistribute
from torch.distributed.tensor._collective_utils import MeshTopoInfo
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpStrategy
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard
from torch.optim import Optimizer
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils.checkpoint import _StopRecomputationError


class OwnDispatch(DTensor):
    """A base class for DTensor subclasses that define ``__torch_dispatch__`` themselves.

    Before 2.12, DTensor's dispatcher ignores that method (PyTorch issue 177716). There, calls from
    Python reach the class through ``__torch_function__``; calls from inside PyTorch, such as those
    of ``__setitem__``, through ``handle_dtensor_op``; calls from autograd do not reach the class.
    """


class _Asking(TorchDispatchMode):
    """A mode that passes each operation to the ``OwnDispatch`` class among its arguments."""

    def __torch_dispatch__(
        self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for cls in types:
            if issubclass(cls, OwnDispatch):
                return cls.__torch_dispatch__(op, types, args, kwargs or {})
        return op(*args, **(kwargs or {}))


def _ask_by_function(
    cls: Any, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
) -> Any:
    with torch._C.DisableTorchFunctionSubclass(), _Asking():  # type: ignore[no-untyped-call]
        return function(*args, **(kwargs or {}))


_VERSION = tuple(map(int, torch.__version__.split(".")[:2]))

if _VERSION < (2, 12):
    OwnDispatch.__torch_function__ = classmethod(_ask_by_function)  # type: ignore[assignment]


# Collectives. 2.13 deprecates all_gather_into_tensor and reduce_scatter_tensor, 2.11 lacks their
# successors; the methods of a process group are the same in all versions and cost less host time.
# Groups written in Python, such as one whose ranks are threads, have only their version's methods.
#
# A backend with streams uses a separate stream per group, of the default priority, and returns work
# to wait for. ``in_order`` asks the backend to use the current stream; then nothing is left to wait
# for, and the call returns None. A backend that cannot do this returns its work as usual.


def all_gather(
    group: dist.ProcessGroup,
    outputs: Sequence[Tensor],
    sources: Sequence[Tensor],
    *,
    in_order: bool = False,
) -> dist.Work | None:
    """Start the backend's all-gather of every 1-D source into its 1-D output, in one call."""
    if is_of_python(group) and hasattr(group, "all_gather_single_coalesced"):
        return group.all_gather_single_coalesced(list(outputs), list(sources))
    options = _gather_options(in_order)
    if len(outputs) == 1:
        return group._allgather_base(outputs[0], sources[0], options)
    return group.allgather_into_tensor_coalesced(list(outputs), list(sources), options)


@cache
def _gather_options(in_order: bool) -> AllgatherOptions:
    options = AllgatherOptions()
    options.asyncOp = not in_order
    return options


def reduce_scatter(
    group: dist.ProcessGroup,
    output: Tensor,
    source: Tensor,
    op: dist.ReduceOp.RedOpType,
    *,
    in_order: bool = False,
) -> dist.Work | None:
    """Start the backend's reduce-scatter of 1-D ``source`` into 1-D ``output``."""
    options = _reduce_options(op, in_order)
    if is_of_python(group) and hasattr(group, "reduce_scatter_single"):
        return group.reduce_scatter_single(output, source, options)
    return group._reduce_scatter_base(output, source, options)


@cache
def _reduce_options(op: dist.ReduceOp.RedOpType, in_order: bool) -> dist.ReduceScatterOptions:
    options = dist.ReduceScatterOptions()
    options.reduceOp = op  # type: ignore[assignment]
    options.asyncOp = not in_order
    return options


def all_reduce(
    group: dist.ProcessGroup,
    values: Tensor,
    op: dist.ReduceOp.RedOpType,
    *,
    in_order: bool = False,
) -> dist.Work | None:
    """Start the backend's all-reduce of ``values``, in place."""
    return group.allreduce([values], _all_reduce_options(op, in_order))


@cache
def _all_reduce_options(op: dist.ReduceOp.RedOpType, in_order: bool) -> dist.AllreduceOptions:
    options = dist.AllreduceOptions()
    options.reduceOp = op  # type: ignore[assignment]
    options.asyncOp = not in_order
    return options


def broadcast(group: dist.ProcessGroup, values: Tensor, root: int) -> dist.Work:
    """Start the backend's broadcast of ``values`` from rank ``root`` of the group, in place."""
    options = dist.BroadcastOptions()
    options.rootRank = root
    return group.broadcast([values], options)


def scatter(
    group: dist.ProcessGroup, output: Tensor, sources: Sequence[Tensor], root: int
) -> dist.Work:
    """Start the backend's scatter of ``sources``, which only rank ``root`` of the group has."""
    options = dist.ScatterOptions()
    options.rootRank = root
    return group.scatter([output], [[*sources]] if sources else [], options)


def all_to_all(
    group: dist.ProcessGroup,
    output: Tensor,
    source: Tensor,
    sizes: Sequence[int] = (),
    lengths: Sequence[int] = (),
    *,
    in_order: bool = False,
) -> dist.Work | None:
    """Start the backend's exchange of slices of 1-D ``source`` into 1-D ``output``.

    ``sizes`` are those of slices that come, ``lengths`` of those that go; equal ones if empty.
    """
    options = dist.AllToAllOptions()
    options.asyncOp = not in_order
    return group.alltoall_base(output, source, [*sizes], [*lengths], options)


def own_gloo_group(
    name: str, rank: int, size: int, timeout: timedelta, connect: timedelta
) -> dist.ProcessGroup:
    """Return a new gloo group for the CPU that no list of ``torch.distributed`` holds.

    All its ranks meet in the store of the default group, under ``name``, within ``connect``.
    """
    store = dist.PrefixStore(f"fullshard/{name}", default_store())
    group = dist.ProcessGroup(store, rank, size)
    gloo = dist.ProcessGroupGloo(store, rank, size, min(timeout, connect))
    gloo._set_default_timeout(timeout)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
    return group


def break_off(group: dist.ProcessGroup) -> None:
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


def end_own_gloo_groups(groups: Iterable[dist.ProcessGroup], pid: int) -> None:
    """Break off groups of process ``pid``; else their ends would wait for what never comes."""
    if os.getpid() == pid:  # a forked child has none of the threads
        for group in groups:
            break_off(group)


def abort(group: dist.ProcessGroup, device_type: str) -> None:
    """End all collectives of ``group`` on devices of that type; the group cannot be used again.

    Only NCCL's and similar backends can; others keep their time-outs. A lock per group keeps two
    threads from aborting at the same time, which would crash ``nccl2``.
    """
    with _locks.setdefault(group, threading.Lock()), suppress(RuntimeError):
        backend_of(group, device_type).abort()


_locks: weakref.WeakKeyDictionary[dist.ProcessGroup, threading.Lock] = weakref.WeakKeyDictionary()
_aborting: list[threading.Thread] = []


def begin_abort(group: dist.ProcessGroup, device_type: str) -> None:
    """Begin to ``abort``, in a thread: aborts of NCCL's groups may wait for each other."""
    thread = threading.Thread(
        target=abort, args=(group, device_type), name="fullshard abort", daemon=True
    )
    _aborting[:] = [one for one in _aborting if one.is_alive()]
    _aborting.append(thread)
    thread.start()


def _end_aborts(timeout_s: float) -> bool:
    """Wait for the ends of all aborts that were begun; return whether they came in time."""
    until_s = time.monotonic() + timeout_s
    for thread in tuple(_aborting):
        thread.join(max(0.0, until_s - time.monotonic()))
    return not any(thread.is_alive() for thread in _aborting)


def mark(device_type: str) -> Any:
    """Return an event behind what was issued on the current stream; None in a graph's capture."""
    module = torch.get_device_module(device_type)
    if is_capturing(module):
        return None
    event = module.Event()
    event.record()
    return event


def is_capturing(module: Any) -> bool:
    """Return whether a graph is captured on the current stream of an accelerator's ``module``."""
    asks: Callable[[], bool] = getattr(module, "is_current_stream_capturing", bool)
    return asks()


@contextmanager
def beside_captures() -> Iterator[bool]:
    """Allow event queries in this thread while another thread captures a CUDA graph.

    A query by a thread in the default capture mode invalidates captures of other threads. Yields
    False if CUDA is initialized and the mode cannot be changed; do not query events then.
    """
    exchange = _exchange_of_capture_modes()
    if exchange is None:
        yield not torch.cuda.is_initialized()  # before that there are no events, nor captures
        return
    mode = ctypes.c_int(_RELAXED)
    exchange(ctypes.byref(mode))
    try:
        yield True
    finally:
        exchange(ctypes.byref(mode))  # the one before


_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


@cache
def _exchange_of_capture_modes() -> Callable[..., Any] | None:
    """Return the driver's function that exchanges the calling thread's mode; PyTorch has none."""
    cuda, hip = ("libcuda.so.1", "cuThread"), ("libamdhip64.so", "hipThread")
    library, prefix = cuda if torch.version.hip is None else hip
    with suppress(OSError, AttributeError):
        exchange = getattr(ctypes.CDLL(library), f"{prefix}ExchangeStreamCaptureMode")
        return cast("Callable[..., Any]", exchange)
    return None


def public_collectives() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return ``torch.distributed``'s all-gather and reduce-scatter; users may replace them."""
    if hasattr(dist, "all_gather_single"):
        return dist.all_gather_single, dist.reduce_scatter_single
    return dist.all_gather_into_tensor, dist.reduce_scatter_tensor


def is_of_python(group: dist.ProcessGroup) -> bool:
    """Return whether ``group`` is written in Python: it has methods, but no backends."""
    return not group._device_types


def has_peers(group: dist.ProcessGroup, device_type: str) -> bool:
    """Return whether ``group`` gets data of such devices from other processes.

    Not if it does not serve them, is written in Python, or its backend is a fake.
    """
    if is_of_python(group) or device_type not in device_types(group):
        return False
    return backend_name(group, device_type) != "fake"


def device_types(group: dist.ProcessGroup) -> Iterable[str]:
    """Return the device types on which ``group`` can communicate."""
    if is_of_python(group):
        return [part.partition(":")[0] for part in dist.get_backend_config(group).split(",")]
    return [device.type for device in group._device_types]


def backend_name(group: dist.ProcessGroup, device_type: str) -> str:
    """Return the name of the backend that serves ``device_type``."""
    if is_of_python(group):
        return dist.get_backend(group)
    name: str = backend_of(group, device_type).name()
    return name


def backend_of(group: dist.ProcessGroup, device_type: str) -> Any:
    """Return the backend that serves ``device_type``, without what DETAIL wraps around it.

    DETAIL is a value of TORCH_DISTRIBUTED_DEBUG.
    """
    backend = group._get_backend(torch.device(device_type))
    while hasattr(backend, "wrapped_pg"):
        backend = backend.wrapped_pg
    return backend


def is_nccl(group: dist.ProcessGroup, device_type: str) -> bool:
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


def is_on_gloo(group: dist.ProcessGroup) -> bool:
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
    return tuple(dist.get_process_group_ranks(c10d._resolve_process_group(name)))


def timeout_of(group: dist.ProcessGroup, device_type: str) -> timedelta:
    """Return how long ``group`` waits for a peer."""
    if is_of_python(group):
        return dist.constants.default_pg_timeout
    options = group._get_backend(torch.device(device_type)).options
    if options is None:  # a stand-in backend without peers
        return dist.constants.default_pg_timeout
    timeout: timedelta = options._timeout
    return timeout


@contextmanager
def other_world(size: int, rank: int, device_type: str = "cpu") -> Iterator[None]:
    """Let this process be one of ``size`` ranks whose collectives do nothing, and no other ranks.

    Process groups that exist are out of reach in the block and back afterwards; other threads must
    not use ``torch.distributed`` meanwhile. Meshes and groups that are made in the block serve the
    CPU and ``device_type``, and end with it.
    """
    outer, last_rank = c10d._world, dist.get_rank() if dist.is_initialized() else -1
    hook = sys.excepthook
    inner = c10d._world = cast("c10d._World", _World())
    for name in outer.pg_names.values():  # names of groups may be equal in both worlds
        _unregister_process_group(name)
    backend, serves = f"{_NOWHERE}_{device_type}", sorted({"cpu", device_type})
    if backend not in dist.Backend.backend_list:
        dist.Backend.register_backend(
            backend, _group_of_nobody, extended_api=True, devices=list(serves)
        )
    backends = ",".join(f"{device_type}:{backend}" for device_type in serves)
    try:
        dist.init_process_group(
            backends, store=dist.HashStore(), rank=rank, world_size=size, group_name="dry"
        )
        yield
    finally:
        for name in inner.pg_names.values():
            _unregister_process_group(name)
        c10d._world = outer
        for group, name in outer.pg_names.items():
            _register_process_group(name, group)
        _set_global_rank(last_rank)
        sys.excepthook = hook


_NOWHERE = "nowhere"


class _World:
    """The process groups of one world, as ``torch.distributed`` keeps them."""

    def __init__(self) -> None:
        self.default_pg: dist.ProcessGroup | None = None
        self.tags_to_pg: dict[Any, Any] = {}
        self.comms: list[Any] = []
        self.group_count = 0

    def __getattr__(self, name: str) -> dict[Any, Any]:
        """Return what is kept by group, which differs between versions: a new, empty dict."""
        if not name.startswith("pg_"):
            object.__getattribute__(self, name)  # raises as for any other object
        kept: dict[Any, Any] = {}
        setattr(self, name, kept)
        return kept


def _group_of_nobody(common: Any, options: Any) -> Any:
    """Make a backend that leaves what it finds."""
    make: Any = FakeProcessGroup._create_internal  # typed with fewer arguments than it takes
    return make(common.group_rank, common.group_size, options)


def default_store() -> dist.Store:
    """Return the store through which the default process group was made."""
    store: dist.Store = dist.distributed_c10d._get_default_store()
    return store


def reaches_processes(store: dist.Store) -> bool:
    """Return whether ``store`` is shared with other processes, and neither threads nor nobody."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return isinstance(store, (dist.TCPStore, dist.FileStore))


def set_timeout(group: dist.ProcessGroup, timeout: timedelta) -> None:
    """Let the default ``group`` and its store wait for peers for ``timeout``."""
    setter = getattr(dist, "set_timeout", c10d._set_pg_timeout)  # the first is new in 2.15
    setter(timeout, group)
    default_store().set_timeout(timeout)


def drop_groups(abort_s: float = 60.0) -> None:
    """Forget all process groups and what PyTorch keeps by them, without waiting for any peer.

    NCCL's are aborted, which ends what runs on devices. Gloo's close their connections, which wakes
    those who wait for us, even if something still holds the group.

    Args:
        abort_s: the longest wait for aborts, in seconds; groups are forgotten in any case.
    """
    forget_meshes()
    if dist.is_initialized():
        for group in list(c10d._world.pg_map):
            if is_on_gloo(group):
                break_off(group)
            for kind in device_types(group):
                if kind != "cpu" and has_peers(group, kind):
                    begin_abort(group, kind)
        if _end_aborts(abort_s):
            with suppress(RuntimeError):  # of an abort; PyTorch then leaves its tables as they are
                c10d._abort_process_group()
        if dist.is_initialized():
            _forget_groups()
    c10d._world.group_count = 0  # names of groups count; a group that failed to be made has counted


def _forget_groups() -> None:
    c10d._update_default_pg(None)
    for name in dir(c10d._world):  # its tables differ between versions
        if name.startswith(("pg_", "tags_to_")) and name != "pg_config_info":  # made when read
            getattr(c10d._world, name).clear()
    c10d._unregister_all_process_groups()


def _nothing() -> None:
    pass


def forget_meshes() -> None:
    """Clear what DTensor remembers by mesh.

    All meshes of a shape are equal: it would hand out meshes whose groups are gone, or now are
    others. And a mesh keeps the threads of its groups, which wake up a hundred times a second.
    """
    # As ``torch.distributed.tensor.debug`` does, which imports the compiler.
    DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()
    getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", _nothing)()
    ShardingPropagator._propagate_tensor_meta_cached.cache_clear()
    _redistribute.clear_redistribute_planner_cache()
    _redistribute._gen_transform_infos.cache_clear()
    MeshTopoInfo.build_from_mesh.cache_clear()
    if _VERSION < (2, 12):  # its dispatcher keeps some for ever, where nobody reaches them
        for one in gc.get_objects():
            if type(one) is DTensorSpec:
                object.__setattr__(one, "mesh", None)
            elif type(one) is OpStrategy:
                one.strategies.clear()


def group_options(group: dist.ProcessGroup, *, connects_later: bool = False) -> Any:
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


@contextmanager
def apart_from_the_default_group(options: Any) -> Iterator[None]:
    """Let the ranks of a new group create it in this block without the other ranks.

    If the default group is bound to a device, PyTorch splits that group's communicator, for which
    NCCL needs all ranks. A separate communicator, as made here, connects at its first use. With
    ``options.lazy_init`` set, PyTorch does not split, and the new group keeps the device.
    """
    world = dist.group.WORLD
    device = getattr(world, "bound_device_id", None)
    if world is None or device is None or getattr(options, "lazy_init", False):
        yield
        return
    world.bound_device_id = None
    try:
        yield
    finally:
        world.bound_device_id = device


def device_to_bind() -> torch.device | None:
    """Return the current device for a new default group; None to leave the choice to PyTorch.

    Only PyTorch 2.15 needs a device: its ``nccl2`` would take the one numbered LOCAL_RANK. If the
    variable names another device than the current one, it decides.
    """
    kind = torch.accelerator.current_accelerator()
    has_nccl2 = hasattr(c10d, "_nccl2_device")
    if not has_nccl2 or kind is None or kind.type != "cuda" or not torch.cuda.is_available():
        return None
    device = torch.device("cuda", torch.cuda.current_device())
    return device if int(os.environ.get("LOCAL_RANK", device.index)) == device.index else None


def has_average(group: dist.ProcessGroup, device_type: str) -> bool:
    """Return whether the backend's reduce-scatter can average every dtype (gloo's cannot)."""
    return is_nccl(group, device_type)


# Copies of many tensors in one kernel.


def fuses_copies(device: torch.device) -> bool:
    """Return whether ``chunk_cat`` and ``split_copy`` are one kernel each on ``device``."""
    return device.type == "cuda"


def chunk_cat(sources: Sequence[Tensor], out: Tensor) -> None:
    """Cut dim 0 of each source into ``len(out)`` chunks; copy chunk r to row r of ``out`` (2-D).

    The number of rows per chunk is rounded up; zeros fill chunks with fewer rows. The sources
    must be contiguous, because the kernel reads contiguous memory in any case.
    """
    is_mixed = len({source.dtype for source in sources}) > 1
    chunk_cat = torch.ops.fsdp.chunk_cat_mixed_dtype if is_mixed else torch._chunk_cat
    chunk_cat(list(sources), 0, len(out), out=out)


def split_copy(source: Tensor, places: Sequence[Tensor]) -> None:
    """Copy adjacent column blocks of ``source`` (2-D) to ``places``; all tensors are contiguous."""
    torch.split_with_sizes_copy(source, [p.shape[1] for p in places], dim=1, out=list(places))


def casts_in_chunk_cat(sources: set[torch.dtype], out: torch.dtype) -> bool:
    """Return whether ``chunk_cat`` into dtype ``out`` is one kernel per dtype in ``sources``."""
    if len(sources) > 1 and not hasattr(torch.ops.fsdp, "chunk_cat_mixed_dtype"):  # new in 2.15
        return False
    return sources == {out} or (sources <= {torch.bfloat16, out} and out is torch.float32)


# Autograd.


def is_profiling() -> bool:
    """Return whether a PyTorch profiler is active."""
    return profiler._is_profiler_enabled


def outside_of_transforms() -> AbstractContextManager[object]:
    """Return a context outside of ``torch.func`` transforms, so that tensors in it have memory."""
    if torch._C._functorch.peek_interpreter_stack() is None:
        return _NOTHING
    cleared: AbstractContextManager[object] = temporarily_clear_interpreter_stack()
    return cleared


_NOTHING = nullcontext()


def apply(function: type[torch.autograd.Function], *args: object) -> Any:
    """Call ``function.apply(*args)``, which torch leaves untyped."""
    return function.apply(*args)


def current_task() -> int:
    """Return the number of the backward call that this thread is in, -1 outside of any."""
    return torch._C._current_graph_task_id()


def ends_recomputation(error: BaseException | None) -> bool:
    """Return whether ``error`` is how a checkpoint leaves a forward that it needs no more of."""
    return isinstance(error, _StopRecomputationError)


def queue_end_of_task(callback: Callable[[], None]) -> None:
    """Call ``callback`` when the current backward call ends; drop it if that call fails."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def post_accumulate_grad_hooks(
    params: Iterable[nn.Parameter],
) -> list[tuple[nn.Parameter, Callable[[Tensor], None]]]:
    """Return the user's hooks that run after ``grad`` is accumulated, each with its parameter.

    Includes the optimizers made by ``_apply_optimizer_in_backward`` of ``torch.distributed.optim``,
    because the hook that would call those optimizers is on a node that is not one of ours.
    """
    hooks: list[tuple[nn.Parameter, Callable[[Tensor], None]]] = []
    for param in params:
        if param._post_accumulate_grad_hooks:
            hooks += [(param, hook) for hook in param._post_accumulate_grad_hooks.values()]
        for optimizer in param.__dict__.get("_in_backward_optimizers", ()):  # getattr is slow
            hooks.append((param, partial(_step, optimizer)))
    return hooks


def _step(optimizer: torch.optim.Optimizer, _: Tensor) -> None:
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


class _Unread(TorchDispatchMode):
    """A mode that answers operations with ``meta`` tensors and reads none of the inputs."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Tensor:
        return torch.empty(args[0].shape, dtype=args[0].dtype, device="meta")


def gradient_node(tensor: Tensor) -> Node:
    """Return the node that receives the gradient of ``tensor``: AccumulateGrad for a leaf.

    PyTorch's lookup makes a view, which a wrapper subclass may compute from memory still in flight.
    """
    if type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__ or isinstance(tensor, DTensor):
        with torch._C._DisableFuncTorch():  # under torch.func.grad, say, which has no node of it
            return get_gradient_edge(tensor).node
    unread = _Unread()  # type: ignore[no-untyped-call]
    with unread, torch.enable_grad(), torch._C.DisableTorchFunctionSubclass():
        computed = torch.neg(tensor).grad_fn
    assert computed is not None
    node = computed.next_functions[0][0]
    assert node is not None
    return node


def set_grad(param: Tensor, grad: Tensor | None) -> None:
    """Set ``param.grad``; if ``param`` expects another dtype, set its ``grad_dtype`` first."""
    if grad is not None and param.grad_dtype not in (None, grad.dtype):
        param.grad = None
        param.grad_dtype = grad.dtype
    param.grad = grad


def put_grad(param: Tensor, grad: Tensor) -> None:
    """Set ``param.grad``, cast to the dtype that ``param`` now expects."""
    try:
        param.grad = grad
    except RuntimeError:
        dtype = param.grad_dtype
        if dtype in (None, grad.dtype):
            raise
        param.grad = grad.to(dtype)


def follows_grad_dtype() -> bool:
    """Return whether FSDP2 of the installed PyTorch honors the ``grad_dtype`` of parameters.

    Since 2.15 it reduces and shows gradients in ``grad_dtype``, by default the parameter's own
    dtype, unless a reduction dtype is given. Before, it reduces in the compute dtype, and drops
    the ``grad_dtype`` of a parameter that it shards.
    """
    return _VERSION >= (2, 15)


def grad_dtypes(params: Iterable[Tensor]) -> list[torch.dtype | None]:
    """Return the dtype that ``.grad`` of each parameter must have; None means any dtype."""
    return list(map(_grad_dtype, params))


_grad_dtype = attrgetter("grad_dtype")


def explicit_grad_dtype(param: Tensor) -> tuple[torch.dtype | None] | None:
    """Return the ``grad_dtype`` that the user set on ``param``, in a tuple; None if it is unset.

    Always None if FSDP2 of the installed PyTorch ignores ``grad_dtype``.
    """
    is_set = follows_grad_dtype() and param._has_grad_dtype_override  # type: ignore[attr-defined]
    return (param.grad_dtype,) if is_set else None


def keep_grad_dtype(explicit: tuple[torch.dtype | None] | None, param: Tensor) -> None:
    """Apply ``explicit``, another tensor's ``explicit_grad_dtype``, unless ``param`` has one."""
    if explicit is None or explicit_grad_dtype(param) is not None:
        return
    grad, param.grad = param.grad, None
    (dtype,) = explicit
    param.grad_dtype = dtype
    if grad is not None:
        param.grad = grad.to(dtype or grad.dtype)


def num_pending_nodes(nodes: Iterable[Node]) -> int | None:
    """Return how many AccumulateGrad ``nodes`` the current backward call will run or has run.

    None inside ``autograd.grad``, which accumulates into no leaf.
    """
    try:
        return sum(map(torch._C._will_engine_execute_node, nodes))
    except RuntimeError:
        return None


def node_number(node: Node) -> int:
    """Return the position of ``node`` in creation order; backward runs high numbers first."""
    return node._sequence_nr()


def node_device(node: Node) -> torch.device:
    """Return the device whose thread runs ``node`` in backward: that of its first output off CPU.

    Nodes of a CPU run in the thread that calls backward.
    """
    devices = (output.device for output in node._input_metadata)
    return next((one for one in devices if one.type != "cpu"), torch.device("cpu"))


def sequence_number() -> int:
    """Return the number that this thread's next autograd node will get."""
    return torch._C._autograd._get_sequence_nr()


# DTensor. The public ``from_local`` is an autograd function and repeats checks that we have done.


def dtensor_spec(
    mesh: DeviceMesh,
    placements: tuple[Placement, ...],
    *,
    shape: torch.Size,
    stride: tuple[int, ...],
    dtype: torch.dtype,
) -> DTensorSpec:
    """Return the spec of a DTensor with this global shape and stride."""
    return DTensorSpec(mesh, placements, TensorMeta(shape, stride, dtype))


AnyDTensor = TypeVar("AnyDTensor", bound=DTensor)


def dtensor_around(
    local: Tensor, spec: DTensorSpec, *, requires_grad: bool, cls: type[AnyDTensor]
) -> AnyDTensor:
    """Return a DTensor of class ``cls`` around ``local`` itself, without checks.

    The DTensor keeps the storage offset of ``local``, which compilers need. Unless that offset is
    0, PyTorch can neither copy nor pickle the DTensor.
    """
    return cls(local, spec, requires_grad=requires_grad)


def dtensor_from_spec(
    local: Tensor, spec: DTensorSpec, *, requires_grad: bool, cls: type[AnyDTensor]
) -> AnyDTensor:
    """Return a DTensor of class ``cls`` that shares the memory of ``local``, without checks.

    A plain ``local`` tensor with a storage offset is replaced by an ``own_storage`` view.
    """
    if local.storage_offset() and type(local) is Tensor:
        local = own_storage(local)
    return dtensor_around(local, spec, requires_grad=requires_grad, cls=cls)


def are_placed_alike(one: DTensor, other: DTensor) -> bool:
    """Return whether both have the same mesh, placements and shape."""
    a, b = one._spec, other._spec
    return a is b or (a.placements == b.placements and a.mesh == b.mesh and a.shape == b.shape)


def local_of(tensor: DTensor) -> Tensor:
    """Return the local tensor itself (``to_local`` makes a new view each time)."""
    return tensor._local_tensor


def locals_of(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield local tensors in one pass in C; a plain tensor raises ``AttributeError``."""
    return map(_local_of, tensors)


def share_specs(tensors: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Return whether all are DTensors, each pair with the very same spec object.

    False does not mean that they are placed differently: see ``are_placed_alike``.
    """
    try:
        return all(map(is_, map(_spec_of, tensors), map(_spec_of, others)))
    except AttributeError:
        return False


_local_of = attrgetter("_local_tensor")
_spec_of = attrgetter("_spec")


def dtensor_like(tensor: DTensor, local: Tensor) -> DTensor:
    """Return ``local``, shaped like the local tensor of ``tensor``, as a DTensor placed like it."""
    spec = tensor._spec
    meta = spec.tensor_meta
    if meta is not None and meta.dtype != local.dtype:
        meta = TensorMeta(meta.shape, meta.stride, local.dtype)
        spec = replace(spec, tensor_meta=meta)
    return dtensor_from_spec(local, spec, requires_grad=False, cls=type(tensor))


def dtensor_as(tensor: DTensor, cls: type[AnyDTensor]) -> AnyDTensor:
    """Return a DTensor of class ``cls`` with the same local tensor, detached from autograd."""
    return dtensor_around(tensor._local_tensor, tensor._spec, requires_grad=False, cls=cls)


def repoint(tensor: DTensor, local: Tensor) -> None:
    """Replace the local tensor of ``tensor`` with another one of the same shape and dtype."""
    tensor._local_tensor = local


def make_param(tensor: Tensor) -> None:
    """Make ``isinstance`` accept ``tensor``, a tensor subclass, as an ``nn.Parameter``."""
    tensor._is_param = True


class _Seen(threading.local):
    """The handlers that the dispatcher uses in this thread; None means the shared handlers."""

    handlers: dict[Any, Any] | None = None


class _Dispatcher(type(DTensor._op_dispatcher)):  # type: ignore[misc]
    """DTensor's dispatcher, from which one thread can drop a handler that other threads keep."""

    @property
    def _custom_op_handlers(self) -> dict[Any, Any]:
        if _seen.handlers is not None:
            return _seen.handlers
        return cast("dict[Any, Any]", self.__dict__["_custom_op_handlers"])

    @_custom_op_handlers.setter
    def _custom_op_handlers(self, handlers: dict[Any, Any]) -> None:
        self.__dict__["_custom_op_handlers"] = handlers


_seen = _Seen()


def handle_dtensor_op(op: Any, handler: Any) -> None:
    """Make DTensor call ``handler(op, args, kwargs)`` for ``op``, whatever the arguments are."""
    dispatcher = DTensor._op_dispatcher
    dispatcher.__class__ = _Dispatcher
    dispatcher._custom_op_handlers[op] = _asking_own(handler) if _VERSION < (2, 12) else handler


def _asking_own(handler: Any) -> Any:
    """Wrap ``handler``: subclasses of ``OwnDispatch`` run ``__torch_dispatch__`` instead."""

    def handle(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        cls = type(args[0])
        if issubclass(cls, OwnDispatch):
            return cast("Any", cls).__torch_dispatch__(op, (cls,), args, kwargs)
        return cast("object", handler(op, args, kwargs))

    return handle


def default_dtensor_op(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """Run ``op`` as DTensor does without our handler, in this thread only."""
    before = _seen.handlers
    _seen.handlers = dict(DTensor._op_dispatcher._custom_op_handlers)
    _seen.handlers.pop(op, None)
    try:
        return cast("object", op(*args, **kwargs))
    finally:
        _seen.handlers = before


def transposed_in_place(tensor: DTensor) -> DTensor:
    """Transpose ``tensor`` in place and return it, because DTensors have no ``t_()``."""
    new = cast("DTensor", tensor.detach().t())
    tensor._local_tensor, tensor._spec = new._local_tensor, new._spec
    with no_dispatch():  # update the shape that the object itself reports
        torch.ops.aten.t_.default(tensor)
    return tensor


AnyTensor = TypeVar("AnyTensor", bound=Tensor)


def wrapper_of(cls: type[AnyTensor], like: Tensor, device: torch.device | None = None) -> AnyTensor:
    """Return a tensor without memory, of a class that dispatches, with the metadata of ``like``."""
    found = Tensor._make_wrapper_subclass(
        cls,
        like.shape,
        strides=like.stride(),
        dtype=like.dtype,
        device=device or like.device,
    )
    return found


def shares_storage(one: Tensor, other: Tensor) -> bool:
    """Return whether ``one`` and ``other`` are views of one storage."""
    return bool(one.untyped_storage()._cdata == other.untyped_storage()._cdata)


def sharded_dim(placement: Placement) -> int | None:
    """Return the tensor dim that ``placement`` shards, strided or not; else None."""
    return placement.dim if isinstance(placement, (Shard, StridedShard)) else None


def is_sum(placement: Placement) -> bool:
    """Return whether the ranks hold the plain terms of a sum or a mean.

    Subclasses of ``Partial``, such as that of an embedding's output, mask or scale the terms.
    """
    return type(placement) is Partial and placement.reduce_op in ("sum", "avg")


def is_mean(placement: Placement) -> bool:
    """Return whether the ranks hold the plain terms of a mean."""
    return type(placement) is Partial and placement.reduce_op == "avg"


def waited(tensor: Tensor) -> Tensor:
    """Return ``tensor``, or wait if a collective is still producing it and return the result."""
    if isinstance(tensor, AsyncCollectiveTensor):
        return cast("Tensor", tensor.trigger_wait())
    return tensor


# Meshes. A mesh and its slices share the rank list of their root; each mesh dimension divides it.


def root_ranks(mesh: DeviceMesh) -> tuple[int, ...]:
    """Return the ranks of the root mesh of ``mesh``, in order; equal for equal roots."""
    return mesh._flatten_rank_map


def joined_mesh(meshes: Sequence[DeviceMesh]) -> DeviceMesh:
    """Return one mesh with all dims of ``meshes``, named slices of one root, and their groups.

    Raises:
        RuntimeError: if the slices have different roots, or overlap.
    """
    return DeviceMesh._concatenate(list(meshes))


def flattened_mesh(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """Return ``mesh`` as a 1-D mesh; the first call makes its group, a collective of all ranks.

    Raises:
        ValueError: if ``name`` belongs to other dims.
    """
    return mesh._flatten(name)


def is_replicated(module: nn.Module) -> bool:
    """Return whether ``replicate``, the function for DDP, was applied to ``module``."""
    contract = _contract()
    return contract is not None and "replicate" in module.__dict__.get(contract.REGISTRY_KEY, ())


def mark_flattened(param: Tensor, fqns: Iterable[str] | None = None) -> None:
    """Make ``param`` known as a parameter of a ``FullyShardedDataParallel`` wrapper.

    Frameworks ask parameters for this attribute. With ``fqns``, the names of all that it holds,
    it is a flat parameter: ``isinstance(param, torch.distributed.fsdp.FlatParameter)`` is true, and
    ``torch.distributed.checkpoint.state_dict`` finds the names.
    """
    param._fsdp_flattened = True  # type: ignore[attr-defined]
    if fqns is not None:
        param._is_flat_param = True  # type: ignore[attr-defined]
        param._fqns = tuple(fqns)  # type: ignore[attr-defined]


def has_spmd_types(param: Tensor) -> bool:
    """Return whether ``param`` has ``spmd_types`` annotations of the axes that shard it.

    FSDP2 accepts such parameters since 2.15. Code that annotates them has imported the package.
    """
    package = sys.modules.get("spmd_types")
    return package is not None and bool(package.get_local_type(param))


def mark_sharded(module: nn.Module) -> None:
    """Mark ``module`` as sharded, so that ``replicate`` around it leaves its parameters to us."""
    contract = _contract()
    if contract is not None:
        registry = module.__dict__.setdefault(contract.REGISTRY_KEY, {})
        registry.setdefault("fully_shard", contract.RegistryItem())


def _contract() -> Any:
    """Return the module in which ``replicate`` registers; None if it has not been imported."""
    return sys.modules.get("torch.distributed._composable.contract")


def overrides_setattr(module: nn.Module) -> bool:
    """Return whether the class of ``module`` overrides ``nn.Module.__setattr__``."""
    return type(module).__setattr__ is not nn.Module.__setattr__


CALLS_STEP_HOOKS = Optimizer.profile_hook_step(Optimizer.step).__code__
"""Code of the wrapper that ``Optimizer.__init__`` puts around the ``step`` method of each class."""


def stepping_optimizers() -> list[int]:
    """Return the ids of optimizers in the middle of ``step``, in any thread, once for each call."""
    found = []
    for top in sys._current_frames().values():
        frame: FrameType | None = top
        while frame is not None:
            if frame.f_code is CALLS_STEP_HOOKS and "self" in frame.f_locals:
                found.append(id(frame.f_locals["self"]))
            frame = frame.f_back
    return found


Function = TypeVar("Function", bound=Callable[..., Any])


def never_compiled(function: Function) -> Function:
    """Return ``function``, marked so that Dynamo skips it and everything that it calls.

    ``torch.compiler.disable`` does the same, but its wrapper costs host time at each call, and it
    imports the compiler.
    """
    marked: Any = function
    marked._torchdynamo_disable = True
    marked._torchdynamo_disable_msg = "fullshard moves parameters here"
    return _skipped(function, eval_frame._FrameAction.SKIP)


def not_compiled(function: Function) -> Function:
    """Return ``function``, marked so that Dynamo skips it, but not what it calls."""
    return _skipped(function, eval_frame._FrameAction.DEFAULT)


def _skipped(function: Function, within: Any) -> Function:
    strategy = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, within)
    eval_frame.set_code_exec_strategy(function.__code__, strategy)
    return function


def num_holders(tensors: list[Tensor]) -> int:
    """Return a count that is higher while other Python or C++ code holds any of ``tensors``."""
    return sum(map(sys.getrefcount, tensors)) + sum(map(_num_uses, tensors))


_num_uses: Callable[[Tensor], int] = Tensor._use_count  # type: ignore[attr-defined]


def num_owners(storages: Iterable[torch.UntypedStorage]) -> int:
    """Return how many tensors and other owners share ``storages``."""
    return sum(map(torch._C._storage_Use_Count, map(_address_of_storage, storages)))


_address_of_storage = attrgetter("_cdata")


def own_storage(view: Tensor) -> Tensor:
    """Return the memory of ``view`` as a tensor whose storage is just that part.

    Pickling a tensor saves its whole storage.
    """
    return own_part(view, 0, view.shape, view.stride())


def own_part(
    flat: Tensor, start: int, shape: Sequence[int], stride: Sequence[int] | None = None
) -> Tensor:
    """Return the elements of ``flat`` from index ``start``, with a storage of just that part.

    ``stride`` is None for a contiguous tensor. The memory is shared with ``flat``, except on meta,
    where no mode sees the part, since it counts as memory of ``flat`` there, too.
    """
    if flat.is_meta:
        with no_dispatch():
            part = flat.new_empty(shape)
        storage: Any = part.untyped_storage()
        storage.kept_alive, storage.start = flat, flat.storage_offset() + start
        return part
    length = prod(shape)
    if stride is not None and length:
        length = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    begin = (flat.storage_offset() + start) * flat.itemsize
    storage = flat.untyped_storage()[begin : begin + length * flat.itemsize]
    part = torch.empty(0, dtype=flat.dtype, device=flat.device)
    # Empty strides make the result contiguous, which torch's annotations do not say.
    return part.set_(storage, 0, shape, () if stride is None else stride)


def keep_alive(tensor: Tensor, other: Tensor) -> None:
    """Keep ``other`` alive as long as the storage of ``tensor``, which does not count ``other``.

    The Python object of a storage lives as long as the storage, and copies omit its attributes.
    """
    tensor.untyped_storage().kept_alive = other  # type: ignore[attr-defined]


def announce_on_meta(flat: Tensor, parts: dict[int, tuple[int, int]]) -> None:
    """Remember number and length of each part of ``flat``, by its first element."""
    storage: Any = flat.untyped_storage()
    storage.announced = weakref.ref(flat), parts


def part_on_meta(tensor: Tensor) -> tuple[Tensor | None, int, tuple[int, int]]:
    """Return what was announced of the ``own_part`` ``tensor``: the flat tensor, start and part."""
    whole = whole_on_meta(tensor)
    storage: Any = None if whole is None else whole.untyped_storage()
    announced = getattr(storage, "announced", None)
    start: int = getattr(tensor.untyped_storage(), "start", 0)
    if announced is None:
        return None, start, (0, 0)
    reference, parts = announced
    return reference(), start, parts.get(start, (0, 0))


def whole_on_meta(tensor: Tensor) -> Tensor | None:
    """Return the tensor that ``tensor`` is an ``own_part`` of on the meta device, or None."""
    whole: Tensor | None = getattr(tensor.untyped_storage(), "kept_alive", None)
    return whole if tensor.is_meta else None


def is_at(tensor: Tensor, other: Tensor) -> bool:
    """Return whether both tensors begin at the same place in memory, on the meta device as well."""
    if not tensor.is_meta:
        return tensor.data_ptr() == other.data_ptr()
    storages = tensor.untyped_storage()._cdata, other.untyped_storage()._cdata
    return len(set(storages)) == 1 and tensor.storage_offset() == other.storage_offset()


def run_backward(loss: Tensor) -> None:
    """Do what ``loss.backward()`` does, without a look for function modes.

    A mode that handles ``backward`` is off meanwhile, and misses forwards that checkpoints repeat.
    """
    ones = torch.ones_like(loss, memory_format=torch.preserve_format)
    _engine_run_backward(
        (loss,), (ones,), False, False, (), allow_unreachable=True, accumulate_grad=True
    )


def is_fake(tensor: Tensor) -> bool:
    """Return whether ``tensor`` is a ``FakeTensor``, made under a ``FakeTensorMode``."""
    return isinstance(tensor, FakeTensor)


def is_wrapper_subclass(tensor: Tensor) -> bool:
    """Return whether ``tensor`` has ``__tensor_flatten__``, which tells what tensors it holds."""
    return bool(is_traceable_wrapper_subclass(tensor))


def preserved_versions(tensors: Iterable[Tensor]) -> AbstractContextManager[None]:
    """Return a context in which autograd does not count writes to ``tensors`` as modifications."""
    return _unsafe_preserve_version_counter(tuple(tensors))


def versions(tensors: Iterable[Tensor]) -> int:
    """Return a count that grows whenever one of ``tensors`` is visibly written."""
    return sum(map(_version, tensors))


_version = attrgetter("_version")
