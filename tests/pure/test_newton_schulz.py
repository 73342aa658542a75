"""Newton-Schulz of many matrices at once, and Muon on unsharded matrices."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim._muon import _zeropower_via_newtonschulz
from torch.utils._python_dispatch import TorchDispatchMode

from fullshard.errors import ConfigError, UnsupportedError
from fullshard.optim.muon.full import FullMuon, matrices_of
from fullshard.optim.muon.newton_schulz import COEFFICIENTS, orthogonalise
from tests.ranks.models import noise

SHAPES = [(16, 16), (8, 24), (24, 8), (3, 5), (33, 65), (1, 7), (7, 1)]


def matrices(shape: tuple[int, ...], count: int = 4) -> list[Tensor]:
    return [noise(*shape, seed=seed) for seed in range(count)]


@pytest.mark.parametrize("shape", SHAPES)
def test_many_are_what_torch_makes_of_each(shape: tuple[int, int]) -> None:
    given = matrices(shape)
    before = copy.deepcopy(given)
    expected = [_zeropower_via_newtonschulz(one, COEFFICIENTS, 5, 1e-7) for one in given]
    for batched in (None, False):
        found = orthogonalise(given, batched=batched)
        assert all(map(torch.equal, found, expected))
    assert all(map(torch.equal, given, before))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", SHAPES)
def test_many_are_bit_equal_to_one_in_any_dtype(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """With (3, 5), some processors round batched products differently; a trial detects that."""
    given = matrices(shape)
    alone = [orthogonalise([one], dtype=dtype)[0] for one in given]
    assert all(map(torch.equal, orthogonalise(given, dtype=dtype), alone))
    for one, other in zip(orthogonalise(given, dtype=dtype, batched=True), alone, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("shape", [(16, 32), (48, 16)])
def test_rare_roundings_are_found_by_the_trial(shape: tuple[int, int]) -> None:
    """Some processors round one of a hundred products differently when two are batched."""
    for seed in range(0, 800, 2):
        given = [noise(*shape, seed=seed), noise(*shape, seed=seed + 1)]
        expected = [_zeropower_via_newtonschulz(one, COEFFICIENTS, 5, 1e-7) for one in given]
        assert all(map(torch.equal, orthogonalise(given), expected)), seed


def test_singular_values_end_near_one() -> None:
    """For tall and wide matrices, in fp64 and bf16; bf16 inputs are not overwritten."""
    for shape in ((40, 20), (20, 40)):
        for dtype in (torch.float64, torch.bfloat16):
            (one,) = [noise(*shape).to(dtype)]
            before = one.clone()
            (found,) = orthogonalise([one])
            values = torch.linalg.svdvals(found.double())
            assert 0.6 < values.min() <= values.max() < 1.3
            assert torch.equal(one, before)


def test_portions_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    given = matrices((6, 9), count=7)
    expected = orthogonalise(given)
    monkeypatch.setattr("fullshard.optim.muon.newton_schulz._MOST_NUMEL", 2 * 6 * 9 + 1)
    assert all(map(torch.equal, orthogonalise(given), expected))


OPTIONS: list[dict[str, Any]] = [
    {},
    {"nesterov": False, "momentum": 0.5},
    {"adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.0},
    {"adjust_lr_fn": "original", "ns_steps": 3, "eps": 1e-3, "ns_coefficients": (2.0, -1.5, 0.5)},
    {"lr": torch.tensor(0.03125)},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: ",".join(options) or "defaults")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_it_is_the_muon_of_torch(options: dict[str, Any], dtype: torch.dtype) -> None:
    """Bit-equal, state included, with equal and unequal shapes, and missing gradients."""
    shapes = [(8, 24), (16, 16), (8, 24), (24, 8), (16, 16), (5, 3)]
    mine, its = (
        [nn.Parameter(noise(*shape, seed=seed, dtype=dtype)) for seed, shape in enumerate(shapes)]
        for _ in range(2)
    )
    optimizer = FullMuon(mine, **{"lr": 0.02, **options})
    reference = torch.optim.Muon(its, **{"lr": 0.02, **options})
    for step in range(4):
        for seed, (one, other) in enumerate(zip(mine, its, strict=True)):
            grad = noise(*one.shape, seed=10 * step + seed, dtype=dtype)
            one.grad = other.grad = None if step == seed else grad
        optimizer.step()
        reference.step()
        assert all(map(torch.equal, mine, its))
    for one, other in zip(mine, its, strict=True):
        assert set(optimizer.state[one]) == set(reference.state[other]) == {"momentum_buffer"}
        found = optimizer.state[one]["momentum_buffer"]
        assert torch.equal(found, reference.state[other]["momentum_buffer"])


@pytest.mark.parametrize(
    ("shape", "stacked", "cut"),
    [((6, 2, 3, 3), 0, (6, 18)), ((4, 5, 6), 1, (5, 6)), ((2, 3, 5, 4), 2, (5, 4))],
)
def test_parameters_of_more_dims_are_their_matrices(
    shape: tuple[int, ...], stacked: int, cut: tuple[int, int]
) -> None:
    """A convolution is one matrix; a stack of experts has one matrix per expert."""
    whole = nn.Parameter(noise(*shape))
    whole.grad = noise(*shape, seed=1)
    parts = [nn.Parameter(part.clone()) for part in matrices_of(whole.detach(), stacked)]
    for part, grad in zip(parts, matrices_of(whole.grad, stacked), strict=True):
        assert part.shape == cut
        part.grad = grad.clone()
    FullMuon([whole], stacked=stacked).step()
    torch.optim.Muon(parts).step()
    assert torch.equal(whole.detach().flatten(), torch.cat([p.detach().flatten() for p in parts]))


class Counts(TorchDispatchMode):
    """Counts the calls of each operation."""

    def __init__(self) -> None:
        super().__init__()
        self.of: Counter[str] = Counter()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.of[op.overloadpacket.__name__] += 1
        return op(*args, **(kwargs or {}))


def test_a_stack_of_experts_goes_through_one_product_at_a_time() -> None:
    groups = [{"params": [nn.Parameter(noise(4, 8, 8))], "stacked": 1}]
    optimizer = FullMuon(groups)
    assert [tuple(one.shape) for one in matrices_of(groups[0]["params"][0], 1)] == [(8, 8)] * 4
    groups[0]["params"][0].grad = noise(4, 8, 8, seed=1)
    optimizer.step()  # the first step runs the trial
    with Counts() as counts:
        optimizer.step()
    assert (counts.of["baddbmm"], counts.of["bmm"], counts.of["addmm"]) == (10, 5, 0)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"lr": -1.0}, "lr=-1.0"),
        ({"momentum": float("nan")}, "momentum=nan"),
        ({"ns_steps": 100}, "ns_steps=100"),
        ({"ns_coefficients": (1.0, 2.0)}, "three numbers"),
        ({"adjust_lr_fn": "other"}, "match_rms_adamw"),
        ({"ns_dtype": "int8"}, "bfloat16"),
    ],
)
def test_values_that_cannot_work_are_refused(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        FullMuon([nn.Parameter(torch.zeros(2, 2))], **options)


def test_what_is_no_matrix_is_refused_and_not_added() -> None:
    optimizer = FullMuon([nn.Parameter(torch.zeros(2, 2))])
    for bad in (torch.zeros(3), torch.zeros(2, 2, dtype=torch.complex64)):
        with pytest.raises(UnsupportedError, match="AdamW"):
            optimizer.add_param_group({"params": [nn.Parameter(bad)]})
    with pytest.raises(UnsupportedError, match="stacks of matrices"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2, 2))], "stacked": 1})
    assert len(optimizer.param_groups) == 1
