"""Streams, events and storage on CUDA and CPU; no other package uses them directly."""

from __future__ import annotations

from fullshard.device.dry import DryLanes, LaneSpan, dry_host_tensor, is_at_home
from fullshard.device.host import HostReader, host_tensor
from fullshard.device.storage import Buffer, BufferKind, StorageMeter, empty_cache
from fullshard.device.streams import Lane, LaneEvent, Lanes, Stamp, make_lanes
