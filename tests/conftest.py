"""What every kind of test shares."""

from __future__ import annotations

import torch
from hypothesis import settings

# The machines that run this have few cores, and one torch thread gives the same sums everywhere.
torch.set_num_threads(1)

# The same examples on every run, and no time limit an example could miss on a loaded machine.
settings.register_profile("fullshard", derandomize=True, deadline=None)
settings.load_profile("fullshard")
