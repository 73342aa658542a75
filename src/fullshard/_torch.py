"""Every private or version-dependent name of PyTorch that fullshard uses (2.11 to 2.15).

When a PyTorch release breaks fullshard, this is the file to look at: one, however long.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from functools import cache, partial
from math import prod
from operator import attrgetter
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import AllgatherOptions
from torch._C._dynamo import eval_frame
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import profiler
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.autograd.graph import Node, get_gradient_edge
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "DTensorSpec",
    "OwnDispatch",
    "StridedShard",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "apart_from_the_default_group",
    "apply",
    "backend_name",
    "broadcast",
    "current_task",
    "default_dtensor_op",
    "device_types",
    "dtensor_around",
    "dtensor_as",
    "dtensor_from_spec",
    "dtensor_like",
    "dtensor_spec",
    "flattened_mesh",
    "explicit_grad_dtype",
    "follows_grad_dtype",
    "grad_dtypes",
    "gradient_node",
    "group_options",
    "handle_dtensor_op",
    "has_average",
    "has_peers",
    "has_spmd_types",
    "is_fake",
    "is_profiling",
    "is_mean",
    "is_of_python",
    "is_replicated",
    "is_sum",
    "joined_mesh",
    "keep_grad_dtype",
    "local_of",
    "make_param",
    "mark_sharded",
    "keep_alive",
    "node_number",
    "num_holders",
    "num_owners",
    "own_part",
    "own_storage",
    "num_pending_nodes",
    "queue_end_of_task",
    "reduce_scatter",
    "repoint",
    "never_compiled",
    "outside_of_transforms",
    "overrides_setattr",
    "post_accumulate_grad_hooks",
    "preserved_versions",
    "public_collectives",
    "put_grad",
    "root_ranks",
    "sequence_number",
    "sharded_dim",
    "shares_storage",
    "timeout_of",
    "transposed_in_place",
    "versions",
    "waited",
]


class OwnDispatch(DTensor):
    """For DTensors whose class has a ``__torch_dispatch__`` of its own.

    Before 2.12 DTensor's dispatcher does not ask it (PyTorch's issue 177716). There what is called
    from Python gets to the class by way of ``__torch_function__``, what PyTorch itself calls, as
    ``__setitem__`` does, by way of ``handle_dtensor_op``; what autograd calls does not.
    """


class _Asking(TorchDispatchMode):
    """Ask the classes of the arguments."""

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
# successors; the methods of the group are the same in all versions, and cost less host time. Groups
# written in Python, such as one whose ranks are threads, have those of their own version alone.
#
# A backend with streams has one of its own for each group, of the default priority, and its work
# there is waited for; ``in_order`` asks it to take the stream that is current. Then nothing is left
# to wait for, and it returns None. One that cannot returns its work as ever.


def all_gather(
    group: dist.ProcessGroup,
    outputs: Sequence[Tensor],
    sources: Sequence[Tensor],
    *,
    in_order: bool = False,
) -> dist.Work | None:
    """Start the backend's all-gather of each 1-D source into its 1-D output, all in one call."""
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


def all_to_all(group: dist.ProcessGroup, output: Tensor, source: Tensor) -> dist.Work:
    """Start the backend's exchange of equal slices of 1-D ``source`` into 1-D ``output``."""
    return group.alltoall_base(output, source, [], [], dist.AllToAllOptions())


def public_collectives() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """What gathers, and reduces and scatters, in ``torch.distributed`` now; it may be replaced."""
    if hasattr(dist, "all_gather_single"):
        return dist.all_gather_single, dist.reduce_scatter_single
    return dist.all_gather_into_tensor, dist.reduce_scatter_tensor


def is_of_python(group: dist.ProcessGroup) -> bool:
    """Whether the group has no backends, but methods of its own."""
    return not group._device_types


def has_peers(group: dist.ProcessGroup, device_type: str) -> bool:
    """Whether what the group carries comes from other processes; a stand-in's is made up."""
    return not is_of_python(group) and backend_name(group, device_type) != "fake"


