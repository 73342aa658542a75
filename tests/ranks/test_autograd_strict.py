"""The strict mode finds reads of freed memory and changes no values."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from tests.ranks.autograd import Tower, loss_of
from tests.ranks.models import fill, noise
from tests.ranks.strict import strict


def free(tensor: Tensor) -> None:
    tensor.untyped_storage().resize_(0)


def plain(block: nn.Module, x: Tensor) -> Tensor:
    return block(x)


def non_reentrant(block: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(block, x, use_reentrant=False)


def reentrant(block: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(block, x, use_reentrant=True)


Way = Callable[[nn.Module, Tensor], Tensor]
ways = pytest.mark.parametrize("way", [plain, non_reentrant, reentrant])


def batch() -> Tensor:
    return noise(4, 6).requires_grad_()


class Frees(nn.Module):
    """A module that frees its weight at the end of its last forward, before backward reads it."""

    def __init__(self, last: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 6, dtype=torch.float64))
        self.num_left = last

    def forward(self, x: Tensor) -> Tensor:
        y = (x * self.weight).sin()
        self.num_left -= 1
        if self.num_left == 0:
            free(self.weight)
        return y


@ways
def test_a_read_of_freed_memory_fails_with_its_shape(way: Way) -> None:
    model = Frees(1 if way is plain else 2)
    with strict(), set_checkpoint_early_stop(False):
        loss = loss_of(way(model, batch()))
        with pytest.raises(AssertionError, match=r"shape \(4, 6\) was read"):
            loss.backward()


def test_so_does_saving_it() -> None:
    weight = nn.Parameter(torch.ones(4, 6))
    free(weight)
    with strict(), pytest.raises(AssertionError, match=r"shape \(4, 6\) was saved"):
        torch.ones(4, 6, requires_grad=True) * weight


def test_what_shrank_below_a_view_of_it_counts_as_freed() -> None:
    buffer = noise(24)
    with strict():
        y = batch() * buffer[18:]
        buffer.untyped_storage().resize_(20 * 8)
        with pytest.raises(AssertionError, match=r"shape \(6,\)"):
            y.sum().backward()


def test_empty_tensors_need_no_memory() -> None:
    x = torch.zeros(0, 3, requires_grad=True)
    with strict():
        (x * torch.zeros(0, 3)).sum().backward()
    assert x.grad is not None


@ways
def test_gradients_are_the_same_bits(way: Way) -> None:
    def gradients() -> list[Tensor]:
        model = fill(Tower().double())
        x = batch()
        y = x * 1
        for block in model.blocks:
            y = way(block, y).mul_(2).tanh_()
        loss_of(y.tanh()).backward()
        found = [p.grad for p in (x, *model.blocks.parameters()) if p.grad is not None]
        assert len(found) == 13
        return found

    expected = gradients()
    with strict():
        assert all(map(torch.equal, expected, gradients()))


def test_second_derivatives_are_the_same_bits() -> None:
    def second() -> Tensor:
        x = batch()
        (grad,) = torch.autograd.grad(x.exp().tanh().sum(), x, create_graph=True)
        return torch.autograd.grad(grad.square().sum(), x)[0]

    expected = second()
    with strict():
        assert torch.equal(second(), expected)


def test_a_change_in_place_is_still_refused() -> None:
    with strict():
        y = batch().exp()
        loss = y.sum()
        y.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_a_graph_is_freed_with_its_last_output() -> None:
    gc.disable()
    try:
        with strict():
            hidden = batch().exp().exp()  # exp saves its output
            gone = weakref.ref(hidden)
            y = hidden.tanh()
            del hidden
            storage = y.untyped_storage()
            del y
        assert gone() is None
        assert storage.nbytes() > 0
    finally:
        gc.enable()


def test_it_ends_with_its_context() -> None:
    before = torch.autograd.graph.saved_tensors_hooks.__init__
    with strict():
        assert torch.autograd.graph.saved_tensors_hooks.__init__ is not before
    assert torch.autograd.graph.saved_tensors_hooks.__init__ is before
