"""``fullshard.plan``: predict memory, communication and time of a training step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from fullshard.errors import ArgumentTypeError, ConfigError, UnsupportedError
from fullshard.frontend import CHOSEN, Choice, num_blocks, shard_blocks
from fullshard.frontend.ownership import units_below
from fullshard.plan.dry_run import Job, Loss, Optimizer, Shard, dry_run
from fullshard.plan.found import plan_from
from fullshard.plan.hardware import Hardware, hardware_of
from fullshard.plan.measuring import device_at_hand
from fullshard.plan.measuring import measure as measure_step
from fullshard.plan.plan import Plan
from fullshard.plan.search import Search
from fullshard.plan.values import Unknown
from fullshard.progress import Operation
from fullshard.tensors import find_tensors


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
    measure: bool = False,
    **options: Any,
) -> Plan:
    """Run a few training steps dry, and return their memory, communication and time.

    The real engine takes the steps, on tensors without memory in a simulated world. No device and
    no process group is needed, and no weights are made. ``model`` and the process groups of the
    program stay unchanged.

    Args:
        model: the whole model before it is sharded, on any device; build large ones in
            ``with torch.device("meta"):``.
        batch: one rank's input for one microbatch: the model's argument, a tuple of arguments or a
            mapping of keyword arguments; tensors on any device.
        world_size: the number of ranks, all along the dim "shard".
        mesh: instead of ``world_size``, the sizes of the dims by name, outermost first, such as
            ``{"replicate": 4, "shard": 256}``.
        hardware: a description, the name of a preset, or a file of ``fullshard doctor``.
        shard: called with a copy of the model on the meta device, and the mesh. Shards the copy as
            the program will, by ``fully_shard`` or by returning a ``FullyShardedDataParallel``.
            None: ``shard_blocks(model, mesh, **options)``.
        loss: called with the sharded model and the batch, returns a scalar. None: the ``loss`` of
            the model's output, or the mean of the first tensor in it.
        optimizer: called with the parameters. None: ``torch.optim.AdamW`` on the local tensors,
            with ``foreach`` as PyTorch chooses it: off on a CPU and for offloaded parameters.
            ``fullshard.optim.Muon``, or ``functools.partial`` of it, is planned with momenta
            divided evenly; its exchange is not planned.
        accumulate: microbatches of a step.
        reduces_once: True if only the last microbatch of a step reduces gradients (no-sync).
        rank: the rank to plan for; with uneven shards, rank 0 has the largest.
        budget_nbytes: bytes of the device that a rank may hold. With a budget, the plan chooses
            layout, replicas (unless ``mesh`` is given), resharding, recomputed blocks, offload,
            blocks of a unit, and budgets of prefetch and reduction. It runs each candidate dry and
            takes the fastest that fits. ``shard_blocks(model, plan=plan)`` applies the choice.
            Given ``options`` stay unchanged, and ``wire`` is never chosen.
        target_s: seconds of a step that are fast enough. Of the choices within this time, the
            plan takes the one with the least memory.
        measure: True to run the planned step with real tensors too, on the current device, which
            must be of the hardware's type. One rank runs, and its collectives send nothing.
            ``measured`` of the plan has the result.
        **options: of ``shard_blocks``, such as ``mp_policy``, ``layout``, ``policy``, ``wire`` and
            ``reshard_after_forward``.

    Raises:
        ArgumentTypeError, ConfigError: an argument does not fit; or as ``shard_blocks`` raises.
        UnsupportedError: the model reads the values of tensors, which a dry run does not have.
    """
    if options.get("ignored_params"):
        raise ConfigError(
            "plan(ignored_params=...): names parameters of the model, and a copy of it is planned; "
            "give shard=, a function that finds those of the copy that it is given"
        )
    checked = _checked_mesh(world_size, mesh, rank)
    machine = hardware_of(hardware)
    if budget_nbytes is not None:
        machine = replace(machine, memory_nbytes=_at_least_one("budget_nbytes", budget_nbytes))
    job = Job(
        model=_checked_model(model),
        batch=batch,
        mesh=checked,
        rank=rank,
        hardware=machine,
        shard=_chosen_shard(shard, options, searches=budget_nbytes is not None),
        loss=loss or mean_loss,
        optimizer=optimizer,
        accumulate=_at_least_one("accumulate", accumulate),
        reduces_once=reduces_once,
    )
    device = device_at_hand(machine.device) if measure else None
    work = Operation("planning", unit="choices")
    if budget_nbytes is None:
        found = _plan(job)
    else:
        found, job = _search(job, options, work, is_free=mesh is None, target_s=target_s)
    return found if device is None else replace(found, measured=measure_step(job, device))


def _plan(job: Job) -> Plan:
    try:
        return plan_from(job, dry_run(job))
    except Unknown as error:
        raise UnsupportedError(
            f"plan: the model, the loss or the optimizer reads values that a dry run does not have "
            f"({error}); the traceback above says where. If they come from the batch, pass real "
            "tensors in batch=. If the model computes them, choose an implementation that does not "
            "depend on values (grouped_mm for experts, not a loop over the experts that were hit). "
            "If the loss computes them, leave that part out of loss="
        ) from error


def _search(
    job: Job, options: dict[str, Any], work: Operation, *, is_free: bool, target_s: float | None
) -> tuple[Plan, Job]:
    """Choose the options missing in ``options``, and the replicas if the mesh ``is_free``."""
    fixed = {name for name in CHOSEN if name in options}
    start = Choice(
        replicas=next(iter(job.mesh.values())) if len(job.mesh) == 2 else 1,
        **{name: options.pop(name) for name in fixed},
    )
    if job.hardware.host is None:
        fixed.add("offload_policy")
    world = math.prod(job.mesh.values())

    def job_for(choice: Choice) -> Job:
        shard = partial(shard_blocks, plan=choice, **options)
        sizes = {"replicate": choice.replicas, "shard": world // choice.replicas}
        if choice.replicas == 1:
            del sizes["replicate"]
        return replace(job, mesh=sizes if is_free else job.mesh, shard=shard)

    reach = job.hardware.links[0].reach if job.hardware.links else None
    nodes = world // reach if reach else 1

    def plan_for(choice: Choice) -> Plan:
        try:
            return _plan(job_for(choice))
        finally:
            work.add(1)

    found = Search(
        plan_for,
        start,
        fixed=fixed,
        num_blocks=num_blocks(job.model, options.get("policy")),
        shapes=[nodes] if is_free and reach and 1 < nodes and world % reach == 0 else [],
        target_s=target_s,
    ).run()
    assert found.choice is not None
    return found, job_for(found.choice)


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
    if mesh is None:
        checked = {"shard": _at_least_one("world_size", world_size)}
    else:
        checked = {
            name: _at_least_one(f"mesh dim {name!r}", size) for name, size in dict(mesh).items()
        }
    if not checked:
        raise ConfigError("plan(mesh=...): got no dims, expected sizes by name")
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


def _chosen_shard(shard: Shard | None, options: Mapping[str, Any], *, searches: bool) -> Shard:
    if shard is not None:
        if searches:
            raise ConfigError(
                "plan(budget_nbytes=...): chooses options of shard_blocks, which shard= does not "
                "call; leave one of them out"
            )
        if options:
            raise ConfigError(
                f"plan: got shard= and options for shard_blocks ({', '.join(options)}); give the "
                "options to the function that shards"
            )
        return shard
    return partial(shard_blocks, **options)


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
    first = next((one for one in find_tensors(output) if one.is_floating_point()), None)
    if first is None:
        raise ConfigError(
            f"plan: the model returned {type(output).__name__} without a tensor of floating-point "
            "numbers; pass loss=, a function of model and batch"
        )
    return first.float().mean() if first.dim() else first