def device_types(group: dist.ProcessGroup) -> Iterable[str]:
    """Device types that the group can communicate on."""
    if is_of_python(group):
        return [part.partition(":")[0] for part in dist.get_backend_config(group).split(",")]
    return [device.type for device in group._device_types]


def backend_name(group: dist.ProcessGroup, device_type: str) -> str:
    """Name of the backend that serves ``device_type``."""
    if is_of_python(group):
        return dist.get_backend(group)
    return group._get_backend(torch.device(device_type)).name()


def timeout_of(group: dist.ProcessGroup, device_type: str) -> timedelta:
    """How long the group waits for a peer."""
    if is_of_python(group):
        return dist.constants.default_pg_timeout
    options = group._get_backend(torch.device(device_type)).options
    if options is None:  # of a stand-in that no peer answers
        return dist.constants.default_pg_timeout
    timeout: timedelta = options._timeout
    return timeout


def group_options(group: dist.ProcessGroup, device_type: str) -> Any:
    """What NCCL's part of ``group`` was made with, for another group; None for other backends.

    The time-out apart, which is an argument of its own, and what ``group`` was split from.
    """
    if is_of_python(group):
        return None
    backend = group._get_backend(torch.device(device_type))
    while hasattr(backend, "wrapped_pg"):  # with TORCH_DISTRIBUTED_DEBUG=DETAIL
        backend = backend.wrapped_pg
    if backend.name() != "nccl":
        return None
    given: Any = backend.options
    options = type(given)(is_high_priority_stream=given.is_high_priority_stream)
    options.config = given.config
    options._timeout = given._timeout
    return options


@contextmanager
def apart_from_the_default_group() -> Iterator[None]:
    """A group that is made in the block is made by its own ranks alone.

    Where the default group is bound to a device, PyTorch splits that one's communicator, in which
    NCCL needs all ranks; a group of its own connects when it is used first.
    """
    world = dist.group.WORLD
    device = getattr(world, "bound_device_id", None)
    if world is None or device is None:
        yield
        return
    world.bound_device_id = None
    try:
        yield
    finally:
        world.bound_device_id = device


def has_average(group: dist.ProcessGroup, device_type: str) -> bool:
    """Whether the backend's reduce-scatter knows a mean for every dtype (gloo's does not)."""
    return backend_name(group, device_type) == "nccl"


# Copies of many tensors in one kernel.


def fuses_copies(device: torch.device) -> bool:
    """Whether ``chunk_cat`` and ``split_with_sizes_copy`` are one kernel each on ``device``."""
    return device.type == "cuda"


def chunk_cat(sources: Sequence[Tensor], out: Tensor) -> None:
    """Write to row r of ``out`` (2-D) the r-th of ``len(out)`` chunks of dim 0 of each source.

    A chunk has its share of rows, rounded up; where there are fewer, zeros. The sources are
    contiguous, as a kernel reads them so in any case.
    """
    is_mixed = len({source.dtype for source in sources}) > 1
    chunk_cat = torch.ops.fsdp.chunk_cat_mixed_dtype if is_mixed else torch._chunk_cat
    chunk_cat(list(sources), 0, len(out), out=out)


def split_copy(source: Tensor, places: Sequence[Tensor]) -> None:
    """Copy ``source`` (2-D) to ``places``, which lie side by side in it; all are contiguous."""
    torch.split_with_sizes_copy(source, [p.shape[1] for p in places], dim=1, out=list(places))


def casts_in_chunk_cat(sources: set[torch.dtype], out: torch.dtype) -> bool:
    """Whether ``chunk_cat`` is one kernel for each of ``sources``."""
    if len(sources) > 1 and not hasattr(torch.ops.fsdp, "chunk_cat_mixed_dtype"):  # new in 2.15
        return False
    return sources == {out} or (sources <= {torch.bfloat16, out} and out is torch.float32)


