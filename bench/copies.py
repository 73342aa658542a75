"""Copied bytes: what a step writes by copies and casts between shards and whole parameters.

Seen from outside, by a ``TorchDispatchMode`` that counts the bytes that copying operators write,
for FSDP2 as for us, less what the unsharded model copies by itself. One process plays one rank of
many with torch's fake process group, so what travels is not counted. Our own count, which is kept
always, has to agree with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import fullshard
from bench.compare import verdict
from bench.machine import grid
from bench.models import GPT, SHAPES
from fullshard.comm import Done, Pending, Wrapper, collectives_of, wrapped
from fullshard.comm.means import put_mean
from fullshard.comm.protocol import put

COPYING = {
    "copy_",
    "_foreach_copy_",
    "_to_copy",
    "clone",
    "cat",
    "split_with_sizes_copy",
    "_chunk_cat",
    "chunk_cat",
    "all_gather_copy_in",
}
BOUNDS = {"ragged": 0.45, "per-parameter": 0.80}
"""Largest shares of FSDP2's; all dims of the model divide evenly."""


class CopiedBytes(TorchDispatchMode):
    """Counts the bytes that copying operators write."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(
        self, op: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run ``op``, and count what it wrote if it is a copy."""
        kwargs = kwargs or {}
        result = op(*args, **kwargs)
        name = op.overloadpacket.__name__
        if name in COPYING:
            self.nbytes += sum(map(_nbytes, _written(name, args, kwargs, result)))
        return result


def _written(name: str, args: Any, kwargs: dict[str, Any], result: Any) -> list[Any]:
    """The tensors that a copying operator wrote."""
    if name == "all_gather_copy_in":  # into its slice of the output
        return tree_leaves(args[0])
    if "out" in kwargs:
        return tree_leaves(kwargs["out"])
    return tree_leaves(args[0] if name.endswith("copy_") else result)


def _nbytes(value: Any) -> int:
    return value.numel() * value.itemsize if isinstance(value, Tensor) else 0


@dataclass(frozen=True)
class Messages(Wrapper):
    """A stand-in for our exchange over gloo between hosts; over NCCL we use native collectives.

    No other rank exists; only the local copies of the exchange are made.
    """

    @property
    def adds_wide(self) -> bool:
        """Our own sums do."""
        return True

    def all_gather(self, outputs: Sequence[Tensor], sources: Sequence[Tensor]) -> Pending:
        """Our own slice goes to its place."""
        for output, source in zip(outputs, sources, strict=True):
            put(source, output.view(self.world, -1)[self.rank])
        return Done()

    def reduce_scatter_mean(self, output: Tensor, source: Tensor) -> Pending:
        """Add up as many slices as would come."""
        own, *others = source.view(self.world, -1).unbind()
        put_mean(output, own, others)
        return Done()


def copied(shard: Callable[..., Any] | None, dtype: torch.dtype, **options: Any) -> int:
    """Bytes that the second step's forward and backward copy, optimizer left out."""
    torch.manual_seed(0)
    shape = SHAPES["wide"]
    model: Any = GPT(shape)
    if shard is None:
        model = model.to(dtype)
    else:
        for module in (*model.blocks, model):
            shard(module, **options)
    tokens = torch.randint(shape.vocab, (shape.batch, shape.length + 1))
    count = CopiedBytes()
    for _ in range(2):
        with count:
            count.nbytes = 0
            before = own_count(model)
            model(tokens).backward()
        for param in model.parameters():
            param.grad = None
    if before is not None:
        own = (own_count(model) or 0) - before
        check(own, count.nbytes - copied(None, dtype))
    return count.nbytes


def own_count(model: nn.Module) -> int | None:
    """Return the copied bytes that our engine has counted so far."""
    return model.copied_nbytes() if isinstance(model, fullshard.FSDPModule) else None


def check(own: int, observed: int) -> None:
    """Raise if the engine's own count differs from the bytes that were observed.

    Over gloo, fullshard exchanges messages itself, so two more copies are observed: the own slice
    into the output of a gather, and the sum of a reduction.
    """
    is_gloo = collectives_of(init_device_mesh("cpu", (dist.get_world_size(),))).adds_wide
    if observed < own or (observed > own and not is_gloo):
        raise AssertionError(f"the engine counted {own} copied bytes, {observed} were observed")


def figures() -> dict[str, dict[str, float]]:
    """By world and dtypes, the bytes as a share of FSDP2's."""
    found = {}
    for world in (2, 8):
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
        for label, dtype in (("fp32", torch.float32), ("bf16/fp32", torch.bfloat16)):
            found[f"{world} ranks, {label}, native"] = _figures(dtype)
            with wrapped(Messages):
                found[f"{world} ranks, {label}, gloo"] = _figures(dtype)
        dist.destroy_process_group()
    return found


def _figures(dtype: torch.dtype) -> dict[str, float]:
    mixed = dtype is not torch.float32
    theirs = {"mp_policy": TorchPolicy(dtype, torch.float32)} if mixed else {}
    ours: dict[str, Any] = (
        {"mp_policy": fullshard.MixedPrecisionPolicy(dtype, torch.float32)} if mixed else {}
    )
    plain = copied(None, dtype)
    whole = copied(torch_fully_shard, dtype, **theirs) - plain
    shares = {"torch FSDP2": 1.0}
    for name, layout in (
        ("per-parameter", fullshard.PerParameter()),
        ("ragged", fullshard.Ragged()),
    ):
        shares[name] = (copied(fullshard.fully_shard, dtype, layout=layout, **ours) - plain) / whole
    return shares


def report(found: dict[str, dict[str, float]]) -> int:
    """Print the table; how many bounds were missed."""
    print("bytes copied in forward and backward, as a share of FSDP2's\n")
    print(grid("", found, ["torch FSDP2", *BOUNDS]))
    missed = [f"{n}, {k}" for k, v in found.items() for n, bound in BOUNDS.items() if v[n] > bound]
    return verdict(missed)
