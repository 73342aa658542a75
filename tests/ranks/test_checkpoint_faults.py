"""Faults of checkpoints on disk are found and named, and change nothing."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast
from unittest import mock
from weakref import WeakKeyDictionary

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fullshard import FullyShardedDataParallel, checkpoint, fully_shard
from fullshard.checkpoint.format import committing, datafile
from fullshard.checkpoint.format.manifest import MANIFEST, digest_of
from fullshard.checkpoint.saving import saving
from fullshard.checkpoint.saving.collect import collected
from fullshard.checkpoint.saving.saving import save_collected
from fullshard.comm import consensus, heartbeat
from fullshard.comm.consensus import Consensus
from fullshard.errors import (
    CheckpointError,
    ConfigError,
    FailedRankError,
    FullshardError,
    LostRankError,
)
from tests.kit.checkpoint_files import alone, built, everything, same, saves
from tests.ranks.models import message_of
from tests.ranks.pool import RankPool, on_ranks


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with three checkpoints."""
    root = tmp_path_factory.mktemp("intact")
    for step in (1, 2):
        checkpoint.save(root / f"step-{step}", *alone(step), {"seed": 1}, step=step)
    checkpoint.save(root / "other", *alone(hidden=32), step=0)
    return root


@pytest.fixture
def root(intact: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(intact, tmp_path / "root"))


def is_refused(path: Path) -> str:
    """Check that load and verify refuse ``path`` and change nothing; return the message."""
    with pytest.raises(CheckpointError) as found:
        checkpoint.verify(path)
    model, optimizer = alone()
    before = everything(model, optimizer)
    with pytest.raises(FullshardError):
        checkpoint.load(path, model, optimizer)
    assert same(everything(model, optimizer), before)
    return str(found.value)


DATA = "rank-00000.safetensors"


