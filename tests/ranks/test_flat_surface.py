"""Attributes and behaviour of the flat interface, beside PyTorch's FSDP1."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.fsdp as theirs
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fullshard as ours
from fullshard.wrap import ModuleWrapPolicy
from tests.kit.flat_differential import BF16, Block, batch, clean, make, quiet, wrap
from tests.ranks.models import fill, noise
from tests.ranks.pool import RankPool

Seen = dict[str, Any]
PRECISION_FIELDS = list(theirs.MixedPrecision.__dataclass_fields__)


def shown(kit: ModuleType) -> Seen:
    seen: Seen = {}
    for original in (True, False):
        plain = make(torch.float64)
        before = {id(param): param for param in plain.parameters()}
        model = wrap(kit, plain, "nested", use_orig_params=original)
        seen[f"kept {original}"] = [id(param) in before for param in model.parameters()]
        seen[f"names {original}"] = [n for n, _ in model.named_parameters()]
        seen[f"buffers {original}"] = [n for n, _ in model.named_buffers()]
        seen[f"shapes {original}"] = [tuple(p.shape) for p in model.parameters()]
        seen[f"modules {original}"] = [n for n, _ in model.named_modules()]
        units = kit.FullyShardedDataParallel.fsdp_modules(model)
        seen[f"units {original}"] = [u is model or type(u.module).__name__ for u in units]
        with quiet():
            roots = kit.FullyShardedDataParallel.fsdp_modules(model, root_only=True)
        seen[f"roots {original}"] = [u is model for u in roots]
        seen[f"is root {original}"] = [u.check_is_root() for u in units]
        with kit.FullyShardedDataParallel.summon_full_params(model):
            seen[f"full names {original}"] = [
                (n, tuple(p.shape)) for n, p in model.named_parameters()
            ]
            seen[f"full buffers {original}"] = [n for n, _ in model.named_buffers()]
            seen[f"inner names {original}"] = [n for n, _ in model.blocks[0].named_parameters()]
        with kit.FullyShardedDataParallel.summon_full_params(model, recurse=False):
            seen[f"some names {original}"] = [n for n, _ in model.named_parameters()]
        model(batch(0, torch.float64)).sum().backward()
        seen[f"grad shapes {original}"] = [
            None if p.grad is None else tuple(p.grad.shape) for p in model.parameters()
        ]
        visited: list[str] = []
        model.apply(lambda m, visited=visited: visited.append(type(m).__name__))
        seen[f"apply {original}"] = visited
        seen[f"attribute {original}"] = (type(model.blocks).__name__, model.shift.shape)
    return seen


ARGUMENTS: dict[str, Callable[[ModuleType], dict[str, Any]]] = {
    "usual": lambda kit: {},
    "chosen": lambda kit: {
        "sharding_strategy": kit.ShardingStrategy.SHARD_GRAD_OP,
        "backward_prefetch": None,
        "forward_prefetch": True,
        "limit_all_gathers": False,
        "mixed_precision": kit.MixedPrecision(BF16, cast_forward_inputs=True),
    },
    "copies": lambda kit: {"sharding_strategy": kit.ShardingStrategy.NO_SHARD},
    "alone": lambda kit: {"process_group": alone()},
    "hybrid": lambda kit: {
        "sharding_strategy": kit.ShardingStrategy.HYBRID_SHARD,
        "process_group": (dist.group.WORLD, alone()),
    },
    "device by name": lambda kit: {"device_id": "cpu"},
}


def alone() -> dist.ProcessGroup:
    group: dist.ProcessGroup = dist.new_subgroups(1)[0]
    return group


def arguments(kit: ModuleType) -> Seen:
    """Return the wrapper's attributes for its arguments; for ours, also those of a copy."""
    seen: Seen = {}
    for name, chosen in ARGUMENTS.items():
        options = chosen(kit)
        model = wrap(kit, make(torch.float32), "policy", **options)
        for one in (model, model.blocks[0], copy.deepcopy(model) if kit is ours else model):
            precision = {f: getattr(one.mixed_precision, f) for f in PRECISION_FIELDS}
            group = options.get("process_group", dist.group.WORLD)
            shards, copies = group if isinstance(group, tuple) else (group, None)
            assert one.process_group is shards
            assert copies is None or one._inter_node_pg is copies
            seen.setdefault(name, []).append(
                (
                    one.sharding_strategy.name,
                    getattr(one.backward_prefetch, "name", None),
                    (one.forward_prefetch, one.limit_all_gathers),
                    (one.cpu_offload.offload_params, one.compute_device),
                    (precision, one.rank, one.world_size),
                )
            )
    return seen


def groups_of_a_grid() -> list[Any]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))
    shards, copies = mesh.get_group("shards"), mesh.get_group("copies")
    found = []
    for given in ({"device_mesh": mesh}, {"process_group": (shards, copies)}):
        strategy = ours.ShardingStrategy._HYBRID_SHARD_ZERO2
        model = wrap(ours, make(torch.float32), "nested", sharding_strategy=strategy, **given)
        assert model.process_group is shards and model._inter_node_pg is copies
        found.append((model.sharding_strategy is strategy, model.rank, model.world_size))
    return found


