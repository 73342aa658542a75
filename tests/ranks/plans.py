"""Jobs that run both dry and for real: models, shardings, and the counts of a real run."""

from __future__ import annotations

import gc
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fullshard
from bench import tracing
from fullshard import WirePolicy
from fullshard.engine import Engine, Offload
from fullshard.frontend.hooks import engine_of
from fullshard.frontend.ownership import units_below
from fullshard.plan import Hardware, Host, hardware_of
from fullshard.plan import ledger as kinds
from fullshard.plan.dry_run import AFTER_BACKWARD, Job, dry_run
from fullshard.schedule import Transcript
from fullshard.tensors import local_part
from tests.kit.offload import a_bus
from tests.ranks.models import GPT
from tests.recording import CollectiveCall, Recording, recordings

STEPS = 2
LEAST_SHARED_NBYTES = 1 << 16
"""Allocations below this size count; shared memory is mapped in larger pieces."""
_TASK = re.compile(r"task=\d+")


class Experts(nn.Module):
    """Four experts, each a unit; the last one never runs."""

    def __init__(self, dim: int = 24) -> None:
        super().__init__()
        self.router = nn.Linear(dim, 4)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, 3 * dim), nn.GELU(), nn.Linear(3 * dim, dim))
            for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1)
        for i in range(3):
            x = x + weights[..., i : i + 1] * self.experts[i](x)
        return x


class Adapted(nn.Module):
    """Frozen layers with small trainable adapters."""

    def __init__(self, dim: int = 32, layers: int = 3, low: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(dim, dim) for _ in range(layers))
        self.down = nn.ModuleList(nn.Linear(dim, low, bias=False) for _ in range(layers))
        self.up = nn.ModuleList(nn.Linear(low, dim, bias=False) for _ in range(layers))
        self.layers.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for layer, down, up in zip(self.layers, self.down, self.up, strict=True):
            x = torch.tanh(layer(x) + up(down(x)))
        return x


class Twice(nn.Module):
    """Two units, each used twice in a forward."""

    def __init__(self, dim: int = 32) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(dim, dim) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in (*self.blocks, *self.blocks):
            x = torch.tanh(block(x))
        return x


