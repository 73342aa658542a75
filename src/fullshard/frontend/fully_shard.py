"""The per-parameter interface: ``fully_shard``."""

from __future__ import annotations

from typing import Any, TypeVar

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fullshard.engine import MixedPrecisionPolicy, OffloadPolicy, WirePolicy
from fullshard.frontend.buckets import CallOptions
from fullshard.frontend.build import shard_modules
from fullshard.frontend.checks import (
    as_modules,
    checked_after_forward,
    checked_ignored,
    checked_layout,
    checked_offload,
    checked_policy,
    checked_wire,
)
from fullshard.frontend.meshes import checked_mesh
from fullshard.frontend.placement import PlacementFn
from fullshard.layout import LayoutStrategy, PerParameter
from fullshard.schedule import AfterForward

Modules = TypeVar("Modules", bound="nn.Module | list[nn.Module] | tuple[nn.Module, ...]")


def fully_shard(
    module: Modules,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    mp_policy: Any = MixedPrecisionPolicy(),
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
        dp_mesh_dims: the data-parallel dims of ``mesh``, as ``DataParallelMeshDims``, if parameters
            are already DTensors on ``mesh``, replicated over these dims.
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
    choices = checked_choices(
        mesh=mesh,
        reshard_after_forward=reshard_after_forward,
        mp_policy=mp_policy,
        offload_policy=offload_policy,
        ignored_params=ignored_params,
        shard_placement_fn=shard_placement_fn,
        dp_mesh_dims=dp_mesh_dims,
        layout=layout,
        wire=wire,
    )
    shard_modules(as_modules(module), choices)
    return module


def checked_choices(
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    mp_policy: Any = MixedPrecisionPolicy(),
    offload_policy: Any = OffloadPolicy(),
    ignored_params: set[nn.Parameter] | None = None,
    shard_placement_fn: PlacementFn | None = None,
    dp_mesh_dims: Any = None,
    layout: LayoutStrategy = PerParameter(),
    wire: WirePolicy = WirePolicy(),
) -> CallOptions:
    """Check the options of a call and return them; raise for the first wrong one."""
    data_mesh = checked_mesh(mesh, dp_mesh_dims)
    after_forward, secondary = checked_after_forward(reshard_after_forward, data_mesh.num_shards)
    if data_mesh.shard_dim is None and after_forward is AfterForward.AUTO:
        after_forward = AfterForward.KEEP  # nothing to gather, only casts to repeat
    return CallOptions(
        after_forward=after_forward,
        secondary=secondary,
        policy=checked_policy(mp_policy),
        offload=checked_offload(offload_policy, data_mesh.mesh.device_type),
        ignored=checked_ignored(ignored_params),
        placement_fn=shard_placement_fn,
        layout=checked_layout(layout),
        mesh=data_mesh,
        wire=checked_wire(wire),
    )
