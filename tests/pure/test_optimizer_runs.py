"""Runs follow the memory of parameters after any change of it, and keep any kind of state."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

from fullshard._torch import memory as _memory
from fullshard.optim import ShardedOptimizer
from fullshard.optim.clip import coalesced
from fullshard.tensors import cut_flat
from tests.kit.owned import Restless
from tests.pure.buffers import NUMELS, SHAPES, neighbours, parameters

TIGHT = (0, 6, 10, 11)  # starts without padding


class Both:
    """Equal parameters twice: of a ShardedOptimizer, and of its plain class."""

    def __init__(self, cls: type[Optimizer] = Adam, **kwargs: Any) -> None:
        self.mine, self.its = parameters(neighbours(0)), parameters(neighbours(0))
        self.optimizer = ShardedOptimizer(self.mine, cls, **kwargs)
        self.expected = cls(self.its, **kwargs)

    def step(self, grads: Sequence[Tensor | None], *, num_runs: int) -> None:
        """Step both, the plain one with copies of the gradients, and compare."""
        for param, other, grad in zip(self.mine, self.its, grads, strict=True):
            param.grad, other.grad = grad, None if grad is None else grad.clone()
        self.optimizer.step()
        self.expected.step()
        self.check()
        assert self.optimizer.num_runs == num_runs

    def check(self) -> None:
        for a, b in zip(self.mine, self.its, strict=True):
            assert torch.equal(a, b)
            assert list(self.optimizer.state[a]) == list(self.expected.state[b])
            for key, value in self.expected.state[b].items():
                got = self.optimizer.state[a][key]
                assert torch.equal(got, value) if isinstance(value, Tensor) else got == value
        groups = (self.optimizer.param_groups, self.expected.param_groups)
        for group, other in zip(*groups, strict=True):
            assert {**group, "params": 0} == {**other, "params": 0}


def test_neighbours_step_as_one_wherever_their_gradients_are() -> None:
    both = Both()
    for seed in range(4):
        both.step(neighbours(seed), num_runs=1)
    grads = neighbours(5)
    for _ in range(2):
        both.step(grads, num_runs=1)


def test_gradients_that_lie_otherwise_split_a_run_as_long_as_they_do() -> None:
    both = Both()
    both.step(neighbours(1), num_runs=1)
    replaced = neighbours(2)
    replaced[1] = replaced[1] * 3  # no longer in the buffer
    both.step(replaced, num_runs=3)
    both.step([grad * 2 for grad in neighbours(3)], num_runs=4)
    both.step([grad * 2 for grad in neighbours(4)], num_runs=4)
    both.step(neighbours(5), num_runs=1)
    both.step(neighbours(6, starts=TIGHT), num_runs=3)  # two are adjacent, as their parameters are
    both.step(neighbours(7), num_runs=1)
    one, other = neighbours(8), neighbours(9)
    both.step([*one[:2], *other[2:]], num_runs=2)
    both.step(neighbours(10), num_runs=1)
    turned = neighbours(11)
    turned[0] = turned[0].t().contiguous().t()
    both.step(turned, num_runs=2)
    one_tensor = torch.cat([grad.flatten() for grad in neighbours(12)])
    parts = zip(one_tensor.split(NUMELS), SHAPES, strict=True)
    both.step([part.view(shape) for part, shape in parts], num_runs=4)  # not cut by ``cut_flat``
    both.step(neighbours(13), num_runs=1)


def move(params: Sequence[nn.Parameter], starts: Sequence[int]) -> None:
    """Move parameters to another buffer, as ``.to()`` and loading do."""
    for param, part in zip(params, neighbours(0, starts), strict=True):
        param.data = part.copy_(param.data)
        param.part = part


def test_parameters_that_moved_are_found() -> None:
    both = Both(SGD, lr=0.1, momentum=0.9)
    both.step(neighbours(1), num_runs=1)
    move(both.mine, TIGHT)
    both.step(neighbours(2, starts=TIGHT), num_runs=1)
    move(both.mine, (1, 8, 12, 16))
    both.mine[1].data = both.mine[1].data.clone()  # no longer in the buffer
    both.step(neighbours(3, starts=(1, 8, 12, 16)), num_runs=3)
    move(both.mine, TIGHT)
    both.step(neighbours(4, starts=TIGHT), num_runs=1)


def test_a_parameter_that_comes_back_joins_its_neighbours() -> None:
    both = Both(SGD, lr=0.1, momentum=0.9)
    part = both.mine[1].data
    both.mine[1].data = part.clone()
    both.step(neighbours(1), num_runs=3)
    both.mine[1].data = part.copy_(both.mine[1].data)
    both.step(neighbours(2), num_runs=1)


def test_parts_keep_their_buffer() -> None:
    both = Both()
    grads = neighbours(1)
    gc.collect()
    both.step(grads, num_runs=1)
    lone = copy.deepcopy(grads)
    both.step(lone, num_runs=4)


def test_missing_gradients_split_a_run_for_good_if_state_has_an_age() -> None:
    for cls, at_last in ((Adam, 3), (SGD, 1)):
        both = Both(cls)
        both.step(neighbours(1), num_runs=1)
        some: list[Tensor | None] = [*neighbours(2)]
        some[1] = None
        both.step(some, num_runs=2)
        both.step(neighbours(3), num_runs=at_last)


def test_another_parameter_in_the_place_of_one() -> None:
    both = Both()
    for params, optimizer in ((both.mine, both.optimizer), (both.its, both.expected)):
        params[2] = optimizer.param_groups[0]["params"][2] = nn.Parameter(torch.ones(1).double())
    both.step(neighbours(1), num_runs=3)
    plain = nn.Parameter(torch.ones(1).double())
    optimizer = ShardedOptimizer([plain], SGD, lr=1.0)
    for _ in range(2):
        other = nn.Parameter(torch.ones(1).double())
        other.grad = torch.ones_like(other)
        optimizer.param_groups[0]["params"][0] = other
        optimizer.step()
        assert other.item() == 0


@pytest.mark.parametrize("cls", [Restless, SGD, Adam, torch.optim.Rprop, torch.optim.Adagrad])
def test_any_kind_of_state_is_kept(cls: type[Optimizer]) -> None:
    both = Both(cls)
    buffer = neighbours(0)  # reused for each step's gradients, as the engine does
    for seed in range(1, 9):
        for part, values in zip(buffer, neighbours(seed), strict=True):
            part.copy_(values)
        skips = seed % 3 == 1 and cls is not SGD
        grads = [None if skips and at == 1 else part for at, part in enumerate(buffer)]
        stateless = cls is SGD
        both.step(grads, num_runs=1 if stateless else 2 if skips else 3)


def test_what_is_held_of_the_state_follows() -> None:
    for cls, key in ((Restless, "mean"), (Adam, "exp_avg")):
        both = Both(cls)
        both.step(neighbours(1), num_runs=1)
        held = [both.optimizer.state[param][key] for param in both.mine]
        some: list[Tensor | None] = [*neighbours(2)]
        some[2] = None
        both.step(neighbours(3), num_runs=1)
        both.step(some, num_runs=2)
        both.step(neighbours(4), num_runs=3)
        now = [both.optimizer.state[param][key] for param in both.mine]
        assert all(torch.equal(a, b) for a, b in zip(held, now, strict=True))


# coalesced()


def values_of(tensors: Sequence[Tensor]) -> list[float]:
    return sorted(value for tensor in tensors for value in tensor.flatten().tolist())


def pieces(starts: Sequence[int]) -> list[Tensor]:
    return neighbours(0, starts)


@pytest.mark.parametrize(
    ("choose", "expected"),
    [
        (lambda: pieces(TIGHT), [17]),
        (lambda: pieces(TIGHT)[:2], [10]),
        (lambda: pieces(TIGHT)[::2], [6, 1]),
        (lambda: pieces(TIGHT)[::-1], [17]),
        (lambda: pieces((0, 8, 12, 16)), [6, 5, 6]),
        (lambda: [*pieces(TIGHT), torch.ones(0), torch.ones(3)], [17, 3]),
        (lambda: [*pieces(TIGHT)[:2], *pieces(TIGHT)[2:]], [10, 7]),
        (lambda: [torch.ones(3, 2).t(), *pieces(TIGHT)], [6, *NUMELS]),
        (lambda: [], []),
    ],
)
def test_neighbours_are_joined(choose: Callable[[], list[Tensor]], expected: list[int]) -> None:
    tensors = choose()
    found = coalesced(tensors)
    assert sorted(t.numel() for t in found) == sorted(expected)
    assert values_of(found) == values_of(tensors)


def test_two_buffers_one_after_the_other_are_not_joined() -> None:
    memory = torch.arange(8.0)
    halves = [_memory.own_storage(memory[:4]), _memory.own_storage(memory[4:])]
    parts = [part for half in halves for part in cut_flat(half, [(0, (2,)), (2, (2,))])]
    assert [part.tolist() for part in coalesced(parts)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    swapped = [*parts[2:], *parts[:2]]  # in the given order, not that of memory
    assert [part.tolist() for part in coalesced(swapped)] == [[4, 5, 6, 7], [0, 1, 2, 3]]
    assert [tuple(part.shape) for part in coalesced(parts[:2])] == [(4,)]


def test_parts_seen_in_another_dtype_are_not_joined() -> None:
    parts = cut_flat(torch.arange(6.0) + 0j, [(0, (2,)), (4, (2,))])
    seen = list(map(torch.view_as_real, parts))
    assert [part.tolist() for part in coalesced(seen)] == [part.tolist() for part in seen]
