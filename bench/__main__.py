"""``python -m bench [NAME ...] [--save]``: compares with PyTorch's own; all, or those named.

``python -m bench gpu --help`` tells what there is for a GPU.

``python -m bench scale --help`` tells how to see how costs grow.

``--save`` writes the figures to ``bench/results.json``, each with the date and the version of
PyTorch; those of other benchmarks stay.
"""

from __future__ import annotations

import datetime
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from bench import (
    checkpoint,
    cluster,
    compiled,
    copies,
    gpu,
    host,
    launches,
    memory,
    optimizer,
    padding,
    plan,
    reserved,
    rounds,
    scale,
    schedule,
    skipping,
    step,
    stream,
    trace,
    transport,
    weights,
    wire,
)
from bench.machine import Loaded

BENCHES: dict[str, ModuleType] = {
    "step": step,
    "compile": compiled,
    "host": host,
    "optimizer": optimizer,
    "copies": copies,
    "launches": launches,
    "padding": padding,
    "memory": memory,
    "reserved": reserved,
    "plan": plan,
    "rounds": rounds,
    "scale": scale,
    "schedule": schedule,
    "skipping": skipping,
    "trace": trace,
    "transport": transport,
    "cluster": cluster,
    "wire": wire,
    "checkpoint": checkpoint,
    "weights": weights,
    "stream": stream,
    "gpu": gpu,
}
RESULTS = Path(__file__).with_name("results.json")


def main() -> int:
    """Run what was asked for; 1 if a figure was refused or missed its bound, 2 for a wrong name."""
    if sys.argv[1:2] == ["gpu"] and sys.argv[2:]:
        return gpu.main(sys.argv[2:])
    if sys.argv[1:2] == ["scale"] and "--save" not in sys.argv:
        return scale.main(sys.argv[2:])
    names = [name for name in sys.argv[1:] if name != "--save"] or list(BENCHES)
    unknown = [name for name in names if name not in BENCHES]
    if unknown:
        print(f"bench: unknown {', '.join(unknown)}; expected some of {', '.join(BENCHES)}")
        return 2
    failures = 0
    for name in names:
        print(f"== {name}")
        try:
            found = BENCHES[name].figures()
        except Loaded as refusal:
            print(refusal)
            failures += 1
            continue
        failures += BENCHES[name].report(found)
        if "--save" in sys.argv and found:
            save(name, found)
        print()
    return int(failures > 0)


def save(name: str, found: Any) -> None:
    """Put the figures of one benchmark into the results."""
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    results[name] = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "torch": torch.__version__,
        "figures": rounded(found),
    }
    RESULTS.write_text(json.dumps(results, indent=2) + "\n")


def rounded(value: Any) -> Any:
    """Numbers to four digits: ratios are not known better."""
    if isinstance(value, dict):
        return {key: rounded(part) for key, part in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value


if __name__ == "__main__":
    sys.exit(main())
