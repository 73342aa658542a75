"""The output of ``--json`` has the keys and types in the tables of docs/json.md."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard

from fullshard import CPUOffloadPolicy, checkpoint, plan
from fullshard.cli import main
from fullshard.doctor import Report
from fullshard.plan import Measured
from fullshard.trace.summary import summarize
from tests.kit.doctor_measured import measured
from tests.kit.trace_report import busy_ranks, busy_step, short_rank
from tests.pure.doctor_facts import a_host, a_rank, with_gpus
from tests.pure.trace_files import rank_file, total

PAGE = Path(__file__).parents[2] / "docs" / "json.md"
TYPES = {
    "integer": int,
    "number": (int, float),
    "string": str,
    "boolean": bool,
    "null": type(None),
    "any": object,
}


def tables() -> dict[str, list[tuple[str, str]]]:
    """Return the keys and types of each command."""
    found: dict[str, list[tuple[str, str]]] = {}
    for section in PAGE.read_text().split("\n## fullshard ")[1:]:
        name, _, text = section.partition("\n")
        rows = [line.split("|")[1:3] for line in text.splitlines() if line.startswith("| `")]
        found[name] = [
            (key, kind.strip()) for keys, kind in rows for key in re.findall("`([^`]+)`", keys)
        ]
    return found


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values inside ``value`` with their paths; empty containers have no values."""
    if isinstance(value, dict):
        for key, one in value.items():
            yield from leaves(one, f"{path}\0{key}")
    elif isinstance(value, list):
        for one in value:
            yield from leaves(one, f"{path}[]")
    else:
        yield path.removeprefix("\0"), value


def matches(key: str, kind: str, path: str) -> bool:
    parts = (re.escape(part).replace(r"\*", "[^\0]+?") for part in key.split("."))
    below = r"((\0|\[\]).*)?" if kind == "any" else ""
    return re.fullmatch("\0".join(parts) + below, path) is not None


def is_of(kind: str, value: Any) -> bool:
    names = re.split(r", | or ", kind)
    return any(
        isinstance(value, TYPES[name]) and (name in ("boolean", "any") or value is not True)
        for name in names
    )


def check(name: str, *outputs: Any) -> None:
    rows, used = tables()[name], set()
    for path, value in (leaf for one in outputs for leaf in leaves(json.loads(json.dumps(one)))):
        fitting = [
            (key, kind) for key, kind in rows if matches(key, kind, path) and is_of(kind, value)
        ]
        assert fitting, (path.replace("\0", "."), value)
        used |= set(fitting)
    assert [key for key, kind in rows if (key, kind) not in used] == []


def test_plan() -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    options: dict[str, Any] = {"batch": torch.zeros(2, 64), "world_size": 4, "hardware": "cpu"}
    found = plan(model, **options, budget_nbytes=10**9)
    seen = Measured("cpu", 0.1, None, None)
    offloaded = plan(model, **options | {"hardware": "h100"}, offload_policy=CPUOffloadPolicy())
    outputs = [
        plan(model, **options),
        offloaded,
        found,
        replace(found, measured=seen, host={"a": 1}),
    ]
    check("plan", *(one.as_json() for one in outputs))


def test_doctor() -> None:
    report = measured()
    report.failures.append("no full measurement")
    short = [a_rank(host=a_host(shm_nbytes=64 << 20), num_threads=8)]
    check(
        "doctor", *(one.as_dict() for one in (report, Report(with_gpus("a"), 2), Report(short, 1)))
    )


def test_trace() -> None:
    ranks = busy_ranks()
    steps = [busy_step(n) | {"missed": [[1, 0, 2]]} for n in (1, 2, 3)]
    alone = [
        rank_file(rank, steps=steps, world=3, first_s=0.5, missed=[[1, 0, 2, 3]])
        for rank in range(2)
    ]
    as_planned = [one | {"plan": {"step_s": 0.1, "hardware": None}} for one in alone]
    empty = rank_file(world=1) | {"steps": []}
    empty["spent"]["step"] = total()
    found = [ranks, alone, as_planned, [short_rank()], [empty]]
    check("trace", *map(summarize, found))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for step in (1, 2):
        torch.manual_seed(step)
        path = tmp_path / "checkpoints" / f"step-{step:06d}"
        checkpoint.save(path, nn.Linear(3, 2), extra={"a": [1]}, step=step)
    (tmp_path / "checkpoints" / "other").mkdir()
    (tmp_path / "best.json").write_text('{"step": 2, "eval_bits_per_byte": 1.25}')
    return tmp_path


@pytest.mark.parametrize("name", ["list", "inspect", "verify", "diff"])
def test_checkpoint(name: str, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = (run / "checkpoints" / f"step-{step:06d}" for step in (1, 2))
    arguments = {"list": [run], "inspect": [one], "verify": [run], "diff": [one, two]}[name]
    main(["checkpoint", name, *map(str, arguments), "--json"])
    found = json.loads(capsys.readouterr().out)
    if name == "inspect":  # on one rank no tensor has placements
        found["tensors"]["model/weight"]["placements"] = [repr(Shard(0))]
    check(f"checkpoint {name}", found)