def flip(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 1 << at % 8
    file.write_bytes(data)


def replace_in_manifest(path: Path, old: str, new: str) -> None:
    """Replace text in a manifest and correct its digest."""
    text = (path / MANIFEST).read_text()
    assert old in text
    write_manifest(path, json.loads(text.replace(old, new)))


def set_in_manifest(path: Path, key: str, value: Any) -> None:
    """Set a value of a manifest and correct its digest."""
    write_manifest(path, {**json.loads((path / MANIFEST).read_text()), key: value})


def write_manifest(path: Path, stored: dict[str, Any]) -> None:
    del stored["digest"]
    body = json.dumps(stored, separators=(",", ":"))
    digest = digest_of(body.encode())
    (path / MANIFEST).write_text(f'{body[:-1]},"digest":"{digest}"}}\n')


REPLACED = {
    "another format": ("fullshard ", "other "),
    "a later version": ('"version":2', '"version":3'),
    "missing fields": ('"files"', '"flies"'),
    "another shape": ("[96,64]", "[64,96]"),
    "files elsewhere": ('"rank-', '"../x/rank-'),
    "a larger mesh": ('"shape":[1]', '"shape":[2]'),
    "unknown dtypes": ('"float32"', '"float31"'),
    "unknown contents": ('"contents":0', '"contents":1'),
    "a mesh of nothing": ('"shape":[1]', '"shape":[0]'),
    "a mesh of millions": ('"count":1}', '"count":300000000}'),
    "dtypes no file has": ('"float32"', '"quint8"'),
    "a step of words": ('"step":2', '"step":"x"'),
    "a writer that is not there": (",0,0,0]", ",0,0,1]"),
    "a strange value": ('{"seed"', '{"$seed"'),
}
FAULTS: dict[str, Callable[[Path], object]] = {
    **{
        f"manifest of {what}": partial(replace_in_manifest, old=old, new=new)
        for what, (old, new) in REPLACED.items()
    },
    "no manifest": lambda path: (path / MANIFEST).unlink(),
    "empty manifest": lambda path: (path / MANIFEST).write_bytes(b""),
    "manifest of another step": lambda path: shutil.copy(path.parent / "step-1" / MANIFEST, path),
    "manifest of another model": lambda path: shutil.copy(path.parent / "other" / MANIFEST, path),
    "no data": lambda path: (path / DATA).unlink(),
    "data is a folder": lambda path: ((path / DATA).unlink(), (path / DATA).mkdir()),
    "empty data": lambda path: (path / DATA).write_bytes(b""),
    "data of another step": lambda path: shutil.copy(path.parent / "step-1" / DATA, path),
    "data of another model": lambda path: shutil.copy(path.parent / "other" / DATA, path),
    "data cut off": lambda path: os.truncate(path / DATA, (path / DATA).stat().st_size - 1),
    "data with more at its end": lambda path: append(path / DATA),
    "a block of zeros": lambda path: zeros(path / DATA),
    "a missing folder": lambda path: shutil.rmtree(path),
}


def append(file: Path) -> None:
    with file.open("ab") as opened:
        opened.write(bytes(1))


def zeros(file: Path) -> None:
    with file.open("r+b") as opened:
        opened.seek(file.stat().st_size - 4096)
        opened.write(bytes(4096))


@pytest.mark.parametrize("fault", list(FAULTS))
def test_every_fault_is_found(root: Path, fault: str) -> None:
    path = root / "step-2"
    FAULTS[fault](path)
    assert str(path) in is_refused(path)


@pytest.mark.parametrize("damage", [flip, os.truncate])
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_every_bit_and_every_length_count(
    intact: Path, tmp_path: Path, damage: Callable[[Path, int], object], data: st.DataObject
) -> None:
    path = tmp_path / "step-2"
    shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(intact / "step-2", path)
    file = path / data.draw(st.sampled_from([MANIFEST, DATA]))
    damage(file, data.draw(st.integers(0, file.stat().st_size - 1)))
    assert str(path) in is_refused(path)


def test_a_foreign_file_is_found_by_verify(root: Path) -> None:
    (root / "step-2" / "rank-00001.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"rank-00001.*: no file of this checkpoint"):
        checkpoint.verify(root / "step-2")


def test_the_newest_complete_checkpoint_is_the_latest(root: Path) -> None:
    assert checkpoint.latest(root) == root / "step-2"  # "other", of step 0, was saved last
    assert (root / "latest").read_text() == "other\n"
    (root / "latest").unlink()
    assert checkpoint.latest(root) == root / "step-2"
    (root / "other" / DATA).unlink()
    assert checkpoint.latest(root) == root / "step-2"
    os.truncate(root / "step-2" / DATA, 100)
    assert checkpoint.latest(root) == root / "step-1"
    assert [one.step for one in checkpoint.list_checkpoints(root)] == [1]
    (root / "step-1" / MANIFEST).write_text("{}")
    assert checkpoint.latest(root) is None
    assert checkpoint.latest(root / "nowhere") is None


def test_anyone_can_read_the_files(root: Path) -> None:
    from safetensors.torch import load_file

    model, _ = alone(2)
    found = load_file(root / "step-2" / DATA)
    for name, value in model.state_dict().items():
        assert torch.equal(found[f"model/{name}"], value)
    assert len(found) == 4 + 3 * 4 + 1  # exp_avg, exp_avg_sq, step; and the digests


def test_nothing_that_was_pickled_is_read(root: Path) -> None:
    """Saved values of many types are read back, and code is refused."""
    extra = {"a": (1, [2.5, float("inf")], {3: b"x"}), "rng": torch.get_rng_state(), "none": None}
    model, optimizer = alone()
    checkpoint.save(root / "new", model, optimizer, extra, step=3)
    found = checkpoint.load(root / "new", model, optimizer)
    assert torch.equal(found.pop("rng"), extra.pop("rng"))
    assert found == extra
    with pytest.raises(ConfigError, match="extra\\['hook'\\] is of type function"):
        checkpoint.save(root / "newer", model, optimizer, {"hook": alone}, step=3)
    assert not (root / "newer").exists()


def test_a_save_needs_a_new_path(root: Path) -> None:
    before = (root / "step-2" / MANIFEST).read_bytes()
    with pytest.raises(ConfigError, match="something at this path"):
        checkpoint.save(root / "step-2", *alone(), step=2)
    assert (root / "step-2" / MANIFEST).read_bytes() == before


def test_all_differences_are_in_one_message(root: Path) -> None:
    model = nn.Sequential(nn.Linear(64, 95), nn.Tanh(), nn.Linear(96, 3, bias=False), nn.PReLU())
    model[2].half()
    with pytest.raises(ConfigError) as found:
        checkpoint.load(root / "step-2", model)
    for part in (
        "model/0.weight has shape (96, 64) there and (95, 64) here",
        "model/2.weight is of torch.float32 there and of torch.float16 here",
        "the checkpoint lacks 3.weight",
        "the model lacks 2.bias",
    ):
        assert part in str(found.value)


def save_with_trouble(path: Path, where: int, trouble: str) -> str:
    """Save while one rank fails; check that all ranks can go on; return the error."""
    model, optimizer = built("rows", 1)
    saves("rows", path / "good")
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == where:
            patch.setattr(*TROUBLE[trouble])
        try:
            checkpoint.save(path / "bad", model, optimizer, step=3)
        except FullshardError as error:
            said = f"{type(error).__name__}: {error}"
    assert sorted(one.name for one in path.iterdir()) == ["good", "good.pt", "latest"]
    assert checkpoint.latest(path) == path / "good"
    checkpoint.save(path / "next", model, optimizer, step=4)
    dist.barrier()
    assert checkpoint.latest(path) == path / "next"
    checkpoint.verify(path / "next")
    return said


def full_disk(*_: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def bug(*_: Any) -> None:
    raise TypeError("a bug")


TROUBLE: dict[str, tuple[Any, ...]] = {
    "full disk": (datafile.DataWriter, "put", full_disk),
    "bug in an optimizer": (torch.optim.AdamW, "state_dict", bug),
}


@pytest.mark.parametrize("where", [0, 1])
@pytest.mark.parametrize("trouble", list(TROUBLE))
def test_trouble_on_one_rank_is_told_on_all(
    pool: RankPool, tmp_path: Path, where: int, trouble: str
) -> None:
    said = pool.run(3, save_with_trouble, tmp_path, where, trouble)
    assert len(set(said)) == 1
    kind = "CheckpointError: " if trouble == "full disk" else "FailedRankError: "
    assert said[0].startswith(kind) and f"rank {where}: " in said[0]
    assert ("No space left" in said[0]) == (trouble == "full disk")


def load_damaged(path: Path, fault: str, way: str) -> str:
    model, optimizer = built(way, 2)
    before = everything(model, optimizer)
    said = message_of(CheckpointError, checkpoint.load, path, model, optimizer)
    assert same(everything(model, optimizer), before)
    return said


@pytest.mark.parametrize("way", ["rows", "tp", "one flat"])
@pytest.mark.parametrize("fault", ["data cut off", "no data", "a block of zeros"])
def test_damage_that_one_rank_sees_is_told_on_all(
    pool: RankPool, tmp_path: Path, fault: str, way: str
) -> None:
    path = tmp_path / "one"
    pool.run(2, saves, "rows", path)
    file = path / "rank-00001.safetensors"
    file.rename(path / DATA)
    FAULTS[fault](path)
    if (path / DATA).exists():
        (path / DATA).rename(file)
    pool.run(2, saves, "rows", tmp_path / "two")
    shutil.copy(tmp_path / "two" / DATA, path)
    said = pool.run(2, load_damaged, path, fault, way)
    assert len(set(said)) == 1
    assert str(file) in said[0]


def without_a_rank(path: Path, *, stops: bool) -> str:
    """Save without rank 1, which is stopped or does not take part; return the others' error."""
    model, optimizer = built("rows", 1)
    saves("rows", path / "good")
    pids: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    said = ""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FULLSHARD_PATIENCE_S", "0.4")  # reported after 2.4 s of silence
        if not stops:
            patch.setattr(Consensus, "limit_s", 2.0)
        if dist.get_rank() != 1:
            try:
                checkpoint.save(path / "bad", model, optimizer, step=3)
            except LostRankError as error:
                said = str(error)
            if stops and dist.get_rank() == 0:
                os.kill(pids[1], signal.SIGCONT)
        elif stops:
            os.kill(pids[1], signal.SIGSTOP)
    dist.barrier()
    assert checkpoint.latest(path) == path / "good"
    return said


def test_a_rank_that_gives_no_sign_of_life_is_named_on_the_others(
    pool: RankPool, tmp_path: Path
) -> None:
    first, absent, last = pool.run(3, without_a_rank, tmp_path, stops=True)
    assert absent == "" and first == last
    assert "rank 1 had no heartbeat for 2.4 s" in first


def ended_before_its_first_sign(path: Path) -> str:
    """Meet the other ranks, while rank 1 sends no heartbeat at all; return their error."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(consensus.PATIENCE, "0.25")  # reported after 1.5 s of silence
        patch.setattr(consensus, "_members_of", WeakKeyDictionary())
        patch.setattr(heartbeat, "_key", "none of {}".format)
        patch.setattr(heartbeat, "_heartbeats", WeakKeyDictionary())  # other tests use another key
        said = ""
        if dist.get_rank() == 1:
            patch.setattr(consensus, "start_heartbeat", mock.Mock())
            consensus.Consensus("meets the others", "save", "a checkpoint")
        else:
            try:
                checkpoint.save(path, *alone(), step=1)
            except LostRankError as error:
                said = str(error)
        dist.barrier()
    return said


def test_a_rank_that_ended_before_its_first_sign_of_life_is_named_on_the_others(
    pool: RankPool, tmp_path: Path
) -> None:
    first, absent, last = pool.run(3, ended_before_its_first_sign, tmp_path / "new")
    assert absent == "" and first == last
    assert "rank 1 had no heartbeat for 1.5 s" in first


def test_a_rank_that_does_something_else_is_named_on_the_others(
    pool: RankPool, tmp_path: Path
) -> None:
    first, absent, last = pool.run(3, without_a_rank, tmp_path, stops=False)
    assert absent == "" and first == last
    assert "rank 1 is alive but did not take part within 2 s" in first


def same_values(one: dict[str, Any], other: dict[str, Any]) -> bool:
    try:
        return same(one, other)
    except AssertionError:
        return False


@on_ranks(2)
def test_a_loop_keeps_those_that_are_intact(tmp_path: Path) -> None:
    """A checkpointer that keeps two checkpoints counts only intact ones."""
    (tmp_path / ".unfinished-step-000001-abc").mkdir(exist_ok=True)
    dist.barrier()
    checkpointer = checkpoint.Checkpointer(tmp_path, every=2, keep=2)
    model, optimizer = built("rows", 1)
    assert checkpointer.load(model, optimizer) is None
    for step in range(1, 13):
        model(torch.full((4, 192), step / 12).double()).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 12:
            dist.barrier()
            if dist.get_rank() == 0:
                zeros(tmp_path / "step-000010" / "rank-00001.safetensors")
            dist.barrier()
            checkpointer = checkpoint.Checkpointer(tmp_path, every=2, keep=2)
        if checkpointer.is_due(step):
            checkpointer.save(model, optimizer, {"step": step}, step=step)
    after = everything(model, optimizer)
    names = sorted(one.name for one in tmp_path.iterdir())
    dist.barrier()
    other, its = built("ragged", 2)
    found = checkpoint.Checkpointer(tmp_path).load(other, its)
    assert found is not None and found.extra == {"step": 12} and found.path.name == "step-000012"
    assert same(everything(other, its), after)
    dist.barrier()
    if dist.get_rank() == 0:
        zeros(tmp_path / "step-000012" / "rank-00000.safetensors")
    dist.barrier()
    older = checkpoint.Checkpointer(tmp_path).load(other, its)
    assert older is not None and older.step == 8
    assert not same_values(everything(other, its), after)
    again = checkpoint.Checkpointer(tmp_path)
    again.save(other, its, step=10)  # the damaged checkpoint is renamed first
    assert checkpoint.verify(tmp_path / "step-000010").extra is None
    with pytest.raises(ConfigError, match="something at this path"):
        again.save(other, its, step=10)
    assert names == ["latest", "step-000008", "step-000010", "step-000012"]


def test_what_is_in_the_way_is_put_aside(tmp_path: Path) -> None:
    (tmp_path / "step-000001").mkdir()
    (tmp_path / "step-000001" / "model.pt").write_bytes(b"precious")
    checkpoint.Checkpointer(tmp_path, keep=1).save(*alone(), step=1)
    (aside,) = tmp_path.glob("step-000001.damaged-*")
    assert (aside / "model.pt").read_bytes() == b"precious"
    assert [one.path.name for one in checkpoint.list_checkpoints(tmp_path)] == ["step-000001"]


def test_only_checkpoints_of_the_loop_are_removed_and_never_the_newest(tmp_path: Path) -> None:
    model, optimizer = alone()
    checkpoint.save(tmp_path / "best", model, optimizer, step=1)
    (tmp_path / "step-best").symlink_to("best")
    checkpointer = checkpoint.Checkpointer(tmp_path, keep=2)
    for step in (900, 1000, 100):  # step 100 comes after a return to an older state
        checkpointer.save(model, optimizer, step=step)
        (checkpointer.path(step) / "scores.json").write_text("{}")  # an extra file is no damage
    found = sorted(one.name for one in tmp_path.iterdir() if ".replaced-" not in one.name)
    assert found == ["best", "latest", "step-000100", "step-best"]
    assert len(list(tmp_path.glob("step-*.replaced-*"))) == 2
    assert checkpoint.latest(tmp_path) == checkpointer.path(100)
    loaded = checkpoint.Checkpointer(tmp_path).load(model, optimizer)
    assert loaded is not None and loaded.step == 100


def test_the_newest_is_of_the_highest_step_whatever_the_clock_says(tmp_path: Path) -> None:
    model, optimizer = alone()
    checkpointer = checkpoint.Checkpointer(tmp_path / "disk", keep=2)
    memory = checkpoint.Checkpointer(tmp_path / "memory", copies=1)
    for step in range(1, 6):
        ahead_s = 86_400 if step == 2 else 0
        with mock.patch.object(saving.time, "time", return_value=1.7e9 + step + ahead_s):
            checkpointer.save(model, optimizer, step=step)
            if step in (2, 3):
                memory.save(model, optimizer, step=step)
    assert sorted(one.name for one in (tmp_path / "disk").glob("step-*")) == [
        "step-000004",
        "step-000005",
    ]
    assert memory.steps() == [2, 3]
    for roots, expected in (([memory], 3), ([memory, checkpointer], 5), ([checkpointer], 5)):
        loaded = checkpoint.load_newest(roots, model, optimizer)
        assert loaded is not None and loaded.step == expected
    assert checkpoint.latest(tmp_path / "memory") == memory.path(3)
    assert [one.step for one in checkpoint.list_checkpoints(tmp_path / "memory")] == [2, 3]


def test_time_decides_between_folders_of_one_step(tmp_path: Path) -> None:
    for name, now in (("b", 1.0), ("a", 2.0), ("c", 0.5)):
        with mock.patch.object(saving.time, "time", return_value=now):
            checkpoint.save(tmp_path / name, *alone(), step=7)
    assert checkpoint.latest(tmp_path) == tmp_path / "a"


def test_a_checkpoint_that_could_not_be_read_for_a_while_does_not_stop_its_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = checkpoint.Checkpointer(tmp_path)
    for step in (1, 2, 3):
        first.save(*alone(step), step=step)
    resumed = checkpoint.Checkpointer(tmp_path)
    broken = OSError(errno.EIO, "Input/output error")
    opened = os.open

    def open_unless_broken(path: Any, *rest: Any, **more: Any) -> int:
        if "step-000003" in str(path):
            raise broken
        return opened(path, *rest, **more)

    with mock.patch.object(datafile.os, "open", open_unless_broken):
        loaded = resumed.load(*alone())
    assert loaded is not None and loaded.step == 2
    caplog.clear()
    resumed.save(*alone(33), step=3)
    (line,) = [one.getMessage() for one in caplog.records]
    (aside,) = tmp_path.glob("step-000003.replaced-*")
    assert aside.name in line and "step 3" in line
    checkpoint.verify(aside)
    assert resumed.steps() == [1, 2, 3]
    model, optimizer = alone()
    again = checkpoint.Checkpointer(tmp_path).load(model, optimizer)
    assert again is not None and again.step == 3
    assert same(everything(model, optimizer), everything(*alone(33)))
    with pytest.raises(ConfigError, match="something at this path"):
        resumed.save(*alone(), step=3)  # this run wrote step 3
    assert resumed.load(*alone()) is not None
    resumed.save(*alone(), step=3)  # step 3 is saved anew after a load


def test_a_branch_that_was_left_is_put_aside(tmp_path: Path) -> None:
    left = checkpoint.Checkpointer(tmp_path, keep=3)
    for step in (100, 200, 300, 400):
        left.save(*alone(step), step=step)
    checkpoint.load(tmp_path / "step-000200", *alone())
    branch = checkpoint.Checkpointer(tmp_path, keep=3)
    with pytest.raises(ConfigError, match="extra"):
        branch.save(*alone(), object(), step=250)
    assert not list(tmp_path.glob("*.replaced-*"))  # a failed save changes nothing
    branch.save(*alone(), step=250)
    assert branch.steps() == [200, 250]
    assert [one.step for one in checkpoint.list_checkpoints(tmp_path)] == [200, 250]
    assert sorted(one.name[:11] for one in tmp_path.glob("*.replaced-*")) == [
        "step-000300",
        "step-000400",
    ]
    for step in (350, 450):
        branch.save(*alone(), step=step)
    assert branch.steps() == [250, 350, 450]
    for aside in tmp_path.glob("*.replaced-*"):
        checkpoint.verify(aside)
    with pytest.raises(ConfigError, match="a meaning of its own"):
        checkpoint.save(tmp_path / "step-000001.replaced-1", *alone(), step=1)


def test_a_branch_that_was_left_is_removed_from_memory(tmp_path: Path) -> None:
    left = checkpoint.Checkpointer(tmp_path, copies=1)
    for step in (1, 2, 3):
        left.save(*alone(step), step=step)
    branch = checkpoint.Checkpointer(tmp_path, copies=1)
    branch.save(*alone(22), step=2)
    assert sorted(one.name for one in tmp_path.iterdir()) == [
        ".machine",
        "latest",
        "step-000001",
        "step-000002",
    ]
    model, optimizer = alone()
    assert branch.load(model, optimizer) is not None
    assert same(everything(model, optimizer), everything(*alone(22)))


def encode_in_utf16(path: Path) -> None:
    (path / MANIFEST).write_bytes((path / MANIFEST).read_text().encode("utf-16"))


def unreadable(path: Path) -> None:
    (path / MANIFEST).unlink()
    (path / MANIFEST).mkdir()


NEIGHBOURS: dict[str, Callable[[Path], object]] = {
    "UTF-16": encode_in_utf16,
    "a NUL in a name": partial(replace_in_manifest, old="rank-00000.", new="rank-00000.\\u0000"),
    "half a character": partial(replace_in_manifest, old="rank-00000.", new="rank-\\ud800."),
    "a time of NaN": partial(set_in_manifest, key="time", value=float("nan")),
    "a time without end": partial(set_in_manifest, key="time", value=float("inf")),
    "versions of nothing": partial(set_in_manifest, key="versions", value=None),
    "an extra of another kind": partial(set_in_manifest, key="extra", value={"$tensor": [1]}),
    "no values": partial(replace_in_manifest, old='"ties"', new='"knots"'),
    "values of a list": partial(replace_in_manifest, old='"states":{}', new='"states":[]'),
    "no file": unreadable,
    "a loop of links": lambda path: (
        (path / MANIFEST).unlink(),
        (path / MANIFEST).symlink_to(MANIFEST),
    ),
}


@pytest.mark.parametrize("copies", [None, 1])
@pytest.mark.parametrize("wrong", list(NEIGHBOURS))
def test_a_bad_neighbour_stops_no_other_checkpoint(
    tmp_path: Path, wrong: str, copies: int | None
) -> None:
    model = nn.Linear(2, 2)
    checkpointer = checkpoint.Checkpointer(tmp_path, keep=1, copies=copies)
    for step in (1, 2, 9):
        checkpoint.save(checkpointer.path(step), model, step=step)
    for step in (1, 9):
        NEIGHBOURS[wrong](checkpointer.path(step))
    assert checkpointer.steps() == [2]
    assert [one.step for one in checkpoint.list_checkpoints(tmp_path)] == [2]
    loaded = checkpointer.load(model)
    assert loaded is not None and loaded.step == 2
    checkpointer.save(model, step=3)
    assert checkpointer.steps() == [3]
    with pytest.raises(CheckpointError):
        checkpoint.inspect(next(tmp_path.glob("step-000009*"), tmp_path / "nowhere"))


def test_a_save_is_saved_whatever_happens_to_old_ones(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Linear(2, 2)
    checkpointer = checkpoint.Checkpointer(tmp_path, keep=1)
    checkpointer.save(model, step=1)
    with mock.patch.object(committing.shutil, "rmtree"):  # NFS keeps files that are in use
        checkpointer.save(model, step=2)
        checkpoint.save(checkpointer.path(1), model, step=1)
        checkpointer.save(model, step=3)
    assert checkpointer.steps() == [3]
    renamed = Path.rename

    def rename(path: Path, to: Path) -> Path:
        if path.name == "step-000003":
            raise OSError(errno.EACCES, "Permission denied")
        return renamed(path, to)

    caplog.clear()
    with mock.patch.object(Path, "rename", rename):
        checkpointer.save(model, step=4)
        checkpointer.save(model, step=2)  # and step 3 cannot be renamed
    said = [one.getMessage() for one in caplog.records]
    assert any("step-000003 cannot be removed" in one for one in said)
    assert any("step-000003 cannot be renamed" in one for one in said)
    assert checkpointer.path(2).exists()


def test_what_was_intact_once_is_read_again_when_it_is_new(tmp_path: Path) -> None:
    model, optimizer = alone()
    checkpointer = checkpoint.Checkpointer(tmp_path, keep=1)
    checkpointer.save(model, optimizer, step=1)
    checkpointer.save(model, optimizer, step=2)
    shutil.rmtree(checkpointer.path(2))
    checkpointer.save(model, optimizer, step=1)
    with pytest.MonkeyPatch.context() as patch:
        seal = committing.seal

        def damaging(unfinished: Path, *rest: Any) -> None:
            zeros(unfinished / DATA)
            seal(unfinished, *rest)

        patch.setattr("fullshard.checkpoint.stores.targets.seal", damaging)
        checkpointer.save(model, optimizer, step=2)
    assert checkpointer.path(1).exists()
    checkpoint.verify(checkpointer.path(1))


def test_no_intact_checkpoint_is_not_no_checkpoint(tmp_path: Path) -> None:
    model, optimizer = alone()
    checkpointer = checkpoint.Checkpointer(tmp_path)
    assert checkpointer.load(model, optimizer) is None
    checkpointer.save(model, optimizer, step=1)
    os.truncate(checkpointer.path(1) / DATA, 1000)
    with pytest.raises(CheckpointError, match="has 1000 bytes"):
        checkpointer.load(model, optimizer)
    (checkpointer.path(1) / MANIFEST).unlink()
    with pytest.raises(CheckpointError, match="no manifest"):
        checkpointer.load(model, optimizer)


def test_what_goes_wrong_in_the_model_is_no_damage(tmp_path: Path) -> None:
    class Strange(nn.Linear):
        def get_extra_state(self) -> dict[str, int]:
            return {"a": 1}

        def set_extra_state(self, state: dict[str, int]) -> None:
            raise KeyError("b")

    checkpointer = checkpoint.Checkpointer(tmp_path)
    checkpointer.save(Strange(2, 2), step=1)
    checkpointer.save(Strange(2, 2), step=2)
    with pytest.raises(FailedRankError, match="step-000002: rank 0: KeyError: 'b'"):
        checkpointer.load(Strange(2, 2))


def test_a_checkpoint_is_there_if_only_its_pointer_cannot_be_written(root: Path) -> None:
    (root / "latest").unlink()
    (root / "latest").mkdir()
    checkpoint.save(root / "step-3", *alone(), step=3)
    assert checkpoint.latest(root) == root / "step-3"
    assert not list(root.glob(".unfinished*"))
    for name in ("latest", ".hidden", "x.damaged-1"):
        with pytest.raises(ConfigError, match="a meaning of its own"):
            checkpoint.save(root / name, *alone(), step=3)


@on_ranks(2)
def test_one_name_on_two_meshes_is_refused(tmp_path: Path) -> None:
    """A save is refused if ranks on different meshes have a tensor of one name."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("each", "own"))
    model = fully_shard(nn.Linear(4, 4), mesh=mesh["own"])
    with pytest.raises(CheckpointError) as caught:
        checkpoint.save(tmp_path / "new", model, step=1)
    said = str(caught.value)
    assert "model/weight: ranks on different meshes, [0] and [1], have it" in said
    dist.barrier()
    assert not any(tmp_path.iterdir())


class Random(nn.Linear):
    """A linear layer with a megabyte of extra state that differs by rank."""

    def get_extra_state(self) -> Any:
        generator = torch.Generator().manual_seed(dist.get_rank())
        return torch.randint(256, (1 << 20,), generator=generator, dtype=torch.uint8)

    def set_extra_state(self, state: Any) -> None:
        self.loaded = state


def broadcast(model: nn.Module) -> None:
    for param in model.parameters():
        dist.broadcast(param.detach(), 0)


@on_ranks(2)
@pytest.mark.parametrize(
    ("mode", "what", "names"),
    [
        ("sync", "equal", ""),
        ("async", "equal", ""),
        ("sync", "weight", "model/0.weight on ranks 0 and 1."),
        ("async", "weight", "model/0.weight on ranks 0 and 1."),
        ("sync", "frozen", "model/frozen on ranks 0 and 1."),
        ("async", "state", "optimizer/0.weight/exp_avg on ranks 0 and 1, "),
    ],
)
def test_plain_tensors_of_one_name_have_to_be_equal(
    tmp_path: Path, mode: str, what: str, names: str
) -> None:
    """Plain tensors of one name, as in pipeline stages, must be equal on all ranks."""
    path = tmp_path / "step-1"
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(300, 70), nn.BatchNorm1d(70))
    frozen = nn.Parameter(torch.zeros(5), requires_grad=False)
    model.register_parameter("frozen", frozen)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    scale = 2.0 if rank and what == "state" else 1.0
    model(torch.randn(4, 300)).square().sum().mul(scale).backward()
    with torch.no_grad():
        cast(nn.BatchNorm1d, model[1]).running_mean += rank  # batch statistics may differ
    optimizer.step()
    with torch.no_grad():
        if what == "weight" and rank:
            cast(nn.Linear, model[0]).weight[-1, -1] += 1e-3
        if what == "frozen":
            frozen.add_(rank)
        if what == "state":
            broadcast(model)
    said = message_of(
        ConfigError, lambda: checkpoint.save(path, model, optimizer, step=1, mode=mode).wait()
    )
    if what == "weight":
        with pytest.raises(ConfigError, match=r"0\.weight on ranks 0 and 1.*prefix their"):
            checkpoint.save_weights(model, path.with_name("weights"))
        kept = collected(rank, 2, model, optimizer).bare()  # by a rank that lost the other one
        memory = path.parent.with_name(f"{path.parent.name}-memory")
        with pytest.raises(ConfigError, match=r"0\.weight on ranks 0 and 1"):
            save_collected(memory / "step-0", lambda: kept.left_to({0: 0, 1: 1}), None, step=1)
    dist.barrier()
    left = [one.name for one in path.parent.iterdir()]
    if what == "equal":
        checkpoint.load(path, model, optimizer)
        checkpoint.verify(path)
    is_right = left == [] if said else path.name in left
    assert is_right
    assert (names in said and "prefix their names" in said) if names else said == ""


def much_extra_state(path: Path) -> bool:
    model = nn.Sequential(*(Random(2, 2) for _ in range(12)))
    fully_shard(model)
    checkpoint.save(path, model, step=1)
    checkpoint.load(path, model)
    generator = torch.Generator().manual_seed(0)  # the first rank's state
    first = torch.randint(256, (1 << 20,), generator=generator, dtype=torch.uint8)
    return all(torch.equal(one.loaded, first) for one in model)


def test_much_extra_state_passes_through_the_store(pool: RankPool, tmp_path: Path) -> None:
    assert pool.run(2, much_extra_state, tmp_path / "new") == [True, True]
    (path,) = [one for one in tmp_path.iterdir() if one.is_dir()]
    assert (path / MANIFEST).stat().st_size < 20 << 20  # stored once, not once a rank


@on_ranks(2)
def test_a_conversion_has_each_group_once_if_extra_state_differs(tmp_path: Path) -> None:
    model = nn.Sequential(Random(2, 2))
    optimizer = torch.optim.SGD(fully_shard(model).parameters(), lr=0.1)
    checkpoint.save(tmp_path / "ours", model, optimizer, step=1)
    if dist.get_rank() == 0:
        checkpoint.convert(tmp_path / "ours", tmp_path / "theirs", to="torch")
        state = torch.load(tmp_path / "theirs", weights_only=False)
        assert len(state["optim"]["param_groups"]) == 1
    dist.barrier()


@on_ranks(2)
def test_equal_extra_with_keys_in_another_order_is_accepted(tmp_path: Path) -> None:
    extra = {"seed": 7, "epoch": 1} if dist.get_rank() else {"epoch": 1, "seed": 7}
    checkpoint.save(tmp_path / "new", fully_shard(nn.Linear(2, 2)), extra=extra, step=1)
    assert checkpoint.verify(tmp_path / "new").extra == extra


@on_ranks(2)
@pytest.mark.parametrize("face", ["rows", "originals", "flat"])
def test_frozen_parameters_are_left_out_if_asked(tmp_path: Path, face: str) -> None:
    def made(value: float) -> Any:
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        for param in model.parameters():
            nn.init.constant_(param, value)
        model[0].requires_grad_(False)
        if face == "rows":
            return fully_shard(model)
        model[0] = FullyShardedDataParallel(model[0], use_orig_params=face == "originals")
        return FullyShardedDataParallel(model, use_orig_params=face == "originals")

    saved, loaded = made(1.0), made(2.0)
    checkpoint.Checkpointer(tmp_path, frozen=False).save(saved, step=1)
    checkpoint.Checkpointer(tmp_path, frozen=False).load(loaded)
    found = checkpoint.full_state_dict(loaded, rank0_only=False)
    values = {name: value.unique().tolist() for name, value in found.items()}
    assert values == {name: [2.0 if name.startswith("0") else 1.0] for name in found}


def test_a_linked_checkpoint_is_loaded_and_stays(tmp_path: Path) -> None:
    """Checkpoints may be moved to another disk; retention does not remove them there."""
    checkpointer = checkpoint.Checkpointer(tmp_path / "run", keep=1)
    model = nn.Linear(2, 2)
    checkpointer.save(model, step=1)
    (tmp_path / "run" / "step-000001").rename(tmp_path / "moved")
    (tmp_path / "run" / "step-000001").symlink_to(tmp_path / "moved")
    info = checkpointer.load(model)
    assert info is not None and info.step == 1 and checkpointer.steps() == [1]
    checkpointer.save(model, step=2)
    assert checkpointer.steps() == [1, 2]
    checkpoint.verify(tmp_path / "moved")


@pytest.mark.parametrize("name", ["every", "keep", "copies"])
@pytest.mark.parametrize("value", [0, -1, True, 1.5])
def test_a_checkpointer_refuses_what_makes_no_sense(tmp_path: Path, name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{name}={value}.*: expected a positive int"):
        checkpoint.Checkpointer(tmp_path, **{name: value})


def pair(seed: int, *, is_tied: bool) -> Any:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Embedding(8, 8), nn.Linear(8, 8, bias=False))
    if is_tied:
        model[1].weight = model[0].weight
    return fully_shard(model)


@on_ranks(2)
def test_what_was_tied_is_loaded_into_every_parameter(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "tied", pair(1, is_tied=True), step=1)
    checkpoint.save(tmp_path / "not", pair(1, is_tied=False), step=1)
    tied = checkpoint.full_state_dict(pair(1, is_tied=True), rank0_only=False)
    model = pair(2, is_tied=False)
    checkpoint.load(tmp_path / "tied", model)
    found = checkpoint.full_state_dict(model, rank0_only=False)
    with pytest.raises(ConfigError, match=r"is tied to model/0\.weight here, not there"):
        checkpoint.load(tmp_path / "not", pair(2, is_tied=True))
    assert [torch.equal(found[name], tied[name]) for name in found] == [True, True]
