"""Run the programs and write their table: ``python -m tests.frameworks [words of rows ...]``.

``python -m tests.frameworks models [words of rows ...]`` does the same for the architectures.
"""

from __future__ import annotations

import sys

from tests.frameworks import architectures, matrix

if __name__ == "__main__":
    if sys.argv[1:2] == ["models"]:
        architectures.main(sys.argv[2:])
    else:
        matrix.main(sys.argv[1:])
