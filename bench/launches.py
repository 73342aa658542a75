"""Launches: what a step of one unit would put on the streams of a GPU, counted without one.

A ``TorchDispatchMode`` sees what is dispatched on the CPU, for FSDP2 and FSDP1 as for us, and
counts for each operation the kernels that PyTorch's CUDA code would launch for these very tensors
(aten/src/ATen/native/cuda, PyTorch 2.13 built for CUDA 13). The operations of the unsharded
model are left out. One process plays one rank of many with torch's fake process group. The layers
are those of real models with a quarter of the dims, so that they fit a small machine. Limits that
count elements are scaled alike. One token runs through the layers.

A count of kernels is no time: the kernels of a large layer take longer than their launches.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFlat
from torch.distributed.fsdp import MixedPrecision
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

import fullshard
from bench.compare import verdict
from bench.contenders import FLAT, FSDP1, FSDP2, PER_PARAMETER, RAGGED, units, wrapped
from bench.machine import table
from fullshard._torch import collectives as _collectives
from fullshard._torch import device as _device
from fullshard.device.streams import Lanes
from fullshard.engine import unshard

WORLDS = (8, 256)

# The limits of one kernel of a foreach operation: tensors by the number of lists, and chunks.
MOST_TENSORS = (770, 448, 336, 252, 210)
SCALE = 16  # of elements: matrices have two dims of a quarter
MOST_CHUNKS, CHUNK_NUMEL = 2240, 65536 // SCALE
MOST_CAT = 128

NOTHING = set(
    "empty empty_like empty_strided new_empty new_empty_strided detach lift_fresh set_ resize_ "
    "_record_function_enter_new _record_function_exit _local_scalar_dense".split()
)
"""Operations that launch no kernel, besides views."""

SYNCS = {"_local_scalar_dense", "nonzero", "is_nonzero", "masked_select", "index", "index_put_"}
"""Operations that make the host wait for a device; an index is a list, which the host sends."""


def kernels(op: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> int:
    """Return the number of kernels and of copies within the device that CUDA needs for ``op``."""
    name = op.overloadpacket.__name__
    if op.is_view or name in NOTHING or op.namespace in ("c10d", "profiler"):
        return 0
    if name.startswith("_foreach_"):
        return _foreach(name, [arg for arg in args if _is_tensors(arg)])
    if name == "all_gather_copy_in":
        sources, output, splits, numel, rank = args
        places = output.narrow(0, numel * rank, numel).split(splits)
        return _foreach("_foreach_copy_", [list(places), sources])
    if name in ("chunk_cat", "_chunk_cat", "chunk_cat_mixed_dtype"):
        return _chunk_cat(args[0], kwargs["out"])
    if name == "split_with_sizes_copy":
        moved = [args[0], *kwargs["out"]]
        is_fused = all(map(_is_dense, moved)) and len({part.dtype for part in moved}) == 1
        return 1 if is_fused else len(kwargs["out"])
    if name == "cat":
        parts = [part for part in args[0] if part.numel()]
        is_fused = len({part.dtype for part in (*parts, kwargs.get("out", result))}) == 1
        return math.ceil(len(parts) / MOST_CAT) if is_fused else len(parts)
    written = args[0] if name.endswith("_") else result
    return int(not isinstance(written, Tensor) or written.numel() > 0)


def _foreach(name: str, lists: list[Sequence[Tensor]]) -> int:
    """One kernel for as much as fits, or one for each tensor where the lists are not alike."""
    kinds = [{(part.dtype, part.device) for part in parts} for parts in lists]
    is_fused = all(len(kind) == 1 for kind in kinds)
    if name != "_foreach_copy_":  # which casts
        is_fused = is_fused and len(set.union(*kinds)) == 1
    for together in zip(*lists, strict=True):
        strides = [_strides(part) for part in together]
        is_fused = is_fused and all(map(_is_dense, together)) and len(set(strides)) == 1
    numels = [part.numel() for part in lists[0] if part.numel()]
    if not is_fused:
        return len(numels)
    depth = len(lists) + (not name.endswith("_"))
    return _batches([math.ceil(numel / CHUNK_NUMEL) for numel in numels], MOST_TENSORS[depth - 1])


def _batches(chunks: Sequence[int], most_tensors: int) -> int:
    """Kernels for tensors of so many chunks each."""
    launched = tensors = filled = 0
    for rest in chunks:
        tensors += 1
        while filled + rest >= MOST_CHUNKS:
            rest -= MOST_CHUNKS - filled
            launched += 1
            tensors, filled = int(rest > 0), 0
        filled += rest
        if tensors == most_tensors:
            launched += filled > 0
            tensors = filled = 0
    return launched + (filled > 0)


def _chunk_cat(parts: Sequence[Tensor], out: Tensor) -> int:
    """One kernel for each dtype, or where it does not cast: one to pad and one to copy each."""
    casts = {(part.dtype, out.dtype) for part in parts}
    fused = {(out.dtype, out.dtype), (torch.bfloat16, torch.float32)}
    return len(casts) if casts <= fused and all(map(_is_dense, parts)) else 2 * len(parts)


def _is_tensors(arg: Any) -> bool:
    return isinstance(arg, (list, tuple)) and bool(arg) and isinstance(arg[0], Tensor)


def _is_dense(part: Tensor) -> bool:
    """Return whether the elements are contiguous in some order of the dims."""
    end = 1
    for size, stride in sorted(zip(part.shape, part.stride(), strict=True), key=lambda d: d[1]):
        if size != 1 and stride != end:
            return False
        end *= size
    return True


def _strides(part: Tensor) -> tuple[tuple[int, int], ...]:
    """Sizes, and strides where there is something to stride over."""
    dims = zip(part.shape, part.stride(), strict=True)
    return tuple((size, stride if size > 1 else 0) for size, stride in dims)


class Launches(TorchDispatchMode):
    """Counts what operations in the block would launch, and how often the host would wait.

    Tensors without dims are on the host (the step counts of an optimizer, for example).
    """

    def __init__(self) -> None:
        super().__init__()
        self.of: Counter[str] = Counter()
        self.collectives = 0
        self.syncs: Counter[str] = Counter()

    @property
    def kernels(self) -> int:
        """All but collectives."""
        return self.of.total()

    def __torch_dispatch__(
        self, op: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run ``op`` and count it; DTensors come back with what they are made of."""
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        kwargs = kwargs or {}
        result = op(*args, **kwargs)
        tensors = [t for t in torch.utils._pytree.tree_leaves((args, kwargs)) if _is_tensor(t)]
        if tensors and not any(tensor.dim() for tensor in tensors):
            return result
        name = op.overloadpacket.__name__
        if name == "copy_" and not tensors[-1].dim():  # of a step count
            return result
        self.collectives += op.namespace == "c10d"
        self.of[name] += kernels(op, args, kwargs, result)
        self.syncs[name] += name in SYNCS
        return result


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


