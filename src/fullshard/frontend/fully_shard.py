"""``fully_shard``: check the options of a call, plan its unit, then change all modules at once."""

from __future__ import annotations

import inspect
import logging
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from types import SimpleNamespace
from typing import Any, NamedTuple, Protocol, TypedDict, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from fullshard._torch import autograd as _autograd
from fullshard._torch import nn as _nn
from fullshard.comm import ENCODED
from fullshard.engine import (
    Bucket,
    BucketSpec,
    Engine,
    GradDtypes,
    MixedPrecisionPolicy,
    Offload,
    OffloadPolicy,
    Unit,
    WirePolicy,
    check_extendable,
)
from fullshard.errors import AssertedConfigError, ConfigError, UnsupportedError
from fullshard.frontend import checks
from fullshard.frontend.hooks import engine_of, install_forward_hooks, install_state_dict_hooks
from fullshard.frontend.meshes import DataMesh, checked_mesh, data_mesh
from fullshard.frontend.module import check_ends_by_itself, sharded_class
from fullshard.frontend.optimizers import check_optimizers_again
from fullshard.frontend.ownership import (
    Additions,
    PlacedParam,
    Subtree,
    collect,
    enlist,
    set_buffer,
    unit_of,
)
from fullshard.frontend.places import FlatPlaces, Places, innermost
from fullshard.layout import Layout, LayoutStrategy, ParamSpec, PerParameter
from fullshard.schedule import AfterForward, UnitPolicy
from fullshard.tensors import (
    Face,
    HookArguments,
    ParallelSpec,
    RaggedShard,
    RaggedTensor,
    Shown,
    explain_uses,
    handle_ops_on,
    is_wrapper,
    local_part,
)

Modules = TypeVar("Modules", bound="nn.Module | list[nn.Module] | tuple[nn.Module, ...]")


class MixedPrecisionLike(Protocol):
    """A ``MixedPrecisionPolicy``, ours or PyTorch's."""

    @property
    def param_dtype(self) -> torch.dtype | None:
        """Dtype of gathered parameters; None: their own."""

    @property
    def reduce_dtype(self) -> torch.dtype | None:
        """Dtype of sums of gradients; None: that of gathered parameters."""

    @property
    def output_dtype(self) -> torch.dtype | None:
        """Dtype of outputs; None: unchanged."""

    @property
    def cast_forward_inputs(self) -> bool:
        """True if inputs are cast to ``param_dtype``."""


class ShardOptions(TypedDict, total=False):
    """Options of ``fully_shard`` that ``shard_blocks`` takes, too, the same for each unit."""

    mp_policy: MixedPrecisionLike
    offload_policy: Any
    shard_placement_fn: PlacementFn | None
    dp_mesh_dims: Any
    layout: LayoutStrategy
    wire: WirePolicy