def device_by_number() -> str:
    """Return the device type for a number as ``device_id`` where there is no accelerator."""
    with mock.patch.object(torch.accelerator, "is_available", lambda: False):
        return wrap(ours, make(torch.float32), "nested", device_id=3).compute_device.type


class Partial(nn.Module):
    """A model with parameters that are frozen, ignored, unused, or used on rank 0 only."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(6, 6)
        self.unused = nn.Linear(6, 6)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.ignored = nn.Linear(6, 6)
        self.once = nn.Linear(6, 6)
        self.bare = Block()
        self.block = Block()

    def forward(self, x: Tensor) -> Tensor:
        x = self.ignored(self.frozen(self.used(x)))
        if dist.get_rank() == 0:
            x = self.once(x)
        self.bare(x)
        return self.block(x)


def partial_model(kit: ModuleType, **options: Any) -> Any:
    model = fill(Partial(), scale=0.4)
    options.setdefault("ignored_modules", [model.ignored])
    for name in ("block", "bare"):
        with quiet():
            inner = kit.FullyShardedDataParallel(
                getattr(model, name), use_orig_params=True, device_id=torch.device("cpu")
            )
        setattr(model, name, inner)
    return wrap(kit, model, "none", use_orig_params=True, **options)


def gradients(kit: ModuleType) -> Seen:  # PyTorch cannot clip fp64
    seen: Seen = {}
    model = partial_model(kit)
    model(batch(0, torch.float32)).sum().backward()
    seen["sum"] = sum(p.grad.sum().item() for p in model.parameters() if p.grad is not None)
    seen["none"] = sorted(
        clean(n) for n, p in model.named_parameters() if p.numel() and p.grad is None
    )
    for param in model.ignored.parameters():
        param.grad = None
    seen["norm"] = model.clip_grad_norm_(1.0).item()
    for kind in (1.0, float("inf")):
        seen[f"norm {kind}"] = model.clip_grad_norm_(0.5, kind).item()
    seen["clipped"] = sum(p.grad.sum().item() for p in model.parameters() if p.grad is not None)
    seen["ignored"] = model.ignored.weight.shape
    model.zero_grad()
    with quiet(), model.no_sync():
        model(batch(1, torch.float32)).sum().backward()
    model(batch(2, torch.float32)).sum().backward()
    for param in model.ignored.parameters():
        param.grad = None
    seen["accumulated"] = model.clip_grad_norm_(100.0).item()
    model.zero_grad()
    with quiet(), model.no_sync():
        model(batch(1, torch.float32)).sum().backward()
    model.zero_grad()
    model(batch(2, torch.float32)).sum().backward()
    for param in model.ignored.parameters():
        param.grad = None
    seen["discarded"] = model.clip_grad_norm_(100.0).item()
    return seen


class Spy(nn.Module):
    """A module that passes its input to another one and records dtypes."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.register_buffer("tell", torch.zeros(3))
        self.register_buffer("count", torch.zeros(3, dtype=torch.long))
        self.heard: list[str] = []

    def forward(self, x: Tensor, *more: Tensor) -> Tensor:
        weight = next(self.inner.parameters())
        out = self.inner(x)
        kinds = [x.dtype, weight.dtype, self.tell.dtype, self.count.dtype, out.dtype]
        self.heard += [str(d).removeprefix("torch.") for d in (*kinds, *(t.dtype for t in more))]
        return out


class Norm(nn.BatchNorm1d):
    def forward(self, x: Tensor) -> Tensor:
        self.heard = x.dtype
        return super().forward(x)


class Spied(nn.Module):
    def __init__(self, has_norm: bool) -> None:
        super().__init__()
        self.first = Spy(nn.Linear(6, 6))
        self.norm: nn.Module = Norm(6) if has_norm else nn.Identity()
        self.second = Spy(nn.Linear(6, 6))

    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        y = self.norm(self.first(x, index))
        return self.second(y)


PRECISIONS: dict[str, dict[str, Any]] = {
    "param": {"param_dtype": BF16},
    "reduce": {"reduce_dtype": BF16},
    "buffer": {"buffer_dtype": BF16},
    "all": {"param_dtype": BF16, "reduce_dtype": torch.float32, "buffer_dtype": BF16},
    "no root cast": {"param_dtype": BF16, "cast_root_forward_inputs": False},
    "casts": {"param_dtype": BF16, "cast_forward_inputs": True},
    "kept": {"param_dtype": BF16, "keep_low_precision_grads": True},
    "kept reduce": {
        "param_dtype": BF16,
        "reduce_dtype": torch.float32,
        "keep_low_precision_grads": True,
    },
}


