"""Runs the commands of the package."""

from __future__ import annotations

import argparse

import tests.mutants
from tests.mutants import choosing, killing, recording

_COMMANDS = {
    "record": recording.record,
    "choose": choosing.choose,
    "kill": killing.kill,
    "write": choosing.write,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutants",
        description=tests.mutants.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=_COMMANDS)
    parser.add_argument("--chosen", action="store_true", help="record the tests of make test only")
    parser.add_argument("--count", type=int, default=300, help="number of mutants to try")
    parser.add_argument("--seed", type=int, default=0, help="draws the mutants to try")
    parser.add_argument("--workers", type=int, default=2, help="pytest processes at once")
    parser.add_argument(
        "--seconds", type=float, default=900, help="choose no second test of a block beyond these"
    )
    options = parser.parse_args()
    _COMMANDS[options.command](options)


if __name__ == "__main__":
    main()