def fully_shard(
    module: Modules,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    mp_policy: MixedPrecisionLike = MixedPrecisionPolicy(),
    offload_policy: Any = OffloadPolicy(),
    ignored_params: set[nn.Parameter] | None = None,
    shard_placement_fn: PlacementFn | None = None,
    dp_mesh_dims: Any = None,
    layout: LayoutStrategy = PerParameter(),
    wire: WirePolicy = WirePolicy(),
) -> Modules:
    """Shard the parameters of ``module`` over the ranks of ``mesh``, in place.

    Each call makes a *unit* of the parameters below ``module`` that no inner call owns. A unit's
    parameters are gathered together before the module's forward and backward and freed afterwards,
    and their gradients are reduced together. Call this bottom-up, on a model's blocks first and on
    the model last, then build the optimizer. The interface is that of
    ``torch.distributed.fsdp.fully_shard``.

    Args:
        module: the module, or a list or tuple of modules that form one unit. Parameters must be
            contiguous and, with ``PerParameter()``, have at least one dim.
        mesh: a 1-D mesh of the data-parallel ranks, or a 2-D mesh with dim names (HSDP). Over a
            2-D mesh, parameters are cut along the second dim, ranks along the first dim hold
            replicas, and gradients are reduced over both. None: all ranks, on the accelerator if
            the default process group serves it, else on the CPU; a process group is made if there
            is none.
        reshard_after_forward: True frees the parameters after forward and gathers them again in
            backward; False keeps them unsharded in between. None: False for the module that is the
            root of a forward, True for others. With an int k, which must divide the number of
            shards, each rank keeps a k-th of the parameters after forward. Backward then gathers
            within groups of k neighboring ranks. k = number of shards means True, 1 means False.
        mp_policy: dtypes of computation and communication, see ``MixedPrecisionPolicy``.
        offload_policy: ``CPUOffloadPolicy()`` keeps shards and gradients on the CPU, where the
            optimizer then runs; without effect on a CPU mesh. None means no offload.
        ignored_params: parameters that this call leaves alone.
        shard_placement_fn: called with each parameter; returns the tensor dim to cut, as
            ``Shard(dim)``, which need not divide evenly, or None for dim 0. To choose another mesh,
            such as that of experts, the function returns a ``ShardPlacementResult``.
        dp_mesh_dims: the data-parallel dims of ``mesh``, as ``DataParallelMeshDims``. Give them if
            parameters are DTensors on ``mesh`` that are replicated over these dims, or local
            tensors that ``spmd_types`` has annotated.
        layout: the arrangement of parameters in the shards. ``PerParameter()`` cuts each parameter
            on one dim, as ``DTensor`` does. ``Ragged()`` concatenates parameters and cuts the
            result into equal shards, which gathers without a copy and shows ``RaggedTensor`` s;
            with ``Ragged()``, ``shard_placement_fn`` cannot choose a dim.
        wire: formats of sent parameters and gradients, see ``WirePolicy``; unchanged by default.

    Returns:
        The object passed in. The class of each module is now ``FSDP<Name>``, a subclass of
        ``FSDPModule`` and of its old class; parameters are ``DTensor`` s or ``RaggedTensor`` s.

    Raises:
        ConfigError: if an argument or parameter cannot work (a ``ValueError``).
        AlreadyShardedError: if the module or a parent of the module was sharded before.
        UnsupportedError, NotBuiltError: if something is not supported, or not built yet
            (``NotImplementedError`` s).
        ProtocolError: if called during a forward or backward.

    After any of these errors, nothing was changed.
    """
    options = dict(locals())
    del options["module"]
    choices = checked_choices(options)
    shard_modules(checks.as_modules(module), choices)
    return module


def checked_choices(options: Mapping[str, Any]) -> CallOptions:
    """Check options of ``fully_shard``, which has the defaults; raise for the first wrong one."""
    bound = inspect.signature(fully_shard).bind(None, **options)
    bound.apply_defaults()
    given = SimpleNamespace(**bound.arguments)
    data_mesh = checked_mesh(given.mesh, given.dp_mesh_dims)
    after_forward, secondary = checks.checked_after_forward(
        given.reshard_after_forward, data_mesh.num_shards
    )
    if data_mesh.shard_dim is None and after_forward is AfterForward.AUTO:
        after_forward = AfterForward.KEEP  # nothing to gather, only casts to repeat
    return CallOptions(
        after_forward=after_forward,
        secondary=secondary,
        policy=checks.checked_policy(given.mp_policy),
        offload=checks.checked_offload(given.offload_policy, data_mesh.mesh.device_type),
        ignored=checks.checked_ignored(given.ignored_params),
        placement_fn=given.shard_placement_fn,
        layout=checks.checked_layout(given.layout),
        mesh=data_mesh,
        wire=checks.checked_wire(given.wire),
    )


log = logging.getLogger("fullshard")

before_sharding: list[Callable[[], None]] = []
"""Called whenever modules are about to be sharded; ``compat`` looks there for patches."""


Plan = list[tuple[BucketSpec, list[PlacedParam]]]
"""The planned buckets of a unit, with their parameters; nothing is allocated yet."""