def dtypes(kit: ModuleType) -> Seen:
    seen: Seen = {}
    for name, fields in PRECISIONS.items():
        for has_norm in (False, True):
            model = fill(Spied(has_norm), scale=0.4)
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                model = kit.FullyShardedDataParallel(
                    model,
                    auto_wrap_policy=ModuleWrapPolicy({Spy}),
                    mixed_precision=kit.MixedPrecision(**fields),
                    use_orig_params=True,
                    device_id=torch.device("cpu"),
                )
            key = f"{name} {has_norm}"
            seen[f"{key} warned"] = sorted({w.category.__name__ for w in told})
            seen[f"{key} names"] = [n for n, _ in model.named_parameters()]
            x = noise(4, 6, dtype=torch.float32).requires_grad_()
            try:
                out = model(x, torch.arange(4))
                out.sum().backward()
            except RuntimeError as error:
                seen[f"{key} raised"] = type(error).__name__
                continue
            seen[f"{key} heard"] = (model.first.heard, model.second.heard, out.dtype, x.grad.dtype)
            seen[f"{key} norm"] = getattr(model.norm, "heard", None)
            seen[f"{key} grads"] = [
                p.grad.dtype for p in model.parameters() if p.numel() and p.grad is not None
            ]
            seen[f"{key} buffers"] = {n: b.dtype for n, b in model.named_buffers()}
            model.eval()
            seen[f"{key} eval"] = model(x, torch.arange(4)).dtype
    return seen


class Hears(nn.Module):
    """A module that records the dtype of its input and accepts any."""

    def __init__(self, *inside: nn.Module, owns: bool = True) -> None:
        super().__init__()
        self.inside = nn.ModuleList(inside)
        self.scale = nn.Parameter(torch.ones(6)) if owns else None

    def forward(self, x: Tensor) -> Tensor:
        self.heard = x.dtype
        for one in self.inside:
            x = one(x.float())
        return x if self.scale is None else x.to(self.scale.dtype) * self.scale


ROOTS: dict[str, Callable[[], Hears]] = {
    "alone": Hears,
    "around units": lambda: Hears(Hears(), Hears()),
    "around units, with nothing of its own": lambda: Hears(Hears(), Hears(), owns=False),
    "around one with nothing of its own": lambda: Hears(Hears(Hears(), owns=False)),
}


def casts(kit: ModuleType) -> Seen:
    seen: Seen = {}
    for name, build in ROOTS.items():
        for root in (False, True):
            for others in (False, True):
                precision = kit.MixedPrecision(
                    BF16, cast_root_forward_inputs=root, cast_forward_inputs=others
                )
                plain = build()
                model = kit.FullyShardedDataParallel(
                    plain,
                    auto_wrap_policy=ModuleWrapPolicy({Hears}),
                    mixed_precision=precision,
                    use_orig_params=True,
                    device_id=torch.device("cpu"),
                )
                model(torch.ones(2, 6))
                heard = [one.heard for one in plain.modules() if isinstance(one, Hears)]
                seen[f"{name}, root {root}, others {others}"] = heard
    return seen


def both(look: Callable[[ModuleType], Seen]) -> dict[str, tuple[Any, Any]]:
    """Return the observations that differ: ours and PyTorch's."""
    a, b = look(ours), look(theirs)
    keys = dict.fromkeys((*a, *b))
    return {k: (a.get(k), b.get(k)) for k in keys if not alike(a.get(k), b.get(k))}


def alike(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return abs(one - other) <= 1e-5 * max(1, abs(one))
    return bool(one == other)


def differences(pool: RankPool, look: Callable[[ModuleType], Seen]) -> set[str]:
    return {key for found in pool.run(2, both, look) for key in found}


def test_names_and_modules(pool: RankPool) -> None:
    """Names and modules equal PyTorch's; only the shapes of original parameters differ.

    Our cuts are planned, and an empty shard has an empty gradient, so that optimizers have state
    for it.
    """
    assert differences(pool, shown) == {"shapes True", "grad shapes True"}


def test_arguments(pool: RankPool) -> None:
    for found in pool.run(2, both, arguments):
        assert found == {}
    for rank, told in enumerate(pool.run(4, groups_of_a_grid)):
        assert told == [(True, rank % 2, 2)] * 2
    assert pool.run(2, device_by_number) == ["cpu"] * 2


def test_gradients(pool: RankPool) -> None:
    """Norms equal PyTorch's; sums over shards and missing gradients differ.

    Shards are cut at other places. A parameter that no rank used keeps None as its gradient.
    ``zero_grad`` of the module also drops unreduced gradients.
    """
    found = differences(pool, gradients)
    assert found == {"sum", "clipped", "none"}


def test_dtypes(pool: RankPool) -> None:
    """Dtypes equal PyTorch's, except that kept gradients have the dtype of the reduction."""
    assert differences(pool, dtypes) == {
        f"{name} {has_norm} grads" for name in ("kept reduce",) for has_norm in (False, True)
    }


def test_casts_of_inputs(pool: RankPool) -> None:
    """The root obeys both cast options; a wrapper without parameters only the root's option."""
    assert differences(pool, casts) == set()
