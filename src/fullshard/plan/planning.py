"""``fullshard.plan``: what a training step of a model takes, told before there is a machine."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fullshard.device import Lane, Span
from fullshard.engine import Unit
from fullshard.errors import ArgumentTypeError, ConfigError, UnsupportedError
from fullshard.frontend import Choice, num_blocks, shard_blocks
from fullshard.frontend.ownership import units_below
from fullshard.plan.adamw import PlainAdamW
from fullshard.plan.dry_run import (
    AFTER_FORWARD,
    BACKWARD,
    FORWARD,
    ROOT,
    Job,
    Loss,
    Optimizer,
    Recorded,
    Shard,
    Step,
    dry_run,
)
from fullshard.plan.hardware import Hardware, hardware_of
from fullshard.plan.ledger import ACTIVATIONS, Moment
from fullshard.plan.plan import Plan, PlannedUnit, Traffic
from fullshard.plan.search import Search
from fullshard.plan.values import Unknown


def plan(
    model: nn.Module,
    *,
    batch: Any,
    world_size: int | None = None,
    mesh: Mapping[str, int] | None = None,
    hardware: Hardware | str | Path = "h100",
    shard: Shard | None = None,
    loss: Loss | None = None,
    optimizer: Callable[[Any], Optimizer] | None = None,
    accumulate: int = 1,
    reduces_once: bool = False,
    rank: int = 0,
    budget_nbytes: int | None = None,
    target_s: float | None = None,
    **options: Any,
) -> Plan:
    """Run a few training steps dry, and return what they would take of memory, wires and time.

    The steps are those of the real engine, on tensors without memory in a world that is not there,
    so that neither devices nor process groups are needed, and no weights are made; ``model`` and
    the process groups of the program stay as they are.

    Args:
        model: the whole model before it is sharded, on any device; build large ones in
            ``with torch.device("meta"):``.
        batch: what one rank gets for one microbatch: the model's argument, a tuple of arguments or
            a mapping of keyword arguments, tensors on any device.
        world_size: the number of ranks, all along the dim "shard".
        mesh: instead of it, the sizes of the mesh's dims by name, outermost first, such as
            ``{"replicate": 4, "shard": 256}``.
        hardware: a description, the name of a preset, or a file of ``fullshard doctor``.
        shard: called with a copy of the model on the meta device, and the mesh; shards it as the
            program will, by ``fully_shard`` or by returning a ``FullyShardedDataParallel``.
            None: ``shard_blocks(model, mesh, **options)``.
        loss: called with the sharded model and the batch, returns a scalar. None: the ``loss`` of
            the model's output, or the mean of the first tensor in it.
        optimizer: called with the parameters. None: ``torch.optim.AdamW``, on the local
            tensors and, as PyTorch chooses itself, by lists of them unless on a CPU.
        accumulate: microbatches of a step.
        reduces_once: True if only the last microbatch of a step reduces gradients (no-sync).
        rank: which rank to be; with uneven shards, rank 0 has the largest.
        budget_nbytes: bytes that a rank may hold. With it, layout, copies (unless ``mesh`` is
            given), resharding, blocks that recompute activations, and budgets are chosen, by one
            dry run for each that is tried: the fastest that fits. ``shard_blocks(model,
            plan=plan)`` applies the choice; ``options`` that are given stay as they are.
        target_s: seconds of a step that are fast enough: among choices that are, the one that
            needs the least memory is taken.
        **options: of ``shard_blocks``, such as ``mp_policy``, ``layout``, ``policy`` and
            ``reshard_after_forward``.

    Raises:
        ArgumentTypeError, ConfigError: an argument does not fit; or as ``shard_blocks`` raises.
        UnsupportedError: the model reads the values of tensors, which a dry run does not have.
    """
    checked = _checked_mesh(world_size, mesh, rank)
    machine = hardware_of(hardware)
    given = partial(
        Job,
        model=_checked_model(model),
        batch=batch,
        rank=rank,
        loss=loss or mean_loss,
        optimizer=optimizer or partial(PlainAdamW, foreach=machine.device != "cpu"),
        accumulate=_at_least_one("accumulate", accumulate),
        reduces_once=reduces_once,
    )
    if budget_nbytes is None:
        return _plan(given(mesh=checked, hardware=machine, shard=_chosen_shard(shard, options)))
    if shard is not None:
        raise ConfigError(
            "plan(budget_nbytes=...): chooses options of shard_blocks, which shard= does not call; "
            "leave one of them out"
        )
    machine = replace(machine, memory_nbytes=_at_least_one("budget_nbytes", budget_nbytes))
    return _search(
        partial(given, hardware=machine), checked, options, is_free=mesh is None, target_s=target_s
    )


def _plan(job: Job) -> Plan:
    with _explaining_values():
        return _of(job, dry_run(job))


def _search(
    given: Callable[..., Job],
    mesh: dict[str, int],
    options: dict[str, Any],
    *,
    is_free: bool,
    target_s: float | None,
) -> Plan:
    """Choose what ``options`` leave open, and copies if the mesh ``is_free``."""
    fixed = {name for name in ("layout", "reshard_after_forward") if name in options}
    start = Choice(
        replicas=next(iter(mesh.values())) if len(mesh) == 2 else 1,
        **{name: options.pop(name) for name in fixed},
    )
    world = math.prod(mesh.values())

    def plan_for(choice: Choice) -> Plan:
        def shard(model: nn.Module, mesh: DeviceMesh) -> None:
            shard_blocks(model, mesh, plan=choice, **options)

        sizes = {"replicate": choice.replicas, "shard": world // choice.replicas}
        if choice.replicas == 1:
            del sizes["replicate"]
        return _plan(given(mesh=sizes if is_free else mesh, shard=shard))

    job = given(mesh=mesh, shard=_chosen_shard(None, options))
    reach = job.hardware.links[0].reach if job.hardware.links else None
    nodes = world // reach if reach else 1
    return Search(
        plan_for,
        start,
        fixed=fixed,
        num_blocks=num_blocks(job.model, options.get("policy")),
        shapes=[nodes] if is_free and reach and 1 < nodes and world % reach == 0 else [],
    ).run(target_s)


def _checked_model(model: Any) -> nn.Module:
    if not isinstance(model, nn.Module):
        raise ArgumentTypeError(f"plan: got {type(model).__name__}, expected an nn.Module")
    if units_below([model]):
        raise ConfigError(
            f"plan: this {type(model).__name__} is sharded already; give the model as it is "
            "before, and what shards it as shard="
        )
    return model


def _checked_mesh(
    world_size: int | None, mesh: Mapping[str, int] | None, rank: int
) -> dict[str, int]:
    if (world_size is None) == (mesh is None):
        raise ConfigError(
            "plan: expected either world_size= or mesh=, such as {'replicate': 4, 'shard': 256}"
        )
    sizes = {"shard": world_size} if mesh is None else dict(mesh)
    if not sizes:
        raise ConfigError("plan(mesh=...): got no dims, expected sizes by name")
    for name, size in sizes.items():
        _at_least_one(f"mesh dim {name!r}" if mesh is not None else "world_size", size)
    checked = {name: int(size) for name, size in sizes.items() if size is not None}
    if not 0 <= rank < math.prod(checked.values()):
        raise ConfigError(
            f"plan(rank={rank}): expected a rank of the {math.prod(checked.values())} that "
            f"{checked} has"
        )
    return checked


def _at_least_one(what: str, given: Any) -> int:
    if not isinstance(given, int) or isinstance(given, bool) or given < 1:
        raise ConfigError(f"plan: {what} is {given!r}, expected an integer of at least 1")
    return given


def _chosen_shard(shard: Shard | None, options: Mapping[str, Any]) -> Shard:
    if shard is not None:
        if options:
            raise ConfigError(
                f"plan: got shard= and options for shard_blocks ({', '.join(options)}); give the "
                "options to the function that shards"
            )
        return shard

    def by_blocks(model: nn.Module, mesh: DeviceMesh) -> None:
        shard_blocks(model, mesh, **options)

    return by_blocks


def mean_loss(model: nn.Module, batch: Any) -> Tensor:
    """Call ``model`` with ``batch``; return the loss of its output, or the mean of a tensor."""
    if isinstance(batch, Mapping):
        output = model(**batch)
    elif isinstance(batch, (tuple, list)):
        output = model(*batch)
    else:
        output = model(batch)
    loss = getattr(output, "loss", None)
    if isinstance(loss, Tensor):
        return loss
    first = next(_floating(output), None)
    if first is None:
        raise ConfigError(
            f"plan: the model returned {type(output).__name__} without a tensor of floating-point "
            "numbers; pass loss=, a function of model and batch"
        )
    return first.float().mean() if first.dim() else first


def _floating(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        if output.is_floating_point():
            yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from _floating(value)
    elif isinstance(output, (tuple, list)):
        for value in output:
            yield from _floating(value)


@contextmanager
def _explaining_values() -> Iterator[None]:
    """Say what it means that values are not known."""
    try:
        yield
    except Unknown as error:
        raise UnsupportedError(
            f"plan: the model, the loss or the optimizer reads values that a dry run does not have "
            f"({error}); the traceback above says where. Give real tensors in batch= if they are "
            "read, choose a form of the model whose operations do not depend on values (experts by "
            "grouped_mm, not in a loop over those that were hit), or leave that part out of loss="
        ) from error


def _of(job: Job, found: Recorded) -> Plan:
    step = found.steps[-1]
    most = max((one.most for one in found.steps if one.most), key=lambda moment: moment.nbytes)
    groups = {carried.exchange.ranks for one in found.steps for carried in one.carried}
    hardware = job.hardware
    return Plan(
        hardware=hardware,
        mesh=dict(job.mesh),
        rank=job.rank,
        units=_units(found.units, step),
        peak=most._replace(at_s=most.at_s - _start_of(most, found.steps)),
        rest=step.rest,
        reserved={
            "framework": hardware.fixed_nbytes,
            "communicators": hardware.communicator_nbytes * len(groups),
        },
        traffic=_traffic(step, found.dims),
        step_s=step.end_s - step.start_s,
        busy_s=sum(s.end_s - s.start_s for s, _ in step.spans if s.lane == Lane.COMPUTE),
        flops=step.flops,
        memory=tuple(m._replace(at_s=m.at_s - step.start_s) for m in step.moments),
        spans=tuple((_since(span, step.start_s), unit) for span, unit in step.spans),
        actions=tuple(str(action) for action in step.transcript.actions()),
    )


def _start_of(moment: Moment, steps: Sequence[Step]) -> float:
    return max(step.start_s for step in steps if step.start_s <= moment.at_s)


def _since(span: Span, start_s: float) -> Span:
    return span._replace(start_s=span.start_s - start_s, end_s=span.end_s - start_s)


def _units(units: Sequence[Unit], step: Step) -> tuple[PlannedUnit, ...]:
    waits: defaultdict[tuple[str, bool], float] = defaultdict(float)
    for span, name in step.spans:
        if span.lane == "wait":
            waits[name, span.what in _OF_GATHERS] += span.end_s - span.start_s
    kept = activations(step.moments)
    return tuple(
        _unit(unit)._replace(
            activation_nbytes=kept[unit.name or ROOT],
            gather_wait_s=waits[unit.name or ROOT, True],
            reduce_wait_s=waits[unit.name or ROOT, False],
        )
        for unit in units
    )


_OF_GATHERS = ("all_gather", Lane.GATHER, Lane.BUS)


def activations(moments: Iterable[Moment]) -> Counter[str]:
    """Return the bytes that the first forward of each unit leaves for backward, by name.

    What an inner unit leaves is not counted for those around it.
    """
    found: Counter[str] = Counter()
    running: list[str] = []
    last, left = 0, ""
    for moment in moments:
        if moment.doing == BACKWARD:
            break
        more = moment.held.get(ACTIVATIONS, 0) - last
        last += more
        if running:  # what is freed after a unit was left, its forward still held
            found[left if more < 0 and left else running[-1]] += more
        if moment.doing == FORWARD and moment.unit:
            running.append(moment.unit)
            left = ""
        elif moment.doing == AFTER_FORWARD and moment.unit in running:
            running.remove(moment.unit)
            left = moment.unit
    return found


def _unit(unit: Unit) -> PlannedUnit:
    layouts = [bucket.spec.layout for bucket in unit.buckets]
    numel = sum(param.numel for layout in layouts for param in layout.params)
    gathered = sum(layout.shard_numel * layout.world for layout in layouts)
    return PlannedUnit(
        name=unit.name,
        numel=numel,
        shard_nbytes=sum(bucket.shards.nbytes for bucket in unit.buckets),
        unsharded_nbytes=unit.nbytes,
        padding=gathered / numel - 1 if numel else 0.0,
    )


def _traffic(step: Step, dims: Mapping[tuple[int, ...], str]) -> tuple[Traffic, ...]:
    counts: Counter[tuple[str, str]] = Counter()
    nbytes: Counter[tuple[str, str]] = Counter()
    for carried in step.carried:
        exchange = carried.exchange
        dim = dims.get(exchange.ranks) or f"{len(exchange.ranks)} neighbours"
        counts[dim, exchange.what] += 1
        nbytes[dim, exchange.what] += exchange.received_nbytes
    return tuple(Traffic(*key, counts[key], nbytes[key]) for key in counts)