class Tied(nn.Module):
    """An embedding and a head with one weight, around two blocks."""

    def __init__(self, vocab: int = 64, dim: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList(nn.Linear(dim, dim) for _ in range(2))
        self.head = nn.Linear(dim, vocab, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x)


class Mlp(nn.Module):
    """Blocks of two linear layers, for tensor parallelism."""

    def __init__(self, dim: int = 32, layers: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"up": nn.Linear(dim, 4 * dim), "down": nn.Linear(4 * dim, dim)})
            for _ in range(layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block["down"](F.gelu(block["up"](x)))
        return x


def small() -> GPT:
    return GPT(dim=32, layers=3, length=16)


def smaller() -> GPT:
    """Return a GPT of five blocks; a unit of two is smaller than ``LEAST_SHARED_NBYTES``."""
    return GPT(dim=16, layers=5, length=16)


def checkpointed() -> GPT:
    model = small()
    model.run_block = partial(checkpoint, use_reentrant=False)
    return model


def tokens() -> Tensor:
    return torch.arange(4 * 16).view(4, 16) % 53


def vectors(dim: int = 32) -> Tensor:
    return torch.ones(8, dim)


def squares(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).float().square().mean()


def blocks(**options: Any) -> Callable[[nn.Module, DeviceMesh], Any]:
    def shard(model: nn.Module, mesh: DeviceMesh) -> None:
        fullshard.shard_blocks(model, mesh, **options)

    return shard


def flat(**options: Any) -> Callable[[nn.Module, DeviceMesh], Any]:
    def shard(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        policy = fullshard.wrap.ModuleWrapPolicy({type(model.blocks[0])})  # type: ignore[index]
        return fullshard.FullyShardedDataParallel(
            model, auto_wrap_policy=policy, device_mesh=mesh, **options
        )

    return shard


def tolerant(model: nn.Module, mesh: DeviceMesh) -> None:
    """Shard a model whose experts ranks may skip."""
    fullshard.shard_blocks(model, mesh)
    for expert in model.experts:  # type: ignore[union-attr]
        expert.set_skip_tolerance(True)


def parallel(model: nn.Module, mesh: DeviceMesh) -> None:
    for block in model.blocks:  # type: ignore[union-attr]
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    for block in model.blocks:  # type: ignore[union-attr]
        for layer in block.values():
            fullshard.fully_shard(layer, mesh=mesh["dp"])
    fullshard.fully_shard(model, mesh=mesh["dp"])


@dataclass(frozen=True)
class Case:
    """A job: a model, its batch, sharding, mesh and optimizer."""

    model: Callable[[], nn.Module] = small
    batch: Callable[[], Any] = tokens
    shard: Callable[[nn.Module, DeviceMesh], Any] = field(default_factory=blocks)
    mesh: Mapping[str, int] = field(default_factory=lambda: {"shard": 2})
    optimizer: Callable[[Any], torch.optim.Optimizer] = torch.optim.AdamW
    accumulate: int = 1

    @property
    def world(self) -> int:
        size = 1
        for ranks in self.mesh.values():
            size *= ranks
        return size


def runs(params: Any) -> torch.optim.Optimizer:
    return fullshard.optim.ShardedOptimizer(params, torch.optim.AdamW)


BF16 = fullshard.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
HSDP = {"replicate": 2, "shard": 2}
CASES = {
    "dense": Case(),
    "dense, four": Case(mesh={"shard": 4}),
    "ragged": Case(shard=blocks(layout=fullshard.Ragged()), mesh={"shard": 3}),
    "ragged, runs": Case(shard=blocks(layout=fullshard.Ragged()), optimizer=runs),
    "runs": Case(optimizer=runs),
    "bf16": Case(shard=blocks(mp_policy=BF16)),
    "kept": Case(shard=blocks(reshard_after_forward=False)),
    "secondary": Case(shard=blocks(reshard_after_forward=2), mesh={"shard": 4}),
    "checkpointed": Case(checkpointed),
    "accumulated": Case(accumulate=2),
    "idle experts": Case(Experts, partial(vectors, 24)),
    "tolerant experts": Case(Experts, partial(vectors, 24), tolerant),
    "tied": Case(Tied, lambda: torch.arange(24).view(4, 6)),
    "frozen": Case(Adapted, vectors),
    "twice": Case(Twice, vectors, mesh={"shard": 3}),
    "HSDP": Case(mesh=HSDP),
    "HSDP, ragged": Case(shard=blocks(layout=fullshard.Ragged()), mesh=HSDP),
    "TP": Case(Mlp, vectors, parallel, {"dp": 2, "tp": 2}),
    "two blocks a unit": Case(smaller, shard=blocks(plan=fullshard.Choice(blocks_per_unit=2))),
    "flat": Case(shard=flat()),
    "flat, original parameters": Case(shard=flat(use_orig_params=True), mesh={"shard": 3}),
}
WIRES = {
    "gathers": WirePolicy(gather="int8"),
    "both": WirePolicy(gather="int8", reduce="int8"),
    "halves": WirePolicy(gather="int8", reduce="int4"),
    "mixed": WirePolicy(gather="bf16", reduce="bf16"),
}
CASES |= {
    "wire, gathers": Case(shard=blocks(wire=WIRES["gathers"])),
    "wire, ragged": Case(
        shard=blocks(layout=fullshard.Ragged(), wire=WIRES["both"]), mesh={"shard": 3}
    ),
    "wire, HSDP": Case(shard=blocks(wire=WIRES["both"]), mesh=HSDP),
    "wire, bf16": Case(shard=blocks(wire=WIRES["mixed"]), accumulate=2),
    "wire, flat": Case(shard=flat(use_orig_params=True, wire=WIRES["both"])),
    "wire, int4, HSDP": Case(shard=blocks(wire=WIRES["halves"]), mesh=HSDP),
    "wire, int4, flat": Case(
        shard=flat(use_orig_params=True, wire=WIRES["halves"]), mesh={"shard": 3}
    ),
}
AWAY = {"offload_policy": fullshard.CPUOffloadPolicy()}
OFFLOADED = {
    "dense": Case(shard=blocks(**AWAY)),
    "ragged": Case(shard=blocks(layout=fullshard.Ragged(), **AWAY), mesh={"shard": 3}),
    "bf16": Case(shard=blocks(mp_policy=BF16, **AWAY)),
    "HSDP": Case(shard=blocks(**AWAY), mesh=HSDP),
    "accumulated": Case(shard=blocks(**AWAY), accumulate=2),
    "flat": Case(shard=flat(cpu_offload=fullshard.CPUOffload(offload_params=True))),
}


def with_a_host() -> Hardware:
    """Return the hardware of a CPU that counts as a device with a separate host."""
    host = Host(memory_nbytes=1 << 40, memory_bandwidth=1e10, bus_bandwidth=1e10)
    return replace(hardware_of("cpu"), device="cuda", host=host)


@dataclass
class Found:
    """The counts of a run on one rank, for comparison."""

    actions: str
    exchanges: Counter[tuple[str, int, int]]
    """Number of calls of each collective, by name, number of ranks and bytes."""
    buffers: dict[str, int]
    """Peak bytes of the engine's buffers, by kind."""
    parameters: int
    gradients: int
    optimizer_state: int
    peak: int
    home: dict[str, int] = field(default_factory=dict)
    """Bytes in host memory by kind, for offloaded jobs; the other fields count device memory."""
    crossings: Counter[tuple[str, int]] = field(default_factory=Counter)
    """Number of copies between host and device, by direction and bytes."""


def real_offloaded(case: Case) -> Found:
    """Train with offloaded shards; the CPU is host and device, and the two are counted apart."""
    face = sys.modules["fullshard.flat.wrapper"]
    with a_bus() as crossings, patch.object(face, "as_offload", lambda *_: Offload(pinned=True)):
        found = real(case, crossings)
    found.crossings = Counter(
        (way.replace(" ", "_"), dtype.itemsize * numel) for way, dtype, numel in crossings
    )
    return found


def real(case: Case, crossings: Any = ()) -> Found:
    """Train for a few steps and return the counts of the last one."""
    mesh = init_device_mesh(
        "cpu", tuple(case.mesh.values()), mesh_dim_names=tuple(case.mesh.keys())
    )
    gc.collect()  # free what earlier tests left, which this trace would count as freed
    with tracing.memory(below=LEAST_SHARED_NBYTES) as trace:
        batch = case.batch()
        model = case.model()
        with recordings() as recorded:
            made = case.shard(model, mesh)
        model = made if isinstance(made, nn.Module) else model
        (engine,) = {engine_of(unit) for unit in units_below([model])}
        optimizer = case.optimizer(model.parameters())
        for number in range(STEPS):
            if number == STEPS - 1:
                for log in (crossings, *(one.calls for one in recorded)):
                    if log:
                        log.clear()
                engine.recorder = transcript = Transcript()
                engine.meter.reset_peak()
                trace.mark()
            for _ in range(case.accumulate):
                squares(model, batch).backward()
            gradients, ones = gradients_of(engine, model), constants_of(engine)
            optimizer.step()
            optimizer.zero_grad()
    shards = sum(bucket.shards.nbytes for unit in engine.units for bucket in unit.buckets)
    state = nbytes_of(one for state in optimizer.state.values() for one in state.values())
    home = {}
    if crossings:
        home = {
            "parameters": shards, "gradients": gradients - ones, "optimizer_state": state,
            "staging": staging_of(engine),
        }  # fmt: skip
        shards, gradients, state = 0, ones, 0
    return Found(
        untold(transcript),
        Counter(exchange(one, call) for one in recorded for call in one.calls if one.world > 1),
        {str(kind): nbytes for kind, nbytes in engine.meter.peak_nbytes.items() if nbytes},
        shards,
        gradients,
        state,
        trace.peak_nbytes,
        home,
    )


def dry(case: Case, rank: int, hardware: Hardware | None = None) -> Found:
    """Return the counts of a dry run of the same job."""
    hardware = hardware or hardware_of("cpu")
    job = Job(
        case.model(), case.batch(), case.mesh, rank, hardware, case.shard, squares,
        case.optimizer, case.accumulate,
    )  # fmt: skip
    step = dry_run(job).steps[-1]
    (after_backward,) = (one for one in step.moments if one.where == AFTER_BACKWARD)
    assert step.most is not None and step.most_at_home is not None
    return Found(
        untold(step.transcript),
        Counter(
            (one.what, len(one.ranks), one.nbytes)
            for one, op in step.carried
            if op and len(one.ranks) > 1
        ),
        {kind: nbytes for kind, nbytes in step.buffers.items() if nbytes},
        after_backward.held.get(kinds.PARAMETERS, 0),
        after_backward.held[kinds.GRADIENTS],
        after_backward.held.get(kinds.OPTIMIZER, 0),
        max(one.nbytes + sum(one.home.values()) for one in (step.most, step.most_at_home)),
        after_backward.home,
        Counter(step.crossings),
    )


def exchange(wire: Recording, call: CollectiveCall) -> tuple[str, int, int]:
    """Return a recorded collective as a dry run reports it."""
    nbytes = call.numel * call.dtype.itemsize
    if call.kind == "all_gather":
        return "all_gather", wire.world, nbytes * wire.world
    what = call.kind if call.kind == "all_to_all" else f"{call.kind}_mean"
    return what, wire.world, nbytes


def gradients_of(engine: Engine, model: nn.Module) -> int:
    """Return the bytes of reduced gradients, of small ones that are kept, and of flag constants."""
    reducers = [
        bucket.gradients
        for unit in engine.units
        for bucket in unit.buckets
        if bucket.gradients is not None
    ]
    kept = [one._sets._last.flat for one in reducers if one._sets._last is not None]
    grads = [param.grad for param in model.parameters()]
    return nbytes_of([*grads, *kept]) + constants_of(engine)


def constants_of(engine: Engine) -> int:
    """Return the bytes of the constants that gradient flags are copied from."""
    buckets = [bucket for unit in engine.units for bucket in unit.buckets if bucket.gradients]
    inputs = [one for bucket in buckets for one in bucket.gradients._sets.now.inputs.values()]
    return nbytes_of([ones for buffer in inputs for ones in buffer._ones.values()])


def staging_of(engine: Engine) -> int:
    """Return the bytes of the pinned memory that offloaded shards are copied through."""
    wholes = [bucket.materialized for unit in engine.units for bucket in unit.buckets]
    return nbytes_of(one._gather._outbound._host for one in wholes)


def nbytes_of(tensors: Iterable[Any]) -> int:
    """Return the bytes of the storages of ``tensors``, each counted once."""
    storages = {}
    for tensor in tensors:
        if isinstance(tensor, Tensor):
            storage = local_part(tensor.detach()).untyped_storage()
            flat = getattr(storage, "kept_alive", None)
            whole = storage if flat is None else flat.untyped_storage()
            storages[whole._cdata] = whole.nbytes()
    return sum(storages.values())


def untold(transcript: Transcript) -> str:
    """Return the transcript without autograd's task numbers, which continue across models."""
    return _TASK.sub("task", str(transcript))
