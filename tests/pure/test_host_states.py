"""Optimizer state in host memory: which state, its peak on the device, and waits of the host."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from fullshard.device.streams import Lanes
from fullshard.errors import ArgumentTypeError, ConfigError, UnsupportedError
from fullshard.optim import Muon, OwnedOptimizer, ShardedOptimizer
from fullshard.optim import host as host_state
from fullshard.optim.flat import stream as state_stream
from fullshard.optim.host import fewest
from tests.kit.owned import Restless
from tests.pure.buffers import neighbours, parameters

NBYTES = 22 * 8 * 2  # Adam's state of a run, with padding


def flat(those: list[list[nn.Parameter]]) -> list[nn.Parameter]:
    return list(chain.from_iterable(those))


class Sets:
    """Equal parameters twice: of an optimizer with host state, and of its plain class."""

    def __init__(
        self, fraction: float, cls: type[Optimizer] = Adam, num: int = 4, **kwargs: Any
    ) -> None:
        self.mine = [parameters(neighbours(seed)) for seed in range(num)]
        self.its = [parameters(neighbours(seed)) for seed in range(num)]
        self.optimizer = ShardedOptimizer(flat(self.mine), cls, host_fraction=fraction, **kwargs)
        self.expected = cls(flat(self.its), **kwargs)

    def backward(self, seed: int, without: Sequence[int] = ()) -> None:
        for number, (mine, its) in enumerate(zip(self.mine, self.its, strict=True)):
            for param, other, grad in zip(mine, its, neighbours(seed + number), strict=True):
                param.grad, other.grad = grad, grad.clone()
        for param in (flat(one)[at] for one in (self.mine, self.its) for at in without):
            param.grad = None

    def step(self, seed: int, without: Sequence[int] = ()) -> None:
        self.backward(seed, without)
        self.optimizer.step()
        self.expected.step()

    def check(self) -> None:
        for a, b in zip(flat(self.mine), flat(self.its), strict=True):
            assert torch.equal(a, b)
            got, want = self.optimizer.state[a], self.expected.state[b]
            assert list(got) == list(want)
            for key, value in want.items():
                assert (
                    torch.equal(got[key], value)
                    if isinstance(value, Tensor)
                    else (got[key] == value)
                )


class Traffic(TorchDispatchMode):
    """Counts copies between host state and other memory, and the peak of the copies."""

    def __init__(self) -> None:
        super().__init__()
        self.hosts: list[Tensor] = []
        self.to_device = self.to_host = self.peak = 0
        self._here: list[tuple[StorageWeakRef, int]] = []

    @contextmanager
    def counting(self) -> Iterator[None]:
        plain = host_state.host_tensor

        def host_tensor(*args: Any, **kwargs: Any) -> Tensor:
            self.hosts.append(plain(*args, **kwargs))
            return self.hosts[-1]

        with patch.object(host_state, "host_tensor", host_tensor), self:
            yield

    def is_host(self, tensor: Tensor) -> bool:
        starts = [(one.data_ptr(), one.nbytes) for one in self.hosts]
        return any(start <= tensor.data_ptr() < start + nbytes for start, nbytes in starts)

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op is torch.ops.aten.copy_.default and self.is_host(args[0]) != self.is_host(args[1]):
            if self.is_host(args[0]):
                self.to_host += args[0].nbytes
            else:
                self.to_device += args[0].nbytes
                storage = args[0].untyped_storage()
                self._here.append((StorageWeakRef(storage), args[0].nbytes))
                self._here = [one for one in self._here if not one[0].expired()]
                self.peak = max(self.peak, sum(nbytes for _, nbytes in self._here))
        return op(*args, **(kwargs or {}))

    def restart(self) -> None:
        self.to_device = self.to_host = self.peak = 0


@pytest.mark.parametrize(("fraction", "num_hosted"), [(0, 0), (0.2, 1), (0.5, 2), (0.6, 3), (1, 4)])
def test_so_many_bytes_travel_and_two_runs_at_most_are_on_the_device(
    fraction: float, num_hosted: int
) -> None:
    sets, traffic = Sets(fraction), Traffic()
    with traffic.counting():
        sets.step(0)
        assert (traffic.to_device, traffic.to_host) == (0, num_hosted * NBYTES)
        assert sum(one.nbytes for one in traffic.hosts) == num_hosted * NBYTES
        for seed in (1, 2):
            traffic.restart()
            sets.step(seed)
            assert traffic.to_device == traffic.to_host == num_hosted * NBYTES
            assert traffic.peak == min(2, num_hosted) * NBYTES
    sets.check()
    hosted = [
        all(traffic.is_host(sets.optimizer.state[one]["exp_avg"]) for one in params)
        for params in sets.mine
    ]
    assert sum(hosted) == num_hosted
    assert not any(traffic.is_host(own["step"]) for own in sets.optimizer.state.values())


@pytest.mark.parametrize("cls", [Restless, SGD, Adam, torch.optim.Adagrad, torch.optim.Rprop])
@pytest.mark.parametrize("fraction", [0.5, 1.0])
def test_any_kind_of_state_is_streamed(cls: type[Optimizer], fraction: float) -> None:
    kwargs = {"lr": 0.1, "momentum": 0.5} if cls is SGD else {}
    sets = Sets(fraction, cls, **kwargs)
    for seed in range(6):
        sets.step(seed)
        sets.check()
    groups = (sets.optimizer.param_groups[0], sets.expected.param_groups[0])
    assert {**groups[0], "params": 0} == {**groups[1], "params": 0}


def test_what_steps_may_change_from_step_to_step() -> None:
    sets = Sets(0.5)
    for seed, without in enumerate([(), (1, 4), (0, 1, 2, 3), (5, 9), (), ()]):
        sets.step(seed, without)
    late = [parameters(neighbours(9)), parameters(neighbours(9))]
    for own, params, optimizer in zip(
        (sets.mine, sets.its), late, (sets.optimizer, sets.expected), strict=True
    ):
        own.append(params)
        group: dict[str, Any] = {"params": params, "lr": 0.5}
        if optimizer is sets.optimizer:
            group["host_fraction"] = 1.0
        optimizer.add_param_group(group)
    for seed in (7, 8):
        sets.step(seed)
    sets.check()
    assert "host_fraction" not in sets.optimizer.state_dict()["param_groups"][1]


class Marks(Lanes):
    """Counts waits of the host."""

    num_waits = 0

    def mark(self) -> Any:
        return self

    def synchronize(self) -> None:
        Marks.num_waits += 1


def test_the_host_waits_when_it_reads_and_not_before() -> None:
    with patch.object(state_stream, "make_lanes", lambda _: Marks()):
        sets = Sets(1.0)
        sets.step(0)
        sets.step(1)
        Marks.num_waits = 0
        for seed in range(3):
            sets.step(seed)
        assert Marks.num_waits == 0
        sets.optimizer.state_dict()
        assert Marks.num_waits == 1
        sets.check()
        assert Marks.num_waits == 1
        sets.step(5, without=(2,))  # a parameter without a gradient makes it read state
        assert Marks.num_waits == 1  # no copy was under way
        sets.step(6, without=(2, 3))
        assert Marks.num_waits == 2


class Fragile(AdamW):
    """Raises in one of its steps, before any change."""

    calls, fails_at = 0, -1

    def step(self, closure: Any = None) -> Any:
        Fragile.calls += 1
        if Fragile.calls == Fragile.fails_at:
            raise ArithmeticError("as asked")
        return super().step(closure)


@pytest.mark.parametrize("at", [1, 2, 3])
@pytest.mark.parametrize("before", [0, 2])
def test_a_step_that_raises_leaves_state_that_goes_on(at: int, before: int) -> None:
    """Runs that stepped before the error keep their step, as if the rest had no gradients."""
    sets = Sets(0.5, Fragile)
    sets.expected = AdamW(flat(sets.its))
    for seed in range(before):
        sets.step(seed)
    sets.backward(5)
    Fragile.calls, Fragile.fails_at = 0, at
    with pytest.raises(ArithmeticError):
        sets.optimizer.step()
    Fragile.fails_at = -1
    # Device state (buffers 2 and 3) is stepped first, then buffer 0, then 1.
    done = {1: (), 2: (2, 3), 3: (2, 3, 0)}[at]
    for number, params in enumerate(sets.its):
        for param in params if number not in done else ():
            param.grad = None
    sets.expected.step()
    for seed in (6, 7):
        sets.step(seed)
    sets.check()


def test_state_edited_and_assigned_by_hand_is_used() -> None:
    sets = Sets(1.0)
    sets.step(0)
    for optimizer, params in ((sets.optimizer, sets.mine), (sets.expected, sets.its)):
        optimizer.state[params[0][0]]["exp_avg"].mul_(3)
        optimizer.state[params[1][1]]["exp_avg_sq"] = torch.ones(4, dtype=torch.float64)
    for seed in (1, 2):
        sets.step(seed)
    sets.check()


def test_loaded_state_does_not_pass_the_device() -> None:
    """Loaded state is cast to the dtype of the parameter, but not moved to its device."""
    sets = Sets(0.5)
    sets.step(0)
    saved = sets.expected.state_dict()
    for own in saved["state"].values():
        own["exp_avg"] = own["exp_avg"].float()
    seen: list[int] = []
    plain = Optimizer._process_value_according_to_param_policy

    def process(param: Tensor, value: Tensor, number: int, groups: Any, key: Any = None) -> Tensor:
        seen.append(number if key != "step" else -1)
        return plain(param, value, number, groups, key)

    with patch.object(Optimizer, "_process_value_according_to_param_policy", process):
        sets.optimizer.load_state_dict(saved)
    assert set(seen) == {-1, *range(8, 16)}  # the device state of buffers 2 and 3
    sets.expected.load_state_dict(saved)
    for seed in (1, 2):
        sets.step(seed)
    sets.check()
    on_host = sets.optimizer.params_on_host()
    assert [id(one) for one in on_host] == [id(one) for one in flat(sets.mine[:2])]


@pytest.mark.parametrize(
    ("sizes", "fraction", "expected"),
    [
        ([], 1.0, []),
        ([4, 4, 4, 4], 0.5, [0, 1]),
        ([4, 4, 4, 4], 0.51, [0, 1, 2]),
        ([9, 1, 1, 1], 0.2, [1, 2, 3]),  # 9 is enough, but needs more memory on the device
        ([1, 9, 9, 1], 0.4, [1]),  # no more than needed
        ([3, 5], 1.0, [0, 1]),
        ([3, 0], 1.0, [0]),
        ([3, 5], 0.0, []),
    ],
)
def test_the_least_that_is_enough(sizes: list[int], fraction: float, expected: list[int]) -> None:
    assert fewest(sizes, fraction) == expected


@pytest.mark.parametrize("fraction", [-0.1, 1.5, float("nan"), True, "half", None])
def test_other_fractions_are_refused(fraction: Any) -> None:
    expected = ConfigError if isinstance(fraction, float) else ArgumentTypeError
    params = parameters(neighbours(0))
    with pytest.raises(expected, match="host_fraction="):
        ShardedOptimizer(params, Adam, host_fraction=fraction)
    with pytest.raises(expected, match="host_fraction="):
        ShardedOptimizer([{"params": params, "host_fraction": fraction}], Adam)
    optimizer = ShardedOptimizer(params[:2], Adam)
    with pytest.raises(expected, match="host_fraction="):
        optimizer.add_param_group({"params": params[2:], "host_fraction": fraction})
    assert len(optimizer.param_groups) == 1


def test_optimizers_that_do_not_host_refuse() -> None:
    params = [nn.Parameter(torch.ones(4, 4))]
    for make in (
        lambda: OwnedOptimizer(params, torch.optim.Adafactor, host_fraction=0.5),
        lambda: OwnedOptimizer([{"params": params, "host_fraction": 0.5}], torch.optim.Adafactor),
        lambda: Muon(nn.Linear(4, 4), adamw={"host_fraction": 0.5}),
        lambda: Muon(nn.Linear(4, 4), rule={"bias": {"algorithm": "adamw", "host_fraction": 0.5}}),
    ):
        with pytest.raises(UnsupportedError, match="only ShardedOptimizer has state in host"):
            make()
