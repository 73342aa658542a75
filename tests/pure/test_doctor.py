"""``fullshard doctor``: findings, printed facts and reasons for transports, from made-up facts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch.distributed.distributed_c10d as c10d

from fullshard._torch import collectives as _collectives
from fullshard.doctor import findings
from fullshard.doctor.facts import Facts, facts_here, launch_variables, memory_limit
from fullshard.doctor.findings import DoctorFinding, Level, findings_of
from fullshard.doctor.wires import (
    BETWEEN_HOSTS,
    SHARED_MEMORY,
    Wire,
    default_shape,
    mesh_shape,
    reason,
)
from fullshard.errors import ConfigError
from tests.pure.doctor_facts import (
    GIB,
    WELL,
    a_host,
    a_rank,
    two_hosts,
    with_gpus,
    with_variables,
)

GLOO = "gloo's own"


def without_variable(name: str) -> list[Facts]:
    kept = {key: value for key, value in a_rank().variables.items() if key != name}
    return [replace(a_rank(), variables=kept)]


UNSEEN = [replace(a_rank(), host=a_host(num_nvidia=2, driver="470.1"))]
CPU_BUILD = [replace(UNSEEN[0], versions={**UNSEEN[0].versions, "torch": "2.13.0+cpu"})]
del CPU_BUILD[0].versions["cuda"]

NCCL2 = {**a_rank().versions, "nccl backend": "nccl2"}

# Name: ranks with the finding, a part of its text, and similar ranks without the finding.
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
        "host one runs 16 threads of 2 ranks on 8 cores",
        [a_rank(0, cores=(0, 1, 2, 3)), a_rank(1, cores=(4, 5, 6, 7))],
    ),
    "idle_cores": (
        [a_rank(0, num_threads=1), a_rank(1, num_threads=1)],
        "runs 2 threads of 2 ranks on 8 cores, and has no GPU",
        [replace(one, num_threads=1) for one in with_gpus("a", "b")],
    ),
    "little_memory": (
        [a_rank(host=a_host(limit_nbytes=600 << 20), num_threads=8)],
        "on host one has 629 MB of memory: the control group allows 629 MB for 1 rank",
        [a_rank(host=a_host(limit_nbytes=2 * GIB), num_threads=8)],
    ),
    "little_shared_memory": (
        [a_rank(host=a_host(shm_nbytes=64 << 20), num_threads=8)],
        "/dev/shm has 67.1 MB",
        [a_rank(host=a_host(shm_nbytes=None), num_threads=8)],
    ),
    "few_open_files": (
        [a_rank(number, num_threads=1, max_files=256) for number in range(64)],
        "ranks 0, 1, 2, 3 and 60 more may open 256 files; 64 ranks may need 452",
        [a_rank(number, max_files=256) for number in range(2)],
    ),
    "gpu_shared": (
        with_variables(with_gpus("a", "b"), LOCAL_RANK="0"),
        "ranks 0, 1 would share one GPU",
        with_gpus("a", "b"),
    ),
    "gpu_missing": (
        with_variables(with_gpus("a"), CUDA_VISIBLE_DEVICES="0"),
        "rank 1 has LOCAL_RANK 1, but sees 1 GPU (CUDA_VISIBLE_DEVICES=0)",
        with_gpus("a", "b"),
    ),
    "gpus_unseen": (
        UNSEEN,
        "of which its ranks see 0: the driver's version is 470.1",
        with_gpus("a", "b"),
    ),
    "no_nccl": (
        with_gpus("a", "b", backends=("gloo",)),
        "ranks 0, 1 sees GPUs, but its only backends are gloo",
        with_gpus("a", "b"),
    ),
}


def named(ranks: Sequence[Facts]) -> dict[str, DoctorFinding]:
    return {finding.name: finding for finding in findings_of(ranks)}


@pytest.mark.parametrize("name", CASES)
def test_a_mistake_is_found_and_its_neighbour_is_not(name: str) -> None:
    wrong, said, well = CASES[name]
    found = named(wrong)[name]
    assert said in found.what and found.advice
    assert name not in named(well)


def test_each_finding_has_a_case_and_is_told_in_the_docs() -> None:
    names = {check.__name__ for check in findings.CHECKS}
    assert names == set(CASES)
    page = (Path(__file__).parents[2] / "docs" / "doctor.md").read_text()
    told = {*names, "slow_rank", "slow_dim", "slow_group"}
    assert [name for name in sorted(told) if f"`{name}`" not in page] == []


def test_hosts_of_one_name_are_two() -> None:
    ranks = [a_rank(0), a_rank(1), a_rank(2, a_host(key="ff"), num_threads=8)]
    found = named(ranks)["uneven_hosts"]
    assert "2 on one, 1 on one" in found.what


def test_nothing_is_found_where_all_is_well() -> None:
    assert findings_of(WELL) == findings_of(two_hosts()) == findings_of(with_gpus("a", "b")) == []


def test_why_gpus_are_not_seen() -> None:
    assert "2.13.0+cpu was built without CUDA" in named(CPU_BUILD)["gpus_unseen"].what
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


def test_ranks_need_one_nccl() -> None:
    """PyTorch 2.15 has two backends for "nccl", which cannot connect to each other."""
    other = replace(a_rank(1), versions=NCCL2 | {"nccl backend": "nccl"})
    found = findings_of([replace(a_rank(0), versions=NCCL2), other])
    assert [one.name for one in found] == ["versions_differ"]
    assert "nccl backend is nccl2 on rank 0, but nccl on rank 1" in found[0].what
    assert "TORCH_DIST_USE_NCCL2" in found[0].advice
    found = findings_of([replace(a_rank(0), versions=NCCL2), a_rank(1)])
    assert "nccl2 on rank 0, but missing on rank 1" in found[0].what
    assert findings_of([replace(a_rank(rank), versions=NCCL2) for rank in (0, 1)]) == []


@pytest.mark.parametrize(
    ("has_second", "is_default", "variable", "name"),
    [
        (False, False, "1", "nccl"),
        (True, False, None, "nccl"),
        (True, False, "1", "nccl2"),
        (True, True, None, "nccl2"),
        (True, True, "0", "nccl"),
    ],
)
def test_the_nccl_of_programs_is_known(
    monkeypatch: pytest.MonkeyPatch,
    has_second: bool,
    is_default: bool,
    variable: str | None,
    name: str,
) -> None:
    for attribute, is_there in (("ProcessGroupNCCL2", has_second), ("_nccl2_device", is_default)):
        if is_there:
            monkeypatch.setattr(c10d, attribute, None, raising=False)
        else:
            monkeypatch.delattr(c10d, attribute, raising=False)
    monkeypatch.delenv("TORCH_DIST_USE_NCCL2", raising=False)
    if variable is not None:
        monkeypatch.setenv("TORCH_DIST_USE_NCCL2", variable)
    assert _collectives.nccl_of_programs() == name


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


# Transports.


@pytest.mark.parametrize(
    ("wire", "ranks", "said"),
    [
        (SHARED_MEMORY, WELL, "on one host and can read each other's memory"),
        ("none", WELL, "a group of one rank"),
        ("nccl's own", with_gpus("a", "b"), "use GPUs on 1 host"),
        (GLOO, with_variables(WELL, FULLSHARD_SHARED_MEMORY="0"), "is 0 on ranks 0, 1"),
        (GLOO, WELL, "the system does not allow it, or their users differ"),
        (GLOO, two_hosts(), "on 2 hosts, one on each"),
        (GLOO, [*two_hosts(), a_rank(2)], "on 2 hosts, and not equally many on each"),
        (GLOO, with_variables(WELL, FULLSHARD_TRANSPORT="backend"), "is backend on ranks 0, 1"),
        (
            BETWEEN_HOSTS,
            [a_rank(number, a_host("one" if number < 2 else "two")) for number in range(4)],
            "on 2 hosts, and each shard is sent once to each other host",
        ),
    ],
)
def test_the_reason_for_a_wire(wire: str, ranks: list[Facts], said: str) -> None:
    assert said in reason(Wire(tuple(range(len(ranks))), wire, True), ranks)


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
