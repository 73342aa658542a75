"""``plan(measure=True)``: the step of a plan with real tensors, on the current device."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._pytree import tree_map

from fullshard.comm import mirror_world
from fullshard.doctor.speed import median_s
from fullshard.errors import ConfigError, UnsupportedError
from fullshard.frontend.hooks import engine_of
from fullshard.frontend.ownership import units_below
from fullshard.plan.adamw import PlainAdamW
from fullshard.plan.dry_run import Job, Optimizer, on_meta, set_sync
from fullshard.plan.muon import is_muon
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
            return _Run(job, device)()
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"plan(measure=True): the memory of {_name_of(device)} is not enough for this rank of "
            f"{size}: {str(error).splitlines()[0]} Plan more ranks or a smaller batch"
        ) from error


class _Run:
    """One model with its batch, from sharding to the last step."""

    def __init__(self, job: Job, device: torch.device) -> None:
        self._job = job
        self._device = device
        self._accelerator: Any = None if device.type == "cpu" else getattr(torch, device.type)
        self._held_before = 0
        if self._accelerator is not None:
            self._accelerator.empty_cache()
            self._held_before = self._accelerator.memory_allocated()
        self._model = self._sharded()
        self._engines = list(dict.fromkeys(map(engine_of, units_below([self._model]))))
        self._batch = tree_map(self._made_real, job.batch)
        self._optimizer = self._make_optimizer()

    def __call__(self) -> Measured:
        for _ in range(WARM_UP):
            self._take_step()
        peak = reserved = None
        if self._accelerator is not None:
            self._accelerator.reset_peak_memory_stats()
        step_s = median_s(self._take_step, self._device, repetitions=STEPS, warm_up=0)
        if self._accelerator is not None:
            peak = self._accelerator.max_memory_allocated() - self._held_before
            reserved = self._accelerator.max_memory_reserved()
        return Measured(_name_of(self._device), step_s, peak, reserved)

    def _sharded(self) -> nn.Module:
        job = self._job
        mesh = init_device_mesh(
            self._device.type, tuple(job.mesh.values()), mesh_dim_names=tuple(job.mesh)
        )
        model = on_meta(job.model)
        made = job.shard(model, mesh)
        model = made if isinstance(made, nn.Module) else model
        buckets = (bucket for unit in units_below([model]) for bucket in unit.buckets)
        if any(bucket.spec.offload for bucket in buckets):
            raise UnsupportedError(
                "plan(measure=True): parameters are offloaded to the host, which is planned but "
                "not measured; leave measure out, or plan without offload"
            )
        model = model.to_empty(device=self._device)
        with torch.no_grad():
            for param in model.parameters():
                param.normal_(std=_STD) if param.is_floating_point() else param.zero_()
            for buffer in model.buffers():
                buffer.normal_(std=_STD) if buffer.is_floating_point() else buffer.zero_()
        return model

    def _made_real(self, given: Any) -> Any:
        if not isinstance(given, Tensor):
            return given
        if not given.is_meta:
            return given.detach().to(self._device)
        if given.is_floating_point():
            return torch.randn_like(given, device=self._device)
        tables = (one for one in self._job.model.modules() if isinstance(one, nn.Embedding))
        high = min((one.num_embeddings for one in tables), default=1)
        return torch.randint_like(given, high, device=self._device)

    def _make_optimizer(self) -> Optimizer:
        optimizer, model = self._job.optimizer, self._model
        if optimizer is None:
            return PlainAdamW(model.parameters(), foreach=self._device.type != "cpu")
        return optimizer(model if is_muon(optimizer) else model.parameters())

    def _take_step(self) -> None:
        job = self._job
        for left in reversed(range(job.accumulate)):
            for engine in self._engines if job.reduces_once else ():
                set_sync(engine, left == 0)
            job.loss(self._model, self._batch).backward()
        self._optimizer.step()
        self._optimizer.zero_grad()


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
    name: str = getattr(torch, device.type).get_device_name(device)
    return name
