"""Autograd hooks, by which we learn what happens in backward; no other file registers any.

    backward_enter   a pre-hook on the node that made an output (for a view, that made its base).
    grads_ready      post-accumulate hooks, which count until all parameters that this task will
                     reach have their gradients.
    task_end/died    a callback at the end of each task. If autograd deletes the callback without
                     calling it, the task died.

Autograd runs younger nodes first. So when backward enters a use, it has left all uses that began
after the forward of that use. Entering one use usually tells us that another was left. Otherwise a
further hook does.

    backward_leave   a pre-hook on the node that made an input of the use, unless a unit made it.

This hook alone would not be enough. It runs late if an input is shared by many units
(cross-attention), and never for inputs that are leaves. Gradients of leaves may come before others
of the unit. A use that made no node of an output, because it returns an input, has a hook on that
tensor instead, which makes us watch the end of the task.

Autograd has a queue and a thread for each device, and younger nodes come first only within a queue.
So our hooks are on nodes of the unit's own device. For an output on another device, such as an
auxiliary loss that was moved to the CPU, we hook the nodes of the unit's device that it was made
from. An input on another device gets no hook.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import NoReturn

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node

from fullshard._torch import autograd as _autograd
from fullshard.engine.unit import Unit
from fullshard.engine.unshard import Unsharded
from fullshard.errors import BusyError, ProtocolError
from fullshard.schedule import triggers as when
from fullshard.schedule.triggers import NO_TASK, Accumulates, Follows, Trigger

log = logging.getLogger("fullshard")

_LINGERS_S = 10.0
"""For how long a forward waits for the end of backwards that this thread is not in."""


@dataclass(slots=True)
class _Arrivals:
    """The gradients that one task brings to one unit."""

    expected: int | None
    """Number of gradients; None: the task is ``autograd.grad``, which accumulates nowhere."""
    count: int = 0
    unreduced: bool = False


class Backward:
    """A watcher of backward, which reports to its engine through ``trigger``."""

    lock: threading.RLock
    """Held by a thread while the engine handles its trigger.

    The thread may wait for other ranks meanwhile, but cannot deadlock. Each rank issues the same
    collectives in the same order under its own lock. The threads that help a collective to end
    (those that carry bytes, and the watcher) never take the lock. No thread holds the lock while a
    module's forward or autograd runs, and destructors never wait for the lock.
    """

    def __init__(
        self, trigger: Callable[[Trigger], None], forward_elsewhere: Callable[[], bool]
    ) -> None:
        self.trigger = trigger
        self.lock = threading.RLock()
        self.hooked: set[int] = set()  # numbers of the nodes that made the last use's outputs
        self.dead: deque[int] = deque()  # tasks that died and were not reported yet
        self._forward_elsewhere = forward_elsewhere  # whether another thread is in a forward
        self.tasks: dict[int, dict[int, _Arrivals]] = {}  # running task -> unit key -> arrivals

    def task(self) -> int:
        """Return the task that this thread is in, and watch for the end of that task."""
        task = _autograd.current_task()
        if task != NO_TASK and task not in self.tasks:
            with self.lock:  # two threads may come to the task at the same time
                if task not in self.tasks:
                    self.tasks[task] = {}
                    _autograd.queue_end_of_task(_EndOfTask(self, task))
        return task

    def are_over(self) -> bool:
        """Wait for the end of all tasks, which this thread is not in; return whether it came.

        A thread of autograd may keep a task that died for a moment after the caller of backward has
        caught the exception.
        """
        if not self.tasks:
            return True
        deadline_s = time.monotonic() + _LINGERS_S
        while self.tasks and time.monotonic() < deadline_s:
            time.sleep(1e-3)
            self.report_dead()
        return not self.tasks

    def watch(self, unit: Unit, params: Iterable[nn.Parameter]) -> None:
        """Watch for every gradient that reaches one of these unsharded parameters of ``unit``.

        The hooks refer to us weakly: autograd's nodes, which the unit keeps, hold the parameters,
        and so whatever their hooks hold, where the garbage collector cannot see it.
        """
        unit.forget_nodes()
        arrived = _Counter(weakref.ref(self), weakref.ref(unit)).arrived
        for param in params:
            if param.is_floating_point() or param.is_complex():
                param.requires_grad_(True)  # hooks need it; the unit sets it again afterwards
                param.register_post_accumulate_grad_hook(arrived)

    def arrivals(self, unit: Unit, task: int) -> _Arrivals:
        """Return the gradients that ``task`` brings to ``unit``; expected ones are counted once."""
        units = self.tasks[task]
        arrivals = units.get(unit.key)
        if arrivals is None:
            expected = _autograd.num_pending_nodes(unit.grad_nodes())
            arrivals = units[unit.key] = _Arrivals(expected)
        return arrivals

    def left(self, until: int) -> None:
        """Report that the current task, if we watch it, has left all uses above ``until``."""
        task = _autograd.current_task()
        if task in self.tasks:
            self.trigger(when.BackwardLeave(task, until))

    def reduced(self, unit: Unit) -> None:
        """Record that the gradients of ``unit`` were taken off its parameters."""
        for units in self.tasks.values():
            if unit.key in units:
                units[unit.key].unreduced = False

    def ended(self, task: int) -> None:
        """Report the end of ``task``; called by autograd."""
        with self.lock:
            self.trigger(when.TaskEnd(task, self._close(task)))

    def died(self, task: int) -> None:
        """Report that autograd gave up ``task``, at once or before the next trigger.

        Called from a destructor, perhaps in a thread of autograd at any moment.
        """
        self.dead.append(task)
        self.report_dead()

    def report_dead(self) -> None:
        """Report the tasks that died, unless another thread is in a trigger or in a forward."""
        while self.dead and self.lock.acquire(blocking=False):
            try:
                if not self.dead or self._forward_elsewhere():
                    return
                task = self.dead.popleft()
                self.trigger(when.TaskDied(task, self._close(task)))
            except RuntimeError as error:
                # The exception that matters is another one, which propagates or was caught: if a
                # peer is gone, the reductions in flight cannot be finished.
                log.debug("after a backward that died: %s", error)
            finally:
                self.lock.release()

    def _close(self, task: int) -> tuple[int, ...]:
        units = self.tasks.pop(task, {})
        return tuple(key for key, arrivals in units.items() if arrivals.unreduced)


class _Counter:
    """A counter of gradients that reach one unit's parameters; lean, as each gradient calls it.

    The counter refers to ``Backward`` and ``Unit`` weakly.
    """

    __slots__ = ("_arrivals", "_backward", "_task", "_unit")

    def __init__(self, backward: weakref.ref[Backward], unit: weakref.ref[Unit]) -> None:
        self._backward = backward
        self._unit = unit
        self._task = NO_TASK
        self._arrivals = _Arrivals(None)  # the arrivals of ``_task``

    def arrived(self, param: Tensor) -> None:
        """Count one gradient, and report when it was the last."""
        if self._task != _autograd.current_task():
            self._turn_to_current_task()
        arrivals = self._arrivals
        arrivals.count += 1
        arrivals.unreduced = True
        if arrivals.count == arrivals.expected:
            backward, unit = self._backward(), self._unit()
            if backward is not None and unit is not None:
                backward.trigger(when.GradsReady(unit.key, self._task))

    def _turn_to_current_task(self) -> None:
        backward, unit = self._backward(), self._unit()
        if backward is not None and unit is not None:
            with backward.lock:
                self._task = backward.task()
                self._arrivals = backward.arrivals(unit, self._task)


class _EndOfTask:
    """A callback that autograd calls at the end of a task, or drops when the task fails."""

    def __init__(self, backward: Backward, task: int) -> None:
        self._backward: Backward | None = backward
        self._task = task

    def __call__(self) -> None:
        backward, self._backward = self._backward, None
        if backward is not None:
            backward.ended(self._task)

    def __del__(self) -> None:
        backward, self._backward = self._backward, None
        if backward is not None:
            backward.died(self._task)


class _PassedBy:
    """A hook on an input that a unit returns: backward, once here, watches for the task's end."""

    def __init__(self, backward: Backward) -> None:
        self.backward = weakref.ref(backward)

    def __call__(self, grad: Tensor) -> None:
        backward = self.backward()
        if backward is not None:
            backward.task()


