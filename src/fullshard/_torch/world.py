"""The world of ``torch.distributed``: its default group and store, its groups, and other worlds."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from fullshard._torch import collectives, mesh
from fullshard._torch.mesh import RECOVERY, forget_meshes
from fullshard._torch.names import Private

private = Private(__name__, RECOVERY)

_PLAN = "`fullshard.plan`"
_C10D = "torch.distributed.distributed_c10d"
default_store: Callable[[], dist.Store]
default_store = private.get(f"{_C10D}._get_default_store", "process groups")
"""Return the store through which the default process group was made."""
_IN_C = "torch._C._distributed_c10d"
_register = private.get(f"{_IN_C}._register_process_group", _PLAN)
_unregister = private.get(f"{_IN_C}._unregister_process_group", _PLAN)
_set_global_rank = private.get(f"{_IN_C}._set_global_rank", _PLAN)
_new_fake_group = private.get(f"{_IN_C}.FakeProcessGroup._create_internal", _PLAN)


def reaches_processes(store: dist.Store) -> bool:
    """Return whether ``store`` is shared with other processes, and neither threads nor nobody."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return isinstance(store, (dist.TCPStore, dist.FileStore))


def set_timeout(group: dist.ProcessGroup, timeout: timedelta) -> None:
    """Let the default ``group`` and its store wait for peers for ``timeout``."""
    public: Any = getattr(dist, "set_timeout", None)  # new in 2.15
    (public or c10d._set_pg_timeout)(timeout, group)
    default_store().set_timeout(timeout)


def own_gloo_group(
    name: str, rank: int, size: int, timeout: timedelta, connect: timedelta
) -> dist.ProcessGroup:
    """Return a new gloo group for the CPU that no list of ``torch.distributed`` holds.

    All its ranks meet in the store of the default group, under ``name``, within ``connect``.
    """
    store = dist.PrefixStore(f"fullshard/{name}", default_store())
    group = dist.ProcessGroup(store, rank, size)
    gloo = dist.ProcessGroupGloo(store, rank, size, min(timeout, connect))
    gloo._set_default_timeout(timeout)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
    return group


def end_own_gloo_groups(groups: Iterable[dist.ProcessGroup], pid: int) -> None:
    """Break off groups of process ``pid``, whose other ends would otherwise wait for ever."""
    if os.getpid() == pid:  # a forked child has none of the threads
        for group in groups:
            collectives.break_off(group)


def drop_groups(abort_s: float = 60.0) -> None:
    """Forget all process groups and what PyTorch keeps by them, without waiting for any peer.

    NCCL's are aborted, which ends what runs on devices. Gloo's close their connections, which wakes
    those who wait for us, even if something still holds the group.

    Args:
        abort_s: the longest wait for aborts, in seconds; groups are forgotten in any case.
    """
    forget_meshes()
    if dist.is_initialized():
        for group in list(c10d._world.pg_map):
            if collectives.is_on_gloo(group):
                collectives.break_off(group)
            for kind in collectives.device_types(group):
                if kind != "cpu" and collectives.has_peers(group, kind):
                    collectives.begin_abort(group, kind)
        if collectives.end_aborts(abort_s):
            with suppress(RuntimeError):  # of an abort; PyTorch then leaves its tables as they are
                c10d._abort_process_group()
        if dist.is_initialized():
            _forget_groups()
    c10d._world.group_count = 0  # names of groups count; a group that failed to be made has counted


def check_recovery() -> None:
    """Raise if PyTorch lacks a name that ``drop_groups`` needs: its first call is after a fault.

    Raises:
        TorchVersionError: a name is missing.
    """
    for use in (*mesh.private.missing(), *private.missing()):
        if use.is_needed and RECOVERY in use.feature:
            use.refuse()


def _forget_groups() -> None:
    c10d._update_default_pg(None)
    for name in dir(c10d._world):  # its tables differ between versions
        if name.startswith(("pg_", "tags_to_")) and name != "pg_config_info":  # made when read
            getattr(c10d._world, name).clear()
    c10d._unregister_all_process_groups()


