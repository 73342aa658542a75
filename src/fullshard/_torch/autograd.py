"""Autograd: backward calls, their nodes and hooks, and the gradients of parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import profiler
from torch.autograd.graph import Node, get_gradient_edge
from torch.distributed.tensor import DTensor
from torch.utils import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode

from fullshard._torch.memory import READS, num_holders
from fullshard._torch.names import VERSION, Private

private = Private(__name__, "training")

current_task: Callable[[], int] = private.get("torch._C._current_graph_task_id")
"""Return the number of the backward call that this thread is in, -1 outside of any."""
sequence_number: Callable[[], int] = private.get("torch._C._autograd._get_sequence_nr")
"""Return the number that this thread's next autograd node will get."""
_will_run: Callable[[Node], bool] = private.get("torch._C._will_engine_execute_node")
queue_end_of_task: Callable[[Callable[[], None]], None]
queue_end_of_task = private.get("torch.autograd.Variable._execution_engine.queue_callback")
"""Call a function when the current backward call ends; drop it if that call fails."""
_run_backward = private.get("torch.autograd.graph._engine_run_backward", "`fullshard.plan`")
preserved_versions: Callable[[tuple[Tensor, ...]], AbstractContextManager[None]] = private.get(
    "torch.autograd.grad_mode._unsafe_preserve_version_counter", "tensors with all-gather hooks"
)
"""Return a context in which autograd does not count writes to the tensors as modifications."""
no_torch_functions: Callable[[], AbstractContextManager[None]] = private.get(
    "torch._C.DisableTorchFunction", "faster plans", instead=nullcontext
)
"""Return a context in which PyTorch calls no ``__torch_function__``."""
set_versions: Callable[[tuple[Tensor, ...], tuple[int, ...]], None] = private.get(
    "torch._C._autograd._unsafe_set_version_counter", READS, instead=lambda *_: None
)
"""Set the version counter of each tensor, which views and detached tensors share."""
_FUNC = "units inside of `torch.func` transforms"
_transform = private.get("torch._C._functorch.peek_interpreter_stack", _FUNC, instead=lambda: None)
_clear_transforms: Callable[[], AbstractContextManager[object]] = private.get(
    "torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack", _FUNC, instead=nullcontext
)


def is_profiling() -> bool:
    """Return whether a PyTorch profiler is active."""
    return profiler._is_profiler_enabled


def outside_of_transforms() -> AbstractContextManager[object]:
    """Return a context outside of ``torch.func`` transforms, so that tensors in it have memory."""
    return _NOTHING if _transform() is None else _clear_transforms()


_NOTHING = nullcontext()


def apply(function: type[torch.autograd.Function], *args: object) -> Any:
    """Call ``function.apply(*args)``, which torch leaves untyped."""
    return function.apply(*args)


def ends_recomputation(error: BaseException | None) -> bool:
    """Return whether ``error`` is how a checkpoint leaves a forward that it needs no more of."""
    return isinstance(error, checkpoint._StopRecomputationError)


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


def steps_in_backward(param: Tensor) -> bool:
    """Return whether ``_apply_optimizer_in_backward`` made an optimizer for ``param``."""
    return hasattr(param, "_in_backward_optimizers")


def grad_hooks(param: Tensor) -> Iterable[Callable[[Tensor], Tensor | None]]:
    """Return the hooks that ``register_hook`` put on ``param``."""
    return (param._backward_hooks or {}).values()


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


@cache
def num_holders_of_a_node() -> int:
    """Return by how much ``num_holders`` of a leaf grows while its ``gradient_node`` is held."""
    with torch.inference_mode(False), torch.enable_grad(), outside_of_transforms():
        leaf = torch.zeros((), requires_grad=True)
        before = num_holders([leaf])
        node = gradient_node(leaf)
        after = num_holders([leaf])
    del node
    return after - before


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
    return VERSION >= (2, 15)


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
        return sum(map(_will_run, nodes))
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


def run_backward(loss: Tensor) -> None:
    """Do what ``loss.backward()`` does, without a look for function modes.

    A mode that handles ``backward`` is off meanwhile, and misses forwards that checkpoints repeat.
    """
    ones = torch.ones_like(loss, memory_format=torch.preserve_format)
    _run_backward((loss,), (ones,), False, False, (), allow_unreachable=True, accumulate_grad=True)


def versions(tensors: Iterable[Tensor]) -> int:
    """Return a count that grows whenever one of ``tensors`` is visibly written."""
    return sum(versions_of(tensors))


def versions_of(tensors: Iterable[Tensor]) -> tuple[int, ...]:
    """Return the version counter of each tensor."""
    with torch._C.DisableTorchFunctionSubclass():
        return tuple(map(_version, tensors))


def requires_grad(tensors: Iterable[Tensor]) -> list[bool]:
    """Return ``requires_grad`` of each tensor; asking subclasses would take twice as long."""
    with torch._C.DisableTorchFunctionSubclass():
        return list(map(_requires_grad, tensors))


_version = attrgetter("_version")
_requires_grad = attrgetter("requires_grad")


private.attributes("torch.Tensor", "_post_accumulate_grad_hooks _version")
private.attributes("torch.Tensor", "_backward_hooks", "`fullshard.unshard_params`")
private.attributes("torch.autograd.graph.Node", "_sequence_nr")
private.attributes("torch.autograd.graph.Node", "_input_metadata", "backward on accelerators")
private.attributes("torch.utils.checkpoint", "_StopRecomputationError", "activation checkpointing")
private.attributes("torch._C", "_DisableFuncTorch DisableTorchFunctionSubclass")
if follows_grad_dtype():
    private.attributes("torch.Tensor", "_has_grad_dtype_override")
private.attributes(
    "torch.autograd.profiler", "_is_profiler_enabled", "names of units in profiles", instead=bool
)
