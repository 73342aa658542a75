"""Checkpoints in folders local to each machine, with copies on other machines.

Ranks that belong to different machines use different folders here.
"""

from __future__ import annotations

import logging
import os
import shutil
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fullshard import checkpoint
from fullshard.checkpoint import Checkpointer
from fullshard.checkpoint.format.manifest import MANIFEST
from fullshard.checkpoint.saving.saving import save_collected
from fullshard.checkpoint.stores import machines, peers
from fullshard.errors import CheckpointError, ConfigError
from tests.kit.checkpoint_files import built, everything, same, stepped
from tests.ranks.models import noise, refusal
from tests.ranks.pool import RankPool, on_ranks

NAME = "step-{:06d}"


def trained(way: str, steps: int) -> tuple[Any, torch.optim.Optimizer]:
    model, optimizer = built(way, 1)
    stepped(model, optimizer, steps)
    return model, optimizer


def files(root: Path, step: int) -> list[int]:
    """Return the ranks whose files a machine has."""
    found = (root / NAME.format(step)).glob("rank-*.safetensors")
    return sorted(int(one.stem.removeprefix("rank-")) for one in found)


def saves(
    way: str, roots: Sequence[Path], copies: int, steps: Sequence[int] = (2,), mode: str = "sync"
) -> list[list[int]]:
    """Train and save into ``roots``, one for each rank; return the files on this rank's machine.

    Rank 0 writes the full state to a file beside the first folder.
    """
    root = roots[dist.get_rank()]
    checkpointer = Checkpointer(root, copies=copies, keep=1, mode=mode)
    for step in steps:
        model, optimizer = trained(way, step)
        checkpointer.save(model, optimizer, {"step": step}, step=step)
        checkpointer.wait()
    whole = everything(model, optimizer)
    if dist.get_rank() == 0:
        torch.save(whole, roots[0].parent / "whole.pt")
    assert not list(root.glob(".unfinished*"))
    return [files(root, step) for step in steps]


def loads(way: str, roots: Sequence[Path], whole: Path, step: int) -> bool:
    """Load, on other machines or another number of ranks; compare with the saved state."""
    model, optimizer = built(way, 5)
    loaded = Checkpointer(roots[dist.get_rank()], copies=2).load(model, optimizer)
    assert loaded is not None
    assert (loaded.step, loaded.extra) == (step, {"step": step})
    return same(everything(model, optimizer), torch.load(whole))


def folders(root: Path, machine_of_ranks: str) -> list[Path]:
    return [root / f"machine-{one}" for one in machine_of_ranks]


PLACED = [
    ("001", 2, [[0, 1, 2], [0, 1, 2]]),
    ("0112", 2, [[0, 3], [0, 1, 2], [1, 2, 3]]),
    ("0123", 3, [[0, 2, 3], [0, 1, 3], [0, 1, 2], [1, 2, 3]]),
    ("0011", 9, [[0, 1, 2, 3], [0, 1, 2, 3]]),  # at most one copy on each machine
    ("00", 2, [[0, 1]]),
    ("01", 1, [[0], [1]]),
]


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize(("of_ranks", "copies", "expected"), PLACED)
def test_each_machine_has_its_files_and_those_of_the_ones_before(
    pool: RankPool, tmp_path: Path, of_ranks: str, copies: int, expected: list[list[int]], mode: str
) -> None:
    roots = folders(tmp_path, of_ranks)
    said = pool.run(len(of_ranks), saves, "ragged", roots, copies, (2,), mode)
    assert [one[0] for one in said] == [expected[int(machine)] for machine in of_ranks]


LOST = [
    ("0011", "1", "00"),  # a machine is lost
    ("0011", "0", "111"),  # the first machine is lost, and the other has more ranks
    ("0123", "2", "013"),
    ("0123", "02", "13"),  # two machines that are not neighbours are lost
    ("0011", "1", "0022"),  # another machine takes the place of a lost one
    ("012", "1", "210"),  # the machines change order, and one lost its memory
    ("01", "", "0"),  # only the rank of one machine is lost
]


@pytest.mark.parametrize("ways", ["rows ragged", "ragged flat", "hsdp rows", "one flat hsdp"])
@pytest.mark.parametrize(("before", "lost", "after"), LOST)
def test_what_is_left_is_enough(
    pool: RankPool, tmp_path: Path, before: str, lost: str, after: str, ways: str
) -> None:
    saved, loaded = ways.split() if ways.count(" ") == 1 else ("one flat", "hsdp")
    pool.run(len(before), saves, saved, folders(tmp_path, before), 2, (1, 2))
    for one in lost:
        shutil.rmtree(tmp_path / f"machine-{one}")
    whole = tmp_path / "whole.pt"
    assert all(pool.run(len(after), loads, loaded, folders(tmp_path, after), whole, 2))