@contextmanager
def as_on_a_gpu(launches: Launches | None = None) -> Iterator[None]:
    """Let our engine do on the CPU what it does on a GPU over NCCL; count what it reads there."""

    def read(lanes: Lanes, values: Sequence[Tensor]) -> list[list[float]]:
        if launches is not None:
            launches.syncs["read"] += 1
        return original(lanes, values)

    original = Lanes.read
    with (
        mock.patch.object(_device, "fuses_copies", lambda device: True),
        mock.patch.object(_collectives, "has_average", lambda group, device_type: True),
        mock.patch.object(Lanes, "read", read),
        mock.patch.object(unshard, "_DIRECT_NBYTES", unshard._DIRECT_NBYTES // SCALE),
    ):
        yield


class Attention(nn.Module):
    """The attention of a layer whose batch is one token, which attends to its own value."""

    def __init__(self, dim: int, kv_dim: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(dim)
        self.q, self.o = (nn.Linear(dim, dim, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(dim, kv_dim, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        values = (self.k(y) + self.v(y)).repeat(1, x.shape[-1] // self.v.out_features)
        return x + self.o(self.q(y) + values)


class Llama(nn.Module):
    """A layer of Llama-3-8B, its dims a quarter: nine parameters."""

    def __init__(self, dim: int = 1024, hidden: int = 3584, kv_dim: int = 256) -> None:
        super().__init__()
        self.attention = Attention(dim, kv_dim)
        self.norm = nn.RMSNorm(dim)
        self.gate, self.up = (nn.Linear(dim, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention(x)
        y = self.norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Experts(nn.Module):
    """A layer of OLMoE-1B-7B, its dims a quarter, experts stacked: nine parameters."""

    def __init__(self, dim: int = 512, hidden: int = 256, num: int = 64) -> None:
        super().__init__()
        self.attention = Attention(dim, dim)
        self.norm = nn.RMSNorm(dim)
        self.router = nn.Linear(dim, num, bias=False)
        self.gate_up = nn.Parameter(torch.empty(num, dim, 2 * hidden))
        self.down = nn.Parameter(torch.empty(num, hidden, dim))

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention(x)
        y = self.norm(x)
        gate, up = (y @ self.gate_up).chunk(2, -1)
        each = (F.silu(gate) * up) @ self.down  # (expert, token, dim): all experts run
        return x + (self.router(y).softmax(-1).T[..., None] * each).sum(0)


LAYERS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "Llama-3-8B": (Llama, 1024),
    "OLMoE-1B-7B": (Experts, 512),
    "small": (lambda: Llama(256, 896, 64), 256),
    "small experts": (lambda: Experts(128, 64, 16), 128),
}
"""Layers, and how wide their inputs are."""
REPORTED = ("Llama-3-8B", "OLMoE-1B-7B")


class Layers(nn.Sequential):
    """Layers, which are the units, and the root around them."""

    @property
    def blocks(self) -> Layers:
        return self


def _on_cpu(prepare: Callable[[nn.Module], nn.Module]) -> Callable[[nn.Module], nn.Module]:
    """Give parameters memory after they were sharded, by ``fully_shard``."""
    return lambda model: prepare(model).to_empty(device="cpu")


def _wrapped(wrapper: Any, **options: Any) -> Callable[[nn.Module], nn.Module]:
    wrap = wrapped(wrapper, {Llama, Experts}, use_orig_params=True, **options)
    return lambda model: wrap(model.to_empty(device="cpu"))


MIXED = torch.bfloat16, torch.float32
_POLICY = fullshard.MixedPrecisionPolicy(*MIXED)
CONTENDERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    FSDP1: _wrapped(TorchFlat, mixed_precision=MixedPrecision(*MIXED)),
    FSDP2: _on_cpu(units(torch_fully_shard, mp_policy=TorchPolicy(*MIXED))),
    PER_PARAMETER: _on_cpu(units(fullshard.fully_shard, mp_policy=_POLICY)),
    RAGGED: _on_cpu(units(fullshard.fully_shard, mp_policy=_POLICY, layout=fullshard.Ragged())),
    FLAT: _wrapped(
        fullshard.FullyShardedDataParallel, mixed_precision=fullshard.MixedPrecision(*MIXED)
    ),
}


def counted(layer: str, prepare: Callable[[nn.Module], nn.Module]) -> tuple[Launches, Launches]:
    """Return the launches of the second step: forward and backward, then the optimizer."""
    make, dim = LAYERS[layer]
    with torch.device("meta"):
        model: nn.Module = Layers(make())
    with as_on_a_gpu():
        model = prepare(model)
    for param in model.parameters():
        nn.init.zeros_(param.to_local() if isinstance(param, DTensor) else param)
    optimizer = _adamw(model, prepare)
    x = torch.zeros(1, dim, dtype=torch.bfloat16)
    passes, step = Launches(), Launches()
    for _ in range(2):
        passes, step = Launches(), Launches()
        with as_on_a_gpu(passes), passes:
            model(x).float().sum().backward()
        with step:
            optimizer.step()
        optimizer.zero_grad()
    return passes, step


def _adamw(model: nn.Module, prepare: Callable[..., Any]) -> torch.optim.Optimizer:
    """The implementation that PyTorch takes on CUDA."""
    options = {"lr": 1e-3, "foreach": True}
    if prepare is CONTENDERS[RAGGED]:
        return fullshard.optim.ShardedOptimizer(model.parameters(), torch.optim.AdamW, **options)
    return torch.optim.AdamW(model.parameters(), **options)


def figures() -> dict[str, dict[str, dict[str, Any]]]:
    """By layer and ranks, by contender: kernels of the passes and the optimizer, and the rest."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    torch.set_num_threads(1)
    for layer in REPORTED:
        own, _ = counted(layer, lambda model: model.to_empty(device="cpu").bfloat16())
        for world in WORLDS:
            dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
            row = found[f"{layer}, {world} ranks"] = {}
            for name, prepare in CONTENDERS.items():
                passes, step = counted(layer, prepare)
                row[name] = {
                    "of": dict(passes.of - own.of),
                    "kernels": passes.kernels - own.kernels,
                    "collectives": passes.collectives,
                    "optimizer": step.kernels,
                    "syncs": passes.syncs.total() - own.syncs.total(),
                }
            dist.destroy_process_group()
    return found


def report(found: dict[str, dict[str, dict[str, Any]]]) -> int:
    """Print the table; how many bounds were missed."""
    print("kernels + collectives, kernels of the optimizer; host syncs, of a layer and step\n")
    rows = [
        [
            where,
            *("{kernels} + {collectives}, {optimizer}; {syncs}".format(**n) for n in row.values()),
        ]
        for where, row in found.items()
    ]
    print(table(["", *CONTENDERS], rows))
    print()
    for where, row in found.items():
        of = ", ".join(f"{op} {number}" for op, number in row[RAGGED]["of"].items())
        print(f"{RAGGED}, {where}: {of}")
    missed = [f"{name}, {where}" for where, row in found.items() for name in _missed(row)]
    return verdict(missed)


def _missed(row: dict[str, dict[str, Any]]) -> Iterator[str]:
    theirs = row[FSDP2]["kernels"]
    for name, most in ((PER_PARAMETER, theirs), (RAGGED, theirs / 2)):
        if row[name]["kernels"] > most or row[name]["syncs"]:
            yield name
