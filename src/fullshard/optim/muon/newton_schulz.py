"""Newton-Schulz iterations: matrices of one shape made nearly orthogonal, many in one product."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor

Coefficients = tuple[float, float, float]

COEFFICIENTS: Coefficients = (3.4445, -4.7750, 2.0315)
"""Of the quintic that ``torch.optim.Muon`` iterates; singular values end between 0.7 and 1.2."""

_MOST_NUMEL = 1 << 27
"""Elements of the matrices that go through one product; they are copied, see ``orthogonalise``."""

_TRIED_NUMEL, _MOST_TRIALS = 1 << 20, 512
"""Elements of square products that a trial compares, and its largest number of rounds. CPUs were
seen to round one element of a hundred thousand differently; one small matrix rarely shows that."""

_rounds_alike: dict[Hashable, bool] = {}


def orthogonalise(
    matrices: Sequence[Tensor],
    *,
    coefficients: Coefficients = COEFFICIENTS,
    steps: int = 5,
    eps: float = 1e-7,
    dtype: torch.dtype = torch.bfloat16,
    batched: bool | None = None,
) -> list[Tensor]:
    """Return each of ``matrices`` with its singular values moved close to 1.

    The products of one matrix are those of ``torch.optim.Muon``, in its order. Products of many
    matrices at once need fewer kernels, but a device may add up in another order there. A trial on
    random numbers, once per polynomial, shape, count, dtype and device, shows whether results are
    bit-equal.

    Args:
        matrices: of one shape (m, n), on one device; they are not changed.
        coefficients: a, b and c of the polynomial a x + b x^3 + c x^5.
        steps: how often the polynomial is applied.
        eps: the least norm by which a matrix is divided.
        dtype: of all products, and of the result.
        batched: whether matrices go through one product. None: if a trial finds results bit-equal
            to those of each matrix alone, so results do not depend on the number of matrices.
    """
    polynomial = (coefficients, steps, eps)
    results: list[Tensor] = []
    for some in _portions(matrices):
        alike = batched
        if alike is None:
            alike = len(some) > 1 and _round_alike(some, polynomial, dtype)
        results += _together(some, polynomial, dtype) if alike else _alone(some, polynomial, dtype)
    return results


_Polynomial = tuple[Coefficients, int, float]


def _portions(matrices: Sequence[Tensor]) -> list[Sequence[Tensor]]:
    size = max(1, _MOST_NUMEL // max(1, matrices[0].numel())) if matrices else 1
    return [matrices[start : start + size] for start in range(0, len(matrices), size)]


def _alone(matrices: Sequence[Tensor], polynomial: _Polynomial, dtype: torch.dtype) -> list[Tensor]:
    return [
        _iterated(_wide(matrix.to(dtype, copy=True)), polynomial, is_tall=_is_tall(matrix))
        for matrix in matrices
    ]


def _together(
    matrices: Sequence[Tensor], polynomial: _Polynomial, dtype: torch.dtype
) -> list[Tensor]:
    first = matrices[0]
    stack = torch.empty(len(matrices), *first.shape, dtype=dtype, device=first.device)
    torch._foreach_copy_(list(stack), list(matrices))
    return list(_iterated(_wide(stack), polynomial, is_tall=_is_tall(first)))


def _iterated(wide: Tensor, polynomial: _Polynomial, *, is_tall: bool) -> Tensor:
    """Return the result for one matrix or a stack of them, which is overwritten."""
    (a, b, c), steps, eps = polynomial
    product: Callable[..., Tensor] = torch.addmm if wide.dim() == 2 else torch.baddbmm
    # Norms one by one: a norm is one number, whose last bit no trial would show.
    many = wide if wide.dim() == 3 else wide[None]
    norms = torch.stack([one.norm() for one in many]).view(*wide.shape[:-2], 1, 1)
    wide.div_(norms.clamp(min=eps))
    for _ in range(steps):
        gram = wide @ wide.mT
        gram = product(gram, gram, gram, beta=b, alpha=c)
        wide = product(wide, gram, wide, beta=a)
    return wide.mT if is_tall else wide


def _round_alike(matrices: Sequence[Tensor], polynomial: _Polynomial, dtype: torch.dtype) -> bool:
    """Return whether the products of many matrices round as those of each matrix alone."""
    first, count = matrices[0], len(matrices)
    if first.is_meta:
        return True
    how = (torch.get_num_threads(), torch.get_float32_matmul_precision())
    key = (first.device, dtype, count, tuple(first.shape), polynomial, how)
    if key not in _rounds_alike:
        trials = min(-(-_TRIED_NUMEL // max(1, count * min(first.shape) ** 2)), _MOST_TRIALS)
        seeds = (range(start, start + count) for start in range(0, trials * count, count))
        _rounds_alike[key] = all(_are_alike(first, some, polynomial, dtype) for some in seeds)
    return _rounds_alike[key]


def _are_alike(
    like: Tensor, seeds: Sequence[int], polynomial: _Polynomial, dtype: torch.dtype
) -> bool:
    given = [_numbers(like.shape, seed, like) for seed in seeds]
    many, alone = _together(given, polynomial, dtype), _alone(given, polynomial, dtype)
    return all(map(torch.equal, many, alone))


def _numbers(shape: Sequence[int], seed: int, like: Tensor) -> Tensor:
    """Return numbers in (-1, 1) that no random state decides; not those of a matrix of low rank."""
    count = torch.arange(torch.Size(shape).numel(), device=like.device, dtype=torch.float32)
    return torch.sin(count * 12.9898 + seed * 78.233).mul(43758.5453).frac().view(*shape)


def _wide(matrices: Tensor) -> Tensor:
    """Return matrices that are at least as wide as high."""
    return matrices.mT if _is_tall(matrices) else matrices


def _is_tall(matrices: Tensor) -> bool:
    return matrices.shape[-2] > matrices.shape[-1]
