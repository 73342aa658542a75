"""Run every program and write the table: ``python -m tests.frameworks [words of rows ...]``."""

from __future__ import annotations

import sys

from tests.frameworks.matrix import main

if __name__ == "__main__":
    main(sys.argv[1:])