def _is_watched(tensor: Tensor, backward: Backward) -> bool:
    """Return whether a leaf, which lives from step to step, has such a hook already."""
    hooks = _autograd.grad_hooks(tensor) if tensor.is_leaf else ()
    return any(isinstance(hook, _PassedBy) and hook.backward() is backward for hook in hooks)


@dataclass(slots=True)
class Use:
    """One forward call of a unit, as autograd's graph remembers it."""

    backward: Backward
    unit: Unit
    number: int
    _first_nodes: list[int] = field(default_factory=list)
    """The number of the first autograd node of each running call, innermost call last."""
    _inputs: list[Tensor] = field(default_factory=list)
    """The inputs, kept only while the forward runs and holds them anyway."""
    _input_nodes: list[Node] = field(default_factory=list)
    """The nodes that made the inputs and the inputs' bases, kept for as long as the inputs."""
    _sides: tuple[Unsharded | None, ...] = ()
    """The unsharded sides that the forward read."""

    @property
    def running(self) -> bool:
        """True while a forward of this use runs."""
        return bool(self._first_nodes)

    def watch(self) -> None:
        """Hook the inputs of this use, which has just begun, to learn when backward leaves it.

        Outputs of the last use need no hook: backward reports when it enters that use.
        """
        if not torch.is_grad_enabled():
            return
        hooked, device = self.backward.hooked, self.unit.device
        for tensor in self._inputs:
            node = tensor.grad_fn
            if node is None or _autograd.node_number(node) in hooked:
                continue
            if is_on(device, tensor):  # else another thread may come to it before we are left
                node.register_prehook(self._input_grad)

    def _input_grad(self, grads: tuple[Tensor | None, ...]) -> None:
        self.backward.left(self.number - 1)

    def begin(self, inputs: Iterable[Tensor]) -> None:
        """Begin a forward call of this use on ``inputs``."""
        self._first_nodes.append(_autograd.sequence_number())
        for tensor in inputs:
            self._inputs.append(tensor)
            for node in (tensor.grad_fn, base_of(tensor).grad_fn):
                if node is not None:
                    self._input_nodes.append(node)
        self._sides = self.unit.sides()

    def end(self, outputs: Iterable[Tensor], last_use: int, inside: Iterable[Unit]) -> Follows:
        """End the forward call: hook its outputs to learn when backward will enter this use.

        Return whether we see all paths back. Backward runs younger nodes first, so a node that the
        outputs do not show is safe if older than their youngest node, and unseen if younger.
        Nodes of the inputs are recognized by identity, not by number: each thread numbers its own
        nodes, and a checkpoint runs the forward again in the thread of backward.
        """
        first, made, outputs = self._first_nodes.pop(), _autograd.sequence_number(), list(outputs)
        inputs, input_nodes = self._inputs, self._input_nodes  # alive, so that ids stay unique
        given = set(map(id, input_nodes))
        if not self._first_nodes:
            self._inputs, self._input_nodes = [], []

        def is_new(base: Tensor) -> bool:
            return all(base_of(tensor) is not base for tensor in inputs)

        if not torch.is_grad_enabled():
            reads = any(is_leaf(base) and is_new(base) for base in map(base_of, outputs))
            return Follows.READS if reads else Follows.NOTHING
        newest = first - 1
        outside = False  # True: a parameter is handed out, and may be read where no hook is
        nodes: dict[int, Node] = {}
        hooked: set[int] = set()
        device = self.unit.device
        elsewhere: Elsewhere | None = None
        # An input that was changed in place is an output too, because it may be read afterwards.
        for tensor in chain(outputs, inputs):
            base = base_of(tensor)
            if is_leaf(base):
                outside = outside or is_new(base)
            elif base.grad_fn is None:
                continue
            elif not is_on(device, tensor):
                elsewhere = elsewhere or Elsewhere(device, range(first, made), given)
                elsewhere.follow(base.grad_fn)
                elsewhere.follow(tensor.grad_fn)
                continue
            elif _autograd.node_number(base.grad_fn) >= first and id(base.grad_fn) not in given:
                nodes[id(base.grad_fn)] = base.grad_fn
            if tensor.grad_fn is not None and id(tensor.grad_fn) not in given:
                number = _autograd.node_number(tensor.grad_fn)
                newest = max(newest, number)
                if number >= first:
                    hooked.add(number)
        self.backward.hooked = hooked
        if elsewhere is not None and elsewhere.outputs:
            if nodes or elsewhere.entries:
                more = elsewhere.entries
                outside = outside or elsewhere.may_read
                while made - 1 in elsewhere.numbers:  # younger than the hooked nodes, and harmless
                    made -= 1
            else:  # nothing is computed on the unit's device
                more = elsewhere.outputs
            nodes |= more
            newest = max([newest, *map(_autograd.node_number, more.values())])
        for node in nodes.values():
            node.register_prehook(partial(self._output_grad, last_use))
        if not nodes:  # the outputs may be nothing but inputs
            for tensor in outputs:
                if tensor.requires_grad and not _is_watched(tensor, self.backward):
                    tensor.register_hook(_PassedBy(self.backward))
        if outside or (newest < made - 1 and _can_have_graph(inside, inputs)):
            return Follows.HIDDEN
        return Follows.BACKWARD if newest >= first else Follows.NOTHING

    def _output_grad(self, until: int, grads: tuple[Tensor | None, ...]) -> None:
        backward = self.backward
        with backward.lock:
            self.unit.check_not_lent("a backward")
            self._check_readable()
            self.unit.check_not_replaced()
            self.unit.sync_requires_grad()  # another forward may have run with parameters frozen
            task = backward.task()
            expected = backward.arrivals(self.unit, task).expected
            if expected is None:
                accumulates = Accumulates.NOWHERE
            else:
                accumulates = Accumulates.HERE if expected else Accumulates.ELSEWHERE
            keeps_graph = torch.is_grad_enabled()
            backward.trigger(
                when.BackwardEnter(
                    self.unit.key, self.number, task, until, accumulates, keeps_graph=keeps_graph
                )
            )

    def _check_readable(self) -> None:
        """Raise ``ProtocolError`` unless the unsharded side is still what the forward read."""
        if self.unit.sides() != self._sides:
            raise ProtocolError(
                f"a backward through unit {self.unit.shown_name} came after the unit was "
                "moved, cast, or changed in precision or communication since the forward; what "
                "that read is gone. Call backward() before"
            )


