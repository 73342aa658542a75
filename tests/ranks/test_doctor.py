"""``fullshard doctor``: facts of ranks, their wires, measurements of a mesh, the command."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from fullshard import doctor
from fullshard._torch import world as _world
from fullshard.cli import doctor as command
from fullshard.comm import collectives_of, rendezvous
from fullshard.doctor.exchange import KeyValueExchange, gather_facts
from fullshard.doctor.facts import Facts, facts_here
from fullshard.doctor.wires import BETWEEN_HOSTS, SHARED_MEMORY, wire_of
from fullshard.errors import LostRankError
from fullshard.plan import hardware_of, time_host
from tests.kit.doctor_measured import measured
from tests.ranks.pool import RankPool
from tests.ranks.train_shell import FROM_A_LAUNCHER

SIZES = (1 << 8, 1 << 12)
TIMEOUT_S = 120.0


def exchange(name: str, timeout_s: float = 30.0) -> KeyValueExchange:
    store = dist.PrefixStore(name, _world.default_store())
    return KeyValueExchange(
        store, rank=dist.get_rank(), world=dist.get_world_size(), timeout_s=timeout_s
    )


def facts_of_all() -> list[Facts]:
    return gather_facts(exchange("facts"), facts_here(dist.get_rank()))


@pytest.mark.parametrize("world", [2, 4])
def test_rank_0_knows_the_facts_of_all(pool: RankPool, world: int) -> None:
    first, *others = pool.run(world, facts_of_all)
    assert [one.rank for one in first] == list(range(world))
    assert len({one.host.key for one in first}) == 1
    assert {one.versions["torch"] for one in first} == {torch.__version__}
    assert all(one.num_threads == 1 and "gloo" in one.backends for one in first)
    assert all(one.clock_error_s == 0 for one in first)
    assert others == [[]] * (world - 1)


def leave_some_out() -> str:
    told = exchange("some", timeout_s=3.0)
    if dist.get_rank() % 2:
        return ""
    try:
        told.gather("facts", dist.get_rank())
    except LostRankError as error:
        return str(error)
    return "none is missing"


def test_ranks_that_say_nothing_are_named(pool: RankPool) -> None:
    first, *others = pool.run(4, leave_some_out)
    assert first == "facts: nothing from ranks 1, 3 within 3 s"
    assert others == ["", "none is missing", ""]


def measure() -> tuple[list[doctor.Dim], list[Any]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return doctor.measure(
        mesh, torch.device("cpu"), exchange("measure"), sizes=SIZES, calibrate=time_host
    )


def test_each_dim_of_a_mesh_is_measured(pool: RankPool) -> None:
    (dims, speeds), *others = pool.run(4, measure)
    assert others == [([], [])] * 3
    assert [(dim.name, dim.size) for dim in dims] == [("replicate", 2), ("shard", 2)]
    groups = [[group.wire.ranks for group in dim.groups] for dim in dims]
    assert groups == [[(0, 2), (1, 3)], [(0, 1), (2, 3)]]
    for dim in dims:
        assert dim.carriers() == {SHARED_MEMORY}
        taken = {(one.what, one.nbytes) for one in dim.timings}
        kinds = ("all_gather", "reduce_scatter", "all_reduce")
        assert taken == {(what, nbytes) for what in kinds for nbytes in SIZES}
        assert all(one.seconds > 0 for one in dim.timings) and dim.bandwidth() > 0
    assert len(speeds) == 4
    for speed in speeds:
        assert set(speed.flops) == {"float32", "bfloat16", "float64"}
        assert min(*speed.flops.values(), speed.memory_bandwidth, speed.op_s, speed.tiny_step_s) > 0


def wires(shape: tuple[int, ...], hosts: str) -> list[str]:
    """Return this rank's carriers by dim; ``hosts`` has a letter per rank."""
    patch, own = pytest.MonkeyPatch(), hosts[dist.get_rank()].encode()
    with patch.context() as patched:
        patched.setattr(rendezvous, "own_host", lambda: own * rendezvous.NBYTES)
        mesh = init_device_mesh("cpu", shape)
        found = [wire_of(mesh, dim, collectives_of(mesh, dim)) for dim in range(mesh.ndim)]
    return [one.gathers for one in found]


def test_wires_between_hosts_are_named(pool: RankPool) -> None:
    shared, pairs = SHARED_MEMORY, "gloo's own"
    assert pool.run(4, wires, (2, 2), "aabb") == [[pairs, shared]] * 4
    assert pool.run(4, wires, (2, 2), "abab") == [[shared, pairs]] * 4
    assert pool.run(4, wires, (4,), "aabb") == [[BETWEEN_HOSTS]] * 4


