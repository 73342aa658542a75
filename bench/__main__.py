"""``python -m bench [step] [schedule] [transport]``: all of them, or those named."""

from __future__ import annotations

import sys

from bench import schedule, step, transport

BENCHES = {"step": step.main, "schedule": schedule.main, "transport": transport.main}


def main() -> int:
    """Run what was asked for; non-zero if a figure was refused or missed its bound."""
    names = sys.argv[1:] or list(BENCHES)
    unknown = [name for name in names if name not in BENCHES]
    if unknown:
        print(f"bench: unknown {', '.join(unknown)}; expected some of {', '.join(BENCHES)}")
        return 2
    return max(BENCHES[name]() for name in names)


if __name__ == "__main__":
    sys.exit(main())
