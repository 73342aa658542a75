"""The start and the end of a job: command line, checks, launcher, workers, exports."""

from __future__ import annotations

from fullshard.train.job.command import run_app, train_command
from fullshard.train.job.finished import FinishedRun
from fullshard.train.job.helping import GroupedCommand, GroupedCommands
from fullshard.train.job.launch import default_nproc, start_workers
from fullshard.train.job.options import flag
from fullshard.train.job.planned import plan_of
