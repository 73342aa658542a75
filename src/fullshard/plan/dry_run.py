"""Dry runs: training steps of a sharded model on the meta device, in a simulated world.

Everything that decides is the real code: hooks, autograd, the scheduler, layouts, and the engine
with its buffers, which have sizes but no memory. Only wires and lanes are replaced: wires report
each collective instead of sending, and lanes have simulated clocks. So a plan has no model of a
step of its own, which could differ from the real step.
"""

from __future__ import annotations

import copy
import gc
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed import get_process_group_ranks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils._pytree import tree_map

from fullshard._torch import autograd as _autograd
from fullshard.comm import Exchange, Pending, dry_world
from fullshard.device import BufferKind, DryLanes, LaneSpan
from fullshard.engine import Engine, Unit
from fullshard.errors import ConfigError, UnsupportedError
from fullshard.frontend.hooks import engine_of
from fullshard.frontend.ownership import units_below
from fullshard.plan import ledger as kinds
from fullshard.plan.hardware import Hardware
from fullshard.plan.kernels import DeviceKernels
from fullshard.plan.ledger import Moment, PlanLedger
from fullshard.plan.optimizers import adamw, is_muon, muon
from fullshard.schedule import Action, Event, Op, Transcript
from fullshard.schedule.triggers import BackwardEnter, ForwardEnter, ForwardExit, GradsReady
from fullshard.tensors import find_tensors, local_part

NUM_STEPS = 2
"""Steps of a dry run: the first learns the order, and from the second on they are alike."""

ROOT = "(root)"
"""The name shown for the root, whose own name is empty."""
FORWARD, AFTER_FORWARD = "forward", "after the forward"
BACKWARD, AFTER_BACKWARD = "backward", "after the backward"

Shard = Callable[[nn.Module, DeviceMesh], Any]
Loss = Callable[[nn.Module, Any], Tensor]


class Optimizer(Protocol):
    """The part of ``torch.optim.Optimizer`` that a dry run needs."""

    @property
    def state(self) -> Mapping[Any, Any]:
        """State by parameter."""

    def step(self) -> Any:
        """Step all parameters that have gradients."""

    def zero_grad(self) -> None:
        """Forget the gradients."""


@dataclass(frozen=True)
class Job:
    """The program to run."""

    model: nn.Module
    batch: Any
    mesh: Mapping[str, int]
    rank: int
    hardware: Hardware
    shard: Shard
    loss: Loss
    optimizer: Callable[[Any], Optimizer] | None = None
    """Called with the parameters, or with the model for ``Muon``; None: PyTorch's AdamW on local
    tensors."""
    accumulate: int = 1
    """Microbatches of a step."""
    reduces_once: bool = False
    """True if only the last microbatch of a step reduces gradients."""


@dataclass
class DryStep:
    """The events of one step."""

    start_s: float
    end_s: float = 0.0
    flops: float = 0.0
    transcript: Transcript = field(default_factory=Transcript)
    carried: list[tuple[Exchange, str]] = field(default_factory=list)
    """The collectives, each with the op of the action that issued it.

    The op is "" if the model itself issued it.
    """
    spans: list[tuple[LaneSpan, str]] = field(default_factory=list)
    """The spans of time on the lanes, each with the name of its unit."""
    moments: list[Moment] = field(default_factory=list)
    most: Moment | None = None
    rest: dict[str, int] = field(default_factory=dict)
    """Bytes held at the end of the step, by kind."""
    most_at_home: Moment | None = None
    """The moment at which the most bytes are held in the host's memory."""
    crossings: list[tuple[str, int]] = field(default_factory=list)
    """Copies between the memories of host and device: "to_device" or "to_host", and bytes."""
    buffers: Counter[BufferKind] = field(default_factory=Counter)
    """The most bytes that the engine's buffers of each kind held."""


@dataclass
class Recorded:
    """The result of a dry run."""

    steps: list[DryStep]
    units: list[Unit]
    dims: dict[tuple[int, ...], str]
    """The name of the mesh dim for each tuple of ranks along one."""


