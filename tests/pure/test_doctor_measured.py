"""``fullshard doctor`` on measurements: links, slow ranks, and the hardware file."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fullshard.cli.doctor_tables import print_report
from fullshard.doctor.findings import DoctorFinding
from fullshard.doctor.report import (
    Report,
    slow_dim,
    slow_group,
    slow_rank,
)
from fullshard.doctor.wires import (
    BETWEEN_HOSTS,
)
from fullshard.errors import ConfigError
from fullshard.plan.calibrate import fitted, hardware_from, link_of
from fullshard.plan.hardware import hardware_of
from tests.kit.doctor_measured import SPEEDS, a_dim, measured, timings
from tests.pure.doctor_facts import (
    GIB,
    WELL,
    with_gpus,
)

latencies = st.floats(1e-7, 1e-2)
bandwidths = st.floats(1e6, 1e12)
sizes = st.lists(st.integers(1, 1 << 30), min_size=2, max_size=8, unique=True)


@given(latencies, bandwidths, sizes)
def test_the_fit_recovers_what_was_planted(
    latency_s: float, bandwidth: float, nbytes: list[int]
) -> None:
    fit = fitted((size, latency_s + size / bandwidth) for size in nbytes)
    for size in nbytes:
        assert fit.latency_s + size / fit.bandwidth == pytest.approx(
            latency_s + size / bandwidth, rel=1e-3
        )
    if 100 * latency_s < max(nbytes) / bandwidth and min(nbytes) / bandwidth < latency_s:
        assert fit.latency_s == pytest.approx(latency_s, rel=1e-3)
        assert fit.bandwidth == pytest.approx(bandwidth, rel=1e-3)


@given(st.lists(st.tuples(st.integers(1, 1 << 30), st.floats(1e-6, 1.0)), min_size=2))
def test_a_fit_of_noise_is_never_negative(points: list[tuple[int, float]]) -> None:
    if len({size for size, _ in points}) < 2:
        with pytest.raises(ConfigError, match="two sizes"):
            fitted(points)
        return
    fit = fitted(points)
    assert fit.latency_s >= 0 and fit.bandwidth > 0


def test_a_hardware_file_says_what_was_measured(tmp_path: Path) -> None:
    hardware = hardware_from(measured(), "2030-01-02")
    hardware.save(tmp_path / "here.json")
    assert hardware_of(tmp_path / "here.json") == hardware
    assert hardware.flops == {"float32": 5e10, "bfloat16": 1e11}
    assert hardware.memory_nbytes == 32 * GIB and hardware.memory_bandwidth == 1e10
    assert [link.reach for link in hardware.links] == [2, None]
    assert [link.bandwidth for link in hardware.links] == pytest.approx([5e9, 1e9])
    assert [link.latency_s for link in hardware.links] == pytest.approx([1e-6, 1e-6])
    assert hardware.source.startswith("measured on 2030-01-02 by fullshard doctor, torch 2.13.0")
    assert (hardware.in_background, hardware.adds_wide, hardware.device) == (False, True, "cpu")


@pytest.mark.parametrize("world", [2, 3, 8])
def test_a_plan_gives_back_the_times_that_were_measured(world: int) -> None:
    report = Report(WELL, 2, dims=[a_dim("shard", 1e9)], speeds=SPEEDS)
    link = link_of(timings(world, 3e-5, 2e9), world)
    hardware = replace(hardware_from(report, ""), links=(link,))
    for one in timings(world, 3e-5, 2e9):
        what = "all_reduce_mean" if one.what == "all_reduce" else one.what
        planned_s = hardware.exchange_s(what, tuple(range(world)), one.nbytes)
        assert planned_s == pytest.approx(one.seconds)


def test_a_gpu_keeps_what_cannot_be_measured_from_a_preset() -> None:
    report = Report(with_gpus("a", "b"), 2, "cuda", speeds=SPEEDS)
    report.dims = [a_dim("shard", 1e11, carrier="nccl's own")]
    hardware = hardware_from(report, "")
    assert (hardware.name, hardware.memory_nbytes) == ("H100", 80 * GIB)
    assert hardware.in_background and hardware.granule_nbytes == 512
    assert hardware.host is not None  # offloaded parameters share the memory of this host
    assert hardware.host.memory_nbytes == hardware_from(measured(), "").memory_nbytes
    assert "of a preset" in hardware.source


def test_nothing_is_written_of_what_ended_early() -> None:
    report = measured()
    report.failures.append("rank 3 is gone")
    with pytest.raises(ConfigError, match="--calibrate"):
        hardware_from(report, "")
    assert report.exitcode == 1
    report = measured()
    report.speeds = [speed._replace(op_s=None) for speed in report.speeds]
    with pytest.raises(ConfigError, match="not everything could be measured"):
        hardware_from(report, "")


@pytest.mark.parametrize(
    ("check", "wrong", "said", "well"),
    [
        (
            slow_rank,
            [SPEEDS[1], SPEEDS[1], SPEEDS[1]._replace(flops={"float32": 2e10})],
            "rank 2 multiplies matrices at 33%",
            SPEEDS,
        ),
        (slow_group, [a_dim("shard", 1e9, 9e9, 9e9)], "ranks 0, 1", [a_dim("shard", 6e9, 9e9)]),
        (
            slow_dim,
            [a_dim("replicate", 9e9, carrier=BETWEEN_HOSTS), a_dim("shard", 1e9)],
            "dim shard has 11% of the bandwidth of dim replicate",
            [a_dim("replicate", 1e9, carrier=BETWEEN_HOSTS), a_dim("shard", 9e9)],
        ),
        (
            slow_dim,
            [a_dim("replicate", 1e9), a_dim("shard", 9e9)],
            "dim replicate has 11%",
            [a_dim("replicate", 5e9), a_dim("shard", 9e9)],
        ),
    ],
)
def test_what_is_slow_is_named(
    check: Callable[[Any], DoctorFinding | None], wrong: Any, said: str, well: Any
) -> None:
    found = check(wrong)
    assert found is not None and said in found.what
    assert check(well) is None


def test_the_report_is_printed_and_is_json(capsys: pytest.CaptureFixture[str]) -> None:
    report = measured()
    print_report(report)
    shown = capsys.readouterr().out
    for said in ("2 x shared memory", "2 x shared memory and gloo", "no common mistake was found"):
        assert said in shown
    read = json.loads(json.dumps(report.as_dict()))
    assert read["dims"][1]["groups"][0]["ranks"] == [0, 1]
    assert read["dims"][0]["timings"][-3]["bandwidth"] == pytest.approx(1e9, rel=0.01)
