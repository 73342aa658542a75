"""Build wheel and sdist, check them, and use the wheel outside of the clone: ``make dist``.

Both are built twice and must be equal byte for byte. The wheel is installed into a clean
environment with only the packages that it requires. There ``fullshard`` prints its version, trains,
and runs a user's program, which mypy and pyright check in their strictest modes.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

import fullshard

ROOT = Path(__file__).parents[2]
PINS = ROOT / "constraints.txt"
PROGRAM = Path(__file__).with_name("program.py")


def run(*command: str | Path, cwd: Path = ROOT, **variables: str) -> str:
    """Return the output of a command; exit with its complete output if it fails."""
    hidden = ("PYTHONPATH", "MYPYPATH", "VIRTUAL_ENV")
    env = {name: value for name, value in os.environ.items() if name not in hidden}
    done = subprocess.run(
        [*map(str, command)], cwd=cwd, env=env | variables, capture_output=True, text=True
    )
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return done.stdout


def environment(folder: Path, *packages: str | Path) -> Path:
    """Create an environment with ``packages``, pinned; return its folder of programs."""
    venv.create(folder, with_pip=True)
    for one in packages:
        run(folder / "bin/python", "-m", "pip", "install", "-q", "--constraint", PINS, one)
    return folder / "bin"


def digests(folder: Path) -> dict[str, str]:
    return {one.name: hashlib.sha256(one.read_bytes()).hexdigest() for one in folder.iterdir()}


def build(tools: Path, into: Path) -> dict[str, str]:
    """Build both from the working tree, dated as the last commit; return their digests."""
    date = run("git", "log", "-1", "--format=%ct").strip()
    command = (tools / "python", "-m", "build", "--no-isolation", "--outdir", into)
    run(*command, SOURCE_DATE_EPOCH=date)
    return digests(into)


def check_contents(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as file:
        names = file.namelist()
    wanted = {"fullshard/py.typed", "fullshard/trace/report.html", "fullshard/__init__.py"}
    missing = wanted.difference(names)
    foreign = {
        one
        for one in names
        if not one.startswith(("fullshard/", "fullshard-", "fullshard_command.py"))
    }
    if missing or foreign:
        sys.exit(f"{wheel.name} lacks {missing or 'nothing'}, and has {foreign or 'no more'}")
    print(f"{wheel.name}: {len(names)} files, {wheel.stat().st_size / 1e3:,.0f} kB")


def use(wheel: Path, tools: Path, folder: Path) -> None:
    """Install the wheel alone, and run it as a user does."""
    pinned = next(one for one in PINS.read_text().split() if one.startswith("torch=="))
    clean = environment(folder / "clean", pinned, wheel)
    told = run(clean / "fullshard", "--version", cwd=folder).strip()
    if fullshard.__version__ not in told:
        sys.exit(f"the wheel says that it is {told!r}, the source {fullshard.__version__}")
    shutil.copy(PROGRAM, folder)
    torchrun = (clean / "torchrun", "--nproc-per-node", "2")
    print(run(*torchrun, PROGRAM.name, folder / "saved", cwd=folder, OMP_NUM_THREADS="1").strip())
    told = run(clean / "fullshard", "train", "--steps", "3", "--seq", "64", cwd=folder)
    print(told.strip().splitlines()[-1])
    python = clean / "python"
    # torch's own ``Tensor.backward`` has no types
    strict = ("--strict", "--untyped-calls-exclude=torch", "--python-executable", python)
    print("mypy:", run(tools / "mypy", *strict, PROGRAM.name, cwd=folder).strip())
    print("pyright:", run(tools / "pyright", "--pythonpath", python, PROGRAM.name,
                          cwd=folder).strip().splitlines()[-1])  # fmt: skip


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tools = environment(folder / "tools", "build", "hatchling", "twine", "mypy", "pyright")
        first, second = (build(tools, folder / one) for one in ("first", "second"))
        if first != second:
            sys.exit(f"two builds differ: {first} and {second}")
        dist = ROOT / "dist"
        shutil.rmtree(dist, ignore_errors=True)
        shutil.copytree(folder / "first", dist)
        print(run(tools / "twine", "check", "--strict", *dist.iterdir()).strip())
        (wheel,) = dist.glob("*.whl")
        check_contents(wheel)
        use(wheel, tools, folder)
        print(*(f"{digest}  dist/{one}" for one, digest in first.items()), sep="\n")


if __name__ == "__main__":
    main()
