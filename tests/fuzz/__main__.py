"""``python -m tests.fuzz --cases 20000`` runs cases for hours; ``--seed N`` runs one case again."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from itertools import count, islice
from pathlib import Path

from tests.fuzz.case import read
from tests.fuzz.generate import MAX_WORLD, generate, world_of
from tests.fuzz.hunt import Failure, Figures, hunt, run_case, shrunk
from tests.ranks.pool import RankPool


def main() -> int:
    """Run the cases that the command line asks for; return 1 if any failed."""
    args = _arguments()
    with RankPool(warning_filters=["error"]) as pool:
        if args.seed is not None or args.case:
            case = read(Path(args.case).read_text()) if args.case else generate(args.seed)
            print(case, flush=True)
            failure = run_case(pool, case)
            print("passed" if failure is None else failure.text)
            if failure is not None and args.shrink:
                _print_shrunk(pool, failure)
            return failure is not None
        return _hunt(pool, args)


def _hunt(pool: RankPool, args: argparse.Namespace) -> int:
    figures, start = Figures(), time.monotonic()
    seen: set[str] = set()
    with Path(args.failures).open("a") as out:
        for failure in hunt(pool, _seeds(args, figures, start), figures=figures, job=args.job):
            out.write(json.dumps(vars(failure) | {"case": str(generate(failure.seed))}) + "\n")
            out.flush()
            print(f"seed {failure.seed}: {failure.kind}", flush=True)
            if args.shrink and failure.kind not in seen:
                _print_shrunk(pool, failure)
            seen.add(failure.kind)
    print(figures)
    print(f"{time.monotonic() - start:.0f} s; failures are in {args.failures}")
    return bool(figures.failures)


def _seeds(args: argparse.Namespace, figures: Figures, start: float) -> Iterator[int]:
    low, _, high = args.ranks.partition("-")
    worlds = range(int(low), int(high or low) + 1)
    fitting = (seed for seed in count(args.from_seed) if world_of(seed) in worlds)
    for number, seed in enumerate(islice(fitting, args.cases)):
        if number % 1000 == 0 and number:
            passed, seconds = sum(figures.passed.values()), time.monotonic() - start
            print(f"{passed} passed, {passed / seconds:.1f} a second", flush=True)
        if time.monotonic() - start > args.seconds:
            return
        yield seed


def _print_shrunk(pool: RankPool, failure: Failure) -> None:
    case, text = shrunk(pool, failure)
    print(f"{case}\n{text}", flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--cases", type=int, default=1000, help="number of cases")
    parser.add_argument("--ranks", default=f"1-{MAX_WORLD}", help="numbers of ranks: 2, or 1-4")
    parser.add_argument("--from-seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after this time")
    parser.add_argument("--seed", type=int, help="run one case, and print it")
    parser.add_argument("--case", help="run the case printed in this file")
    parser.add_argument(
        "--shrink", action="store_true", help="look for smaller cases that fail in the same way"
    )
    parser.add_argument("--job", type=int, default=50, help="number of cases in a job")
    parser.add_argument("--failures", default="fuzz-failures.jsonl", help="file for failures")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
