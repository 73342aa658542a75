"""One call in a process of its own; its result is the last line, as JSON."""

from __future__ import annotations

import importlib
import json
import sys

from bench.gpu.machine import Machine


def main() -> None:
    """Call what the argument names."""
    module, name, args = json.loads(sys.argv[1])
    found = getattr(importlib.import_module(module), name)(Machine.here(), *args)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
