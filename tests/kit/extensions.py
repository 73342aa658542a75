"""A tensor subclass with hooks around its all-gather."""

from __future__ import annotations

from types import MethodType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fullshard.tensors import local_part
from tests.ranks.net import Net, make

EXACT = 1e-12


class Halves(Tensor):
    """An fp64 tensor that is gathered exactly, as one tensor of high bits and one of low bits.

    High bits are int32; low bits are int16, in two columns for each column.
    """

    calls: ClassVar[list[tuple[Any, ...]]] = []

    @staticmethod
    def __new__(cls, data: Tensor) -> Halves:
        return Tensor._make_wrapper_subclass(
            cls, data.shape, data.stride(), dtype=data.dtype, device=data.device
        )

    def __init__(self, data: Tensor) -> None:
        self.data_inside = data

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        def inside(x: Halves) -> Tensor:
            return x.data_inside

        out = func(
            *pytree.tree_map_only(Halves, inside, args),
            **pytree.tree_map_only(Halves, inside, kwargs or {}),
        )
        if func is torch.ops.aten.copy_.default:
            return args[0]
        return pytree.tree_map_only(Tensor, cls, out)

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], Any]:
        Halves.calls.append((mesh, outer_size, outer_stride, module, mp_policy, self.shape))
        return split(self.data_inside)

    def fsdp_post_all_gather(
        self, outputs: tuple[Tensor, ...], metadata: Any, dtype: Any, *, out: Tensor | None = None
    ) -> Any:
        return join(outputs, metadata, dtype, out)


def split(data: Tensor) -> tuple[tuple[Tensor, ...], Any]:
    halves = data.contiguous().view(torch.int32).view(*data.shape, 2)
    low = halves[..., 0].contiguous().view(torch.int16).view(*data.shape, 2)
    return (halves[..., 1].contiguous(), low), ("split", tuple(data.shape[1:]))


def join(outputs: tuple[Tensor, ...], metadata: Any, dtype: Any, out: Tensor | None) -> Any:
    high, low = outputs
    assert metadata == ("split", tuple(high.shape[1:]))
    halves = torch.stack([low.contiguous().view(torch.int32).view(high.shape), high], dim=-1)
    whole = halves.view(torch.float64).view(high.shape).to(dtype)
    if out is None:
        return whole, (high, low, whole)
    assert out.shape == whole.shape
    out.copy_(whole)
    return None


def wrapped(cls: Any) -> Net:
    model = make()
    for module in (*model.blocks, model.plain[0], model.head):
        module.weight = nn.Parameter(cls(module.weight.detach()))
    return model


def worst(model: nn.Module, plain: nn.Module) -> float:
    """Return the largest difference between this rank's shards and the unsharded model's."""
    ours, theirs = dict(model.named_parameters()), dict(plain.named_parameters())
    assert ours.keys() == theirs.keys()
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    found = 0.0
    for name, param in ours.items():
        local = local_part(param).detach()
        local = getattr(local, "data_inside", local)
        pieces = theirs[name].detach().chunk(world)
        piece = pieces[rank] if rank < len(pieces) else theirs[name][:0]
        assert local.shape == piece.shape, name
        if piece.numel():
            found = max(found, (local - piece).abs().max().item())
    return found


def put_on(param: Tensor, pre: Any, post: Any) -> None:
    local = local_part(param)
    local.fsdp_pre_all_gather = MethodType(pre, local)
    local.fsdp_post_all_gather = MethodType(post, local)


def held(model: Any) -> int:
    from fullshard.frontend.hooks import engine_of
    from fullshard.frontend.ownership import unit_of

    unit = unit_of(model)
    assert unit is not None
    return sum(engine_of(unit).meter.held_nbytes.values())
