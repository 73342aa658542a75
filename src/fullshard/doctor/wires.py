"""The transport that each process group of a mesh uses, the reason for it, and mesh shapes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fullshard._torch import collectives as _collectives
from fullshard.comm import Collectives
from fullshard.comm.c10d import default_choice, way_of
from fullshard.comm.rendezvous import SWITCH, TRANSPORT, Wish
from fullshard.comm.shared import Shared
from fullshard.comm.text import counted
from fullshard.comm.twolevel import TwoLevels
from fullshard.doctor.facts import Facts, by_host, named_ranks
from fullshard.errors import ConfigError

SHARED_MEMORY = "shared memory"
BETWEEN_HOSTS = "shared memory and gloo"


class Wire(NamedTuple):
    """The transport of the collectives of one process group."""

    ranks: tuple[int, ...]
    gathers: str
    """The transport of the group: "shared memory", "nccl's own", ...; "none" for one rank."""
    adds_wide: bool
    """True if reductions add in fp32, whatever dtype is sent."""


def wire_of(mesh: DeviceMesh, dim: int, wire: Collectives) -> Wire:
    """Return the transport of this rank's group along ``dim``; all its ranks call this together."""
    group = mesh.get_group(dim)
    ranks = tuple(dist.get_process_group_ranks(group))
    if len(ranks) == 1:
        return Wire(ranks, "none", True)
    kind, adds_wide = mesh.device_type, wire.adds_wide
    way = way_of(group, default_choice(group, kind))
    name = f"{_collectives.backend_name(group, kind)}'s own"
    if isinstance(way, Shared):
        name = SHARED_MEMORY
    if isinstance(way, TwoLevels) and len(way.hosts) < way.world:
        name = BETWEEN_HOSTS
    return Wire(ranks, name, adds_wide)


def reason(wire: Wire, all_ranks: Sequence[Facts]) -> str:
    """Return the reason why the group uses this transport."""
    ranks = [all_ranks[rank] for rank in wire.ranks]
    num_hosts = len(by_host(ranks))
    hosts = counted(num_hosts, "host")
    if wire.gathers == "none":
        return "a group of one rank"
    if wire.gathers == SHARED_MEMORY:
        return f"its {len(ranks)} ranks are on one host and can read each other's memory"
    if wire.gathers == BETWEEN_HOSTS:
        return f"its ranks are on {hosts}, and each shard is sent once to each other host"
    if "gloo" not in wire.gathers:
        return f"its ranks use GPUs on {hosts}"
    asking = [one for one in ranks if one.variables.get(TRANSPORT) == Wish.BACKEND]
    if asking:
        return f"{TRANSPORT} is {Wish.BACKEND} on {named_ranks(asking)}"
    off = [one for one in ranks if one.variables.get(SWITCH) == "0"]
    if off:
        return f"{SWITCH} is 0 on {named_ranks(off)}"
    if num_hosts == len(ranks):
        return f"its ranks are on {hosts}, one on each"
    if len({len(those) for those in by_host(ranks).values()}) > 1:
        return f"its ranks are on {hosts}, and not equally many on each"
    return (
        f"its ranks are on {hosts}, but do not all share memory: the system does not allow it, or "
        "their users differ"
    )


def mesh_shape(given: str | None, world: int) -> dict[str, int] | None:
    """Return sizes by name of dim from the value of ``--mesh``; None: the option is not given.

    Args:
        given: the value, such as ``replicate=2,shard=4``.
        world: the number of ranks.

    Raises:
        ConfigError: the value is malformed, or its sizes do not multiply to ``world``.
    """
    if given is None:
        return None
    shape: dict[str, int] = {}
    for part in given.split(","):
        name, _, size = part.partition("=")
        if not (name.isidentifier() and size.isdigit() and int(size)) or name in shape:
            raise ConfigError(f"--mesh {given}: expected NAME=SIZE,..., as in replicate=2,shard=4")
        shape[name] = int(size)
    total = math.prod(shape.values())
    if total != world:
        raise ConfigError(f"--mesh {given} has {total} ranks, but there are {world}")
    return shape


def default_shape(ranks: Sequence[Facts]) -> dict[str, int]:
    """Return a mesh that shards within hosts and replicates over hosts.

    If hosts have different numbers of ranks, all ranks shard.
    """
    sizes = [len(here) for here in by_host(ranks).values()]
    if len(sizes) > 1 and len(set(sizes)) == 1:
        return {"replicate": len(sizes), "shard": sizes[0]}
    return {"shard": len(ranks)}
