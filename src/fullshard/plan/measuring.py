"""``plan(measure=True)``: the step of a plan with real tensors, on the current device."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from fullshard.comm import mirror_world
from fullshard.doctor.speed import median_s
from fullshard.errors import ConfigError, UnsupportedError
from fullshard.frontend.hooks import engine_of
from fullshard.frontend.ownership import units_below
from fullshard.plan.dry_run import Job, Optimizer, microbatches, sharded_copy
from fullshard.plan.optimizers import adamw, is_muon
from fullshard.plan.plan import Measured

WARM_UP, STEPS = 3, 5
_STD = 0.02
"""The standard deviation of the random weights."""


def measure(job: Job, device: torch.device) -> Measured:
    """Train a few steps of ``job`` as one rank whose collectives send nothing; measure them.

    Weights and buffers are random. Tensors of the batch on the meta device get random values, too:
    floating-point numbers, or token ids that are valid in every embedding of the model.

    Raises:
        ConfigError: the memory of ``device`` is not enough.
        UnsupportedError: parameters are offloaded to the host.
    """
    hardware, size = job.hardware, math.prod(job.mesh.values())
    world = mirror_world(size, job.rank, adds_wide=hardware.adds_wide, device_type=hardware.device)
    try:
        with world:
            return _measured(job, device)
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"plan(measure=True): the memory of {_name_of(device)} is not enough for this rank of "
            f"{size}: {str(error).splitlines()[0]} Plan more ranks or a smaller batch"
        ) from error


def _measured(job: Job, device: torch.device) -> Measured:
    accelerator: Any = None if device.type == "cpu" else getattr(torch, device.type)
    held_before = 0
    if accelerator is not None:
        accelerator.empty_cache()
        held_before = accelerator.memory_allocated()
    model = _filled(job, device)
    engines = list(dict.fromkeys(map(engine_of, units_below([model]))))
    batch = tree_map(partial(_made_real, job.model, device), job.batch)
    optimizer: Optimizer
    if job.optimizer is None:
        optimizer = adamw(model.parameters(), foreach=device.type != "cpu")
    else:
        optimizer = job.optimizer(model if is_muon(job.optimizer) else model.parameters())

    def take_step() -> None:
        for _ in microbatches(job, engines):
            job.loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(WARM_UP):
        take_step()
    if accelerator is not None:
        accelerator.reset_peak_memory_stats()
    step_s = median_s(take_step, device, repetitions=STEPS, warm_up=0)
    if accelerator is None:
        return Measured(_name_of(device), step_s, None, None)
    peak, reserved = accelerator.max_memory_allocated(), accelerator.max_memory_reserved()
    return Measured(_name_of(device), step_s, peak - held_before, reserved)


def _filled(job: Job, device: torch.device) -> nn.Module:
    """Return the sharded model on ``device``, with random weights and buffers."""
    model, _ = sharded_copy(job, device.type)
    buckets = (bucket for unit in units_below([model]) for bucket in unit.buckets)
    if any(bucket.spec.offload for bucket in buckets):
        raise UnsupportedError(
            "plan(measure=True): parameters are offloaded to the host, which is planned but not "
            "measured; leave measure out, or plan without offload"
        )
    model = model.to_empty(device=device)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.normal_(std=_STD) if tensor.is_floating_point() else tensor.zero_()
    return model


def _made_real(model: nn.Module, device: torch.device, given: Any) -> Any:
    if not isinstance(given, Tensor):
        return given
    if not given.is_meta:
        return given.detach().to(device)
    if given.is_floating_point():
        return torch.randn_like(given, device=device)
    tables = (one for one in model.modules() if isinstance(one, nn.Embedding))
    high = min((one.num_embeddings for one in tables), default=1)
    if given.dtype is torch.bool:
        return torch.randint_like(given, 2, device=device)
    return torch.randint_like(given, min(high, torch.iinfo(given.dtype).max), device=device)


def device_at_hand(device_type: str) -> torch.device:
    """Return the current device of this type, and make it ready.

    Raises:
        ConfigError: no such device is available.
    """
    if device_type == "cpu":
        return torch.device("cpu")
    module: Any = getattr(torch, device_type, None)
    if module is None or not module.is_available():
        raise ConfigError(
            f"plan(measure=True): no {device_type} device is available: run on a machine with one, "
            "or measure on this CPU with hardware='cpu'"
        )
    module.init()
    return torch.device(device_type, module.current_device())


def _name_of(device: torch.device) -> str:
    if device.type == "cpu":
        return "this CPU"
    return str(getattr(torch, device.type).get_device_name(device))
