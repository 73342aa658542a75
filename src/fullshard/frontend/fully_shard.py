"""``fully_shard``: the per-parameter face."""

from __future__ import annotations

from typing import Any, TypeVar

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fullshard.engine import MixedPrecisionPolicy, OffloadPolicy
from fullshard.frontend.buckets import Choices
from fullshard.frontend.build import shard_modules
from fullshard.frontend.checks import (
    as_modules,
    checked_after_forward,
    checked_ignored,
    checked_layout,
    checked_offload,
    checked_policy,
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
) -> Modules:
    """Shard the parameters of ``module`` over the ranks of ``mesh``, in place.

    Each call makes a *unit*: the parameters below ``module`` that no inner call owns are gathered
    together before the module's forward and backward, freed after them, and their gradients are
    reduced together. Call it bottom-up: on the blocks of a model first, on the model last. Build
    the optimizer after it. The interface is that of ``torch.distributed.fsdp.fully_shard``.

    Args:
        module: the module, or several that form one unit; parameters must be contiguous, of at
            least one dimension.
        mesh: a 1-D mesh of the data-parallel ranks, or a named 2-D one: then ranks along the first
            dim hold copies, over which gradients are reduced too (HSDP), and parameters are cut
            along the second. None: all ranks, on the accelerator if the default process group
            serves it, else on the CPU; without a process group one is made.
        reshard_after_forward: free the parameters after forward and gather them again in backward
            (True), or keep them in between (False). None: True, but False for whatever module is
            the root of a forward. An int k, which divides the number of shards: keep a k-th of
            them, and gather in backward among groups of k neighbours; k equal to the number of
            shards is True, 1 is False.
        mp_policy: dtypes, see ``MixedPrecisionPolicy``.
        offload_policy: ``CPUOffloadPolicy()`` keeps shards and gradients on the CPU, where the
            optimizer then runs. On a CPU mesh there is nothing to do.
        ignored_params: parameters to leave alone.
        shard_placement_fn: the tensor dim on which a parameter is cut, as ``Shard(dim)``; it need
            not divide evenly. None, or None returned: dim 0. A ``ShardPlacementResult`` names
            another mesh as well, such as that of experts.
        dp_mesh_dims: which dims of ``mesh`` are data-parallel, as ``DataParallelMeshDims``, where
            ``mesh`` is the one that the parameters lie on already, replicated over those dims.
        layout: how parameters lie in the shards. ``PerParameter()`` cuts each on one dim, as
            ``DTensor`` does; ``Ragged()`` lays them end to end and cuts that into equal shards,
            which gathers without a copy and shows ``RaggedTensor`` s. Give ``shard_placement_fn``
            to the first only.

    Returns:
        The object passed in. Its class is now ``FSDP<Name>``, a subclass of ``FSDPModule`` and of
        the class it was; its parameters are ``DTensor`` s, ``RaggedTensor`` s among them.

    Raises:
        ConfigError: an argument or parameter that cannot work (a ``ValueError``).
        AlreadyShardedError: the module was sharded before, or inside of a sharded parent.
        UnsupportedError, NotBuiltError: something that is not supported, or not yet
            (``NotImplementedError`` s).
        ProtocolError: called in the middle of a forward or backward.

        Whatever is raised, nothing was changed.
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
) -> Choices:
    """The options of a call, or the error that one of them deserves."""
    data_mesh = checked_mesh(mesh, dp_mesh_dims)
    after_forward, secondary = checked_after_forward(reshard_after_forward, data_mesh.num_shards)
    if data_mesh.shard_dim is None and after_forward is AfterForward.AUTO:
        after_forward = AfterForward.KEEP  # nothing to gather, at most casts to make again
    return Choices(
        after_forward=after_forward,
        secondary=secondary,
        policy=checked_policy(mp_policy),
        offload=checked_offload(offload_policy, data_mesh.mesh.device_type),
        ignored=checked_ignored(ignored_params),
        placement_fn=shard_placement_fn,
        layout=checked_layout(layout),
        mesh=data_mesh,
    )
