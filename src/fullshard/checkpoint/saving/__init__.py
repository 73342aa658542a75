"""Collect the state of a model, write it and commit it, at once or behind training."""

from __future__ import annotations

from fullshard.checkpoint.saving.collect import Collected, collected
from fullshard.checkpoint.saving.pending import PendingSave, await_save
from fullshard.checkpoint.saving.replicas import digests_of, refuse_apart, shared_digests
from fullshard.checkpoint.saving.saving import How, begin, merged, save, save_collected, shared
from fullshard.checkpoint.saving.write import CopyMemory