def _can_have_graph(units: Iterable[Unit], inputs: Iterable[Tensor]) -> bool:
    """Return whether anything in a forward on ``inputs`` inside of ``units`` may need gradients.

    Node numbers cannot tell: a custom Function takes one even if no tensor requires grad.
    """
    trainable = any(bucket.trainable for unit in units for bucket in unit.buckets)
    return trainable or any(tensor.requires_grad for tensor in inputs)


def refuse_gradients(unit: Unit, params: Iterable[Tensor]) -> None:
    """Make a backward that reaches ``params`` raise ``BusyError``; ``unit`` lends them now."""
    for param in params:
        hooks = _autograd.grad_hooks(param)
        if param.requires_grad and not any(isinstance(hook, _Refusal) for hook in hooks):
            param.register_hook(_Refusal(unit))


class _Refusal:
    """A hook of a lent parameter."""

    def __init__(self, unit: Unit) -> None:
        assert unit.lending is not None
        self._where = f"unit {unit.shown_name} that {unit.lending.call}"

    def __call__(self, grad: Tensor) -> NoReturn:
        raise BusyError(
            f"a backward came to parameters of {self._where} lent to the forward: gradients would "
            "reach no shard. Run the forward outside of the with block, or in torch.no_grad()"
        )


# Which tensors the nodes of one forward made, and on which device backward runs them. Autograd has
# one queue and one thread for each device, and runs younger nodes first within a queue only.
# Between two queues, the graph alone orders nodes.


