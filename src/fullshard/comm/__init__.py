"""The wire: collectives, and nothing else in fullshard talks to another rank.

``Collectives`` is the seam; ``C10d`` speaks NCCL and gloo through ``torch.distributed``, and
``Recording`` wraps any of them and notes what was asked for.
"""

from __future__ import annotations

from fullshard.comm.c10d import C10d
from fullshard.comm.custom import AllGather, Comm, Custom, ReduceScatter
from fullshard.comm.mesh import (
    all_reduce,
    broadcast_from_first,
    broadcast_object_from_first,
    broadcast_pieces,
    collectives_of,
    collectives_of_part,
    collectives_of_twin,
    default_mesh,
    device_types_of,
    gather_uneven,
    wrapped,
)
from fullshard.comm.protocol import Alone, Collectives, Done, Pending
from fullshard.comm.recording import CollectiveCall, Recording

__all__ = [
    "AllGather",
    "Alone",
    "C10d",
    "CollectiveCall",
    "Collectives",
    "Comm",
    "Custom",
    "Done",
    "Pending",
    "Recording",
    "ReduceScatter",
    "all_reduce",
    "broadcast_from_first",
    "broadcast_object_from_first",
    "broadcast_pieces",
    "collectives_of",
    "collectives_of_part",
    "collectives_of_twin",
    "default_mesh",
    "device_types_of",
    "gather_uneven",
    "wrapped",
]
