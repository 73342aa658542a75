"""Peak bytes of a rank: everything allocated, from building the model to the end of a third step.

A process plays one rank of eight with torch's fake process group; PyTorch's profiler notes what
its CPU allocator hands out and gets back. Each contender has a process of its own, so that none
counts what another one left behind.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFlat
from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy, ShardingStrategy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import fullshard
from bench import tracing
from bench.compare import apart, verdict
from bench.contenders import (
    FLAT,
    FSDP1,
    FSDP2,
    ONE_FLAT,
    PER_PARAMETER,
    RAGGED,
    Contender,
    adamw,
    sharded_adamw,
    units,
    wrapped,
)
from bench.machine import table
from bench.models import GPT, SHAPES

WORLD = 8
FSDP1_ONE = "torch FSDP1, one flat parameter"
RIVALS = {PER_PARAMETER: FSDP2, RAGGED: FSDP2, FLAT: FSDP1, ONE_FLAT: FSDP1_ONE}
"""The contender of PyTorch that each of ours is compared with."""
BOUND = 1.02
"""Largest share at the peak and between steps."""


@dataclass(frozen=True)
class Case:
    """A model, and how it is sharded and trained; what all contenders do alike."""

    shape: str = "layers"
    bf16: bool = False
    """Computation in bf16, reduction in fp32."""
    replicas: int = 1
    reshards: bool = True
    """True if units are resharded after their forward."""
    syncs: tuple[bool, ...] = (True,)
    """For each microbatch of a step: whether its gradients are reduced."""


# Parameters matter here, and activations do not: a layer has 3 MB in fp32, the embedding 17.
LAYERS = replace(SHAPES["deep"], batch=1)
FORMS = {**SHAPES, "layers": LAYERS, "large embedding": replace(LAYERS, vocab=16384)}

CASES = {
    "deep": Case("deep"),
    "wide": Case("wide"),
    "layers": Case(),
    "layers, bf16/fp32": Case(bf16=True),
    "large embedding": Case("large embedding"),
    "large embedding, bf16/fp32": Case("large embedding", bf16=True),
    "not resharded after forward": Case(reshards=False),
    "accumulated sharded": Case(syncs=(True, True)),
    "accumulated sharded, bf16/fp32": Case(bf16=True, syncs=(True, True)),
    "accumulated whole (no_sync)": Case(syncs=(False, True)),
    "accumulated whole, bf16/fp32": Case(bf16=True, syncs=(False, True)),
    "2 replicas (HSDP)": Case(replicas=2),
    "2 replicas, bf16/fp32": Case(bf16=True, replicas=2),
}


def mesh_of(case: Case) -> DeviceMesh:
    """The mesh that the case is sharded on."""
    if case.replicas == 1:
        return init_device_mesh("cpu", (WORLD,))
    sizes = (case.replicas, WORLD // case.replicas)
    return init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard"))


def per_parameter(shard: Callable[..., Any], case: Case, **options: Any) -> Any:
    """Return the preparation by ``fully_shard``, PyTorch's or ours."""
    if case.bf16:
        options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    if not case.reshards:
        options["reshard_after_forward"] = False
    return units(shard, mesh=mesh_of(case), **options)


def flat(wrapper: Any, case: Case, **options: Any) -> Any:
    """Return the preparation by ``FullyShardedDataParallel``, PyTorch's or ours."""
    if case.bf16:
        options["mixed_precision"] = MixedPrecision(torch.bfloat16, torch.float32)
    kinds = ShardingStrategy if wrapper is TorchFlat else fullshard.ShardingStrategy
    names = ("FULL_SHARD", "HYBRID_SHARD"), ("SHARD_GRAD_OP", "_HYBRID_SHARD_ZERO2")
    strategy = kinds[names[not case.reshards][case.replicas > 1]]
    return wrapped(wrapper, device_mesh=mesh_of(case), sharding_strategy=strategy, **options)


