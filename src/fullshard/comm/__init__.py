"""Collectives on process groups, in shared memory and among hosts, and a ledger of them.

``Collectives`` is the protocol. ``C10d`` uses NCCL and gloo through process groups, ``Public`` the
functions of ``torch.distributed``. With gloo, data travels through shared memory within a host
(``shared``), and by groups of our own between hosts (``twolevel``).
"""

from __future__ import annotations

from fullshard.comm.blocking import (
    all_reduce,
    all_to_all,
    broadcast_from_first,
    broadcast_object_from_first,
    broadcast_pieces,
    broadcast_together,
    gather_objects,
    gather_over,
    gather_uneven,
)
from fullshard.comm.c10d import C10d, Public
from fullshard.comm.codecs import ENCODED, INT4, Blocks, Cast, Codec, round_trip
from fullshard.comm.custom import AllGather, Comm, Custom, ReduceScatter
from fullshard.comm.dry import DryWire, Exchange, dry_world, is_dry, mirror_world, played_by
from fullshard.comm.encoded import Encoded, encoded
from fullshard.comm.hooked import HookedCopies, HookedShards, Settled
from fullshard.comm.mesh import (
    Wire,
    choose_wire,
    collectives_of,
    collectives_of_group,
    collectives_of_part,
    collectives_of_twin,
    default_mesh,
    device_types_of,
    flattened,
    mesh_of_dim,
    mesh_of_group,
    mesh_of_groups,
    mesh_of_nodes,
    served_by,
    wrapped,
)
from fullshard.comm.protocol import Collectives, Done, Label, Pending, SingleRank, Then, Wrapper
