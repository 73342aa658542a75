"""``Muon`` for parameters of any layout."""

from __future__ import annotations

from fullshard.optim.muon.optimizer import Muon
from fullshard.optim.muon.rule import MUON, choose