def spoil(file: Path) -> None:
    """Change a byte of a file; its size stays."""
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def test_a_damaged_file_of_the_own_machine_is_read_from_another(
    pool: RankPool, tmp_path: Path
) -> None:
    roots = folders(tmp_path, "01")
    pool.run(2, saves, "rows", roots, 2)
    for machine, rank in enumerate((0, 1)):
        spoil(tmp_path / f"machine-{machine}" / NAME.format(2) / f"rank-{rank:05d}.safetensors")
    whole = tmp_path / "whole.pt"
    assert all(pool.run(2, loads, "ragged", roots, whole, 2))
    assert [files(root, 2) for root in roots] == [[1], [0]]
    assert all(pool.run(2, loads, "rows", roots, whole, 2))


def test_a_file_that_is_damaged_everywhere_is_not_removed(pool: RankPool, tmp_path: Path) -> None:
    roots = folders(tmp_path, "01")
    pool.run(2, saves, "rows", roots, 2)
    for root in roots:
        spoil(root / NAME.format(2) / "rank-00000.safetensors")
    (said,) = {*pool.run(2, finds_nothing, roots)}
    assert "rank-00000.safetensors" in said
    assert [files(root, 2) for root in roots] == [[0, 1], [0, 1]]


def finds_nothing(roots: Sequence[Path]) -> str:
    model, optimizer = built("rows", 5)
    before = everything(model, optimizer)
    with pytest.raises(CheckpointError) as caught:
        Checkpointer(roots[dist.get_rank()], copies=2).load(model, optimizer)
    assert same(everything(model, optimizer), before)
    return str(caught.value).partition(": ")[2]


def test_a_file_that_is_nowhere_is_named_on_all_ranks(pool: RankPool, tmp_path: Path) -> None:
    pool.run(4, saves, "rows", folders(tmp_path, "0123"), 2)
    for one in "12":  # neighbours: the files of rank 1 are on no other machine
        shutil.rmtree(tmp_path / f"machine-{one}")
    (said,) = {*pool.run(2, finds_nothing, folders(tmp_path, "03"))}
    assert "rank-00001.safetensors is on none of the remaining machines" in said


def test_an_older_one_is_taken_if_the_newest_is_not_complete(
    pool: RankPool, tmp_path: Path
) -> None:
    roots = folders(tmp_path, "0011")
    for step in (1, 2):
        pool.run(4, saves, "rows", roots, 2, (step,))
        if step == 1:
            shutil.copytree(tmp_path / "machine-0", tmp_path / "before")
            shutil.copy(tmp_path / "whole.pt", tmp_path / "whole-1.pt")
    for root in (tmp_path / "machine-0", tmp_path / "machine-1"):
        (root / NAME.format(2) / "rank-00003.safetensors").unlink()
    shutil.copytree(tmp_path / "before" / NAME.format(1), tmp_path / "machine-0" / NAME.format(1))
    assert all(pool.run(4, loads, "rows", roots, tmp_path / "whole-1.pt", 1))


def saves_again(roots: Sequence[Path], step: int) -> list[str]:
    """Save a step that some machines already have; return the names in the folder."""
    root = roots[dist.get_rank()]
    model, optimizer = trained("rows", step)
    Checkpointer(root, copies=2, keep=1).save(model, optimizer, {"step": step}, step=step)
    whole = everything(model, optimizer)
    if dist.get_rank() == 0:
        torch.save(whole, roots[0].parent / "whole.pt")
    return sorted(one.name for one in root.glob("*step*"))


def test_a_step_that_some_machines_had_is_saved_again_and_never_mixed(
    pool: RankPool, tmp_path: Path
) -> None:
    roots = folders(tmp_path, "0011")
    pool.run(4, saves, "ragged", roots, 1, (3,))
    shutil.rmtree(tmp_path / "machine-1")
    said = pool.run(4, saves_again, roots, 3)
    assert said == [[NAME.format(3)]] * 4
    assert files(tmp_path / "machine-0", 3) == [0, 1, 2, 3]
    # A checkpoint of another run under the same name is ignored.
    pool.run(3, saves, "rows", folders(tmp_path / "other", "000"), 2, (3,))
    foreign = tmp_path / "machine-2" / NAME.format(3)
    shutil.copytree(tmp_path / "other/machine-0" / NAME.format(3), foreign)
    (foreign / "rank-00001.safetensors").unlink()
    pair = folders(tmp_path, "12")
    assert all(pool.run(2, loads, "ragged", pair, tmp_path / "whole.pt", 3))


