"""How autograd tells us what happens in backward; the only place with autograd hooks.

    backward_enter   a pre-hook on the node that made an output (of a view, that made its base)
    grads_ready      post-accumulate hooks, counted down from the parameters that this very task
                     will reach
    task_end/died    a callback at the end of each task; its deletion without a call means that
                     the task died

Autograd runs younger nodes first, so on entering a use backward has left all that began after that
one's forward. That it has left one shows there, as a rule, and else at

    backward_leave   a pre-hook on the node that made an input of the use, where no unit did

which alone would not do: it comes late where an input is shared by many units (cross-attention),
and never where inputs are leaves, whose gradients may come before others of the unit. A use that
made no node of an output, because it hands an input on, has a hook on that tensor instead, by which
the end of the task is told.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from itertools import chain

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from fullshard import _torch
from fullshard.engine.extended import AnyUnsharded
from fullshard.engine.unit import Unit
from fullshard.errors import ProtocolError
from fullshard.schedule import triggers as when
from fullshard.schedule.triggers import NO_TASK, Accumulates, Follows, Trigger

log = logging.getLogger("fullshard")


@dataclass(slots=True)
class _Arrivals:
    """Gradients that one task brings to one unit."""

    expected: int | None
    """None: the task is ``autograd.grad``, which accumulates into no parameter."""
    count: int = 0
    unreduced: bool = False


class Backward:
    """Watches backward on behalf of an engine, which it tells through ``trigger``."""

    def __init__(self, trigger: Callable[[Trigger], None]) -> None:
        self.trigger = trigger
        self.hooked: set[int] = set()  # numbers of the nodes that made outputs of the last use
        self._tasks: dict[int, dict[int, _Arrivals]] = {}  # task -> unit key -> arrivals

    def task(self) -> int:
        """The task that this thread is in, with its end watched."""
        task = _torch.current_task()
        if task != NO_TASK and task not in self._tasks:
            self._tasks[task] = {}
            _torch.queue_end_of_task(_EndOfTask(self, task))
        return task

    def watch(self, unit: Unit, params: Iterable[nn.Parameter]) -> None:
        """Learn of every gradient that reaches one of these unsharded parameters of ``unit``.

        The hooks refer to us weakly: autograd's nodes, which the unit keeps, hold the parameters
        where the garbage collector does not look, and with them whatever their hooks hold.
        """
        unit.forget_nodes()
        arrived = _Counter(weakref.ref(self), weakref.ref(unit)).arrived
        for param in params:
            if param.is_floating_point() or param.is_complex():
                param.requires_grad_(True)  # or it would refuse the hook; the unit sets it anew
                param.register_post_accumulate_grad_hook(arrived)

    def arrivals(self, unit: Unit, task: int) -> _Arrivals:
        """What ``task`` brings to ``unit``; counted once per task."""
        units = self._tasks[task]
        arrivals = units.get(unit.key)
        if arrivals is None:
            expected = _torch.num_pending_nodes(unit.grad_nodes())
            arrivals = units[unit.key] = _Arrivals(expected)
        return arrivals

    def left(self, until: int) -> None:
        """The current task has left all uses above ``until``, if it ever was in one of a unit."""
        task = _torch.current_task()
        if task in self._tasks:
            self.trigger(when.BackwardLeave(task, until))

    def reduced(self, unit: Unit) -> None:
        """The gradients of ``unit`` were taken off its parameters."""
        for units in self._tasks.values():
            if unit.key in units:
                units[unit.key].unreduced = False

    def ended(self, task: int) -> None:
        """Called by autograd at the end of ``task``."""
        self.trigger(when.TaskEnd(task, self._close(task)))

    def died(self, task: int) -> None:
        """``task`` was given up by autograd."""
        try:
            self.trigger(when.TaskDied(task, self._close(task)))
        except RuntimeError as error:
            # Called from a destructor, while the exception that matters is on its way: with a
            # peer gone, the reductions in flight cannot be finished.
            log.debug("after a backward that died: %s", error)

    def _close(self, task: int) -> tuple[int, ...]:
        units = self._tasks.pop(task, {})
        return tuple(key for key, arrivals in units.items() if arrivals.unreduced)


class _Counter:
    """Counts the gradients that reach the parameters of one unit; called for each, so it is lean.

    It refers to backward and unit weakly.
    """

    __slots__ = ("_arrivals", "_backward", "_task", "_unit")

    def __init__(self, backward: weakref.ref[Backward], unit: weakref.ref[Unit]) -> None:
        self._backward = backward
        self._unit = unit
        self._task = NO_TASK
        self._arrivals = _Arrivals(None)  # of that task

    def arrived(self, param: Tensor) -> None:
        """A gradient is there."""
        if self._task != _torch.current_task():
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
            self._task = backward.task()
            self._arrivals = backward.arrivals(unit, self._task)


class _EndOfTask:
    """Autograd calls it at the end of a task, or drops it when the task fails."""

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


def _passed_by(backward: weakref.ref[Backward], grad: Tensor) -> None:
    """Backward came by an output that no unit made: gradients that wait are reduced at its end."""
    watching = backward()
    if watching is not None:
        watching.task()


def _base(tensor: Tensor) -> Tensor:
    """What ``tensor`` is a view of in the eyes of autograd, or itself.

    A view that a custom Function returns has a node of its own, and its base has none, such as
    what ``DTensor.to_local`` gives.
    """
    base = tensor._base
    if base is None or (base.grad_fn is None and not base.requires_grad):
        return tensor
    return base


def _is_leaf(tensor: Tensor) -> bool:
    """Whether it may be a parameter, or is another source of gradients."""
    return isinstance(tensor, nn.Parameter) or (tensor.requires_grad and tensor.grad_fn is None)


@dataclass(slots=True)
class Use:
    """One forward call of a unit, as autograd's graph remembers it."""

    backward: Backward
    unit: Unit
    number: int
    _first_nodes: list[int] = field(default_factory=list)
    """For each running call, innermost last: the number of the first autograd node it makes."""
    _inputs: list[Tensor] = field(default_factory=list)
    """Only while the forward runs, and has them anyway."""
    _input_nodes: list[Node] = field(default_factory=list)
    """Those that made the inputs and what they are views of, for as long."""
    _sides: tuple[AnyUnsharded | None, ...] = ()
    """What the forward read."""

    @property
    def running(self) -> bool:
        """Whether a forward of this use is under way."""
        return bool(self._first_nodes)

    def watch(self) -> None:
        """Learn by its inputs when backward leaves this use, which has just begun.

        Not by what a unit has just made: backward tells when it enters that.
        """
        if not torch.is_grad_enabled():
            return
        hooked = self.backward.hooked
        for tensor in self._inputs:
            node = tensor.grad_fn
            if node is not None and _torch.node_number(node) not in hooked:
                node.register_prehook(self._input_grad)

    def _input_grad(self, grads: tuple[Tensor | None, ...]) -> None:
        self.backward.left(self.number - 1)

    def begin(self, inputs: Iterable[Tensor]) -> None:
        """The forward begins."""
        self._first_nodes.append(_torch.sequence_number())
        for tensor in inputs:
            self._inputs.append(tensor)
            for node in (tensor.grad_fn, _base(tensor).grad_fn):
                if node is not None:
                    self._input_nodes.append(node)
        self._sides = self.unit.sides()

    def end(self, outputs: Iterable[Tensor], last_use: int) -> Follows:
        """The forward ended: learn when backward will enter this use by its outputs.

        Tells whether all ways back are seen. Backward runs younger nodes first, so what the
        outputs do not show is safe if it is older than the youngest of them, and unseen if not.
        Nodes of the inputs are told by themselves: each thread numbers its own, and a checkpoint
        runs again in the thread of backward.
        """
        first, made, outputs = self._first_nodes.pop(), _torch.sequence_number(), list(outputs)
        inputs, input_nodes = self._inputs, self._input_nodes  # alive, or others get their ids
        given = set(map(id, input_nodes))
        if not self._first_nodes:
            self._inputs, self._input_nodes = [], []

        def is_new(base: Tensor) -> bool:
            return all(_base(tensor) is not base for tensor in inputs)

        if not torch.is_grad_enabled():
            reads = any(_is_leaf(base) and is_new(base) for base in map(_base, outputs))
            return Follows.READS if reads else Follows.NOTHING
        newest = first - 1
        outside = False  # a parameter is handed out, to be read where no hook is
        nodes: dict[int, Node] = {}
        hooked: set[int] = set()
        # An input that was changed in place, and may be read afterwards, is an output too.
        for tensor in chain(outputs, inputs):
            base = _base(tensor)
            if _is_leaf(base):
                outside = outside or is_new(base)
            elif base.grad_fn is None:
                continue
            elif _torch.node_number(base.grad_fn) >= first and id(base.grad_fn) not in given:
                nodes[id(base.grad_fn)] = base.grad_fn
            if tensor.grad_fn is not None and id(tensor.grad_fn) not in given:
                number = _torch.node_number(tensor.grad_fn)
                newest = max(newest, number)
                if number >= first:
                    hooked.add(number)
        self.backward.hooked = hooked
        for node in nodes.values():
            node.register_prehook(partial(self._output_grad, last_use))
        if not nodes:  # an input may be all that came out
            for tensor in outputs:
                if tensor.requires_grad:
                    tensor.register_hook(partial(_passed_by, weakref.ref(self.backward)))
        if outside or (newest < made - 1 and self._can_have_graph(inputs)):
            return Follows.HIDDEN
        return Follows.BACKWARD if newest >= first else Follows.NOTHING

    def _can_have_graph(self, inputs: Iterable[Tensor]) -> bool:
        """Whether anything in this forward may need gradients; numbers alone do not tell.

        A custom Function takes one even where nothing requires grad.
        """
        engine = self.unit.engine
        units = engine.units if self.unit.encloses and engine is not None else [self.unit]
        trainable = any(bucket.trainable for unit in units for bucket in unit.buckets)
        return trainable or any(tensor.requires_grad for tensor in inputs)

    def _output_grad(self, until: int, grads: tuple[Tensor | None, ...]) -> None:
        self.unit.check_not_lent("a backward")
        self._check_readable()
        self.unit.check_not_replaced()
        task = self.backward.task()
        expected = self.backward.arrivals(self.unit, task).expected
        if expected is None:
            accumulates = Accumulates.NOWHERE
        else:
            accumulates = Accumulates.HERE if expected else Accumulates.ELSEWHERE
        self.backward.trigger(
            when.BackwardEnter(
                self.unit.key,
                self.number,
                task,
                until,
                accumulates,
                keeps_graph=torch.is_grad_enabled(),
            )
        )

    def _check_readable(self) -> None:
        """Raise ``ProtocolError`` if what the forward read is not what would be gathered now."""
        if self.unit.sides() != self._sides:
            raise ProtocolError(
                f"a backward through unit {self.unit.name or '(root)'} came after the unit was "
                "moved, cast, or changed in precision or communication since the forward; what "
                "that read is gone. Call backward() before"
            )
