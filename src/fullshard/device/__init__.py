"""Streams, events and storage: the only room that uses them directly, for CUDA and CPU alike."""

from __future__ import annotations

from fullshard.device.dry import DryLanes, LaneSpan, dry_host_tensor, is_at_home
from fullshard.device.host import HostReader, host_tensor
from fullshard.device.storage import Buffer, BufferKind, StorageMeter, empty_cache
from fullshard.device.streams import Lane, LaneEvent, Lanes, Stamp, make_lanes