def plan_unit(modules: Sequence[nn.Module], choices: CallOptions) -> tuple[Subtree, Plan]:
    """Return what is below ``modules``, and the plan for ``shard_modules``; change nothing.

    Parameters are grouped by mesh, dtypes, trainability and class.

    Raises:
        ConfigError, UnsupportedError, ProtocolError: if ``modules`` cannot be sharded.
    """
    below = collect(modules, choices.ignored)
    for unit in below.units:
        engine_of(unit).check_idle("fully_shard")
        check_ends_by_itself(unit)
    checks.check_params(below.params, choices.layout)
    groups: dict[tuple[object, ...], list[_Member]] = {}
    for owned in below.params:
        member = _member(owned, choices)
        groups.setdefault(member.key, []).append(member)
    return below, [
        (_bucket_spec(members, choices), [member.owned for member in members])
        for members in groups.values()
    ]


def shard_modules(modules: Sequence[nn.Module], choices: CallOptions) -> Unit:
    """Make ``modules`` one unit.

    If users see DTensors, the class of each module becomes ``FSDP<Name>``; otherwise ``modules`` is
    one of our wrappers, which already has the methods.
    """
    for look in before_sharding:
        look()
    below, plan = plan_unit(modules, choices)
    has_methods = choices.shown is Shown.DTENSORS
    classes: list[Any] = list(map(type, modules))  # hashable, whatever __eq__ of instances does
    kinds = [sharded_class(one) for one in classes] if has_methods else []
    device = choices.mesh.device
    buckets = [Bucket(spec, [owned.param for owned in params]) for spec, params in plan]
    places = _places(modules, plan, choices, buckets)
    unit = Unit(
        "",
        buckets,
        places,
        device=device,
        num_members=len(modules),
        num_inside=len(below.units),
    )
    _move_buffers((one for one in below.modules if one not in choices.ignored_modules), device)
    Engine.join((engine_of(u) for u in below.units), unit, UnitPolicy(choices.after_forward))
    places.show_sharded(buckets)
    for param in chain.from_iterable(bucket.sharded_params for bucket in buckets):
        if isinstance(param, DTensor):
            handle_ops_on(param.device_mesh)
        if choices.shown is Shown.ORIGINALS:
            _nn.mark_flattened(param)
    install_forward_hooks(unit, modules, replace(choices.policy, param_dtype_override_fn=None))
    install_state_dict_hooks(unit, places)
    if has_methods:
        explain_uses(parallel=any(any(bucket.spec.parallel or ()) for bucket in buckets))
    for module, kind in zip(modules, kinds, strict=False):
        module.__class__ = kind
        _nn.mark_sharded(module)
    for module in below.modules:
        _nn.mark_managed(module, shows_originals=choices.shown is not Shown.FLAT)
    check_optimizers_again()
    enlist(modules, chain.from_iterable(params for _, params in plan), unit)
    places.warn_of_additions = Additions(below.modules).warn
    _name_units(modules, unit)
    _log(unit, modules)
    return unit


def _places(
    modules: Sequence[nn.Module], plan: Plan, choices: CallOptions, buckets: Sequence[Bucket]
) -> Places:
    """Return the places of the parameters, with a flat parameter if users see one."""
    where = [[owned.places for owned in params] for _, params in plan]
    if choices.shown is not Shown.FLAT:
        return Places(where)
    (wrapper,) = modules
    fronts = [bucket.front for bucket in buckets if bucket.front is not None]
    return FlatPlaces(where, innermost(next(wrapper.children())), fronts)


def _move_buffers(modules: Iterable[nn.Module], device: torch.device) -> None:
    for module in modules:
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device != device and not buffer.is_meta:
                set_buffer(module, name, buffer.to(device))


def _name_units(modules: Sequence[nn.Module], unit: Unit) -> None:
    """Name all units of the tree relative to the new top module."""
    names: dict[Unit, list[str]] = {}
    for root in modules:
        for name, module in root.named_modules():
            inner = unit_of(module)
            if inner is not None and inner is not unit:
                full = name if len(modules) == 1 else f"{type(root).__name__}.{name}"
                names.setdefault(inner, []).append(full)
    for inner, members in names.items():
        inner.name = members[0] if len(members) == 1 else f"{members[0]} to {members[-1]}"
    if len(modules) > 1:
        unit.name = ", ".join(type(module).__name__ for module in modules)


