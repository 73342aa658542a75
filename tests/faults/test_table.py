"""A short run of ``python -m tests.faults table``: the other ranks name the rank that failed.

The tests kill ranks, so they start processes of their own instead of using the session's pool.
"""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import pytest
import torch

from tests.faults import table
from tests.faults.at_random import drawn, saved
from tests.faults.device import Device
from tests.faults.jobs import run
from tests.faults.judge import Kind
from tests.faults.rank import Engine, Job, Wire
from tests.faults.rows import EXPECTED, Fault, Phase, What, rows

JOBS = [
    Job(Fault(What.SKIP, Phase.FORWARD), Engine.UNITS, Wire.SHARED, 4),
    Job(Fault(What.SWAP, Phase.FORWARD), Engine.UNITS, Wire.SOCKETS, 2),
    Job(Fault(What.OTHER_WIDTH, Phase.BUILD), Engine.UNITS, Wire.SOCKETS, 2, at_step=1),
    Job(Fault(What.RAISE, Phase.FORWARD), Engine.FLAT, Wire.SHARED, 2),
    Job(Fault(What.CAUGHT, Phase.FORWARD), Engine.UNITS, Wire.SHARED, 2),
    Job(Fault(What.CAUGHT, Phase.BACKWARD), Engine.UNITS, Wire.SOCKETS, 2),
    Job(Fault(What.CAUGHT_ALONE, Phase.OPTIMIZER), Engine.UNITS, Wire.SOCKETS, 2),
    Job(Fault(What.SYS_EXIT, Phase.DATA), Engine.UNITS, Wire.SHARED, 2),
    Job(Fault(What.KILL, Phase.GATHER), Engine.UNITS, Wire.SHARED, 4),
    Job(Fault(What.STOP, Phase.BACKWARD), Engine.UNITS, Wire.SHARED, 2),
    Job(Fault(What.DISK_FULL, Phase.SAVE), Engine.UNITS, Wire.SHARED, 2),
    Job(Fault(What.SAVE_ALONE, Phase.SAVE), Engine.UNITS, Wire.SHARED, 2, saves=True),
    Job(Fault(What.SAVE_ALONE, Phase.SAVE), Engine.UNITS, Wire.SOCKETS, 2, at_step=5),
    Job(Fault(What.CLIP_ALONE, Phase.CLIP), Engine.UNITS, Wire.SHARED, 3, at_step=5),
    Job(Fault(What.STALL, Phase.DATA, stall_s=4.0), Engine.UNITS, Wire.SHARED, 2),
]

ON_DEVICE = [
    Job(Fault(What.SKIP, Phase.FORWARD), Engine.UNITS, Wire.DEVICE, 2),
    Job(Fault(What.RAISE, Phase.BACKWARD), Engine.FLAT, Wire.DEVICE, 2),
    Job(Fault(What.CAUGHT, Phase.FORWARD), Engine.UNITS, Wire.DEVICE, 2),
    Job(Fault(What.KILL, Phase.GATHER), Engine.UNITS, Wire.DEVICE, 2),
    Job(Fault(What.SWAP, Phase.FORWARD), Engine.UNITS, Wire.DEVICE, 4),
    Job(Fault(What.KILL, Phase.BACKWARD), Engine.FLAT, Wire.DEVICE, 4),
    Job(Fault(What.STOP, Phase.BACKWARD), Engine.UNITS, Wire.DEVICE, 2),
    Job(Fault(What.EARLY_END, Phase.END), Engine.UNITS, Wire.DEVICE, 2),
    Job(Fault(What.SAVE_ALONE, Phase.SAVE), Engine.UNITS, Wire.DEVICE, 2),
]


@pytest.mark.parametrize(
    "job", JOBS + ON_DEVICE, ids=lambda job: f"{job.fault.what.name}-{job.wire.name}"
)
def test_a_fault_on_one_rank_is_named_on_the_others(job: Job) -> None:
    result, verdict = table.seen(job)
    assert verdict.kind is Kind.NAMED, (str(verdict), result.endings)


@pytest.mark.parametrize("engine", [Engine.UNITS, Engine.FLAT])
def test_a_job_on_the_fake_device_trains_as_on_the_cpu(engine: Engine) -> None:
    fault = Fault(What.LEFT_OUT, Phase.DATA)
    here, there = (
        run(Job(fault, engine, wire, 2, victim=0)) for wire in (Wire.SOCKETS, Wire.DEVICE)
    )
    assert [one.kind for one in here.endings + there.endings] == [""] * 4
    assert all(map(torch.equal, here.weights, there.weights))


def test_the_host_of_the_fake_device_goes_on_until_it_reads() -> None:
    device, gate = Device(), threading.Event()
    with device.used():
        device.current_stream().issue(gate.wait)
        x = torch.ones(3, requires_grad=True)
        loss = (2 * x).sum()
        loss.backward()
        mark = device.current_stream().record_event()
        assert not mark.query()
        gate.set()
        assert loss.item() == 6 and mark.query()
        assert x.grad is not None and x.grad.tolist() == [2, 2, 2]


def test_a_job_without_a_fault_ends_and_leaves_checkpoints_that_load() -> None:
    """A missing or damaged checkpoint is reported."""
    job = Job(Fault(What.NOTHING, Phase.END), Engine.UNITS, Wire.SHARED, 2, at_step=6, saves=True)
    look, complaints = saved(job), list[str]()

    def damage(folder: Path) -> str:
        complaints.append(look(folder))
        file = next((folder / "checkpoints" / "step-2").glob("*.safetensors"))
        file.write_bytes(file.read_bytes()[:-1] + b"?")
        complaints.append(look(folder))
        shutil.rmtree(folder / "checkpoints" / "step-2")
        return look(folder)

    result = run(job, damage)
    assert [ending.kind for ending in result.endings] == ["", ""]
    assert complaints[0] == ""
    assert "a checkpoint that loads (" in complaints[1]
    assert result.complaint == "5 checkpoints, of which 4 are there"


def test_random_faults_are_all_that_are_expected_somewhere() -> None:
    jobs = [drawn(0, number) for number in range(2000)]
    assert jobs == [drawn(0, number) for number in range(2000)]
    found = {(job.fault.what, job.fault.phase) for job in jobs}
    assert found == {(what, phase) for what, one in EXPECTED.items() for phase in one.phases}
    assert {job.victim for job in jobs} == {0, 1, 2, 3}


def test_the_page_has_a_cell_for_every_row_that_was_run() -> None:
    """To update the page, run ``python -m tests.faults table --write``."""
    _, cells, _ = table.parts()
    assert list(cells) == [fault.title for fault in rows()]
    for fault in rows():
        expected = [engine is not Engine.FLAT or fault in table.ON_FLAT for engine in Engine]
        assert [bool(cell) for cell in cells[fault.title]] == expected, fault.title
