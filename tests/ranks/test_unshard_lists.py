"""``unshard_params`` of several modules at once."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fullshard import unshard_params
from tests.kit.unshard_params import refuses, usable
from tests.ranks.net import make, shard
from tests.ranks.pool import on_ranks


@on_ranks(2)
def test_a_list_of_modules_is_lent_together() -> None:
    plain = make()
    model: Any = shard(copy.deepcopy(plain))
    inner, rest = model.blocks[0], model.blocks[1]
    parts, wrong = [inner, rest, inner], [inner, 3]
    for given in (parts, tuple(parts)):
        with unshard_params(given), torch.no_grad():
            for part in (inner, rest):
                assert not any(isinstance(param, DTensor) for param in part.parameters())
                next(part.parameters()).add_(1)
            assert isinstance(model.scale, DTensor)
    with torch.no_grad():
        for part in plain.blocks[:2]:
            next(part.parameters()).add_(2)
    with unshard_params([inner, model]):  # a unit in both is gathered once
        assert not isinstance(model.scale, DTensor)
    refuses(model, lambda: unshard_params([]).__enter__(), "got no module")
    refuses(model, lambda: unshard_params(wrong).__enter__(), "got int, expected a")
    usable(model, plain)
