"""Which parameters of a unit share a bucket, and how they lie in it; nothing is changed here."""

from __future__ import annotations

import enum
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, TypeVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard import _torch
from fullshard.engine import BucketSpec, GradDtypes, MixedPrecisionPolicy, Offload, check_extendable
from fullshard.errors import ConfigError, UnsupportedError
from fullshard.frontend.meshes import DataMesh
from fullshard.frontend.ownership import OwnedParam
from fullshard.frontend.placement import PlacementFn, placed
from fullshard.layout import Layout, LayoutStrategy, ParamSpec, PerParameter
from fullshard.schedule import AfterForward
from fullshard.tensors import (
    DTensorForm,
    HookArguments,
    ParallelSpec,
    PlainForm,
    RaggedShard,
    RaggedTensor,
    ShardForm,
    is_wrapper,
    local_part,
)

_ALIGN_NBYTES = 16

Decided = TypeVar("Decided")


class Shown(enum.Enum):
    """What users see of their parameters between steps."""

    DTENSORS = "DTensors"
    """New ones in their place: ``fully_shard``."""
    ORIGINALS = "originals"
    """Their own Parameter objects, over this rank's plain piece:
    ``FullyShardedDataParallel(use_orig_params=True)``."""
    FLAT = "flat"
    """One plain Parameter over the whole shard; the pieces are hidden:
    ``FullyShardedDataParallel(use_orig_params=False)``."""