@contextmanager
def apart_from_the_default_group(options: Any) -> Iterator[None]:
    """Let the ranks of a new group create it in this block without the other ranks.

    If the default group is bound to a device, PyTorch splits that group's communicator, for which
    NCCL needs all ranks. A separate communicator, as made here, connects at its first use. With
    ``options.lazy_init`` set, PyTorch does not split, and the new group keeps the device.
    """
    world = dist.group.WORLD
    device = getattr(world, "bound_device_id", None)
    if world is None or device is None or getattr(options, "lazy_init", False):
        yield
        return
    world.bound_device_id = None
    try:
        yield
    finally:
        world.bound_device_id = device


def device_to_bind() -> torch.device | None:
    """Return the current device for a new default group; None to leave the choice to PyTorch.

    Only PyTorch 2.15 needs a device: its ``nccl2`` would take the one numbered LOCAL_RANK. If the
    variable names another device than the current one, it decides.
    """
    kind = torch.accelerator.current_accelerator()
    has_nccl2 = hasattr(c10d, "_nccl2_device")
    if not has_nccl2 or kind is None or kind.type != "cuda" or not torch.cuda.is_available():
        return None
    device = torch.device("cuda", torch.cuda.current_device())
    return device if int(os.environ.get("LOCAL_RANK", device.index)) == device.index else None


@contextmanager
def other_world(size: int, rank: int, device_type: str = "cpu") -> Iterator[None]:
    """Let this process be one of ``size`` ranks whose collectives do nothing, and no other ranks.

    Process groups that exist are out of reach in the block and back afterwards; other threads must
    not use ``torch.distributed`` meanwhile. Meshes and groups that are made in the block serve the
    CPU and ``device_type``, and end with it.
    """
    outer, last_rank = c10d._world, dist.get_rank() if dist.is_initialized() else -1
    hook = sys.excepthook
    inner = c10d._world = cast("c10d._World", _World())
    for name in outer.pg_names.values():  # names of groups may be equal in both worlds
        _unregister(name)
    backend, serves = f"{_NOWHERE}_{device_type}", sorted({"cpu", device_type})
    if backend not in dist.Backend.backend_list:
        dist.Backend.register_backend(
            backend, _group_of_nobody, extended_api=True, devices=list(serves)
        )
    backends = ",".join(f"{device_type}:{backend}" for device_type in serves)
    try:
        dist.init_process_group(
            backends, store=dist.HashStore(), rank=rank, world_size=size, group_name="dry"
        )
        yield
    finally:
        for name in inner.pg_names.values():
            _unregister(name)
        c10d._world = outer
        for group, name in outer.pg_names.items():
            _register(name, group)
        _set_global_rank(last_rank)
        sys.excepthook = hook


_NOWHERE = "nowhere"


class _World:
    """The process groups of one world, as ``torch.distributed`` keeps them."""

    def __init__(self) -> None:
        self.default_pg: dist.ProcessGroup | None = None
        self.tags_to_pg: dict[Any, Any] = {}
        self.comms: list[Any] = []
        self.group_count = 0

    def __getattr__(self, name: str) -> dict[Any, Any]:
        """Return what is kept by group, which differs between versions: a new, empty dict."""
        if not name.startswith("pg_"):
            object.__getattribute__(self, name)  # raises as for any other object
        kept: dict[Any, Any] = {}
        setattr(self, name, kept)
        return kept


def _group_of_nobody(common: Any, options: Any) -> Any:
    """Make a backend that leaves what it finds."""
    return _new_fake_group(common.group_rank, common.group_size, options)


private.attributes(_C10D, "_abort_process_group _unregister_all_process_groups _update_default_pg")
if not hasattr(dist, "set_timeout"):
    private.attributes(_C10D, "_set_pg_timeout")
private.attributes(_C10D, "_world", f"{_PLAN} and {RECOVERY}")
_GROUP, _HOSTS = "torch.distributed.ProcessGroup", "collectives among hosts"
private.attributes(_GROUP, "bound_device_id", "groups of some ranks over NCCL", instead=nullcontext)
private.attributes(_GROUP, "_register_backend", _HOSTS)
private.attributes("torch.distributed.ProcessGroupGloo", "_set_default_timeout", _HOSTS)