def _log(unit: Unit, modules: Iterable[nn.Module]) -> None:
    numel = sum(p.numel for b in unit.buckets for p in b.spec.layout.params)
    shard = sum(bucket.shards.nbytes for bucket in unit.buckets)
    log.info(
        "unit %s: %d parameters, %d elements in %d bucket(s), %d bytes a rank",
        " + ".join(type(module).__name__ for module in modules),
        unit.num_params,
        numel,
        len(unit.buckets),
        shard,
    )


_ALIGN_NBYTES = 16


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
    ignored_modules: Collection[nn.Module] = ()
    """Modules whose buffers stay where they are."""

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


class _Member(NamedTuple):
    """A parameter to put in a bucket; ``spec`` is of the tensor that data-parallel ranks cut."""

    owned: PlacedParam
    mesh: DataMesh
    spec: ParamSpec
    parallel: ParallelSpec | None
    policy: MixedPrecisionPolicy

    @property
    def key(self) -> tuple[object, ...]:
        """A key that is equal for the parameters of one bucket."""
        param = self.owned.param
        computed = self.policy.param_dtype if param.is_floating_point() else None
        return self.mesh, param.dtype, computed or param.dtype, param.requires_grad, self.kind

    @property
    def kind(self) -> type[Tensor]:
        """The class of the local tensor, if it is a wrapper subclass."""
        tensor = local_part(self.owned.param).detach()
        return type(tensor) if is_wrapper(tensor) else Tensor


def _member(owned: PlacedParam, choices: CallOptions) -> _Member:
    answer = choices.placement_fn(owned.param) if choices.placement_fn else None
    dim, mesh = _placed(owned, answer, choices.mesh)
    if dim is not None and not isinstance(choices.layout, PerParameter):
        raise ConfigError(
            f"shard_placement_fn: got Shard({dim}) for parameter {owned.name} with "
            f"layout={choices.layout!r}, which cuts on no dim; return None, or use PerParameter()"
        )
    with _naming(owned):
        parallel = mesh.parallel_spec(owned.param, owned.name)
    shape = owned.param.shape if parallel is None else parallel.local_shape
    spec = ParamSpec(owned.name, tuple(shape), dim or 0)
    return _Member(owned, mesh, spec, parallel, choices.policy.for_param(owned.name, owned.param))


def _bucket_spec(members: Sequence[_Member], choices: CallOptions) -> BucketSpec:
    """Return the spec of a bucket of ``members``, whose keys are equal.

    Raises:
        ConfigError, UnsupportedError: if a parameter does not fit the chosen mesh or dim.
    """
    first, mesh, dtype = members[0], members[0].mesh, members[0].owned.param.dtype
    policy = first.policy if dtype.is_floating_point else MixedPrecisionPolicy()
    strategy = choices.layout_on(mesh)
    align = choices.alignment(dtype, policy)
    layout = strategy.build([member.spec for member in members], mesh.num_shards, align)
    parallel = tuple(member.parallel for member in members)
    modules = [weakref.ref(member.owned.places[0].module) for member in members]
    by_param = isinstance(strategy, PerParameter)  # hooks cannot read the pieces of other layouts
    spec = BucketSpec(
        layout=layout,
        form=_face(members, layout, choices),
        **mesh.facts(choices.secondary),
        parallel=parallel if any(parallel) else None,
        param_dtype=policy.param_dtype,
        reduce_dtype=policy.reduce_dtype,
        follows_grad_dtype=choices.shown is Shown.DTENSORS and _autograd.follows_grad_dtype(),
        clean_padding=choices.shown is Shown.FLAT,
        offload=choices.offload,
        are_wrapped=first.kind is not Tensor,
        hook_arguments=HookArguments(mesh.one_dim, modules, first.policy) if by_param else None,
        wire=choices.wire,
    )
    GradDtypes.check(spec, [member.owned.param for member in members])
    if spec.are_wrapped:
        check_extendable(spec)
    return spec