def fails(roots: Sequence[Path], where: str) -> str:
    root = roots[dist.get_rank()]
    model, optimizer = trained("rows", 1)
    checkpointer = Checkpointer(root, copies=2)
    checkpointer.save(model, optimizer, step=1)
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 3 and where == "copying":
            patch.setattr(machines, "copy", raises_full)
        if dist.get_rank() == 2 and where == "renaming":
            patch.setattr("fullshard.checkpoint.format.committing.publish", raises_full)
        if dist.get_rank() == 2 and where == "serving":
            patch.setattr(machines, "Server", raises_full)
        if dist.get_rank() == 2 and where == "sending":
            patch.setattr(socket.socket, "sendfile", raises_full)
        if dist.get_rank() == 3 and where == "writing":
            patch.setattr("fullshard.checkpoint.saving.write.Writing.run", raises_full)
        with pytest.raises(CheckpointError) as caught:
            checkpointer.save(model, optimizer, step=2)
    dist.barrier()  # the first rank of each machine removes unfinished files
    left = sorted(one.name for one in root.iterdir() if not one.name.startswith(".machine"))
    half = ["latest", NAME.format(1), NAME.format(2)] if where == "renaming" else []
    assert left in (["latest", NAME.format(1)], half), left
    model(noise(4, 192, seed=0)).sum().backward()  # training continues
    loaded = Checkpointer(root, copies=2).load(*built("rows", 3))
    assert loaded is not None
    checkpointer.save(model, optimizer, step=3)
    return str(caught.value).partition(": ")[2]  # without the path, which differs by machine


def raises_full(*_: object) -> None:
    raise OSError(28, "No space left on device")


FAILURES = {
    "writing": ("rank 3: ", "No space left"),
    "serving": ("rank 2: ", "No space left"),
    "copying": ("rank 3: ", "No space left"),
    "renaming": ("rank 2: ", "No space left"),
    "sending": ("rank-00002.safetensors of machine 1: the machine that has it does not send",),
}


@pytest.mark.parametrize("where", FAILURES)
def test_a_machine_that_cannot_write_or_send_fails_all_and_leaves_nothing(
    pool: RankPool, tmp_path: Path, where: str
) -> None:
    (said,) = {*pool.run(4, fails, folders(tmp_path, "0011"), where)}
    assert all(words in said for words in FAILURES[where]), said


def takes_the_newest(roots: Sequence[Path], disk: Path) -> list[int]:
    """Save to memory and to a disk in turns; return the loaded steps."""
    memory = Checkpointer(roots[dist.get_rank()], every=2, keep=1, copies=2)
    seldom = Checkpointer(disk, every=5)
    steps = []

    def load() -> None:
        loaded = checkpoint.load_newest([memory, seldom], *built("ragged", 5))
        steps.append(loaded.step if loaded else 0)

    load()
    model, optimizer = trained("rows", 1)
    for step in range(1, 7):
        for one in (seldom, memory):
            if one.is_due(step):
                one.save(model, optimizer, step=step)
                break
        load()
    if dist.get_rank() == 0:
        for one in roots[0].parent.glob("machine-*/step-*/rank-00000.safetensors"):
            one.unlink()
    dist.barrier()
    load()
    return steps


