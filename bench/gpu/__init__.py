"""Checks that need a GPU, in parts of at most ten minutes; one GPU is enough.

    python -m bench gpu --help                   the parts
    python -m bench gpu collectives races --out results/
    python -m bench gpu all --out results/       each in a process of its own, in this order
    python -m bench gpu --first                  times that were never published, first; see FIRST
    python -m bench gpu --table results/         what was found, for docs/benchmarks.md
    python -m bench gpu all --stand-in           on a CPU: whether the parts run, nothing else

Each part judges by itself; with ``--out`` it writes ``PART.json``. Ends with 1 if a part failed.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bench.gpu import costs, features, programs, races, ranks, tax, wires
from bench.gpu.machine import Failed, Machine, Verdict
from bench.machine import table


class Part(NamedTuple):
    """A function of the machine, and how long it may take."""

    check: Callable[[Machine], Verdict]
    limit_s: int


PARTS = {
    "collectives": Part(wires.collectives, 120),
    "tax-1b": Part(tax.tax_1b, 300),
    "tax-8b": Part(tax.tax_8b, 300),
    "tax-compiled": Part(tax.tax_compiled, 420),
    "hosts": Part(tax.hosts, 300),
    "wire": Part(costs.wire, 300),
    "streams": Part(wires.streams, 120),
    "races": Part(races.races, 600),
    "controls": Part(races.controls, 420),
    "threads": Part(programs.threads, 120),
    "two-streams": Part(programs.two_streams, 120),
    "syncs": Part(costs.syncs, 180),
    "memory": Part(costs.memory, 600),
    "kernels": Part(costs.kernels, 240),
    "offload": Part(costs.offload, 300),
    "speed": Part(costs.speed, 420),
    "graphs": Part(programs.graphs, 300),
    "ranks": Part(ranks.ranks, 600),
    "jobs": Part(ranks.jobs, 480),
    "codecs": Part(features.codecs, 120),
    "owners": Part(features.owners, 180),
    "host-states": Part(features.host_states, 240),
    "checkpoints": Part(features.checkpoints, 300),
    "scaling": Part(features.scaling, 120),
    "plans": Part(features.plans, 240),
    "trainer": Part(features.trainer, 420),
}
"""The most important first."""

FIRST = ("tax-1b", "hosts", "tax-8b", "tax-compiled", "wire", "kernels", "memory")
"""Parts to run first, alone on the machine: their times are still to be published."""

RESULTS = Path(__file__).parent / "results"
_BUSY_NBYTES = 2 << 30


def judge(name: str, machine: Machine) -> dict[str, Any]:
    """Run a part here; return the record that is written of it."""
    start = time.perf_counter()
    try:
        verdict = PARTS[name].check(machine)
    except Failed as failure:
        verdict = Verdict(passed=False, notes=[str(failure)])
    except Exception:
        verdict = Verdict(passed=False, notes=[traceback.format_exc()[-4000:]])
    seconds = round(time.perf_counter() - start, 1)
    return {"part": name, "seconds": seconds, "machine": machine.describe(), **asdict(verdict)}


def main(args: Sequence[str]) -> int:
    """Run what was asked for; 1 if some part failed, 2 if it cannot be run."""
    given = _parser().parse_args(args)
    if given.table is not None:
        print(_table([json.loads(path.read_text()) for path in _results(given.table)]))
        return 0
    if not given.stand_in and not torch.cuda.is_available():
        print("gpu: no CUDA device; --stand-in tries the parts on the CPU")
        return 2
    unknown = set(given.parts) - {*PARTS, "all"}
    if unknown or not (given.parts or given.first):
        print(f"gpu: no part {', '.join(unknown)}; expected some of {', '.join(PARTS)}, or all")
        return 2
    if given.first:
        return _first(given)
    names = list(PARTS) if "all" in given.parts else given.parts
    if len(names) > 1:
        return max([_apart(name, args, given.parts) for name in names], default=0)
    (name,) = names
    faulthandler.dump_traceback_later(PARTS[name].limit_s, exit=True)
    found = judge(name, Machine.here(stand_in=given.stand_in))
    faulthandler.cancel_dump_traceback_later()
    if given.out is not None:
        given.out.mkdir(parents=True, exist_ok=True)
        (given.out / f"{name}.json").write_text(json.dumps(found, indent=2) + "\n")
    print(_table([found]))
    return int(found["passed"] is False)


def _parser() -> argparse.ArgumentParser:
    listed = "\n".join(
        f"  {name:<14}{(part.check.__doc__ or '').splitlines()[0]} ({part.limit_s} s at most)"
        for name, part in PARTS.items()
    )
    parser = argparse.ArgumentParser(
        prog="python -m bench gpu",
        description=(__doc__ or "").splitlines()[0],
        epilog=f"parts:\n{listed}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help="some of those below, or all")
    parser.add_argument("--out", type=Path, help="folder for PART.json of each part")
    parser.add_argument("--first", action="store_true", help=f"run {', '.join(FIRST)}, with a log")
    parser.add_argument("--stand-in", action="store_true", help="on the CPU; judges little")
    parser.add_argument("--table", type=Path, metavar="OUT", help="show what was written there")
    return parser


def _first(given: argparse.Namespace) -> int:
    """Run the given parts, or ``FIRST``, one at a time; write JSON and a log to a folder."""
    machine = Machine.here(stand_in=given.stand_in)
    if machine.is_real:
        free, total = torch.cuda.mem_get_info()
        if total - free > _BUSY_NBYTES:
            print(
                f"gpu: other programs use {(total - free) >> 20} MiB of the GPU and would distort "
                "times; end them and try again"
            )
            return 2
    device = machine.describe()["device"].replace(" ", "-")
    out = given.out or RESULTS / f"{time.strftime('%Y-%m-%d')}-{device}"
    out.mkdir(parents=True, exist_ok=True)
    options = ["--out", str(out), *(["--stand-in"] if given.stand_in else [])]
    worst = 0
    with (out / "log.txt").open("a") as log:
        for name in given.parts or FIRST:
            print(f"{time.strftime('%H:%M:%S')} {name}", flush=True)
            status, printed = _in_a_process(name, options)
            log.write(printed)
            print(printed, flush=True)
            worst = max(worst, status)
    print(f"gpu: commit {out}")
    return worst


def _in_a_process(name: str, options: Sequence[str]) -> tuple[int, str]:
    command = [sys.executable, "-m", "bench", "gpu", name, *options]
    limit_s = PARTS[name].limit_s + 30
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            printed, _ = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            process.kill()
            return 1, f"gpu: {name} took longer than {limit_s} s\n"
    return int(process.returncode != 0), printed


def _apart(name: str, args: Sequence[str], parts: Sequence[str]) -> int:
    """One part in a process of its own: a fault in one leaves the device to the next."""
    status, printed = _in_a_process(name, [arg for arg in args if arg not in parts])
    print(printed, flush=True)
    return status


def _results(folder: Path) -> list[Path]:
    """In the order of the parts."""
    return [path for name in PARTS if (path := folder / f"{name}.json").exists()]


def _table(found: list[dict[str, Any]]) -> str:
    """Markdown: a verdict a part, then its figures."""
    words = {True: "passed", False: "FAILED", None: "not judged"}
    rows = [
        [one["part"], words[one["passed"]], f"{one['seconds']} s", "; ".join(one["notes"])]
        for one in found
    ]
    lines = [table(["part", "verdict", "took", "notes"], rows)] if rows else []
    for one in found:
        if one["figures"]:
            figures = [[name, _text(value)] for name, value in one["figures"].items()]
            lines += ["", table([one["part"], _where(one["machine"])], figures)]
    return "\n".join(lines)


def _where(machine: dict[str, str]) -> str:
    return f"{machine['device']}, torch {machine['torch']}, Python {machine['python']}"


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_text(part)}" for name, part in value.items())
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def figures() -> dict[str, Any]:
    """Return the seconds of steps, for runs of all benchmarks; empty without a GPU."""
    if not torch.cuda.is_available():
        return {}
    return costs.speed(Machine.here()).figures


def report(found: dict[str, Any]) -> int:
    """Print the table; nothing is promised."""
    if not found:
        print("gpu: no CUDA device, nothing was measured")
        return 0
    print(table(["", "ms"], [[name, _text(value)] for name, value in found.items()]))
    return 0