# Autograd.


def is_profiling() -> bool:
    """Whether a profiler of PyTorch is active."""
    return profiler._is_profiler_enabled


def outside_of_transforms() -> AbstractContextManager[object]:
    """What is made and written here has memory, also where ``torch.func`` runs the forward."""
    if torch._C._functorch.peek_interpreter_stack() is None:
        return _NOTHING
    cleared: AbstractContextManager[object] = temporarily_clear_interpreter_stack()
    return cleared


_NOTHING = nullcontext()


def apply(function: type[torch.autograd.Function], *args: object) -> Any:
    """``function.apply(*args)``, which torch leaves untyped."""
    return function.apply(*args)


def current_task() -> int:
    """Number of the backward call that this thread is in, -1 outside of any."""
    return torch._C._current_graph_task_id()


def queue_end_of_task(callback: Callable[[], None]) -> None:
    """Call ``callback`` when the current backward call ends; drop it if that call fails."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def post_accumulate_grad_hooks(
    params: Iterable[nn.Parameter],
) -> list[tuple[nn.Parameter, Callable[[Tensor], None]]]:
    """What the user registered to be called when the ``grad`` of a parameter is there.

    Optimizers that ``_apply_optimizer_in_backward`` of ``torch.distributed.optim`` made are among
    it: what calls them is a hook on another node than one of ours.
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
    """Answers operations with tensors that have no memory, and reads none of their inputs."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Tensor:
        return torch.empty(args[0].shape, dtype=args[0].dtype, device="meta")


def gradient_node(tensor: Tensor) -> Node:
    """Return the node that receives the gradient of ``tensor``, for a leaf its AccumulateGrad.

    PyTorch asks a view for it, which wrapper subclasses may compute; their memory may be in flight.
    """
    if type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__ or isinstance(tensor, DTensor):
        return get_gradient_edge(tensor).node
    unread = _Unread()  # type: ignore[no-untyped-call]
    with unread, torch.enable_grad(), torch._C.DisableTorchFunctionSubclass():
        computed = torch.neg(tensor).grad_fn
    assert computed is not None
    node = computed.next_functions[0][0]
    assert node is not None
    return node


def set_grad(param: Tensor, grad: Tensor | None) -> None:
    """``param.grad = grad``, also of another dtype than ``param`` expects."""
    if grad is not None and param.grad_dtype not in (None, grad.dtype):
        param.grad = None
        param.grad_dtype = grad.dtype
    param.grad = grad


def put_grad(param: Tensor, grad: Tensor) -> None:
    """``param.grad = grad``, in the dtype that ``param`` expects by now."""
    try:
        param.grad = grad
    except RuntimeError:
        dtype = param.grad_dtype
        if dtype in (None, grad.dtype):
            raise
        param.grad = grad.to(dtype)


def follows_grad_dtype() -> bool:
    """Whether FSDP2 of the installed PyTorch goes by the ``grad_dtype`` of parameters.

    Since 2.15 it reduces and shows gradients in it, unset in the parameter's own dtype, where no
    dtype of reduction is given. Before, it reduces in the dtype of computation, and forgets what
    was set on a parameter that it shards.
    """
    return _VERSION >= (2, 15)


def grad_dtypes(params: Iterable[Tensor]) -> list[torch.dtype | None]:
    """The dtype that ``.grad`` of each must have; None: any."""
    return list(map(_grad_dtype, params))


_grad_dtype = attrgetter("grad_dtype")


def explicit_grad_dtype(param: Tensor) -> tuple[torch.dtype | None] | None:
    """What the user set as ``grad_dtype`` of ``param``, in a tuple; None: nothing.

    None always where FSDP2 of the installed PyTorch does not ask for it.
    """
    is_set = follows_grad_dtype() and param._has_grad_dtype_override  # type: ignore[attr-defined]
    return (param.grad_dtype,) if is_set else None


def keep_grad_dtype(explicit: tuple[torch.dtype | None] | None, param: Tensor) -> None:
    """Set what ``explicit_grad_dtype`` told of another on ``param``, if it has none of its own."""
    if explicit is None or explicit_grad_dtype(param) is not None:
        return
    grad, param.grad = param.grad, None
    (dtype,) = explicit
    param.grad_dtype = dtype
    if grad is not None:
        param.grad = grad.to(dtype or grad.dtype)


def num_pending_nodes(nodes: Iterable[Node]) -> int | None:
    """How many of these accumulating nodes the current backward call will run, or has run.

    None inside of ``autograd.grad``, which accumulates into no leaf.
    """
    try:
        return sum(map(torch._C._will_engine_execute_node, nodes))
    except RuntimeError:
        return None


def node_number(node: Node) -> int:
    """The node's place in the order in which nodes were made; backward runs high ones first."""
    return node._sequence_nr()


