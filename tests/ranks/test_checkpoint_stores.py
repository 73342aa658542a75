"""Checkpoints in object stores: complete or absent, verified, never mixed."""

from __future__ import annotations

import errno
import gc
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fullshard import checkpoint
from fullshard.checkpoint.format.manifest import MANIFEST, digest_of
from fullshard.checkpoint.weights import save
from fullshard.cli import main
from fullshard.errors import (
    CheckpointError,
    ConfigError,
    FullshardError,
    LostRankError,
    StorageError,
)
from tests.kit.checkpoint_files import alone, built, everything, same
from tests.ranks import object_kills
from tests.ranks.models import noise
from tests.ranks.object_store import objects, trouble
from tests.ranks.pool import RankPool, on_ranks


def url_of(folder: Path) -> str:
    return f"emulated://{folder}"


def saves(way: str, folder: Path, mode: str) -> None:
    """Train and save; on rank 0, also save the full state."""
    model, optimizer = built(way, 1)
    model(noise(4, 192, seed=1)).square().mean().backward()
    optimizer.step()
    pending = checkpoint.save(
        url_of(folder), model, optimizer, {"a": (1, 0.5)}, step=2, mode=mode, **budget(mode)
    )
    whole = everything(model, optimizer)
    if dist.get_rank() == 0:
        torch.save(whole, folder.with_suffix(".pt"))
    optimizer.step()  # waits for the copies only
    pending.wait()
    assert str(pending.path) == url_of(folder)


def budget(mode: str) -> dict[str, int]:
    return {"budget_nbytes": 1 << 20} if mode == "async" else {}


def loads(way: str, folder: Path) -> bool:
    model, optimizer = built(way, 3)
    assert checkpoint.load(url_of(folder), model, optimizer) == {"a": (1, 0.5)}
    return same(everything(model, optimizer), torch.load(folder.with_suffix(".pt")))


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("ways", ["rows ragged", "ragged rows", "hsdp flat", "tp one", "flat hsdp"])
def test_a_store_keeps_every_layout_bit_for_bit(
    pool: RankPool, tmp_path: Path, ways: str, mode: str
) -> None:
    saved, loaded = ways.replace("one", "one_flat").split()
    folder = tmp_path / "step-1"
    pool.run(2, saves, saved, folder, mode)
    names = {name.partition("-")[0] for name in objects(folder)}
    assert names == {"manifest.json", "rank"} and len(objects(folder)) == 3
    info = checkpoint.verify(url_of(folder))
    assert (info.step, info.world, str(info.path)) == (2, 2, url_of(folder))
    assert all(pool.run(3, loads, loaded.replace("_", " "), folder))


def to_version_1(path: Path) -> None:
    """Rewrite a checkpoint in version 1 of the format, with digests in the headers of files."""
    manifest = json.loads((path / MANIFEST).read_text())
    del manifest["digest"]
    for file in manifest["files"]:
        data = (path / file["name"]).read_bytes()
        end = 8 + int.from_bytes(data[:8], "little")
        tensors = json.loads(data[8:end])
        start, stop = tensors.pop("digests")["data_offsets"]
        assert not any(name.startswith("padding-") for name in tensors)
        tensors["__metadata__"]["digests"] = data[end + start : end + stop].hex()
        header = json.dumps(tensors).encode()
        header = len(header).to_bytes(8, "little") + header
        (path / file["name"]).write_bytes(header + data[end : end + start])
        file["digest"], file["nbytes"] = digest_of(header), len(header) + start
    body = json.dumps({**manifest, "version": 1}, separators=(",", ":"))
    (path / MANIFEST).write_text(f'{body[:-1]},"digest":"{digest_of(body.encode())}"}}\n')


def test_a_folder_and_its_copy_in_a_store_are_one_checkpoint(tmp_path: Path) -> None:
    model, optimizer = alone(1)
    disk = checkpoint.Checkpointer(tmp_path / "disk")
    disk.save(model, optimizer, step=1)
    shutil.copytree(tmp_path / "disk", tmp_path / "store")
    both = [disk, checkpoint.Checkpointer(url_of(tmp_path / "store"))]
    for order in (both, both[::-1]):
        loaded = checkpoint.load_newest(order, model, optimizer)
        assert loaded is not None and loaded.step == 1