def fail_on_rank_1(path: str, rank: int) -> tuple[int, list[str], int]:
    """Return the exit code, the reported failures, and the number of ranks known by then."""
    shown: list[doctor.Report] = []
    patch = pytest.MonkeyPatch()
    with patch.context() as patched:
        if rank == 1:
            patched.setattr(dist, "init_process_group", _refuse)
        store = dist.FileStore(path, 2)
        code = doctor.examine(lambda: store, shown.append, rank=rank, world=2, timeout_s=3.0)
    return code, *((shown[0].failures, len(shown[0].ranks)) if shown else ([], 0))


def _refuse(*_: object, **__: object) -> None:
    raise PermissionError("no network here")


def test_what_failed_on_another_rank_is_shown(tmp_path: Path) -> None:
    """A failure on rank 1 is shown on rank 0.

    A group that was never complete leaves threads behind, so the ranks are processes of their own.
    """
    program = (
        "import sys; from tests.ranks.test_doctor import fail_on_rank_1 as f; "
        "print(f(sys.argv[1], int(sys.argv[2])))"
    )
    jobs = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(tmp_path / "store"), str(rank)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    first, second = (job.communicate(timeout=TIMEOUT_S)[0] for job in jobs)
    assert "rank 1: PermissionError: no network here" in first
    assert first.startswith("(1, [") and first.rstrip().endswith(", 2)")
    assert second.strip() == "(1, [], 0)"


def run_command(folder: Path, *options: str, **variables: str) -> subprocess.CompletedProcess[str]:
    kept = {key: value for key, value in os.environ.items() if key not in FROM_A_LAUNCHER}
    return subprocess.run(
        [sys.executable, "-m", "fullshard.cli", "doctor", *options],
        cwd=folder,
        env=kept | {"OMP_NUM_THREADS": "1"} | variables,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )


def test_the_command_measures_and_calibrates(tmp_path: Path) -> None:
    options = ("--nproc", "2", "--json", "--calibrate", "here.json", "--timeout", "30")
    done = run_command(tmp_path, *options)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["mesh"] == {"shard": 2} and report["failures"] == []
    assert [one["variables"]["RANK"] for one in report["ranks"]] == ["0", "1"]
    (group,) = report["dims"][0]["groups"]
    assert group["gathers"] in (SHARED_MEMORY, "gloo's own") and group["why"]
    hardware = hardware_of(tmp_path / "here.json")
    assert set(hardware.flops) == {"float32", "bfloat16", "float64"}
    assert [link.reach for link in hardware.links] == [None] and hardware.links[0].bandwidth > 0
    assert hardware.source.startswith("measured on 2")


@pytest.mark.parametrize(("load", "is_told"), [(0.4, False), (0.6, True)])
def test_figures_of_a_busy_machine_are_told_so(
    load: float,
    is_told: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(command.os, "cpu_count", lambda: 10)
    path = tmp_path / "here.json"
    command._show(measured(), as_json=True, calibrate=path, load=10 * load)
    told = capsys.readouterr().err
    assert path.exists()
    assert ("other programs used this machine (load 6.0 on 10 cores)" in told) == is_told


def test_half_of_an_environment_is_told_and_nothing_started(tmp_path: Path) -> None:
    done = run_command(tmp_path, RANK="0")
    assert done.returncode == 1
    assert "the environment has RANK, but not WORLD_SIZE, LOCAL_RANK" in done.stdout


def test_a_rank_that_nobody_meets_ends_with_what_it_knows(tmp_path: Path) -> None:
    variables = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    place = {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    done = run_command(tmp_path, "--timeout", "2", **variables, **place)
    assert done.returncode == 1
    assert "failed: the rendezvous at MASTER_ADDR: not done within 4 s" in done.stdout


def test_a_rendezvous_that_fails_at_once_is_told(tmp_path: Path) -> None:
    with socket.create_server(("localhost", 0)) as other:
        place = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(other.getsockname()[1])}
        variables = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
        done = run_command(tmp_path, **variables, **place)
    assert done.returncode == 1
    assert "failed: the rendezvous at MASTER_ADDR: " in done.stdout, done.stdout
    assert "Traceback" not in done.stderr


def test_a_mesh_of_another_size_is_refused(tmp_path: Path) -> None:
    done = run_command(tmp_path, "--mesh", "shard=3")
    assert done.returncode == 2
    assert done.stderr == "fullshard: error: --mesh shard=3 has 3 ranks, but there are 2\n"