def contender(name: str, case: Case) -> Contender:
    """Return the contender called ``name``, set up for ``case``."""
    ours, ours_flat = fullshard.fully_shard, fullshard.FullyShardedDataParallel
    makers: dict[str, Callable[[], Contender]] = {
        FSDP2: lambda: Contender(per_parameter(torch_fully_shard, case), adamw),
        PER_PARAMETER: lambda: Contender(per_parameter(ours, case), adamw),
        RAGGED: lambda: Contender(
            per_parameter(ours, case, layout=fullshard.Ragged()), sharded_adamw
        ),
        FSDP1: lambda: Contender(flat(TorchFlat, case, use_orig_params=True), adamw),
        FSDP1_ONE: lambda: Contender(flat(TorchFlat, case), adamw),
        FLAT: lambda: Contender(flat(ours_flat, case, use_orig_params=True), adamw),
        ONE_FLAT: lambda: Contender(flat(ours_flat, case), adamw),
    }
    return makers[name]()


@contextmanager
def reducing(model: Any, sync: bool) -> Iterator[None]:
    """Let backwards in the block reduce their gradients, or not."""
    if hasattr(model, "no_sync"):
        with nullcontext() if sync else model.no_sync():
            yield
    else:
        model.set_requires_gradient_sync(sync)
        yield


def step(
    model: nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor, syncs: tuple[bool, ...]
) -> None:
    """Take one training step, a microbatch for each of ``syncs``."""
    for sync in syncs:
        with reducing(model, sync):
            model(tokens).backward()
    optimizer.step()
    optimizer.zero_grad()


def peaks(name: str, case: Case) -> tuple[int, int]:
    """Most bytes held in the third step, and bytes held after it; in a process group of eight."""
    gc.collect()  # else memory of an earlier case would be freed, and counted, in this one
    shape = FORMS[case.shape]
    made = contender(name, case)
    with tracing.memory() as trace:
        torch.manual_seed(0)
        model, optimizer = made.make(GPT(shape))
        tokens = torch.randint(shape.vocab, (shape.batch, shape.length + 1))
        for _ in range(2):
            step(model, optimizer, tokens, case.syncs)
        trace.mark()
        step(model, optimizer, tokens, case.syncs)
    return trace.peak_nbytes, trace.held_nbytes


@contextmanager
def playing_a_rank() -> Iterator[None]:
    """Be one of eight ranks whose collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD)
    try:
        yield
    finally:
        dist.destroy_process_group()


def of_all_cases(name: str) -> dict[str, tuple[int, int]]:
    """``peaks`` of one contender in every case."""
    torch.set_num_threads(1)
    with playing_a_rank():
        return {title: peaks(name, case) for title, case in CASES.items()}


def figures() -> dict[str, dict[str, dict[str, float]]]:
    """By case and contender: peak and held bytes, as shares of PyTorch's counterpart."""
    nbytes = {name: apart(of_all_cases, name) for name in {*RIVALS.values(), *RIVALS}}
    return {
        title: {
            name: {
                kind: nbytes[name][title][i] / nbytes[rival][title][i]
                for i, kind in enumerate(("peak", "held"))
            }
            for name, rival in RIVALS.items()
        }
        for title in CASES
    }


def report(found: dict[str, dict[str, dict[str, float]]]) -> int:
    """Print the table; how many shares are above the bound."""
    print(f"bytes of a rank of {WORLD}: at the peak / between steps; as a share of FSDP2's, or,")
    print(f"in the last two columns, of FSDP1's (torch {torch.__version__})\n")
    rows = [
        [title, *(f"{shares[n]['peak']:.2f} / {shares[n]['held']:.2f}" for n in RIVALS)]
        for title, shares in found.items()
    ]
    print(table(["model", *RIVALS], rows))
    missed = [
        f"{title}, {name}, {kind}: {share:.3f}"
        for title, shares in found.items()
        for name, kinds in shares.items()
        for kind, share in kinds.items()
        if share > BOUND
    ]
    return verdict(missed, f"above {BOUND}")