class _Witness:
    """Records an engine's events, and the unit and action that cause new memory."""

    def __init__(self, engine: Engine, run: _Run) -> None:
        self._engine = engine
        self._run = run

    def record(self, event: Event) -> None:
        """See ``Recorder``; book a unit's unsharded gradients when the last is computed."""
        self._run.step.transcript.record(event)
        trigger = event.trigger
        if isinstance(trigger, GradsReady):
            unit = self._engine.units[trigger.unit]
            grads = (param.grad for param in unit.unsharded_params())
            self._run.ledger.book(
                (local_part(grad) for grad in grads if grad is not None), kinds.WHOLE_GRADIENTS
            )
        doing = _DOING.get(type(trigger))
        key = getattr(trigger, "unit", None)
        if doing is not None and key is not None:
            self._run.ledger.turn_to(doing, self._engine.units[key].name or ROOT)
        self._run.ledger.note()

    @contextmanager
    def acting(self, action: Action) -> Iterator[None]:
        """See ``Observer``; book memory made during ``action`` under the kind of the action."""
        run = self._run
        unit = None if action.unit is None else self._engine.units[action.unit]
        before, run.acting = run.acting, ("" if unit is None else unit.name or ROOT, action.op)
        run.lanes.take_host(run.job.hardware.action_s)
        kind = _MADE_BY.get(action.op, run.ledger.kind)
        if unit is not None and action.op in (Op.UNSHARD, Op.WAIT, Op.FINISH_GATHER):
            encodes = any(bucket.spec.wire.gather is not None for bucket in unit.buckets)
            kind = kinds.ENCODED if encodes else kind
        try:
            with run.ledger.booking(kind):
                yield
        finally:
            run.acting = before


_DOING = {
    ForwardEnter: FORWARD,
    ForwardExit: AFTER_FORWARD,
    BackwardEnter: BACKWARD,
    GradsReady: AFTER_BACKWARD,
}
_MADE_BY = {
    Op.REDUCE_SCATTER: kinds.GRADIENTS,
    Op.ALL_REDUCE: kinds.GRADIENTS,
    Op.KEEP_PARTIAL: kinds.GRADIENTS,
    Op.FINISH_REDUCE: kinds.GRADIENTS,
    Op.ACCUMULATE: kinds.WHOLE_GRADIENTS,
}


class _Run:
    """One dry run, from sharding to the last step."""

    def __init__(self, job: Job) -> None:
        hardware = job.hardware
        self.job = job
        self.step = DryStep(0.0)
        self.acting: tuple[str, str] = ("", "")
        self.engines: list[Engine] = []
        self._is_offloaded = False
        self.lanes = DryLanes(
            duration_s=self._duration_s,
            note=self._note,
            is_async=hardware.device != "cpu",
            in_background=hardware.in_background,
            issue_s=hardware.op_s,
        )
        self.ledger = PlanLedger(hardware, self.lanes, self.carry)

    def carry(self, exchange: Exchange) -> Pending:
        """Record a collective with its action, and start it."""
        self.step.carried.append((exchange, self.acting[1]))
        return self.lanes.carry(exchange)

    def _duration_s(self, exchange: Exchange) -> float:
        return self.job.hardware.exchange_s(exchange.what, exchange.ranks, exchange.nbytes)

    def _note(self, span: LaneSpan) -> None:
        self.step.spans.append((span, self.acting[0]))

    def __call__(self) -> Recorded:
        job, ledger = self.job, self.ledger
        with ledger.booking(kinds.PARAMETERS):
            model, mesh = sharded_copy(job, "cpu")
        groups = (mesh.get_group(dim) for dim in range(mesh.ndim))
        dims = dict(zip(map(tuple, map(get_process_group_ranks, groups)), job.mesh, strict=True))
        units = units_below([model])
        if not units:
            raise ConfigError(
                "plan: shard(model, mesh) made no unit of the model; expected it to call "
                "fully_shard or shard_blocks, or to return a FullyShardedDataParallel"
            )
        self.engines = list(dict.fromkeys(map(engine_of, units)))
        self._bring_home(units)
        for engine in self.engines:
            engine.run_dry(self.lanes)
            engine.recorder = engine.observer = _Witness(engine, self)
            engine.meter.watch = ledger.resized
        sharded = {id(p) for unit in units for b in unit.buckets for p in b.stepped_params}
        others = (param for param in model.parameters() if id(param) not in sharded)
        ledger.book(map(local_part, others), kinds.PARAMETERS)
        ledger.book(model.buffers(), kinds.INPUTS)
        batch = tree_map(self._on_meta, job.batch)
        ledger.book(find_tensors(batch), kinds.INPUTS)
        optimizer = self._make_optimizer(model)
        steps = [self._take_step(model, optimizer, batch) for _ in range(NUM_STEPS)]
        return Recorded(steps, list(units), dims)

    def _bring_home(self, units: Sequence[Unit]) -> None:
        """Book offloaded shards in the host's memory."""
        away = [bucket for unit in units for bucket in unit.buckets if bucket.spec.offload]
        if away and self.job.hardware.host is None:
            raise ConfigError(
                f"plan: parameters are offloaded, but hardware {self.job.hardware.name!r} has no "
                "host; describe it, Hardware(host=Host(...)), or plan without offload"
            )
        if any(bucket.spec.are_wrapped for bucket in away):
            raise UnsupportedError(
                "plan: offloaded parameters of a wrapper subclass cannot be planned; plan without "
                "offload, or with plain parameters"
            )
        self.ledger.bring_home(local for bucket in away for local in bucket.shards.locals)
        self._is_offloaded = bool(away)

    def _make_optimizer(self, model: nn.Module) -> Optimizer:
        job = self.job
        on_cpu = job.hardware.device == "cpu" or self._is_offloaded
        if is_muon(job.optimizer):
            return muon(model, job.optimizer, foreach=not on_cpu)
        if job.optimizer is not None:
            return job.optimizer(model.parameters())
        return adamw(model.parameters(), foreach=not on_cpu)  # as PyTorch chooses itself

    def _on_meta(self, given: Any) -> Any:
        """Return a tensor of the batch on the meta device; keep integer values for the dry run."""
        if not isinstance(given, Tensor):
            return given
        made = torch.empty_like(given, device="meta")
        if not (given.is_meta or given.is_floating_point()):
            self.ledger.values.learn(made, given.detach().cpu().clone())
        return made

    def _take_step(self, model: nn.Module, optimizer: Optimizer, batch: Any) -> DryStep:
        ledger = self.ledger
        self.step = step = DryStep(self.lanes.end())
        ledger.restart()
        for engine in self.engines:
            engine.meter.reset_peak()
        for _ in microbatches(self.job, self.engines):
            ledger.turn_to(FORWARD)
            with ledger.booking(kinds.ACTIVATIONS):
                loss = self.job.loss(model, batch)
            with ledger.booking(kinds.BACKWARD):
                _autograd.run_backward(loss)
            del loss
        ledger.turn_to(AFTER_BACKWARD)
        ledger.note()
        ledger.turn_to("step of the optimizer")
        self.acting = ("", "step")
        with ledger.booking(kinds.STEP):
            optimizer.step()
        self.acting = ("", "")
        ledger.book(map(local_part, find_tensors(dict(optimizer.state))), kinds.OPTIMIZER)
        optimizer.zero_grad()
        ledger.note()
        step.end_s = self.lanes.end()
        step.flops, step.moments = ledger.flops, ledger.moments
        step.most, step.rest = ledger.device.most, ledger.device.held
        step.most_at_home, step.crossings = ledger.home.most, ledger.crossings
        for engine in self.engines:
            step.buffers.update(engine.meter.peak_nbytes)
        return step


