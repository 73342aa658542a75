"""Record what the engines of a model do during training, and report it.

``trace`` listens to the engine (``tape``), keeps some steps in full and sums of all steps
(``steps``), and writes one file for each rank. Later, code that imports no torch makes reports of
these files: ``summary`` computes the figures, ``chrome`` and ``report`` show them.
"""

from __future__ import annotations

from fullshard.trace.report import Combined, combine
from fullshard.trace.trace import Trace, trace