def base_of(tensor: Tensor) -> Tensor:
    """Return the tensor that ``tensor`` is a view of as autograd sees it, or ``tensor`` itself.

    A view that a custom Function returns, such as the result of ``DTensor.to_local``, has its own
    node while its base has none.
    """
    base = tensor._base
    if base is None or (base.grad_fn is None and not base.requires_grad):
        return tensor
    return base


def is_leaf(tensor: Tensor) -> bool:
    """Return whether ``tensor`` may be a parameter, or is another leaf that needs gradients."""
    return isinstance(tensor, nn.Parameter) or (tensor.requires_grad and tensor.grad_fn is None)


def is_on(device: torch.device, tensor: Tensor) -> bool:
    """Return whether ``tensor`` is on ``device``, or on the meta device as in a dry run."""
    return tensor.device == device or tensor.is_meta


class Elsewhere:
    """The nodes of a forward between its outputs on other devices and the nodes of ``device``.

    Args:
        device: the device of the unit.
        made: the numbers of the nodes that the forward made.
        given: the ids of the nodes that made its inputs.
    """

    def __init__(self, device: torch.device, made: range, given: Container[int]) -> None:
        self._device, self._made, self._given = device, made, given
        self.outputs: dict[int, Node] = {}
        """The nodes that made the outputs, by id."""
        self.entries: dict[int, Node] = {}
        """The first nodes of ``device`` behind them, by id: backward enters through these."""
        self.numbers: set[int] = set()
        """The numbers of the nodes on other devices that were found."""
        self.may_read = False
        """True if one of them is a custom Function, which may read the unit's parameters; PyTorch's
        own nodes on other devices only copy."""

    def follow(self, output: Node | None) -> None:
        """Follow the node that made an output to the first nodes of ``device``."""
        if output is None or not self._is_ours(output):
            return
        self.outputs[id(output)] = output
        ahead = [output]
        while ahead:
            node = ahead.pop()
            number = _autograd.node_number(node)
            if _autograd.node_device(node) == self._device:
                self.entries[id(node)] = node
            elif number not in self.numbers:
                self.numbers.add(number)
                self.may_read = self.may_read or isinstance(node, BackwardCFunction)
                ahead += [one for one, _ in node.next_functions if one and self._is_ours(one)]

    def _is_ours(self, node: Node) -> bool:
        return _autograd.node_number(node) in self._made and id(node) not in self._given