@dataclass(frozen=True)
class Choices:
    """What the user chose in a call, checked."""

    mesh: DataMesh
    after_forward: AfterForward
    secondary: int | None
    """Ranks that gather again in backward, if fewer than all."""
    policy: MixedPrecisionPolicy
    ignored: set[nn.Parameter]
    placement_fn: PlacementFn | None
    layout: LayoutStrategy
    offload: Offload | None = None
    shown: Shown = Shown.DTENSORS

    def layout_on(self, mesh: DataMesh) -> LayoutStrategy:
        """The layout; where nothing is cut, layouts differ in nothing but the shapes of pieces."""
        if mesh.shard_dim is None and self.shown is not Shown.FLAT:
            return PerParameter()
        return self.layout

    def alignment(self, dtype: torch.dtype, policy: MixedPrecisionPolicy) -> int:
        """Elements that each parameter starts at a multiple of; one tensor has no gaps."""
        if self.shown is Shown.FLAT:
            return 1
        narrowest = min(d.itemsize for d in (dtype, policy.param_dtype, policy.reduce_dtype) if d)
        return max(1, _ALIGN_NBYTES // narrowest)


@dataclass(frozen=True)
class Plan:
    """The buckets of a unit, before anything is made."""

    specs: list[BucketSpec]
    params: list[list[OwnedParam]]


class _Member(NamedTuple):
    """A parameter on its way into a bucket; ``spec`` is what data-parallel ranks share of it."""

    owned: OwnedParam
    spec: ParamSpec
    parallel: ParallelSpec | None
    policy: MixedPrecisionPolicy

    @property
    def computed(self) -> torch.dtype:
        """The dtype of the unsharded parameter."""
        own = self.owned.param.dtype
        return self.policy.param_dtype or own if own.is_floating_point else own


def plan_buckets(owned: Sequence[OwnedParam], choices: Choices) -> Plan:
    """Parameters of one mesh, trainability, kind of tensor and of the same dtypes share a bucket.

    Raises:
        ConfigError, UnsupportedError: a parameter cannot lie where it was sent.
    """
    groups: dict[tuple[DataMesh, torch.dtype, torch.dtype, bool, type], list[_Member]] = {}
    for one in owned:
        mesh, member = _member(one, choices)
        tensor = local_part(one.param).detach()
        kind = type(tensor) if is_wrapper(tensor) else torch.Tensor
        key = (
            mesh,
            one.param.dtype,
            member.computed,
            one.param.requires_grad,
            kind,
        )
        groups.setdefault(key, []).append(member)
    plan = Plan([], [])
    for (mesh, dtype, *_, kind), members in groups.items():
        params = [member.owned for member in members]
        plan.params.append(params)
        spec = _bucket_spec(members, dtype, mesh, choices)
        GradDtypes.check(spec, [owned.param for owned in params])
        if kind is not torch.Tensor:
            check_extendable(spec)
            spec = replace(spec, are_wrapped=True)
        plan.specs.append(spec)
    return plan


def device_of(mesh: DataMesh) -> torch.device:
    """This rank's device."""
    kind = mesh.mesh.device_type
    if kind == "cpu":
        return torch.device("cpu")
    return torch.device(kind, torch.get_device_module(kind).current_device())


def _member(owned: OwnedParam, choices: Choices) -> tuple[DataMesh, _Member]:
    answer = choices.placement_fn(owned.param) if choices.placement_fn else None
    dim, mesh = placed(owned, answer, choices.mesh)
    if dim is not None and not isinstance(choices.layout, PerParameter):
        raise ConfigError(
            f"shard_placement_fn: got Shard({dim}) for parameter {owned.name} with "
            f"layout={choices.layout!r}, which cuts on no dim; return None, or use PerParameter()"
        )
    parallel = _named(owned, lambda: mesh.parallel_spec(owned.param, owned.name))
    shape = owned.param.shape if parallel is None else parallel.local_shape
    policy = choices.policy.for_param(owned.name, owned.param)
    return mesh, _Member(owned, ParamSpec(owned.name, tuple(shape), dim or 0), parallel, policy)


def _bucket_spec(
    members: Sequence[_Member], dtype: torch.dtype, mesh: DataMesh, choices: Choices
) -> BucketSpec:
    policy = members[0].policy if dtype.is_floating_point else MixedPrecisionPolicy()
    strategy = choices.layout_on(mesh)
    align = choices.alignment(dtype, policy)
    layout = strategy.build([member.spec for member in members], mesh.num_shards, align)
    parallel = tuple(member.parallel for member in members)
    return BucketSpec(
        layout=layout,
        comm=mesh.shards,
        form=_form(members, layout, mesh, choices),
        device=device_of(mesh),
        replicas=mesh.replicas,
        secondary=mesh.secondary(choices.secondary) if choices.secondary else None,
        parallel=parallel if any(parallel) else None,
        param_dtype=policy.param_dtype,
        reduce_dtype=policy.reduce_dtype,
        follows_grad_dtype=choices.shown is Shown.DTENSORS and _torch.follows_grad_dtype(),
        clean_padding=choices.shown is Shown.FLAT,
        offload=choices.offload,
        hook_arguments=_hook_arguments(members, strategy, mesh, choices),
    )


def _hook_arguments(
    members: Sequence[_Member], strategy: LayoutStrategy, mesh: DataMesh, choices: Choices
) -> HookArguments | None:
    """What tensors with hooks are told; None where these could not know what they have."""
    if not isinstance(strategy, PerParameter):
        return None
    modules = [weakref.ref(member.owned.places[0].module) for member in members]
    return HookArguments(mesh.one_dim, modules, members[0].policy)


def _form(
    members: Sequence[_Member], layout: Layout, mesh: DataMesh, choices: Choices
) -> ShardForm:
    """How users see the pieces."""
    ragged = mesh.shard_dim is not None and not isinstance(choices.layout, PerParameter)
    cuts = [_ragged_cut(layout, i) if ragged else m.spec.shard_dim for i, m in enumerate(members)]
    form = DTensorForm(
        [member.owned.param.shape for member in members],
        [
            _named(member.owned, partial(mesh.place, member.parallel, cut))
            for member, cut in zip(members, cuts, strict=True)
        ],
        RaggedTensor if ragged else DTensor,
    )
    return form if choices.shown is Shown.DTENSORS else PlainForm(form)


def _named(owned: OwnedParam, decide: Callable[[], Decided]) -> Decided:
    """What ``decide`` returns, or its error with the name of the parameter."""
    try:
        return decide()
    except (ConfigError, UnsupportedError) as error:
        raise type(error)(f"fully_shard: parameter {owned.name}: {error}") from error


def _ragged_cut(layout: Layout, param: int) -> RaggedShard:
    return RaggedShard((band.num_ranks, band.segment.length) for band in layout.bands[param])