def _face(members: Sequence[_Member], layout: Layout, choices: CallOptions) -> Face:
    """Return the face by which users see the pieces."""
    mesh = members[0].mesh
    ragged = mesh.shard_dim is not None and not isinstance(choices.layout, PerParameter)
    places = []
    for member, bands in zip(members, layout.bands, strict=True):
        intervals = ((band.num_ranks, band.segment.length) for band in bands)
        with _naming(member.owned):
            cut = RaggedShard(intervals) if ragged else member.spec.shard_dim
            places.append(mesh.place(member.parallel, cut))
    shapes = [(member.parallel or member.owned.param).shape for member in members]
    return Face(shapes, places, RaggedTensor if ragged else DTensor, choices.shown)


@contextmanager
def _naming(owned: PlacedParam) -> Iterator[None]:
    """Add the name of the parameter to errors in the block."""
    try:
        yield
    except (ConfigError, UnsupportedError) as error:
        raise type(error)(f"fully_shard: parameter {owned.name}: {error}") from error


@dataclass(frozen=True)
class ShardPlacementResult:
    """A result of ``shard_placement_fn`` for a parameter on another mesh, such as an expert's."""

    placement: Shard | None
    """The tensor dim to cut; None: dim 0, or the choice of the layout."""
    mesh_info: Any
    """A mesh, 1-D to shard over or 2-D to replicate and shard over. PyTorch's own mesh infos, which
    name the dims of their mesh, are accepted as well, also those made with ``dp_mesh_dims``."""


PlacementFn = Callable[[nn.Parameter], Shard | ShardPlacementResult | None]
"""The type of ``shard_placement_fn``: returns a dim, a dim and a mesh, or None."""


def _placed(owned: PlacedParam, answer: Any, default: DataMesh) -> tuple[int | None, DataMesh]:
    """Return the dim, not negative, and the mesh that ``shard_placement_fn`` chose by ``answer``.

    Raises:
        ConfigError: if ``answer`` is of a wrong type, or a dim that the parameter does not have.
    """
    mesh = default
    if hasattr(answer, "mesh_info") and hasattr(answer, "placement"):
        mesh = _mesh_of(owned, answer.mesh_info, default)
        answer = answer.placement
    if answer is None:
        return None, mesh
    if not isinstance(answer, Shard):
        raise ConfigError(
            f"shard_placement_fn: got {answer!r} for parameter {owned.name}, expected "
            "Shard(dim), a ShardPlacementResult or None"
        )
    if mesh.shard_dim is None:
        raise ConfigError(
            f"shard_placement_fn: got {answer!r} for parameter {owned.name}, but parameters are "
            "only replicated over this mesh; return None"
        )
    num_dims = owned.param.dim()
    if not -num_dims <= answer.dim < num_dims:
        raise AssertedConfigError(
            f"shard_placement_fn: got {answer} for parameter {owned.name} of shape "
            f"{tuple(owned.param.shape)}, expected a dim below {num_dims}"
        )
    return answer.dim % num_dims, mesh


def _mesh_of(owned: PlacedParam, info: Any, default: DataMesh) -> DataMesh:
    mesh = getattr(info, "mesh", None)
    if isinstance(info, DeviceMesh):
        found = data_mesh(info)
    elif getattr(info, "dp_mesh_dims", None) is not None:
        found = checked_mesh(info.spmd_mesh, info.dp_mesh_dims)
    elif isinstance(mesh, DeviceMesh) and hasattr(info, "shard_mesh_dim"):
        found = DataMesh(mesh, info.shard_mesh_dim, getattr(info, "replicate_mesh_dim", None))
        used = {found.shard_dim, found.replicate_dim} - {None}
        if len(used) < mesh.ndim:
            raise ConfigError(
                f"shard_placement_fn: got mesh_info={info!r} for parameter {owned.name}, which "
                f"gives {mesh.ndim - len(used)} of {mesh.ndim} mesh dims nothing to do"
            )
    else:
        raise ConfigError(
            f"shard_placement_fn: got mesh_info={info!r} for parameter {owned.name}, expected a "
            "DeviceMesh"
        )
    if found.mesh.device_type != default.mesh.device_type:
        raise ConfigError(
            f"shard_placement_fn: got a mesh on {found.mesh.device_type} for parameter "
            f"{owned.name}, the unit is on {default.mesh.device_type}"
        )
    return found
