"""Random numbers of a class, such as those of stochastic rounding, that no mesh changes.

A tensor's numbers in a step follow from a seed, its number among the parameters, and that of its
block, whoever steps it and whatever else that rank steps. The seed is an option of the parameter
group, so that checkpoints have it, and another after each step.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from fullshard.errors import UnsupportedError
from fullshard.optim.inner import Groups, step_without_hooks
from fullshard.optim.probe.blocks import Recipe
from fullshard.optim.probe.elementwise import isolated

SEED = "seed"
"""The option's name."""

_known: dict[object, bool] = {}


def uses_rng(recipe: Recipe, dtype: torch.dtype) -> bool:
    """Return whether a step of a small matrix of this dtype uses PyTorch's generator."""
    key = (recipe.key, dtype)
    if key not in _known:
        with isolated():
            param = nn.Parameter(torch.ones(2, 5, dtype=dtype))
            param.grad = torch.ones_like(param)
            before = torch.get_rng_state()
            try:
                step_without_hooks(recipe.made([param]))
            except Exception:
                return False  # of this, other trials tell
            _known[key] = not torch.equal(before, torch.get_rng_state())
    return _known[key]


def refuse_rng(
    recipe: Recipe, dtype: torch.dtype, seed: int | None, label: str, *, is_cut: bool
) -> None:
    """Refuse random numbers that would depend on the mesh.

    Args:
        recipe: the class.
        dtype: of a parameter.
        seed: see ``seeded``; None if there is none.
        label: of the parameter, for the error message.
        is_cut: ranks may step pieces of it.

    Raises:
        UnsupportedError: the class uses such numbers.
    """
    if (is_cut or seed is None) and uses_rng(recipe, dtype):
        advice = "which would depend on who owns what: give seed=, the same on all ranks"
        if is_cut:
            advice = "a piece would get numbers of its own: leave out blocks= for it"
        raise UnsupportedError(
            f"{label}: with {dtype} the class uses random numbers, as for stochastic rounding, "
            f"and {advice}"
        )


@contextmanager
def seeded(seed: int, param: int, block: int, device: torch.device) -> Iterator[None]:
    """Draw the numbers of a block of a parameter; the generators go on as before afterwards."""
    devices = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"):
        torch.manual_seed(_mixed(seed, param, block))
        yield


def advance(groups: Groups) -> None:
    """Give groups that have a seed the one of the next step."""
    for group in groups:
        if SEED in group:
            group[SEED] = _mixed(group[SEED])


def _mixed(*numbers: Any) -> int:
    text = " ".join(str(int(one)) for one in numbers)
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