def sharded_copy(job: Job, device_type: str) -> tuple[nn.Module, DeviceMesh]:
    """Return a sharded copy of the model, on the meta device, and its mesh."""
    mesh = init_device_mesh(device_type, tuple(job.mesh.values()), mesh_dim_names=tuple(job.mesh))
    model = on_meta(job.model)
    made = job.shard(model, mesh)
    return (made if isinstance(made, nn.Module) else model), mesh


def microbatches(job: Job, engines: Sequence[Engine]) -> Iterator[int]:
    """Yield before each microbatch of a step, after setting if its backward reduces gradients."""
    for number in range(job.accumulate):
        for engine in engines if job.reduces_once else ():
            for unit in engine.units:
                is_last = number == job.accumulate - 1
                policy = replace(engine.policy_of(unit), requires_gradient_sync=is_last)
                engine.set_policy(unit, policy)
        yield number


def dry_run(job: Job) -> Recorded:
    """Run the steps of ``job``; its model and existing process groups stay unchanged."""
    run = _Run(job)
    hardware, size = job.hardware, math.prod(job.mesh.values())
    world = dry_world(
        size, job.rank, carry=run.carry, adds_wide=hardware.adds_wide, device_type=hardware.device
    )
    with (
        _without_collector(),
        world,
        DeviceKernels(on_cpu=hardware.device == "cpu"),
        run.ledger,
    ):
        return run()


@contextmanager
def _without_collector() -> Iterator[None]:
    """Stop Python's garbage collector, which takes up to a fifth of the time of a dry run."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def on_meta(model: nn.Module) -> nn.Module:
    """Return a copy of ``model`` with parameters and buffers on the meta device; no value moves."""
    memo: dict[int, Any] = {
        id(one): torch.empty_like(one, device="meta") for one in model.buffers()
    }
    for param in model.parameters():
        like = torch.empty_like(param, device="meta")
        memo[id(param)] = nn.Parameter(like, param.requires_grad)
    return copy.deepcopy(model, memo)
