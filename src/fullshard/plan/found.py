"""Turn the records of a dry run into a plan."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

from fullshard.device import Lane, LaneSpan
from fullshard.engine import Unit
from fullshard.plan.dry_run import AFTER_FORWARD, BACKWARD, FORWARD, ROOT, DryStep, Job, Recorded
from fullshard.plan.ledger import ACTIVATIONS, Moment
from fullshard.plan.plan import Plan, PlannedUnit, Traffic


def plan_from(job: Job, found: Recorded) -> Plan:
    """Return the plan of ``job`` from ``found``, the result of its dry run."""
    step = found.steps[-1]
    most = max((one.most for one in found.steps if one.most), key=lambda moment: moment.nbytes)
    homes = [one.most_at_home for one in reversed(found.steps) if one.most_at_home]
    most_at_home = max(homes, key=lambda moment: sum(moment.home.values()))
    groups = {exchange.ranks for one in found.steps for exchange, _ in one.carried}
    start_s = max(one.start_s for one in found.steps if one.start_s <= most.at_s)
    hardware = job.hardware
    return Plan(
        hardware=hardware,
        mesh=dict(job.mesh),
        rank=job.rank,
        num_parameters=sum(parameter.numel() for parameter in job.model.parameters()),
        units=_units(found.units, step),
        peak=most._replace(at_s=most.at_s - start_s),
        rest=step.rest,
        reserved={
            "framework": hardware.fixed_nbytes,
            "communicators": hardware.communicator_nbytes * len(groups),
        },
        host=most_at_home.home,
        traffic=_traffic(step, found.dims),
        step_s=step.end_s - step.start_s,
        busy_s=sum(s.end_s - s.start_s for s, _ in step.spans if s.lane == Lane.COMPUTE),
        flops=step.flops,
        memory=tuple(m._replace(at_s=m.at_s - step.start_s) for m in step.moments),
        spans=tuple((_since(span, step.start_s), unit) for span, unit in step.spans),
        actions=tuple(str(action) for action in step.transcript.actions()),
    )


def _since(span: LaneSpan, start_s: float) -> LaneSpan:
    return span._replace(start_s=span.start_s - start_s, end_s=span.end_s - start_s)


def _units(units: Sequence[Unit], step: DryStep) -> tuple[PlannedUnit, ...]:
    waits: defaultdict[tuple[str, bool], float] = defaultdict(float)
    for span, name in step.spans:
        if span.lane == "wait":
            waits[name, span.what in _OF_GATHERS] += span.end_s - span.start_s
    kept = activations(step.moments)
    found = []
    for unit in units:
        name, layouts = unit.name or ROOT, [bucket.spec.layout for bucket in unit.buckets]
        numel = sum(param.numel for layout in layouts for param in layout.params)
        gathered = sum(layout.shard_numel * layout.world for layout in layouts)
        found.append(
            PlannedUnit(
                name=unit.name,
                numel=numel,
                shard_nbytes=sum(bucket.shards.nbytes for bucket in unit.buckets),
                unsharded_nbytes=unit.nbytes,
                padding=gathered / numel - 1 if numel else 0.0,
                activation_nbytes=kept[name],
                gather_wait_s=waits[name, True],
                reduce_wait_s=waits[name, False],
            )
        )
    return tuple(found)


_OF_GATHERS = ("all_gather", Lane.GATHER, Lane.HOST_TO_DEVICE)


def activations(moments: Iterable[Moment]) -> Counter[str]:
    """Return the bytes that the first forward of each unit leaves for backward, by name.

    The bytes of an inner unit do not count for the units around it.
    """
    found: Counter[str] = Counter()
    running: list[str] = []
    last, left = 0, ""
    for moment in moments:
        if moment.doing == BACKWARD:
            break
        more = moment.held.get(ACTIVATIONS, 0) - last
        last += more
        if running:  # memory freed after a unit's exit was held by its forward
            found[left if more < 0 and left else running[-1]] += more
        if moment.doing == FORWARD and moment.unit:
            running.append(moment.unit)
            left = ""
        elif moment.doing == AFTER_FORWARD and moment.unit in running:
            running.remove(moment.unit)
            left = moment.unit
    return found


def _traffic(step: DryStep, dims: Mapping[tuple[int, ...], str]) -> tuple[Traffic, ...]:
    received: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
    for exchange, _ in step.carried:
        dim = dims.get(exchange.ranks) or f"{len(exchange.ranks)} neighbours"
        received[dim, exchange.what].append(exchange.received_nbytes)
    for way, nbytes in step.crossings:
        received["host", way].append(nbytes)
    return tuple(Traffic(*key, len(each), sum(each)) for key, each in received.items())