def test_files_of_a_folder_load_from_a_store_and_the_other_way_round(tmp_path: Path) -> None:
    model, optimizer = alone(1)
    for name in ("folder", "old"):
        checkpoint.save(tmp_path / name, model, optimizer, step=1)
    to_version_1(tmp_path / "old")
    checkpoint.save(url_of(tmp_path / "store"), model, optimizer, step=1)
    for name in ("folder", "old", "store"):
        uploads = shutil.ignore_patterns(".uploads")
        shutil.copytree(tmp_path / name, tmp_path / "copy", ignore=uploads)
        for place in (tmp_path / "copy", url_of(tmp_path / "copy")):
            checkpoint.verify(place)
            other, its = alone(2)
            checkpoint.load(place, other, its)
            assert same(everything(other, its), everything(model, optimizer))
            assert list(checkpoint.differences(place, tmp_path / "folder")) == []
        shutil.rmtree(tmp_path / "copy")
    (data,) = (tmp_path / "old").glob("rank*")
    flips(data, -1)
    with pytest.raises(CheckpointError, match="are not what was written"):
        checkpoint.verify(tmp_path / "old")


def test_data_of_all_alignments_are_read_by_safetensors(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    model = nn.Linear(3, 3, dtype=torch.bfloat16)
    kinds = [torch.uint8, torch.float64, torch.bool, torch.complex128, torch.float16, torch.int8]
    for number, kind in enumerate(kinds):
        model.register_buffer(f"buffer{number}", torch.ones(5, dtype=kind))
    optimizer = torch.optim.AdamW(model.parameters())
    checkpoint.save(url_of(tmp_path / "one"), model, optimizer, step=1, mode="async").wait()
    checkpoint.verify(url_of(tmp_path / "one"))
    (data,) = (tmp_path / "one").glob("rank*")
    for name, value in load_file(data).items():
        own = model.state_dict().get(name.removeprefix("model/"))
        if own is not None and not own.is_complex():
            assert torch.equal(value, own)


def test_memory_of_fsspec_is_a_store() -> None:
    root = "memory://tests/run"
    checkpointer = checkpoint.Checkpointer(root, keep=2)
    for step in (1, 2, 3):
        checkpointer.save(*alone(step), step=step)
    assert checkpointer.steps() == [2, 3]
    assert [one.step for one in checkpoint.list_checkpoints(root)] == [2, 3]
    model, optimizer = alone()
    loaded = checkpoint.Checkpointer(root).load(model, optimizer)
    assert loaded is not None and loaded.step == 3
    assert str(checkpoint.latest(root)) == f"{root}/step-000003"
    assert same(everything(model, optimizer), everything(*alone(3)))


def flips(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 4
    file.write_bytes(data)


def test_every_byte_counts(tmp_path: Path) -> None:
    model, optimizer = alone(1)
    checkpoint.save(url_of(tmp_path / "one"), model, optimizer, step=1)
    (data,) = (tmp_path / "one").glob("rank*")
    intact, size = data.read_bytes(), data.stat().st_size
    header = 8 + int.from_bytes(intact[:8], "little")
    for at in (0, 9, header - 1, header, size // 2, size - 1, *range(header + 7, size, 4999)):
        flips(data, at)
        with pytest.raises(CheckpointError, match=data.name):
            checkpoint.verify(url_of(tmp_path / "one"))
        data.write_bytes(intact)
    before = everything(model, optimizer)
    for damage in (intact[:-1], intact + b"x", b""):
        data.write_bytes(damage)
        with pytest.raises(CheckpointError, match="bytes"):
            checkpoint.inspect(url_of(tmp_path / "one"))
        with pytest.raises(CheckpointError, match=r"emulated://.*rank-00000"):
            checkpoint.load(url_of(tmp_path / "one"), model, optimizer)
    assert same(everything(model, optimizer), before)


def saves_with_trouble(folder: Path, rank: int, kind: str, number: int) -> list[str]:
    """Save while request ``number`` of a ``kind`` fails on a rank, then save again."""
    url = url_of(folder)
    model, optimizer = built("rows", 1)
    checkpoint.save(f"{url}/step-1", model, optimizer, step=1)
    before = objects(folder)
    dist.barrier()
    count = 0

    def fails(its: str, path: str) -> None:
        nonlocal count
        if its == kind and rank == dist.get_rank():
            count += 1
            if count == number:
                raise ConnectionResetError(errno.ECONNRESET, "the wire was cut")

    said = ""
    with trouble(fails):
        try:
            checkpoint.save(f"{url}/step-2", model, optimizer, step=2)
        except FullshardError as error:
            said = f"{type(error).__name__}: {error}"
    dist.barrier()
    now = objects(folder)
    assert {name: now[name] for name in before} == before
    found = [one.step for one in checkpoint.list_checkpoints(url)]
    assert found == ([1] if said else [1, 2])
    latest = checkpoint.latest(url)
    assert latest is not None
    checkpoint.verify(latest)
    left = sorted(now.keys() - before.keys()) if said else []
    dist.barrier()
    checkpointer = checkpoint.Checkpointer(url)
    checkpointer.save(model, optimizer, step=3)
    if said:
        checkpoint.save(f"{url}/step-2", model, optimizer, step=2)
        checkpoint.verify(f"{url}/step-2")
        assert len(objects(folder / "step-2")) == 3
    return [said, *left]


TROUBLES = [
    *((kind, 1, rank) for kind in ("put", "part", "put answered") for rank in (0, 1)),
    *(("put", 2, 0), ("list", 1, 0), ("list", 2, 0), ("list", 3, 0), ("get", 1, 1)),
]


@pytest.mark.parametrize(("kind", "number", "rank"), TROUBLES)
def test_a_request_that_fails_fails_the_save_on_all_ranks(
    pool: RankPool, tmp_path: Path, kind: str, number: int, rank: int
) -> None:
    said = pool.run(2, saves_with_trouble, tmp_path / "run", rank, kind, number)
    assert said[0] == said[1]
    text, *left = said[0]
    assert text.startswith(f"StorageError: save to {url_of(tmp_path / 'run')}/step-2: rank")
    assert f"emulated://{tmp_path}" in text and "the wire was cut" in text
    assert "check the network" in text
    is_unknown = (kind, number) == ("put", 2)  # the store may still complete the manifest's upload
    assert bool(left) == is_unknown and ("left in the store" in text) == is_unknown


def test_a_manifest_whose_answer_is_lost_is_a_checkpoint(tmp_path: Path) -> None:
    url = url_of(tmp_path / "one")

    def loses_the_answer(kind: str, path: str) -> None:
        if kind == "put answered" and path.endswith(MANIFEST):
            raise TimeoutError("no answer")

    with trouble(loses_the_answer):
        checkpoint.save(url, *alone(1), step=1)
    checkpoint.verify(url)


def test_an_interrupt_after_the_manifest_leaves_the_checkpoint_whole(tmp_path: Path) -> None:
    url = url_of(tmp_path / "one")

    def is_interrupted(kind: str, path: str) -> None:
        if kind == "put answered" and path.endswith(MANIFEST):
            raise KeyboardInterrupt

    with trouble(is_interrupted), pytest.raises(KeyboardInterrupt):
        checkpoint.save(url, *alone(1), step=1)
    checkpoint.verify(url)


def test_an_intact_checkpoint_is_not_passed_over(tmp_path: Path) -> None:
    """If the store fails, no older checkpoint is loaded. If an object is missing, one is."""
    root = url_of(tmp_path / "run")
    checkpointer = checkpoint.Checkpointer(root)
    for step in (1, 2):
        checkpointer.save(*alone(step), step=step)

    def cuts(kind: str, path: str) -> None:
        if kind == "get" and "/rank-" in path:
            raise ConnectionError("the wire was cut")

    with trouble(cuts), pytest.raises(StorageError, match="the wire was cut"):
        checkpointer.load(*alone())
    found = checkpointer.load(*alone())
    assert found is not None and found.step == 2
    newest = max(path.parent for path in (tmp_path / "run").rglob("rank-*"))
    (file,) = newest.glob("rank-*")
    file.unlink()
    found = checkpointer.load(*alone())
    assert found is not None and found.step == 1


def test_what_keeps_ranks_from_the_store_is_explained(tmp_path: Path) -> None:
    def denied(*_: str) -> None:
        raise PermissionError("Access Denied")

    url = url_of(tmp_path / "run" / "step-1")
    checkpoint.save(url, *alone(), step=1)
    for call in (
        lambda: checkpoint.save(f"{url}0", *alone(), step=1),
        lambda: checkpoint.load(url, *alone()),
        lambda: checkpoint.latest(url_of(tmp_path / "run")),
        lambda: checkpoint.list_checkpoints(url_of(tmp_path / "run")),
        lambda: checkpoint.Checkpointer(url_of(tmp_path / "run")).load(*alone()),
        lambda: checkpoint.Checkpointer(url_of(tmp_path / "run")).steps(),
    ):
        with trouble(denied), pytest.raises(CheckpointError, match=r"emulated://.*credentials"):
            call()
    with mock.patch.dict(sys.modules, {"fsspec": None, "fsspec.core": None}):
        for act in (checkpoint.load, lambda path, *rest: checkpoint.save(path, *rest, step=1)):
            with pytest.raises(ConfigError, match=r"rank 0: .*pip install -e '.\[object-stores\]'"):
                act(url, *alone())
    with pytest.raises(ConfigError, match="s3fs"):
        checkpoint.load("s3://bucket/run", *alone())


def test_a_store_that_fails_is_not_an_empty_one(tmp_path: Path) -> None:
    """A failing request raises, so that no job takes the store for empty and starts anew."""
    root = url_of(tmp_path / "run")
    checkpoint.Checkpointer(root).save(*alone(), step=1)
    requests: list[str] = []
    with trouble(lambda kind, path: requests.append(kind)):
        checkpoint.latest(root)
    for number in range(len(requests)):
        left = iter(range(number))

        def cuts(kind: str, path: str, left: Any = left) -> None:
            if next(left, None) is None:
                raise ConnectionError("the wire was cut")

        with trouble(cuts), pytest.raises(CheckpointError, match="the wire was cut"):
            checkpoint.latest(root)


def test_the_command_takes_urls(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = url_of(tmp_path)
    for step in (1, 2, 3):
        checkpoint.save(f"{root}/step-{step}", *alone(step), step=step)
    (tmp_path / "step-3" / MANIFEST).unlink()
    assert main(["checkpoint", "list", root]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[1:3]] == [["step-1", "1"], ["step-2", "2"]]
    assert lines[3] == "step-3: not complete"
    assert main(["checkpoint", "inspect", f"{root}/step-2"]) == 0
    assert "step 2" in capsys.readouterr().out
    assert main(["checkpoint", "verify", f"{root}/step-2"]) == 0
    assert main(["checkpoint", "verify", root]) == 1
    assert "its save did not finish" in capsys.readouterr().out
    assert main(["checkpoint", "diff", f"{root}/step-1", f"{root}/step-1"]) == 0
    assert main(["checkpoint", "diff", f"{root}/step-1", f"{root}/step-2"]) == 1
    assert main(["checkpoint", "list", f"{root}/nowhere"]) != 0
    assert "no checkpoint at this URL" in capsys.readouterr().err


REFUSED: list[tuple[Callable[[], object], str]] = [
    (lambda: checkpoint.save("s3://", *alone(), step=1), "names no bucket"),
    (lambda: checkpoint.save("file:///tmp/x", *alone(), step=1), "without file://"),
    (lambda: checkpoint.load("simplecache::s3://b/x", *alone()), "expected a folder, or a URL"),
    (lambda: checkpoint.load(Path("s3://b/x"), *alone()), "give it as a str"),
    (lambda: checkpoint.save("none-such://b/x", *alone(), step=1), "does not know this URL"),
    (lambda: checkpoint.Checkpointer("memory://b/x", copies=2), "copies are for folders"),
    (lambda: checkpoint.convert("memory://b/x", "x"), "convert reads and writes folders"),
    (lambda: checkpoint.save("memory://b/latest", *alone(), step=1), "a meaning of its own"),
]


@pytest.mark.parametrize(("call", "why"), REFUSED, ids=[why for _, why in REFUSED])
def test_what_is_no_place_in_a_store_is_refused(call: Callable[[], object], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        call()


def test_a_save_needs_a_url_without_a_checkpoint(tmp_path: Path) -> None:
    url = url_of(tmp_path / "one")
    checkpoint.save(url, *alone(1), step=1)
    before = objects(tmp_path)
    with pytest.raises(ConfigError, match="there is a checkpoint at this URL"):
        checkpoint.save(url, *alone(2), step=1)
    assert objects(tmp_path) == before


def test_files_of_a_killed_save_are_no_checkpoint_and_the_next_save_removes_them(
    tmp_path: Path,
) -> None:
    root = url_of(tmp_path)
    checkpointer = checkpoint.Checkpointer(root)
    for step in (1, 2, 3):
        checkpointer.save(*alone(step), step=step)
    (tmp_path / "step-000003" / MANIFEST).unlink()
    foreign = tmp_path / "step-000003" / "notes.txt"
    foreign.write_text("mine")
    assert str(checkpoint.latest(root)) == f"{root}/step-000002"
    assert [one.step for one in checkpoint.list_checkpoints(root)] == [1, 2]
    for call in (checkpoint.inspect, checkpoint.verify, lambda url: checkpoint.load(url, *alone())):
        with pytest.raises(CheckpointError, match="its save did not finish"):
            call(f"{root}/step-000003")
    resumed = checkpoint.Checkpointer(root)
    loaded = resumed.load(*alone())
    assert loaded is not None and loaded.step == 2
    resumed.save(*alone(4), step=4)
    assert [*objects(tmp_path / "step-000003")] == ["notes.txt"]
    assert resumed.steps() == [1, 2, 4]


def test_a_branch_that_was_left_is_put_aside_and_can_be_brought_back(tmp_path: Path) -> None:
    root = url_of(tmp_path)
    left = checkpoint.Checkpointer(root)
    for step in (1, 2, 3):
        left.save(*alone(step), step=step)
    branch = checkpoint.Checkpointer(root)
    branch.save(*alone(22), step=2)
    assert branch.steps() == [1, 2]
    checkpoint.verify(f"{root}/step-000002")
    model, optimizer = alone()
    assert checkpoint.Checkpointer(root).load(model, optimizer) is not None
    assert same(everything(model, optimizer), everything(*alone(22)))
    checkpoint.Checkpointer(root).save(*alone(5), step=5)  # deletes no object that a manifest lists
    for step in (2, 3):
        (aside,) = (tmp_path / f"step-{step:06d}").glob("replaced-*.json")
        aside.replace(aside.with_name(MANIFEST))
        checkpoint.verify(f"{root}/step-{step:06d}")
        checkpoint.load(f"{root}/step-{step:06d}", model, optimizer)
        assert same(everything(model, optimizer), everything(*alone(step)))


def keeps(folder: Path, mode: str) -> list[int]:
    checkpointer = checkpoint.Checkpointer(url_of(folder), keep=2, mode=mode)
    for step in range(1, 6):
        model, optimizer = built("rows", step)
        checkpointer.save(model, optimizer, step=step)
        checkpointer.wait()
        dist.barrier()
        if step == 4 and dist.get_rank() == 0:
            for file in (folder / "step-000004").glob("rank-00001*"):
                flips(file, 9999)
        dist.barrier()
    return checkpointer.steps()


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_only_intact_checkpoints_count_for_keep(pool: RankPool, tmp_path: Path, mode: str) -> None:
    said = pool.run(2, keeps, tmp_path / "run", mode)
    assert said[0] == said[1] and 5 in said[0] and len(said[0]) >= 2
    prefixes = {name.partition("/")[0] for name in objects(tmp_path / "run")}
    assert prefixes == {f"step-{step:06d}" for step in said[0]}  # nothing else remains


def loads_what_vanishes(folder: Path) -> list[str]:
    """Load while an object that is being read disappears; return the errors."""
    url = url_of(folder)
    model, optimizer = built("rows", 1)
    checkpoint.save(url, model, optimizer, step=1)
    other, its = built("ragged", 2)
    before = everything(other, its)
    said = []
    for number in (1, 2):
        count = 0

        def vanishes(kind: str, path: str, number: int = number) -> None:
            nonlocal count
            count += kind == "get" and "rank-00001" in path
            if count == number and dist.get_rank() == 1:
                shutil.move(path, f"{path}.away")
                count += 1

        with trouble(vanishes):
            try:
                checkpoint.load(url, other, its)
            except CheckpointError as error:
                said.append(str(error))
        dist.barrier()
        if dist.get_rank() == 0:
            for one in folder.glob("*.away"):
                one.rename(one.with_suffix(""))
        dist.barrier()
        assert same(everything(other, its), before)
    return said


def test_an_object_that_vanishes_is_named_on_all_ranks(pool: RankPool, tmp_path: Path) -> None:
    said = pool.run(2, loads_what_vanishes, tmp_path / "one")
    assert said[0] == said[1] and len(said[0]) == 2
    for text in said[0]:
        assert "rank" in text and "rank-00001" in text and "removes objects" in text


@on_ranks(2)
@pytest.mark.parametrize("max_file_nbytes", [1 << 30, 600_000])
@pytest.mark.parametrize("way", ["rows", "tp"])
def test_weights_are_the_same_in_a_store_and_a_folder(
    tmp_path: Path, way: str, max_file_nbytes: int
) -> None:
    folder = tmp_path / "weights"
    model, _ = built(way, 1)
    checkpoint.save_weights(model, url_of(folder), max_file_nbytes=max_file_nbytes)
    checkpoint.save_weights(model, folder.with_name("local"), max_file_nbytes=max_file_nbytes)
    dist.barrier()
    assert objects(folder) == objects(folder.with_name("local"))
    for other in ("rows", "tp", "ragged"):
        loaded, _ = built(other, 2)
        checkpoint.load_weights(loaded, url_of(folder))
        one, two = (checkpoint.full_state_dict(m, rank0_only=False) for m in (model, loaded))
        same(one, two)
    with pytest.raises(ConfigError, match="there are objects at this URL"):
        checkpoint.save_weights(model, url_of(folder))


def weights_with_trouble(folder: Path, kind: str, rank: int) -> str:
    model, _ = built("rows", 1)

    def fails(its: str, path: str) -> None:
        if its == kind and rank == dist.get_rank():
            raise ConnectionError("the wire was cut")

    with trouble(fails), pytest.raises(CheckpointError) as caught:
        checkpoint.save_weights(model, url_of(folder), max_file_nbytes=600_000)
    dist.barrier()
    assert objects(folder) == {}
    dist.barrier()
    checkpoint.save_weights(model, url_of(folder), max_file_nbytes=600_000)
    other, _ = built("ragged", 2)
    checkpoint.load_weights(other, url_of(folder))
    return str(caught.value)


def test_weights_given_up_between_two_parts_leave_nothing(tmp_path: Path) -> None:
    """The store's library would finish the upload of a file that is dropped."""
    model, _ = alone(1)
    sent = []

    def lost(*args: Any) -> Any:
        sent.append(1)
        if len(sent) == 2:
            raise LostRankError("rank 1 ended")
        return exchange(*args)

    exchange = save.all_to_all_bytes
    with (
        mock.patch.object(save, "all_to_all_bytes", lost),
        mock.patch.object(save, "_BUFFER_NBYTES", 1 << 15),
        pytest.raises(LostRankError),
    ):
        checkpoint.save_weights(model, url_of(tmp_path / "weights"))
    gc.collect()
    assert len(sent) == 2 and objects(tmp_path / "weights") == {}


@pytest.mark.parametrize(("kind", "rank"), [("put", 0), ("part", 1), ("put answered", 1)])
def test_weights_that_cannot_be_written_leave_nothing(
    pool: RankPool, tmp_path: Path, kind: str, rank: int
) -> None:
    said = pool.run(2, weights_with_trouble, tmp_path / "weights", kind, rank)
    assert said[0] == said[1] and f"rank {rank}: emulated://" in said[0]


def test_weights_that_are_damaged_or_missing_are_named(tmp_path: Path) -> None:
    url, model = url_of(tmp_path / "one"), alone(1)[0]
    with pytest.raises(CheckpointError, match=r"emulated://.*model.safetensors"):
        checkpoint.load_weights(model, url)
    checkpoint.save_weights(model, url)
    file = tmp_path / "one" / "model.safetensors"
    checkpoint.load_weights(model, f"{url}/model.safetensors")
    data = file.read_bytes()
    for wrong in (data[:-1], data[:100], b"", b"x" * 200):
        file.write_bytes(wrong)
        with pytest.raises(CheckpointError, match=r"emulated://.*model.safetensors"):
            checkpoint.load_weights(model, url)


def test_nothing_is_lost_or_half_read_when_ranks_are_killed(tmp_path: Path) -> None:
    assert object_kills.run(tmp_path, kills=4, seed=1).kills == 4
