"""``fullshard checkpoint``: look at checkpoints, check, compare and convert them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from fullshard.checkpoint import (
    CheckpointInfo,
    ObjectUrl,
    convert,
    differences,
    faults,
    inspect,
    list_checkpoints,
)
from fullshard.cli.printing import AsJson, print_json, print_table
from fullshard.errors import CheckpointError, ConfigError, StorageError
from fullshard.plan import in_bytes
from fullshard.train.job import GroupedCommand, GroupedCommands
from fullshard.train.run import RunDir, read_best
from fullshard.train.showing import showing_progress

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    cls=GroupedCommands,
    help="Look at checkpoints, check, compare and convert them.",
)

Folder = Annotated[str, typer.Argument(metavar="PATH", help="Folder or URL of a checkpoint.")]
Root = Annotated[
    str, typer.Argument(metavar="PATH", help="A checkpoint, or a folder of checkpoints; or a URL.")
]


@app.command("list", cls=GroupedCommand)
def list_command(path: Root, *, as_json: AsJson = False) -> None:
    """List the complete checkpoints in a folder, the newest last, and all other folders in it."""
    place = _place(path)
    best = read_best(RunDir(place)) if isinstance(place, Path) else None
    place = _of_run(place)
    folders = _folders(place)
    if folders == [place]:
        try:
            complete = [inspect(place)]
        except StorageError:
            raise
        except CheckpointError:
            complete = []
    else:
        complete = list_checkpoints(place)
    others = [one.name for one in folders if one not in {info.path for info in complete}]
    if as_json:
        found: dict[str, Any] = {"checkpoints": [_as_dict(info) for info in complete]}
        if best is not None:
            found["best"] = {**asdict(best), "path": str(best.path)}
        print_json({**found, "others": others})
        return
    rows = [
        (info.path.name, str(info.step), str(info.world), in_bytes(info.nbytes), _moment(info.time))
        for info in complete
    ]
    print_table(("folder", "step", "ranks", "size", "written"), rows)
    for name in others:
        print(f"{name}: {_why_not_listed(name)}")
    if best is not None:
        print(f"best: {best.path} ({best.bits_per_byte:.4f} held-out bits per byte)")


@app.command("inspect", cls=GroupedCommand)
def inspect_command(path: Folder, *, as_json: AsJson = False) -> None:
    """Show what a checkpoint holds; reads no tensors."""
    info = inspect(path)
    if as_json:
        tensors = {name: one._asdict() for name, one in info.tensors.items()}
        print_json({**_as_dict(info), "tensors": tensors})
        return
    versions = ", ".join(f"{name} {version}" for name, version in info.versions.items())
    print(
        f"step {info.step}, {in_bytes(info.nbytes)} by {info.world} rank(s), {_moment(info.time)}"
    )
    print(f"written with {versions}")
    print(f"extra: {info.extra!r}")
    rows = [
        (name, one.dtype, "x".join(map(str, one.shape)) or "scalar", _placed(one.placements))
        for name, one in info.tensors.items()
    ]
    print_table(("tensor", "dtype", "shape", "placements"), rows)


@app.command("verify", cls=GroupedCommand)
def verify_command(path: Root, *, as_json: AsJson = False) -> None:
    """Read everything and compare it with its digests; exit code 1 if there is any fault.

    Of a folder of checkpoints all that are in it are read.
    """
    found: dict[str, list[str]] = {}
    with showing_progress():
        for folder in _folders(_of_run(_place(path))):
            found[str(folder)] = list(faults(folder))
    if as_json:
        print_json(found)
    for name, problems in () if as_json else found.items():
        print(f"{name}: {'intact' if not problems else f'{len(problems)} fault(s)'}")
        for problem in problems:
            print(f"  {problem}")
    if any(found.values()):
        raise typer.Exit(1)


@app.command("diff", cls=GroupedCommand)
def diff_command(
    path: Folder,
    other: Annotated[
        str, typer.Argument(metavar="OTHER", help="Folder or URL of the other checkpoint.")
    ],
    *,
    as_json: AsJson = False,
) -> None:
    """Compare two checkpoints, however their tensors are cut; exit code 1 if they differ."""
    with showing_progress():
        found = dict(differences(path, other))
    if as_json:
        print_json(found)
    for name, what in () if as_json else found.items():
        print(f"{name}: {what}")
    if found:
        raise typer.Exit(1)
    if not as_json:
        print("all tensors are equal")


@app.command("convert", cls=GroupedCommand)
def convert_command(
    source: Annotated[Path, typer.Argument(metavar="SOURCE", help="Checkpoint, or PyTorch's.")],
    target: Annotated[Path, typer.Argument(metavar="TARGET", help="A path where nothing is.")],
    *,
    to: Annotated[
        str, typer.Option(help="fullshard, dcp (torch.distributed.checkpoint) or torch (a file).")
    ] = "fullshard",
    step: Annotated[int | None, typer.Option(help="Step of the training.")] = None,
    leave_out: Annotated[
        list[str] | None, typer.Option(help="A key of PyTorch's dictionary; may be repeated.")
    ] = None,
) -> None:
    """Write a checkpoint in another format; nothing that is read can run code."""
    with showing_progress():
        convert(source, target, to=to, step=step, leave_out=leave_out or ())
    print(f"{target} is written")


def _place(path: str) -> Path | ObjectUrl:
    return ObjectUrl.of(path) if "://" in path else Path(path)


def _of_run(path: Path | ObjectUrl) -> Path | ObjectUrl:
    """Return the checkpoints of a run of the trainer if ``path`` is its folder, else ``path``."""
    is_run = isinstance(path, Path) and (path / "checkpoints").is_dir()
    return path / "checkpoints" if is_run else path


def _folders(path: Path | ObjectUrl) -> Sequence[Path | ObjectUrl]:
    """Return ``path`` if it is a checkpoint, else the folders in it."""
    if isinstance(path, ObjectUrl):
        there = path.below()
        prefixes = [path / name for name, size in sorted(there.items()) if size is None]
        if "manifest.json" not in there and not prefixes:
            raise CheckpointError(f"{path}: no checkpoint at this URL")
        return [path] if "manifest.json" in there else prefixes
    if not path.is_dir():
        raise ConfigError(f"{path}: there is no such folder")
    if (path / "manifest.json").exists():
        return [path]
    found = sorted(one for one in path.iterdir() if one.is_dir())
    if not found:
        raise CheckpointError(f"{path}: no checkpoint in this folder")
    return found


def _why_not_listed(name: str) -> str:
    if name.startswith("."):
        return "left by a job that was stopped"
    return "put aside, as the training went back" if ".replaced-" in name else "not complete"


def _as_dict(info: CheckpointInfo) -> dict[str, Any]:
    shown = {key: value for key, value in info._asdict().items() if key != "tensors"}
    return {**shown, "path": str(info.path)}


def _placed(placements: Any) -> str:
    return "on every rank" if placements is None else ", ".join(map(str, placements))


def _moment(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
