"""Optimizer state of the flat interface that is missing, empty or of unmanaged parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fullshard import FullyShardedDataParallel as FSDP
from fullshard import OptimStateKeyType, ShardedOptimStateDictConfig, StateDictType
from fullshard.compat import patch_torch
from fullshard.errors import ConfigError, UnsupportedError
from fullshard.flat import optim_state
from tests.kit.flat import originals, step
from tests.ranks.pool import on_ranks


class OnStream(nn.Module):
    """Two wrapped modules, with ``extra`` a parameter between them that no wrapper manages."""

    def __init__(self, *, original: bool | None, extra: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6).double()
        if extra:
            self.extra = nn.Parameter(torch.ones(6).double())
        self.last = nn.Linear(6, 5).double()
        if original is not None:
            self.first = FSDP(self.first, use_orig_params=original)  # type: ignore[assignment]
            self.last = FSDP(self.last, use_orig_params=original)  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return self.last(y * self.extra if hasattr(self, "extra") else y)


@on_ranks(2)
@pytest.mark.parametrize("offload", [True, False])
def test_sharded_state_goes_to_the_host_if_asked(offload: bool) -> None:
    moved: list[object] = []

    def on_cpu(value: object) -> object:
        moved.append(value)
        return value

    model = FSDP(nn.Linear(6, 5).double())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    step(model, optimizer)
    config = ShardedOptimStateDictConfig(offload_to_cpu=offload)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optim_state, "on_cpu", on_cpu)
        FSDP.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT, None, config)
        state = FSDP.optim_state_dict(model, optimizer)["state"]
    found = [value for values in state.values() for value in values.values()]
    assert len(found) == 6 and [id(one) for one in moved] == [id(one) for one in found] * offload


@on_ranks(2)
@originals
def test_parameters_that_no_wrapper_manages_are_for_the_program_to_add(original: bool) -> None:
    """Older calls leave out parameters that the state dict lacks, as in PyTorch."""
    small = OnStream(original=original)
    its = torch.optim.Adam(small.parameters(), lr=1e-2)
    step(small, its)
    full = FSDP.full_optim_state_dict(small, its, rank0_only=False)
    sharded = FSDP.sharded_optim_state_dict(small, its)
    is_first = torch.distributed.get_rank() == 0
    for call in ("shard", "scatter", "flatten", "now"):
        model = OnStream(original=original, extra=True)
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-2)
        if call == "shard":
            state = FSDP.shard_full_optim_state_dict(full, model, optim=optimizer)
        elif call == "scatter":
            given = full if is_first else None
            state = FSDP.scatter_full_optim_state_dict(given, model, optim=optimizer)
        elif call == "flatten":
            state = FSDP.flatten_sharded_optim_state_dict(sharded, model, optimizer)
        else:
            state = FSDP.optim_state_dict_to_load(model, optimizer, full)
        params: list[int] = state["param_groups"][0]["params"]
        everything = list(range(5 if original else 3))
        if call == "now":  # this state loads without additions, unlike PyTorch's
            assert params == everything
        else:
            assert params == everything[1:]
            zeros = torch.zeros_like(model.extra)
            state["state"][0] = {
                "step": torch.tensor(1.0),
                "exp_avg": zeros,
                "exp_avg_sq": zeros.clone(),
            }
            params.insert(0, 0)
        optimizer.load_state_dict(state)
        assert (model.extra in optimizer.state) is (call != "now")
        assert optimizer.param_groups[0]["lr"] == 1e-2
        step(model, optimizer)


@on_ranks(2)
@originals
def test_state_of_nothing(original: bool) -> None:
    """State of optimizers that never stepped, and groups without parameters, are loaded."""
    names = {"first.weight", "first.bias", "last.weight", "last.bias"}
    model, plain = OnStream(original=original), OnStream(original=None)

    def groups_of(one: nn.Module, rate: float) -> torch.optim.Optimizer:
        groups = [{"params": list(one.parameters())}, {"params": [], "lr": rate}]
        return torch.optim.Adam(groups, lr=1e-2)

    ours, theirs = groups_of(model, 7.0), groups_of(plain, 7.0)
    is_first = torch.distributed.get_rank() == 0
    for number in range(2):
        full = FSDP.full_optim_state_dict(model, ours, rank0_only=False)
        sharded = FSDP.sharded_optim_state_dict(model, ours)
        for state in (full, sharded, FSDP.optim_state_dict(model, ours)):
            assert set(state["state"]) == (names if number else set())
            assert set(state["param_groups"][0]["params"]) == names
        fresh = groups_of(model, 9.0)
        given = full if is_first else None
        for loaded in (
            FSDP.shard_full_optim_state_dict(full, model, optim=fresh),
            FSDP.scatter_full_optim_state_dict(given, model, optim=fresh),
            FSDP.flatten_sharded_optim_state_dict(sharded, model, fresh),
            FSDP.optim_state_dict_to_load(model, fresh, full),
        ):
            fresh.load_state_dict(loaded)
            assert bool(fresh.state) is bool(number)
            assert [group["lr"] for group in fresh.param_groups] == [1e-2, 7.0]
        by_number = FSDP.rekey_optim_state_dict(
            full, OptimStateKeyType.PARAM_ID, plain, optim=theirs
        )
        assert [group["params"] for group in by_number["param_groups"]] == [[0, 1, 2, 3], []]
        by_name = FSDP.rekey_optim_state_dict(
            by_number, OptimStateKeyType.PARAM_NAME, plain, optim=theirs
        )
        assert set(by_name["param_groups"][0]["params"]) == names
        assert by_name["state"].keys() == full["state"].keys()
        nothing: dict[str, Any] = {"state": {}, "param_groups": []}
        for kind in OptimStateKeyType:
            kept = FSDP.rekey_optim_state_dict(nothing, kind, plain, optim=theirs)
            assert kept == nothing
        step(model, ours)
    by_number["state"][9] = {}
    with pytest.raises(ConfigError, match=r"of \[9\], which the model"):
        FSDP.rekey_optim_state_dict(by_number, OptimStateKeyType.PARAM_NAME, plain, optim=theirs)


@on_ranks(2)
@originals
def test_pytorchs_functions_are_refused_where_they_do_not_know_our_wrapper(original: bool) -> None:
    """Unpatched PyTorch functions, which would take shards for full tensors, are refused."""
    from torch.distributed.checkpoint import state_dict as reader

    for wraps_root in (False, True):
        inner: Any = OnStream(original=original)
        model: Any = FSDP(inner, use_orig_params=original) if wraps_root else inner
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        before = [param.detach().clone() for param in model.parameters()]
        calls: list[Callable[[], Any]] = [
            lambda: reader.get_state_dict(model, optimizer),  # noqa: B023
            lambda: reader.get_optimizer_state_dict(model, optimizer),  # noqa: B023
            lambda: reader.set_optimizer_state_dict(model, optimizer, {}),  # noqa: B023
            lambda: reader.get_model_state_dict(model),  # noqa: B023
        ]
        for call in calls:
            with pytest.raises(UnsupportedError, match=r"patch_torch\(\) before"):
                call()
        assert not optimizer.state
        for param, kept in zip(model.parameters(), before, strict=True):
            assert torch.equal(param, kept) and param.grad is None
        with patch_torch():
            _, state = reader.get_state_dict(model, optimizer)
        assert "first.weight" in state["state"]