def test_the_newest_of_memory_and_disk_is_loaded(
    pool: RankPool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    roots = folders(tmp_path, "0011")
    expected = [0, 0, 2, 2, 4, 5, 6, 5]
    assert pool.run(4, takes_the_newest, roots, tmp_path / "disk") == [expected] * 4


def give_away(root: Path) -> None:
    """Make a folder that belongs to another user."""
    root.mkdir(mode=0o700)
    os.chown(root, 12345, -1)


FOREIGN: dict[str, Callable[[Path], object]] = {
    "another user's": give_away,
    "a link": lambda root: ((root.parent / "own").mkdir(), root.symlink_to("own")),
    "a dangling link": lambda root: root.symlink_to("nowhere"),
    "the group's": lambda root: (root.mkdir(), root.chmod(0o770)),
    "everybody's": lambda root: (root.mkdir(), root.chmod(0o1777)),
    "a file": lambda root: root.write_text(""),
}


@pytest.mark.parametrize("foreign", list(FOREIGN))
def test_a_folder_that_others_can_change_is_refused_each_time(tmp_path: Path, foreign: str) -> None:
    if foreign == "another user's" and os.geteuid() != 0:
        pytest.skip("only root can give a folder away")
    root = tmp_path / "memory"
    checkpointer = Checkpointer(root, copies=1)
    model = nn.Linear(2, 2)
    checkpointer.save(model, step=1)
    assert root.stat().st_mode & 0o777 == 0o700
    root.rename(tmp_path / "ours")
    FOREIGN[foreign](root)
    there = sorted(tmp_path.rglob("*"))
    for call in (
        lambda: checkpointer.save(model, step=2),
        lambda: checkpointer.load(model),
        checkpointer.steps,
        lambda: save_collected(root / "step-0", lambda: pytest.fail("it was asked"), None, step=1),
    ):
        with pytest.raises(ConfigError, match=rf"{root}.* chmod 700"):
            call()
    assert sorted(tmp_path.rglob("*")) == there


@on_ranks(2)
def test_a_folder_that_others_can_change_is_told_on_all_ranks(tmp_path: Path) -> None:
    """A folder that all users may change on one machine is reported on all ranks."""
    roots = folders(tmp_path, "01")
    root = roots[dist.get_rank()]
    if dist.get_rank() == 1:
        root.mkdir()
        root.chmod(0o777)
    said = refusal(ConfigError, lambda: Checkpointer(root, copies=2).save(nn.Linear(2, 2), step=1))
    assert "rank 1: " in said and "machine-1" in said


@pytest.fixture
def server(tmp_path: Path) -> Any:
    (tmp_path / "a").write_bytes(bytes(range(100)))
    (tmp_path / "secret").write_bytes(b"secret")
    with peers.Server(tmp_path, ["a"]) as one:
        yield one


def test_who_reads_a_file_may_pause(server: peers.Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection survives a pause of the reader, as ranks wait for each other between reads."""
    monkeypatch.setattr(peers, "stall_s", lambda: 0.2)
    file = peers.PeerFile(server.address, 0, "a", 100)
    into = bytearray(10)
    for offset in (0, 10):
        file.read(offset, memoryview(into))
        assert bytes(into) == bytes(range(offset, offset + 10))
        time.sleep(0.6)
    file.close()


def asked(server: peers.Server, key: str, *request: int) -> bytes:
    """Send a raw request with ``key``; return the answer."""
    host, port, _ = server.address.split()
    with socket.create_connection((host, int(port)), timeout=5) as connection:
        connection.sendall(peers._REQUEST.pack(bytes.fromhex(key), *request))
        found = b""
        while part := connection.recv(1000):
            found += part
        return found


def test_files_are_sent_to_who_shows_the_key_alone(server: peers.Server) -> None:
    *_, key = server.address.split()
    one = peers.PeerFile(server.address, 0, "a", 100)
    data = bytearray(10)
    one.read(20, memoryview(data))
    assert bytes(data) == bytes(range(20, 30))
    one.close()
    assert asked(server, "00" * 32, 0, 0, 10) == b""
    assert asked(server, key[:-2] + ("00" if key[-2:] != "00" else "11"), 0, 0, 10) == b""
    for number in (-1, 1, 1 << 40):  # only offered files are served
        assert asked(server, key, number, 0, 6) == b""
    for offset, nbytes in [(-1, 5), (0, -5), (0, 0)]:
        assert asked(server, key, 0, offset, nbytes) == b""
    assert asked(server, key, 0, 95, 10) == bytes(range(95, 100))  # and the connection is closed


def test_others_are_served_after_a_thread_that_could_not_start(
    server: peers.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(peers, "stall_s", lambda: 5.0)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", start)
        unserved = peers.PeerFile(server.address, 0, "a", 100)
        with pytest.raises(CheckpointError, match="does not send byte 0"):
            unserved.read(0, memoryview(bytearray(10)))
        unserved.close()
    served = peers.PeerFile(server.address, 0, "a", 100)
    served.read(0, memoryview(bytearray(10)))
    served.close()


def test_nobody_is_served_any_longer_when_the_block_ends(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(10))
    with peers.Server(tmp_path, ["a"]) as one:
        early = peers.PeerFile(one.address, 0, "a", 10)
        early.read(0, memoryview(bytearray(10)))
    for file in (early, peers.PeerFile(one.address, 0, "a", 10)):
        with pytest.raises(CheckpointError, match="does not send byte 0"):
            file.read(0, memoryview(bytearray(10)))
        file.close()


def test_a_folder_of_a_machine_that_is_damaged_says_so(tmp_path: Path) -> None:
    model, optimizer = built("plain", 1)
    Checkpointer(tmp_path, copies=1).save(model, optimizer, step=1)
    (tmp_path / NAME.format(1) / MANIFEST).write_text("{}")
    with pytest.raises(CheckpointError, match="its manifest is on no machine"):
        Checkpointer(tmp_path, copies=1).load(model, optimizer)
