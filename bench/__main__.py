"""``python -m bench [NAME ...] [--save]``: compares with PyTorch's own; all, or those named.

``python -m bench gpu --help`` lists the checks for a GPU.

``python -m bench scale --help`` tells how to see how costs grow.

``--save`` writes the figures to ``bench/results.json``, each with the date and the version of
PyTorch; those of other benchmarks stay.
"""

from __future__ import annotations

import datetime
import importlib
import json
import sys
from pathlib import Path
from typing import Any

import torch

from bench.machine import Loaded

NAMES = (
    "step compile host optimizer copies launches padding memory reserved plan rounds scale schedule"
    " skipping trace transport cluster wire checkpoint weights stream gpu".split()
)
RESULTS = Path(__file__).with_name("results.json")


def main() -> int:
    """Run what was asked for; 1 if a figure was refused or missed its bound, 2 for a wrong name."""
    first, saves = sys.argv[1:2], "--save" in sys.argv
    if (first == ["gpu"] and sys.argv[2:]) or (first == ["scale"] and not saves):
        return int(module_of(*first).main(sys.argv[2:]))
    names = [name for name in sys.argv[1:] if name != "--save"] or NAMES
    unknown = [name for name in names if name not in NAMES]
    if unknown:
        print(f"bench: unknown {', '.join(unknown)}; expected some of {', '.join(NAMES)}")
        return 2
    failures = 0
    for name in names:
        print(f"== {name}")
        try:
            found = module_of(name).figures()
        except Loaded as refusal:
            print(refusal)
            failures += 1
            continue
        failures += module_of(name).report(found)
        if saves and found:
            save(name, found)
        print()
    return int(failures > 0)


def module_of(name: str) -> Any:
    """Return the module of a benchmark, which has ``figures`` and ``report``."""
    return importlib.import_module(f"bench.{'compiled' if name == 'compile' else name}")


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
