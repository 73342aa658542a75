"""Plans of buckets: the grouping and the layout of a unit's parameters; changes nothing."""

from __future__ import annotations

import enum
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple, TypeVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard._torch import autograd as _autograd
from fullshard.comm import ENCODED
from fullshard.engine import (
    BucketSpec,
    GradDtypes,
    MixedPrecisionPolicy,
    Offload,
    WirePolicy,
    check_extendable,
)
from fullshard.errors import ConfigError, UnsupportedError
from fullshard.frontend.meshes import DataMesh
from fullshard.frontend.ownership import PlacedParam
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
    """The form in which users see their parameters between steps."""

    DTENSORS = "DTensors"
    """New DTensors replace the parameters: ``fully_shard``."""
    ORIGINALS = "originals"
    """The user's own Parameter objects, over this rank's plain piece:
    ``FullyShardedDataParallel(use_orig_params=True)``."""
    FLAT = "flat"
    """One plain Parameter over the whole shard; the pieces are hidden:
    ``FullyShardedDataParallel(use_orig_params=False)``."""


@dataclass(frozen=True)
class CallOptions:
    """The options of one call, checked."""

    mesh: DataMesh
    after_forward: AfterForward
    secondary: int | None
    """Size of the groups that gather again in backward, if smaller than all ranks."""
    policy: MixedPrecisionPolicy
    ignored: set[nn.Parameter]
    placement_fn: PlacementFn | None
    layout: LayoutStrategy
    offload: Offload | None = None
    shown: Shown = Shown.DTENSORS
    wire: WirePolicy = field(default_factory=WirePolicy)

    def layout_on(self, mesh: DataMesh) -> LayoutStrategy:
        """Return the layout on ``mesh``; ``PerParameter`` if nothing is cut, as it keeps shapes."""
        if mesh.shard_dim is None and self.shown is not Shown.FLAT:
            return PerParameter()
        return self.layout

    def alignment(self, dtype: torch.dtype, policy: MixedPrecisionPolicy) -> int:
        """Return the alignment of parameters in elements; 1 if flat, so that there are no gaps.

        Where they travel in blocks, no block has elements of two parameters, or is cut.
        """
        if self.shown is Shown.FLAT:
            return 1
        block = self.wire.block if self.wire.has_blocks and dtype in ENCODED else 1
        narrowest = min(d.itemsize for d in (dtype, policy.param_dtype, policy.reduce_dtype) if d)
        return max(block, _ALIGN_NBYTES // narrowest)


@dataclass(frozen=True)
class BucketPlan:
    """The planned buckets of a unit; nothing is allocated yet."""

    specs: list[BucketSpec]
    params: list[list[PlacedParam]]


class _Member(NamedTuple):
    """A parameter to put in a bucket; ``spec`` is of the tensor that data-parallel ranks cut."""

    owned: PlacedParam
    spec: ParamSpec
    parallel: ParallelSpec | None
    policy: MixedPrecisionPolicy

    @property
    def computed(self) -> torch.dtype:
        """The dtype of the unsharded parameter."""
        own = self.owned.param.dtype
        return self.policy.param_dtype or own if own.is_floating_point else own


def plan_buckets(owned: Sequence[PlacedParam], choices: CallOptions) -> BucketPlan:
    """Group parameters into buckets by mesh, dtypes, trainability and tensor class.

    Raises:
        ConfigError, UnsupportedError: if a parameter does not fit the chosen mesh or dim.
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
    plan = BucketPlan([], [])
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
    """Return this rank's device of the type of ``mesh``."""
    kind = mesh.mesh.device_type
    if kind == "cpu":
        return torch.device("cpu")
    return torch.device(kind, torch.get_device_module(kind).current_device())


def _member(owned: PlacedParam, choices: CallOptions) -> tuple[DataMesh, _Member]:
    answer = choices.placement_fn(owned.param) if choices.placement_fn else None
    dim, mesh = placed(owned, answer, choices.mesh)
    if dim is not None and not isinstance(choices.layout, PerParameter):
        raise ConfigError(
            f"shard_placement_fn: got Shard({dim}) for parameter {owned.name} with "
            f"layout={choices.layout!r}, which cuts on no dim; return None, or use PerParameter()"
        )
    parallel = _naming(owned, lambda: mesh.parallel_spec(owned.param, owned.name))
    shape = owned.param.shape if parallel is None else parallel.local_shape
    policy = choices.policy.for_param(owned.name, owned.param)
    return mesh, _Member(owned, ParamSpec(owned.name, tuple(shape), dim or 0), parallel, policy)


def _bucket_spec(
    members: Sequence[_Member], dtype: torch.dtype, mesh: DataMesh, choices: CallOptions
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
        follows_grad_dtype=choices.shown is Shown.DTENSORS and _autograd.follows_grad_dtype(),
        clean_padding=choices.shown is Shown.FLAT,
        offload=choices.offload,
        hook_arguments=_hook_arguments(members, strategy, mesh, choices),
        wire=choices.wire,
    )


def _hook_arguments(
    members: Sequence[_Member], strategy: LayoutStrategy, mesh: DataMesh, choices: CallOptions
) -> HookArguments | None:
    """Return arguments for all-gather hooks; None for layouts whose pieces hooks cannot read."""
    if not isinstance(strategy, PerParameter):
        return None
    modules = [weakref.ref(member.owned.places[0].module) for member in members]
    return HookArguments(mesh.one_dim, modules, members[0].policy)


def _form(
    members: Sequence[_Member], layout: Layout, mesh: DataMesh, choices: CallOptions
) -> ShardForm:
    """Return the form in which users see the pieces."""
    ragged = mesh.shard_dim is not None and not isinstance(choices.layout, PerParameter)
    cuts = [_ragged_cut(layout, i) if ragged else m.spec.shard_dim for i, m in enumerate(members)]
    form = DTensorForm(
        [member.owned.param.shape for member in members],
        [
            _naming(member.owned, partial(mesh.place, member.parallel, cut))
            for member, cut in zip(members, cuts, strict=True)
        ],
        RaggedTensor if ragged else DTensor,
    )
    return form if choices.shown is Shown.DTENSORS else PlainForm(form)


def _naming(owned: PlacedParam, decide: Callable[[], Decided]) -> Decided:
    """Return the result of ``decide``; add the name of the parameter to errors."""
    try:
        return decide()
    except (ConfigError, UnsupportedError) as error:
        raise type(error)(f"fully_shard: parameter {owned.name}: {error}") from error


def _ragged_cut(layout: Layout, param: int) -> RaggedShard:
    return RaggedShard((band.num_ranks, band.segment.length) for band in layout.bands[param])
