"""Checkpoints, through files, of optimizers that did not step all parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)

from fullshard import FullyShardedDataParallel as FSDP
from fullshard import PerParameter, Ragged, checkpoint
from fullshard.checkpoint import LoadPlanner
from fullshard.optim import ShardedOptimizer
from fullshard.tensors import local_part
from tests.ranks.models import fill, noise, shard_units, shared_folder
from tests.ranks.pool import on_ranks

FACES = ["per_parameter", "ragged", "originals", "flat"]


class Experts(nn.Module):
    """Two experts, of which the second may be unused for a while."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 3)
        self.second = nn.Linear(4, 3)
        self.double()
        fill(self)

    def forward(self, x: Tensor, *, second: bool) -> Tensor:
        y = self.first(x)
        return y * torch.tanh(self.second(x)) if second else y


def sharded(face: str) -> Any:
    model: Any = Experts()
    if face in ("originals", "flat"):
        for name in ("first", "second"):
            wrapper = FSDP(getattr(model, name), use_orig_params=face == "originals")
            setattr(model, name, wrapper)
        return model
    layout = Ragged() if face == "ragged" else PerParameter()
    return shard_units(model, (model.first, model.second), layout=layout)


def adam(model: nn.Module, face: str) -> torch.optim.Optimizer:
    if face == "ragged":
        return ShardedOptimizer(model.parameters(), torch.optim.Adam, lr=1e-2)
    return torch.optim.Adam(model.parameters(), lr=1e-2)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, *, second: bool, at: int) -> None:
    for number in range(at, at + 2):
        model(noise(5, 4, seed=number), second=second).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def check_end(model: Any, plain: nn.Module) -> None:
    state = checkpoint.full_state_dict(model, rank0_only=False)
    for name, value in plain.state_dict().items():
        assert (state[name] - value).abs().max() < 1e-12, name


def locals_of(own: dict[str, Any]) -> dict[str, Tensor]:
    return {key: local_part(value).clone() for key, value in own.items()}


def resumes(face: str, other: str, *, saved: bool, loading: bool, by_torch: bool) -> None:
    """Save and load; ``saved`` and ``loading`` say whether the second expert stepped before."""
    plain = Experts()
    model, fresh = sharded(face), sharded(other)
    its = torch.optim.Adam(plain.parameters(), lr=1e-2)
    optimizer, new = adam(model, face), adam(fresh, other)
    for one, steps in ((plain, its), (model, optimizer)):
        train(one, steps, second=False, at=0)
        if saved:
            train(one, steps, second=True, at=2)
    if not by_torch:
        train(fresh, new, second=loading, at=8)  # other values, which the load replaces
    folder = shared_folder()
    dcp.save(
        {
            "model": checkpoint.sharded_state_dict(model),
            "optim": checkpoint.sharded_optim_state_dict(model, optimizer),
        },
        checkpoint_id=folder,
    )
    state: dict[str, Any]
    if by_torch:
        state = dict(zip(("model", "optim"), get_state_dict(fresh, new), strict=True))
        dcp.load(state, checkpoint_id=folder, planner=LoadPlanner())
        set_state_dict(
            fresh,
            new,
            model_state_dict=state["model"],
            optim_state_dict=state["optim"],
            options=StateDictOptions(strict=False),
        )
    else:
        kept = checkpoint.sharded_optim_state_dict(fresh, new)["state"]
        before = {name: locals_of(own) for name, own in kept.items()}
        state = {
            "model": checkpoint.sharded_state_dict(fresh),
            "optim": checkpoint.sharded_optim_state_dict(fresh, new, template=True),
        }
        for name, own in before.items():  # making the template changes no existing state
            found = locals_of(state["optim"]["state"][name])
            assert all(torch.equal(found[key], value) for key, value in own.items()), name
        dcp.load(state, checkpoint_id=folder, planner=LoadPlanner())
        checkpoint.load_sharded_state_dict(fresh, state["model"])
        checkpoint.load_sharded_optim_state_dict(fresh, new, state["optim"])
    names = checkpoint.sharded_optim_state_dict(fresh, new)["state"].keys()
    assert ("second.weight" in names) is saved
    for one, steps in ((plain, its), (fresh, new)):
        train(one, steps, second=True, at=4)
    check_end(fresh, plain)


@on_ranks(2)
@pytest.mark.parametrize(("face", "other"), list(zip(FACES, FACES[1:] + FACES[:1], strict=True)))
def test_parameters_that_never_stepped_are_resumed_as_such(face: str, other: str) -> None:
    for saved in (False, True):
        for loading in (False, True):
            resumes(face, other, saved=saved, loading=loading, by_torch=False)
        if other not in ("originals", "flat"):
            resumes(face, other, saved=saved, loading=False, by_torch=True)


@on_ranks(2)
def test_weights_that_a_file_lacks_are_still_missed() -> None:
    model = sharded("per_parameter")
    folder = shared_folder()
    dcp.save({"model": checkpoint.sharded_state_dict(model)}, checkpoint_id=folder)
    state = {"model": {**checkpoint.sharded_state_dict(model), "more": torch.ones(2)}}
    with pytest.raises(dcp.CheckpointException, match=r"Missing key.*model\.more"):
        dcp.load(state, checkpoint_id=folder, planner=LoadPlanner())
