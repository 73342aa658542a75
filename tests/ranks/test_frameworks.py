"""Software that no one here wrote, on our engine: programs of ``examples/frameworks``.

They run as a user starts them. With PyTorch's own FSDP2 the same programs print the same losses.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import sys
import warnings
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

from tests.ranks.pool import RankPool
from tests.ranks.test_examples import ROOT, TORCHRUN, losses_in, run

FRAMEWORKS = {"fabric.py": "lightning_fabric", "accelerate_fsdp2.py": "accelerate"}


def run_with_torchs_own(program: str, folder: str) -> str:
    """What ``program`` prints in processes that are there already, which saves their start."""
    warnings.simplefilter("ignore")  # the frameworks' own
    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    launched = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    elastic = {
        "GROUP_RANK": "0",
        "TORCHELASTIC_RUN_ID": "none",
        "MASTER_ADDR": "",
        "MASTER_PORT": "0",
    }
    with (
        mock.patch.dict(os.environ, launched | elastic),
        mock.patch.object(sys, "argv", [program, "torch"]),
        mock.patch.object(dist, "init_process_group"),  # there is one, which stays
        mock.patch.object(dist, "destroy_process_group"),
        contextlib.chdir(folder),
        contextlib.redirect_stdout(io.StringIO()) as printed,
    ):
        runpy.run_path(program, run_name="__main__")
    return printed.getvalue()


def units_in(printed: str) -> list[str]:
    return re.findall(r"^units of fullshard: (\d+)$", printed, re.MULTILINE)


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_a_framework_trains_saves_and_loads_on_our_engine(
    pool: RankPool, name: str, tmp_path: Path
) -> None:
    pytest.importorskip(FRAMEWORKS[name])
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    ours.mkdir()
    theirs.mkdir()
    program = str(ROOT / "examples" / "frameworks" / name)
    on_us = run(ours, *TORCHRUN, program)
    on_torch, _ = pool.run(2, run_with_torchs_own, program, str(theirs))
    assert (units_in(on_us), units_in(on_torch)) == (["4"], ["0"])
    for folder in (ours, theirs):
        assert len(list(folder.glob("*-checkpoint/*.distcp"))) == 2
    losses = losses_in(on_us)
    assert losses[-1] < losses[0]
    assert losses == pytest.approx(losses_in(on_torch), abs=2e-6) and len(losses) == 4
