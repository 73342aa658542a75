"""Which wire the groups of each mesh dim take, and why."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fullshard import _torch
from fullshard.comm import Collectives
from fullshard.comm.c10d import default_choice, ways_of
from fullshard.comm.levels import Levels
from fullshard.comm.meeting import SWITCH
from fullshard.comm.native import Native
from fullshard.comm.shared import Shared
from fullshard.doctor.facts import Facts, by_host
from fullshard.errors import ConfigError

SHARED_MEMORY = "shared memory"
MESSAGES = "messages between hosts"


class Wire(NamedTuple):
    """The transport of the collectives of one process group."""

    ranks: tuple[int, ...]
    gathers: str
    reduces: str
    adds_wide: bool


def wire_of(mesh: DeviceMesh, dim: int, wire: Collectives) -> Wire:
    """Return what carries the collectives of this rank's group along ``dim``; a collective."""
    group = mesh.get_group(dim)
    ranks = tuple(dist.get_process_group_ranks(group))
    if len(ranks) == 1:
        return Wire(ranks, "none", "none", True)
    kind, adds_wide = mesh.device_type, wire.adds_wide  # which meets the others first, if need be
    ways = ways_of(group, default_choice(group, kind))
    backend = _torch.backend_name(group, kind)
    names = {Shared: SHARED_MEMORY, Levels: MESSAGES, Native: f"{backend}'s own"}
    return Wire(ranks, names[type(ways.gathers)], names[type(ways.reduces)], adds_wide)


def reason(wire: Wire, all_ranks: Sequence[Facts]) -> str:
    """Return why the group has this wire."""
    ranks = [all_ranks[rank] for rank in wire.ranks]
    hosts = len(by_host(ranks))
    if wire.gathers == "none":
        return "a group of one rank"
    if wire.gathers == SHARED_MEMORY:
        return f"its {len(ranks)} ranks are on one host and read each other's memory"
    if wire.gathers != MESSAGES and "gloo" not in wire.gathers:
        return f"its ranks are on GPUs, on {hosts} host(s)"
    if wire.gathers != MESSAGES:
        return f"its ranks are on {hosts} host(s) that could not be connected beside gloo"
    if hosts > 1:
        return f"its ranks are on {hosts} hosts, and each shard goes once to each other host"
    off = [one.rank for one in ranks if one.variables.get(SWITCH) == "0"]
    why = f"{SWITCH} is 0 on rank(s) {off}" if off else "the system or its users forbid sharing"
    return f"its ranks are on one host, but do not all share memory: {why}"


def mesh_shape(given: str | None, world: int) -> dict[str, int] | None:
    """Return the mesh that ``replicate=2,shard=4`` asks for; None if nothing is asked for.

    Raises:
        ConfigError: it is written otherwise, or is no mesh of ``world`` ranks.
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
    """Return shards within hosts and replicas over them, or shards alone if hosts are uneven."""
    sizes = [len(here) for here in by_host(ranks).values()]
    if len(sizes) > 1 and len(set(sizes)) == 1:
        return {"replicate": len(sizes), "shard": sizes[0]}
    return {"shard": len(ranks)}
