"""One call in a process of its own; its result is the last line, as JSON."""

from __future__ import annotations

import importlib
import json
import sys

from bench.gpu.machine import Machine


def main() -> None:
    """Call what the argument names."""
    module, name, args, stand_in = json.loads(sys.argv[1])
    machine = Machine.here(stand_in=stand_in)
    found = getattr(importlib.import_module(module), name)(machine, *args)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
