"""See the package."""

from __future__ import annotations

import argparse

from tests.mutants import choosing, killing, recording

_COMMANDS = {
    "record": recording.record,
    "choose": choosing.choose,
    "kill": killing.kill,
    "write": choosing.write,
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants")
    parser.add_argument("command", choices=_COMMANDS)
    parser.add_argument("--count", type=int, default=300, help="mutants to kill")
    parser.add_argument("--workers", type=int, default=2, help="pytest processes at once")
    parser.add_argument("--seconds", type=float, default=900, help="time of all chosen tests")
    parser.add_argument("--chosen", action="store_true", help="record these tests only")
    options = parser.parse_args()
    _COMMANDS[options.command](options)


if __name__ == "__main__":
    main()
