"""Corners of checkpoints in one process: what machines refuse, devices, extra state and ties."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fullshard import checkpoint, fully_shard
from fullshard.checkpoint import Checkpointer
from fullshard.checkpoint.state.optimizer import OptimStateToLoad
from fullshard.errors import ConfigError, StorageError

pytestmark = pytest.mark.usefixtures("world_of_one")


def sharded(model: nn.Module) -> Any:
    return fully_shard(model)


def trained(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


@pytest.mark.parametrize("code", [errno.EMFILE, errno.EACCES, errno.ESTALE])
def test_a_file_that_the_machine_refuses_is_no_damage(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, checkpointer = sharded(nn.Linear(4, 3)), Checkpointer(tmp_path)
    for step in (1, 2):
        checkpointer.save(model, step=step).wait()
    opened = os.open

    def refused(path: Any, *args: Any, **options: Any) -> int:
        if "step-000002/rank-" in str(path):
            raise OSError(code, os.strerror(code))
        return opened(path, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refused)
        with pytest.raises(StorageError, match="cannot be opened"):
            Checkpointer(tmp_path).load(model)
    found = Checkpointer(tmp_path).load(model)
    assert found is not None and found.step == 2


def test_another_default_device_changes_nothing(tmp_path: Path) -> None:
    model = sharded(nn.Linear(4, 3))
    optimizer = trained(model)
    want = [param.full_tensor().clone() for param in model.parameters()]
    with torch.device("meta"):
        checkpointer = Checkpointer(tmp_path, keep=1)
        for step in (1, 2):
            extra = {"rng": torch.get_rng_state()}
            checkpointer.save(model, optimizer, extra, step=step).wait()
        path = checkpointer.path(2)
        assert checkpointer.steps() == [2]
        checkpoint.verify(path)
        assert not list(checkpoint.differences(path, path))
        found = checkpointer.load(model, optimizer)
        assert found is not None and found.extra["rng"].device.type == "cpu"
        checkpoint.save_weights(model, tmp_path / "weights")
        checkpoint.load_weights(model, tmp_path / "weights")
    assert all(map(torch.equal, want, (param.full_tensor() for param in model.parameters())))


class Counts(nn.Linear):
    """A layer whose extra state is a tensor of any length, or nothing."""

    def __init__(self, counts: Tensor | None) -> None:
        super().__init__(4, 4)
        self.counts = counts

    def get_extra_state(self) -> Any:
        return self.counts

    def set_extra_state(self, state: Any) -> None:
        self.counts = state


def test_extra_state_may_change_its_length(tmp_path: Path) -> None:
    model = sharded(Counts(torch.arange(3)))
    optimizer = trained(model)
    checkpoint.save(tmp_path / "one", model, optimizer, step=1)
    full = checkpoint.full_state_dict(model)
    for load in (
        lambda new: checkpoint.load(tmp_path / "one", new, trained(new)),
        lambda new: checkpoint.load_full_state_dict(new, full),
    ):
        new = sharded(Counts(torch.arange(0)))
        load(new)
        assert new.counts is not None and new.counts.tolist() == [0, 1, 2]


def test_missing_extra_state_is_told(tmp_path: Path) -> None:
    class One(nn.Sequential):
        pass

    checkpoint.save(tmp_path / "one", sharded(nn.Sequential(Counts(None), nn.Linear(4, 4))), step=1)
    with pytest.raises(ConfigError, match=r"lacks 1\._extra_state"):
        checkpoint.load(tmp_path / "one", sharded(One(Counts(None), Counts(None))))


class Tied(nn.Module):
    def __init__(self, *names: str) -> None:
        super().__init__()
        for name in names:
            setattr(self, name, nn.Linear(4, 4, bias=False))
        self.head.weight = self.emb.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.emb(x))  # type: ignore[no-any-return]


@pytest.mark.parametrize("strict", [True, False])
def test_state_of_a_tied_parameter_comes_back_in_another_order(
    tmp_path: Path, strict: bool
) -> None:
    old = sharded(Tied("emb", "head"))
    optimizer = trained(old)
    checkpoint.save(tmp_path / "one", old, optimizer, step=1)
    new = sharded(Tied("head", "emb"))
    its = torch.optim.AdamW(new.parameters(), lr=0.1)
    checkpoint.load(tmp_path / "one", new, its, strict=strict)
    ((_, want),), ((_, found),) = optimizer.state.items(), its.state.items()
    assert torch.equal(want["exp_avg"].full_tensor(), found["exp_avg"].full_tensor())


def test_urls_of_two_parts_and_steps_below_zero_are_refused(tmp_path: Path) -> None:
    model = sharded(nn.Linear(4, 3))
    with pytest.raises(ConfigError, match="'::' chains URLs"):
        checkpoint.save_weights(model, "memory://b/x::1")
    with pytest.raises(ConfigError, match="expected 0 or more"):
        Checkpointer(tmp_path).save(model, step=-1)


def test_a_rate_on_a_device_stays_there() -> None:
    to_load: Any = OptimStateToLoad.__new__(OptimStateToLoad)
    to_load._groups, to_load._grouped, to_load._own_name = [{"params": ["a"], "lr": 1}], {"a"}, {}
    to_load._groups[0]["lr"] = torch.tensor(0.5)

    class Stepped:
        @staticmethod
        def by_group() -> Any:
            return [({"lr": torch.tensor(0.1, device="meta")}, {0: ["a"]})]

    to_load._stepped = Stepped
    (group,) = to_load._regrouped(all_params=True)
    assert group["lr"].device.type == "meta"
