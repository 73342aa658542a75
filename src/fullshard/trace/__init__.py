"""Record what the engines of a model do during training, and report it.

``trace`` records through the seams of the engine (``tape``), keeps some steps whole and sums of all
(``steps``), and writes one file for each rank. Reports are made of these files later, by code that
imports no torch: ``summary`` says what was found, ``chrome`` and ``report`` show it.
"""

from __future__ import annotations

from fullshard.trace.report import Combined, combine
from fullshard.trace.trace import Trace, trace
