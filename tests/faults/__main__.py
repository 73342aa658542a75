"""``python -m tests.faults --kills 1000``: kill jobs that save, and say what they lost."""

from __future__ import annotations

import argparse
import time

from tests.faults.kills import Failed, Killer


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    start_s = time.monotonic()

    def tell(killer: Killer) -> None:
        seconds = time.monotonic() - start_s
        print(f"{killer.kills.total()} kills, {seconds / 60:.0f} min", flush=True)

    killer = Killer(options.seed)
    try:
        killer.run(options.kills, tell)
    except Failed as error:
        print(f"FAILED after {killer.kills.total()} kills, seed {options.seed}: {error}")
        return 1
    for what, count in sorted(killer.kills.items()):
        print(f"{count:5} {what}")
    print(f"{killer.kills.total()} kills: nothing was lost, final weights equal")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