def sequence_number() -> int:
    """The number that this thread's next autograd node will get."""
    return torch._C._autograd._get_sequence_nr()


# DTensor. The public ``from_local`` is an autograd function and checks again what we know.


def dtensor_spec(
    mesh: DeviceMesh,
    placements: tuple[Placement, ...],
    *,
    shape: torch.Size,
    stride: tuple[int, ...],
    dtype: torch.dtype,
) -> DTensorSpec:
    """Where a DTensor of this global shape and stride lies."""
    return DTensorSpec(mesh, placements, TensorMeta(shape, stride, dtype))


AnyDTensor = TypeVar("AnyDTensor", bound=DTensor)


def dtensor_around(
    local: Tensor, spec: DTensorSpec, *, requires_grad: bool, cls: type[AnyDTensor]
) -> AnyDTensor:
    """A DTensor of class ``cls`` around ``local`` itself, without a check.

    It takes over where ``local`` begins in its storage, as compilers need it; unless that is at the
    start, PyTorch can neither copy nor pickle it.
    """
    return cls(local, spec, requires_grad=requires_grad)


def dtensor_from_spec(
    local: Tensor, spec: DTensorSpec, *, requires_grad: bool, cls: type[AnyDTensor]
) -> AnyDTensor:
    """A DTensor of class ``cls`` in the memory of ``local``, without a check.

    It is around ``local`` itself if that begins where its storage does.
    """
    if local.storage_offset() and type(local) is Tensor:
        local = own_storage(local)
    return dtensor_around(local, spec, requires_grad=requires_grad, cls=cls)


def local_of(tensor: DTensor) -> Tensor:
    """The local tensor itself (``to_local`` makes a new view each time)."""
    return tensor._local_tensor


def dtensor_like(tensor: DTensor, local: Tensor) -> DTensor:
    """``local``, of the shape of the local tensor of ``tensor``, as a DTensor placed alike."""
    spec = tensor._spec
    meta = spec.tensor_meta
    if meta is not None and meta.dtype != local.dtype:
        meta = TensorMeta(meta.shape, meta.stride, local.dtype)
        spec = replace(spec, tensor_meta=meta)
    return dtensor_from_spec(local, spec, requires_grad=False, cls=type(tensor))


def dtensor_as(tensor: DTensor, cls: type[AnyDTensor]) -> AnyDTensor:
    """One of class ``cls`` around the same local tensor, unknown to autograd."""
    return dtensor_around(tensor._local_tensor, tensor._spec, requires_grad=False, cls=cls)


def repoint(tensor: DTensor, local: Tensor) -> None:
    """Make ``tensor`` stand for another local tensor of the same shape and dtype."""
    tensor._local_tensor = local


def make_param(tensor: Tensor) -> None:
    """Let ``tensor``, of a class of its own, be an ``nn.Parameter`` by ``isinstance``."""
    tensor._is_param = True


class _Seen(threading.local):
    """The handlers that the dispatcher finds in this thread; None for those of all threads."""

    handlers: dict[Any, Any] | None = None


