"""Weights in the names and files of Hugging Face: load, save, and stream them."""

from __future__ import annotations

from fullshard.checkpoint.weights.load import Conversion, LoadedWeights, load_weights
from fullshard.checkpoint.weights.save import save_weights
from fullshard.checkpoint.weights.stream import stream_params
