"""``fullshard doctor``: each finding from made-up facts, the fit of a link, the hardware file."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fullshard.cli.doctor_tables import print_report
from fullshard.errors import ConfigError
from fullshard.plan import doctor_findings as findings
from fullshard.plan.doctor_facts import Facts, Gpu, Host, facts_here, launch_variables, memory_limit
from fullshard.plan.doctor_findings import Finding, Level, findings_of
from fullshard.plan.doctor_links import Timing, fit_of, fitted
from fullshard.plan.doctor_report import (
    Dim,
    Group,
    Report,
    hardware_from,
    slow_dim,
    slow_group,
    slow_rank,
)
from fullshard.plan.doctor_speed import Speed
from fullshard.plan.doctor_wires import (
    PAIRS,
    SHARED_MEMORY,
    Wire,
    default_shape,
    mesh_shape,
    reason,
)
from fullshard.plan.hardware import hardware_of

GIB = 1 << 30
GLOO = "gloo's own"


def a_host(name: str = "one", **changes: Any) -> Host:
    key = name.encode().ljust(16, b".").hex()
    host = Host(name, key, "10.0.0.1", ("lo", "eth0"), 8, 64 * GIB, None, 8 * GIB, 0, "")
    return replace(host, **changes)


def a_rank(rank: int = 0, host: Host | None = None, **changes: Any) -> Facts:
    """A rank that is well: two threads, the cores of a machine of eight, no GPU."""
    versions = {"python": "3.12.0", "torch": "2.13.0", "fullshard": "0.1.0", "cuda": "13.0"}
    variables = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank % 2)}
    variables |= {"MASTER_ADDR": "head", "MASTER_PORT": "29500"}
    variables |= changes.pop("variables", {})
    facts = Facts(
        rank, host or a_host(), versions, ("gloo",), tuple(range(8)), 4, 1024, (), variables
    )
    return replace(facts, **changes)


def a_gpu(uuid: str) -> Gpu:
    return Gpu("H100", uuid, 80 * GIB)


def two_hosts(**changes: Any) -> list[Facts]:
    return [
        a_rank(0, a_host("one", **changes), num_threads=8),
        a_rank(1, a_host("two"), num_threads=8),
    ]


def with_gpus(*uuids: str, backends: Sequence[str] = ("nccl", "gloo")) -> list[Facts]:
    """Two ranks that see these GPUs."""
    gpus = tuple(map(a_gpu, uuids))
    host = a_host(num_nvidia=len(uuids), driver="570.10")
    return [a_rank(rank, host, gpus=gpus, backends=tuple(backends)) for rank in (0, 1)]


def with_variables(ranks: Sequence[Facts], **variables: str) -> list[Facts]:
    return [replace(one, variables={**one.variables, **variables}) for one in ranks]


def without_variable(name: str) -> list[Facts]:
    kept = {key: value for key, value in a_rank().variables.items() if key != name}
    return [replace(a_rank(), variables=kept)]


WELL = [a_rank(0), a_rank(1)]
UNSEEN = [replace(a_rank(), host=a_host(num_nvidia=2, driver="470.1"))]
CPU_BUILD = [replace(UNSEEN[0], versions={**UNSEEN[0].versions, "torch": "2.13.0+cpu"})]
del CPU_BUILD[0].versions["cuda"]

# name, ranks where it is found, what is said, ranks where it is not although they are close
CASES: dict[str, tuple[list[Facts], str, list[Facts]]] = {
    "half_launched": (without_variable("WORLD_SIZE"), "but not WORLD_SIZE", [a_rank()]),
    "loopback_master": (
        with_variables(two_hosts(), MASTER_ADDR="127.0.0.1"),
        "127.0.0.1 on ranks 0, 1, but there are 2 hosts",
        with_variables(WELL, MASTER_ADDR="localhost"),
    ),
    "loopback_hostname": (
        two_hosts(address="127.0.1.1"),
        "resolves to 127.0.1.1 (rank 0)",
        with_variables(two_hosts(address="127.0.1.1"), GLOO_SOCKET_IFNAME="eth0"),
    ),
    "wrong_interface": (
        with_variables(two_hosts(), GLOO_SOCKET_IFNAME="lo"),
        "GLOO_SOCKET_IFNAME is lo",
        with_variables(WELL, GLOO_SOCKET_IFNAME="lo"),
    ),
    "versions_differ": (
        [a_rank(), replace(a_rank(1), versions={**a_rank().versions, "torch": "2.14.1"})],
        "torch is 2.13.0 on rank 0, but 2.14.1 on rank 1",
        [a_rank(), replace(a_rank(1), versions={**a_rank().versions, "nccl": "2.27"})],
    ),
    "uneven_hosts": (
        [a_rank(0), a_rank(1), a_rank(2, a_host("two"), num_threads=8)],
        "2 on one, 1 on two",
        two_hosts(),
    ),
    "clocks_differ": (
        [a_rank(), a_rank(1, clock_error_s=7.25)],
        "rank 1 differs from rank 0's by at least 7.2 s",
        [a_rank(), a_rank(1, clock_error_s=0.5)],
    ),
    "too_many_threads": (
        [a_rank(0, num_threads=8), a_rank(1, num_threads=8)],
        "2 rank(s) on one have 16 threads for 8 core(s)",
        [a_rank(0, cores=(0, 1, 2, 3)), a_rank(1, cores=(4, 5, 6, 7))],
    ),
    "idle_cores": (
        [a_rank(0, num_threads=1), a_rank(1, num_threads=1)],
        "have 2 thread(s) for 8 cores",
        [replace(one, num_threads=1) for one in with_gpus("a", "b")],
    ),
    "little_memory": (
        [a_rank(host=a_host(limit_nbytes=600 << 20), num_threads=8)],
        "600 MiB of memory for each of 1 rank(s) on one: its control group allows",
        [a_rank(host=a_host(limit_nbytes=2 * GIB), num_threads=8)],
    ),
    "little_shared_memory": (
        [a_rank(host=a_host(shm_nbytes=64 << 20), num_threads=8)],
        "/dev/shm has 64 MiB",
        [a_rank(host=a_host(shm_nbytes=None), num_threads=8)],
    ),
    "few_open_files": (
        [a_rank(number, num_threads=1, max_files=256) for number in range(64)],
        "ranks 0, 1, 2, 3 and 60 more may open 256 files; 64 ranks may need 452",
        [a_rank(number, max_files=256) for number in range(2)],
    ),
    "gpu_shared": (
        with_variables(with_gpus("a", "b"), LOCAL_RANK="0"),
        "ranks 0, 1 are all on one GPU",
        with_gpus("a", "b"),
    ),
    "gpu_missing": (
        with_variables(with_gpus("a"), CUDA_VISIBLE_DEVICES="0"),
        "rank 1 has LOCAL_RANK 1, but sees 1 GPU(s) (CUDA_VISIBLE_DEVICES=0)",
        with_gpus("a", "b"),
    ),
    "gpus_unseen": (UNSEEN, "of which ranks see 0: the driver is 470.1", with_gpus("a", "b")),
    "no_nccl": (
        with_gpus("a", "b", backends=("gloo",)),
        "have GPUs, but PyTorch only has gloo",
        with_gpus("a", "b"),
    ),
}


def named(ranks: Sequence[Facts]) -> dict[str, Finding]:
    return {finding.name: finding for finding in findings_of(ranks)}


@pytest.mark.parametrize("name", CASES)
def test_a_mistake_is_found_and_its_neighbour_is_not(name: str) -> None:
    wrong, said, well = CASES[name]
    found = named(wrong)[name]
    assert said in found.what and found.advice
    assert name not in named(well)


def test_each_finding_has_a_case_and_is_told_in_the_docs() -> None:
    names = {check.__name__.removesuffix("_rank") for check in findings.CHECKS}
    assert names == set(CASES)
    page = (Path(__file__).parents[2] / "docs" / "doctor.md").read_text()
    told = {*names, "slow_rank", "slow_dim", "slow_group"}
    assert [name for name in sorted(told) if f"`{name}`" not in page] == []


def test_nothing_is_found_where_all_is_well() -> None:
    assert findings_of(WELL) == findings_of(two_hosts()) == findings_of(with_gpus("a", "b")) == []


def test_why_gpus_are_not_seen() -> None:
    assert "2.13.0+cpu has no CUDA" in named(CPU_BUILD)["gpus_unseen"].what
    masked = named(with_variables(UNSEEN, CUDA_VISIBLE_DEVICES=""))["gpus_unseen"]
    assert masked.level is Level.WARNING and "CUDA_VISIBLE_DEVICES is ''" in masked.what


def test_a_name_without_address_is_found() -> None:
    assert "resolves to no address" in named(two_hosts(address=""))["loopback_hostname"].what


def test_fewer_ranks_where_there_are_more_than_cores() -> None:
    ranks = [a_rank(number, cores=(0,), num_threads=1) for number in (0, 1)]
    assert named(ranks)["too_many_threads"].advice == "start fewer ranks"


def test_errors_come_first() -> None:
    wrong = [a_rank(), *with_variables([a_rank(1, num_threads=9)], GLOO_SOCKET_IFNAME="eth7")]
    levels = [finding.level for finding in findings_of(wrong)]
    assert levels == [Level.ERROR, Level.WARNING]


def test_facts_survive_the_way_through_json() -> None:
    own = facts_here(3)
    assert Facts.from_json(json.loads(json.dumps(asdict(own)))) == own
    other = with_gpus("a", "b")[1]
    assert Facts.from_json(json.loads(json.dumps(asdict(other)))) == other


def test_only_variables_of_launchers_and_backends_are_told() -> None:
    given = {"RANK": "1", "NCCL_DEBUG": "INFO", "FULLSHARD_STORE": "s", "HF_TOKEN": "secret"}
    assert list(launch_variables(given)) == ["FULLSHARD_STORE", "NCCL_DEBUG", "RANK"]


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({}, None),
        ({"memory.max": "max"}, None),
        ({"memory.max": "max", "a/b/memory.max": "7000", "a/memory.max": "5000"}, 5000),
        ({"memory/a/b/memory.limit_in_bytes": "6000"}, 6000),
        ({"memory/memory.limit_in_bytes": str((1 << 63) - 4096)}, None),
    ],
)
def test_the_smallest_limit_of_memory_counts(
    tmp_path: Path, files: dict[str, str], limit: int | None
) -> None:
    for name, text in files.items():
        path = tmp_path / "root" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    own = tmp_path / "cgroup"
    own.write_text("0::/a/b\n")
    assert memory_limit(own, tmp_path / "root") == limit


# Wires


@pytest.mark.parametrize(
    ("wire", "ranks", "said"),
    [
        (SHARED_MEMORY, WELL, "on one host and read each other's memory"),
        ("none", WELL, "a group of one rank"),
        ("nccl's own", with_gpus("a", "b"), "on GPUs, on 1 host(s)"),
        (PAIRS, with_variables(WELL, FULLSHARD_SHARED_MEMORY="0"), "is 0 on rank(s) [0, 1]"),
        (PAIRS, WELL, "the system or its users forbid sharing"),
        (
            GLOO,
            [a_rank(number, a_host("one" if number < 2 else "two")) for number in range(4)],
            "2 hosts; shards into the busiest one: 4 in pairs, 3 by gloo's all-gather, 6 by",
        ),
    ],
)
def test_the_reason_for_a_wire(wire: str, ranks: list[Facts], said: str) -> None:
    assert said in reason(Wire(tuple(range(len(ranks))), wire, wire, True), ranks)


def test_the_mesh_is_as_given_or_as_hosts_are() -> None:
    assert mesh_shape("replicate=2,shard=3", 6) == {"replicate": 2, "shard": 3}
    assert mesh_shape(None, 6) is None
    assert default_shape(two_hosts()) == {"replicate": 2, "shard": 1}
    assert default_shape(WELL) == default_shape(WELL[:1]) | {"shard": 2}
    assert default_shape([*two_hosts(), a_rank(2)]) == {"shard": 3}


@pytest.mark.parametrize("given", ["shard", "shard=0", "shard=2,shard=3", "shard=5", "=6", ""])
def test_another_mesh_is_refused(given: str) -> None:
    with pytest.raises(ConfigError, match="--mesh"):
        mesh_shape(given, 6)


# Measurements


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


def timings(world: int, latency_s: float, bandwidth: float) -> list[Timing]:
    """As ``Hardware.exchange_s`` has them; means of whole values are two collectives."""
    found = []
    for nbytes in (1 << 10, 1 << 16, 1 << 22):
        taken_s = latency_s * (world - 1) + nbytes * (world - 1) / world / bandwidth
        found += [Timing(what, nbytes, taken_s) for what in ("all_gather", "reduce_scatter")]
        found.append(Timing("all_reduce", nbytes, 2 * taken_s))
    return found


def a_dim(name: str, *rates: float, carrier: str = SHARED_MEMORY) -> Dim:
    """A dim of groups of two ranks each, with these bandwidths."""
    groups = [
        Group(Wire((2 * i, 2 * i + 1), carrier, carrier, True), timings(2, 1e-6, rate))
        for i, rate in enumerate(rates)
    ]
    return Dim(name, 2, groups)


SPEEDS = [Speed({"float32": rate, "bfloat16": 2 * rate}, 1e10, 1e-5) for rate in (4e10, 6e10)]


def measured() -> Report:
    """Four ranks on two hosts, as 2 x 2."""
    ranks = [
        a_rank(number, a_host("one" if number < 2 else "two"), num_threads=4) for number in range(4)
    ]
    report = Report(ranks, 4, "cpu", {"replicate": 2, "shard": 2}, speeds=2 * SPEEDS)
    report.dims = [a_dim("replicate", 1e9, 1e9, carrier=PAIRS), a_dim("shard", 5e9, 5e9)]
    return report


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
    fit = fit_of(timings(world, 3e-5, 2e9), world)
    (link,) = hardware_from(report, "").links
    hardware = replace(
        hardware_from(report, ""),
        links=(replace(link, bandwidth=fit.bandwidth, latency_s=fit.latency_s),),
    )
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
    assert "of a preset" in hardware.source


def test_nothing_is_written_of_what_ended_early() -> None:
    report = measured()
    report.failures.append("rank 3 is gone")
    with pytest.raises(ConfigError, match="--calibrate"):
        hardware_from(report, "")
    assert report.exitcode == 1


@pytest.mark.parametrize(
    ("check", "wrong", "said", "well"),
    [
        (
            slow_rank,
            [SPEEDS[1], SPEEDS[1], SPEEDS[1]._replace(flops={"float32": 2e10})],
            "rank 2 computes products of matrices at 33%",
            SPEEDS,
        ),
        (slow_group, [a_dim("shard", 1e9, 9e9, 9e9)], "ranks 0, 1", [a_dim("shard", 6e9, 9e9)]),
        (
            slow_dim,
            [a_dim("replicate", 9e9, carrier=PAIRS), a_dim("shard", 1e9)],
            "dim shard has 11% of the bandwidth of dim replicate",
            [a_dim("replicate", 1e9, carrier=PAIRS), a_dim("shard", 9e9)],
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
    check: Callable[[Any], Finding | None], wrong: Any, said: str, well: Any
) -> None:
    found = check(wrong)
    assert found is not None and said in found.what
    assert check(well) is None


def test_the_report_is_printed_and_is_json(capsys: pytest.CaptureFixture[str]) -> None:
    report = measured()
    print_report(report)
    shown = capsys.readouterr().out
    for said in ("2 x shared memory", "2 x pairs over gloo", "no common mistake was found"):
        assert said in shown
    read = json.loads(json.dumps(report.as_dict()))
    assert read["dims"][1]["groups"][0]["ranks"] == [0, 1]
    assert read["dims"][0]["timings"][-3]["bandwidth"] == pytest.approx(1e9, rel=0.01)