class _Dispatcher(type(DTensor._op_dispatcher)):  # type: ignore[misc]
    """DTensor's dispatcher, in which one thread can do without a handler that others find."""

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
    """Let DTensor call ``handler(op, args, kwargs)`` for ``op``, whatever its arguments are."""
    dispatcher = DTensor._op_dispatcher
    dispatcher.__class__ = _Dispatcher
    dispatcher._custom_op_handlers[op] = _asking_own(handler) if _VERSION < (2, 12) else handler


def _asking_own(handler: Any) -> Any:
    """``handler``, but a class with a ``__torch_dispatch__`` of its own is asked instead."""

    def handle(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        cls = type(args[0])
        if issubclass(cls, OwnDispatch):
            return cast("Any", cls).__torch_dispatch__(op, (cls,), args, kwargs)
        return cast("object", handler(op, args, kwargs))

    return handle


def default_dtensor_op(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """What DTensor itself does for an ``op`` that is handled."""
    before = _seen.handlers
    _seen.handlers = dict(DTensor._op_dispatcher._custom_op_handlers)
    _seen.handlers.pop(op, None)
    try:
        return cast("object", op(*args, **kwargs))
    finally:
        _seen.handlers = before


def transposed_in_place(tensor: DTensor) -> DTensor:
    """``tensor.t_()``, which DTensors do not have."""
    new = cast("DTensor", tensor.detach().t())
    tensor._local_tensor, tensor._spec = new._local_tensor, new._spec
    with no_dispatch():  # what the object itself tells of its shape
        torch.ops.aten.t_.default(tensor)
    return tensor


def shares_storage(one: Tensor, other: Tensor) -> bool:
    """Whether they are views of the same memory."""
    return bool(one.untyped_storage()._cdata == other.untyped_storage()._cdata)


def sharded_dim(placement: Placement) -> int | None:
    """The tensor dim that ``placement`` cuts, strided or not."""
    return placement.dim if isinstance(placement, (Shard, StridedShard)) else None


def is_sum(placement: Placement) -> bool:
    """Whether ranks hold terms of a sum or a mean, and nothing more is to it.

    Subclasses, such as that of an embedding's output, mask or scale what they hold.
    """
    return type(placement) is Partial and placement.reduce_op in ("sum", "avg")


def is_mean(placement: Placement) -> bool:
    """Whether it is a mean."""
    return type(placement) is Partial and placement.reduce_op == "avg"


def waited(tensor: Tensor) -> Tensor:
    """``tensor``, or the result of the collective that it stands for, once that is there."""
    if isinstance(tensor, AsyncCollectiveTensor):
        return cast("Tensor", tensor.trigger_wait())
    return tensor


# Meshes. The dims of a mesh and of its slices are cuts of one list of ranks, their root's.


def root_ranks(mesh: DeviceMesh) -> tuple[int, ...]:
    """The ranks of the mesh that ``mesh`` is a slice of, in order; equal for equal roots."""
    return mesh._flatten_rank_map


def joined_mesh(meshes: Sequence[DeviceMesh]) -> DeviceMesh:
    """All dims of named slices of one root, as one mesh with their groups.

    Raises:
        RuntimeError: they have different roots, or overlap.
    """
    return DeviceMesh._concatenate(list(meshes))


def flattened_mesh(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """``mesh`` as a 1-D mesh; its group is made the first time, by a collective of all ranks.

    Raises:
        ValueError: the name is that of other dims.
    """
    return mesh._flatten(name)


def is_replicated(module: nn.Module) -> bool:
    """Whether ``replicate``, the function for DDP, was applied to ``module``."""
    contract = _contract()
    return contract is not None and "replicate" in module.__dict__.get(contract.REGISTRY_KEY, ())


def has_spmd_types(param: Tensor) -> bool:
    """Whether ``param`` says over which axes it is cut by the package ``spmd_types``.

    PyTorch's FSDP2 takes such parameters from 2.15 on. Who annotates has imported the package.
    """
    package = sys.modules.get("spmd_types")
    return package is not None and bool(package.get_local_type(param))


def mark_sharded(module: nn.Module) -> None:
    """Let ``replicate`` around ``module`` leave its parameters to us."""
    contract = _contract()
    if contract is not None:
        registry = module.__dict__.setdefault(contract.REGISTRY_KEY, {})
        registry.setdefault("fully_shard", contract.RegistryItem())


def _contract() -> Any:
    """The registry of torch's functions for modules; whoever uses ``replicate`` has imported it."""
    return sys.modules.get("torch.distributed._composable.contract")


def overrides_setattr(module: nn.Module) -> bool:
    """Whether assigning an attribute of ``module`` does more than ``nn.Module`` does."""
    return type(module).__setattr__ is not nn.Module.__setattr__


Function = TypeVar("Function", bound=Callable[..., Any])


def never_compiled(function: Function) -> Function:
    """``function``, which Dynamo leaves alone, with all that it calls.

    ``torch.compiler.disable`` does the same by a wrapper that costs host time at each call, and
    imports the compiler.
    """
    marked: Any = function
    marked._torchdynamo_disable = True
    marked._torchdynamo_disable_msg = "fullshard moves parameters here"
    skip = eval_frame._FrameAction.SKIP
    eval_frame.set_code_exec_strategy(marked.__code__, eval_frame._FrameExecStrategy(skip, skip))
    return function


def num_holders(tensors: list[Tensor]) -> int:
    """Grows while somebody else, in Python or in C++, refers to one of ``tensors``."""
    return sum(map(sys.getrefcount, tensors)) + sum(map(_num_uses, tensors))


_num_uses: Callable[[Tensor], int] = Tensor._use_count  # type: ignore[attr-defined]


def num_owners(storages: Iterable[torch.UntypedStorage]) -> int:
    """How many tensors and others share these storages."""
    return sum(map(torch._C._storage_Use_Count, map(_address_of_storage, storages)))


_address_of_storage = attrgetter("_cdata")


def own_storage(view: Tensor) -> Tensor:
    """The memory of ``view`` as a tensor with a storage of just that part.

    What is pickled takes its whole storage along.
    """
    return own_part(view, 0, view.shape, view.stride())


def own_part(
    flat: Tensor, start: int, shape: Sequence[int], stride: Sequence[int] | None = None
) -> Tensor:
    """Elements of ``flat`` from number ``start`` on, with a storage of just that part.

    ``stride`` is None for a contiguous tensor.
    """
    if flat.is_meta:
        return flat.new_empty(shape)
    length = prod(shape)
    if stride is not None and length:
        length = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    begin = (flat.storage_offset() + start) * flat.itemsize
    storage = flat.untyped_storage()[begin : begin + length * flat.itemsize]
    part = torch.empty(0, dtype=flat.dtype, device=flat.device)
    # Without strides it is contiguous, which torch's annotations do not say.
    return part.set_(storage, 0, shape, () if stride is None else stride)


def keep_alive(tensor: Tensor, other: Tensor) -> None:
    """Let ``other`` live as long as the storage of ``tensor``, which does not count it.

    The Python object of a storage lives as long as that, and no copy takes its attributes along.
    """
    tensor.untyped_storage().kept_alive = other  # type: ignore[attr-defined]


def is_fake(tensor: Tensor) -> bool:
    """Whether ``tensor`` only plays its part, under a ``FakeTensorMode``."""
    return isinstance(tensor, FakeTensor)


def preserved_versions(tensors: Iterable[Tensor]) -> AbstractContextManager[None]:
    """What is written to ``tensors`` in the block is no modification in the eyes of autograd."""
    return _unsafe_preserve_version_counter(tuple(tensors))


def versions(tensors: Iterable[Tensor]) -> int:
    """Grows whenever one of ``tensors`` is visibly written."""
    return sum(map(_version, tensors))


_version = attrgetter("_version")
