"""The folder of a run: configuration, figures, checkpoints, trackers and display."""

from __future__ import annotations

from fullshard.train.run.best import read_best
from fullshard.train.run.folder import (
    Origin,
    RunDir,
    check_continues,
    check_frozen,
    describe,
    difference,
    locked,
    origin_of,
    read_origin,
)
from fullshard.train.run.metrics import (
    StepRecord,
    device_nbytes,
    draw_loss,
    drop_after,
    end_wire_check,
    peak_memory_nbytes,
    planned_flops,
    read_metrics,
    recording,
    shard_nbytes,
)
from fullshard.train.run.patience import HeldOut
from fullshard.train.run.progress import Reporter, say
from fullshard.train.run.saves import Saves
from fullshard.train.run.signals import Stopping, handling, stopping
from fullshard.train.run.trackers import check_tracker, tracker_of
from fullshard.train.run.weights import weights_key
