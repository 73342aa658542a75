"""Guarantees of codecs: sizes, error bounds, non-finite values, and numbers of kernels."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import fullshard
from fullshard import WirePolicy
from fullshard.comm import INT4, Blocks, Cast, round_trip
from fullshard.errors import ConfigError

INT8, FP8 = torch.int8, torch.float8_e4m3fn
BF16 = Cast(torch.bfloat16)
_ROUNDING = 1 + 2.0**-20  # rounding errors of the scale and of the quotient, in fp32
_NARROW = (1 + 2.0**-8) * _ROUNDING  # rounding error of a scale in bf16
_LEAST = 2.0**-126  # the smallest scale
every_kind = pytest.mark.parametrize("kind", [INT8, FP8, INT4], ids=["int8", "fp8", "int4"])


def bound(blocks: Tensor, kind: torch.dtype) -> Tensor:
    """Return the error bound of each element; ``blocks`` are ``[n, block]`` in fp64."""
    largest = blocks.abs().amax(-1, keepdim=True)
    if kind is INT4:
        return ((largest / 14).clamp_min(_LEAST) * _NARROW).expand_as(blocks)
    if kind is INT8:
        return ((largest / 254).clamp_min(_LEAST) * _ROUNDING).expand_as(blocks)
    step = (largest / 448).clamp_min(_LEAST) * 2.0**-10  # half of the smallest e4m3 number, 2^-9
    return torch.maximum(blocks.abs() / 16, step) * _ROUNDING


most = float(torch.tensor(3.4e38))  # a larger number may round to inf
values = st.floats(-most, most, width=32)


@every_kind
@settings(max_examples=200, deadline=None)
@given(st.lists(values, min_size=32, max_size=32))
def test_an_element_is_off_by_half_a_step_at_most(kind: torch.dtype, numbers: list[float]) -> None:
    exact = torch.tensor(numbers).view(1, -1)
    arrived = round_trip(Blocks(kind, 16), exact)
    blocks, error = exact.double().view(2, 16), (arrived.double() - exact).abs().view(2, 16)
    assert bool((error <= bound(blocks, kind)).all())


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 1 << 32), st.sampled_from([16, 32, 64, 128]), st.integers(1, 300))
def test_int4_in_any_blocks_is_the_same_for_all_who_decode(seed: int, block: int, n: int) -> None:
    """Encoding works row by row, and a row decodes to equal values alone and with others."""
    values = torch.randn(3, n, generator=torch.Generator().manual_seed(seed)) ** 3
    codec, whole = Blocks(INT4, block), torch.empty(3, n)
    sent = codec.encode([values])
    codec.decode(sent, [whole])
    num_blocks = -(-n // block)
    assert sent.shape == (3, -(-num_blocks * (block // 2 + 2) // 16) * 16)
    used, alone = num_blocks * (block // 2 + 2), torch.empty(3, n)
    for row in range(3):
        own = slice(row, row + 1)
        assert torch.equal(codec.encode([values[own]])[:, :used], sent[own, :used])
        codec.decode(sent[own], [alone[own]])
    assert torch.equal(alone, whole)
    blocks = torch.nn.functional.pad(values.double(), (0, -n % block)).view(-1, block)
    limit = bound(blocks, INT4).reshape(3, -1)[:, :n]
    assert bool(((whole.double() - values).abs() <= limit).all())


def test_what_int4_loses_of_normal_and_of_heavy_tails() -> None:
    """The errors of docs/wire.md: shares of the norm, by block size."""
    torch.manual_seed(0)
    normal = torch.randn(1, 1 << 18)
    heavy = torch.distributions.StudentT(3.0).sample(normal.shape)  # type: ignore[no-untyped-call]
    for block, *expected in ((64, 0.108, 0.18), (32, 0.097, 0.144), (16, 0.085, 0.113)):
        for values, share in zip((normal, heavy), expected, strict=True):
            arrived = round_trip(Blocks(INT4, block), values)
            found = ((arrived - values).norm() / values.norm()).item()
            assert found == pytest.approx(share, rel=0.05)
    zeros = (round_trip(Blocks(INT4, 64), normal) == 0).float().mean().item()
    assert zeros == pytest.approx(1 / 7, rel=0.05)


@pytest.mark.parametrize(("is_once", "share"), [(True, 0.108), (False, 0.188)])
def test_what_means_over_two_replicas_of_two_shards_lose(is_once: bool, share: float) -> None:
    """Gradients travel in int4, then means in the codec for means, or in int4 again."""
    torch.manual_seed(0)
    grads, first = torch.randn(4, 1 << 16), Blocks(INT4, 64)
    then = first.for_means if is_once else first
    means = round_trip(first, grads).view(2, 2, -1).mean(1)
    arrived = round_trip(then, round_trip(then, means).mean(0, keepdim=True))
    exact = grads.mean(0, keepdim=True)
    assert ((arrived - exact).norm() / exact.norm()).item() == pytest.approx(share, rel=0.03)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@every_kind
def test_all_dtypes_and_sizes(kind: torch.dtype, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    codec = Blocks(kind, 64)
    for sizes in ((64,), (200,), (1,), (0,), (128, 64, 200), (7, 64)):
        sent = [torch.randn(3, size).to(dtype) for size in sizes]
        found = [torch.empty_like(one) for one in sent]
        codec.decode(codec.encode(sent), found)
        for one, other in zip(sent, found, strict=True):
            filled = torch.nn.functional.pad(one.double(), (0, -one.shape[1] % 64)).view(-1, 64)
            limit = bound(filled, kind).reshape(3, -1)[:, : one.shape[1]]
            off = (other.double() - one).abs()
            rounded = one.double().abs().max() * torch.finfo(dtype).eps if one.numel() else 0
            assert bool((off <= limit + rounded).all())


def test_bytes() -> None:
    """INT8 takes a byte per element in whole blocks, and 4 bytes per scale; rows are padded to 16.

    INT4 takes half a byte per element, and 2 bytes per scale.
    """
    codec = Blocks(INT8, 64)
    assert codec.nbytes([64 * 12]) == 12 * 68 == 816
    assert codec.nbytes([65]) == 2 * 68 + 8 == 144
    assert codec.nbytes([64, 1], exact=8) == 2 * 68 + 4 * 8 + 8 == 176
    assert codec.encode([torch.ones(3, 65)]).shape == (3, 144)
    half = Blocks(INT4, 64)
    assert half.nbytes([64 * 8]) == 8 * 34 == 272
    assert half.nbytes([65]) == 2 * 34 + 12 == 80
    assert half.nbytes([64, 1], exact=8) == 2 * 34 + 4 * 8 + 12 == 112
    assert half.encode([torch.ones(3, 65)]).shape == (3, 80)
    assert BF16.encode([torch.ones(3, 65)]).nbytes == 3 * 65 * 2


@every_kind
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_is_not_lost(kind: torch.dtype, bad: float) -> None:
    given = torch.ones(1, 48)
    given[0, 20] = bad
    found = round_trip(Blocks(kind, 16), given)
    assert not bool(found[0, 16:32].isfinite().any())
    rest, exact = torch.cat((found[0, :16], found[0, 32:])), torch.ones(32)
    torch.testing.assert_close(rest, exact, rtol=2.0**-8 if kind is INT4 else 0, atol=0)
    assert bool(round_trip(BF16, given).isfinite().logical_not().sum() == 1)


@every_kind
def test_zeros_and_a_single_element_arrive_exactly(kind: torch.dtype) -> None:
    given = torch.zeros(2, 64)
    given[1, 5] = -3.0
    found = round_trip(Blocks(kind, 32), given)
    torch.testing.assert_close(found, given, rtol=2.0**-8 if kind is INT4 else 0, atol=0)


@every_kind
def test_exact_elements_share_no_scale(kind: torch.dtype) -> None:
    given = torch.full((2, 24), 1e30)
    given[0, 3] = float("nan")
    given[:, 16:] = torch.arange(16.0).view(2, 8) / 7
    codec, found = Blocks(kind, 16), torch.empty(2, 24)
    codec.decode(codec.encode([given], 8), [found], 8)
    assert torch.equal(found[:, 16:], given[:, 16:])


class Kernels(TorchDispatchMode):
    """Counts operations that write memory."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if not func.is_view and name not in ("empty", "detach", "alias", "new_empty", "empty_like"):
            self.found[name] += 1
        return func(*args, **kwargs or {})


def kernels(codec: Blocks | Cast, sources: list[Tensor]) -> tuple[int, int]:
    with Kernels() as encoding:
        sent = codec.encode(sources)
    with Kernels() as decoding:
        codec.decode(sent, [torch.empty_like(source) for source in sources])
    return encoding.found.total(), decoding.found.total()


def test_kernels() -> None:
    """The number of kernels does not depend on the size; several tensors take one more to join."""
    for numel in (1 << 10, 1 << 16):
        one, several = [torch.ones(1, numel)], [torch.ones(1, numel), torch.ones(1, 64)]
        assert kernels(Blocks(INT8, 64), one) == (7, 2)
        assert kernels(Blocks(FP8, 64), one) == (6, 2)
        assert kernels(Blocks(INT8, 64), several) == (8, 4)
        assert kernels(Blocks(INT4, 64), one) == (8, 6)
        assert kernels(BF16, one) == (1, 1)


def test_the_text_of_a_policy() -> None:
    for policy in (
        WirePolicy(),
        WirePolicy(gather="int8"),
        WirePolicy(gather="fp8", reduce="bf16"),
        WirePolicy(reduce="int8", block=128),
        WirePolicy(gather="int8", reduce="int4"),
    ):
        assert WirePolicy.parse(str(policy)) == policy if str(policy) else policy == WirePolicy()
    assert str(WirePolicy(reduce="int8", gather="bf16", block=32)) == (
        "gather=bf16,reduce=int8,block=32"
    )


@pytest.mark.parametrize(
    "text", ["int8", "gather=int4", "reduce=", "block=60", "block=x", "to=fp8"]
)
def test_refused_texts(text: str) -> None:
    with pytest.raises(ConfigError, match="expected"):
        WirePolicy.parse(text)


def test_int4_is_for_gradients() -> None:
    with pytest.raises(ConfigError, match="'bf16', 'int8', 'fp8'; in 4 bits only gradients"):
        WirePolicy(gather="int4")
    with pytest.raises(ConfigError, match=r"'bf16', 'int8', 'fp8', 'int4'$"):
        WirePolicy(reduce="int2")


def received(wire: WirePolicy) -> int:
    """Return the bytes that a rank receives in a planned step of one layer, on two ranks."""

    def shard(model: nn.Module, mesh: Any) -> None:
        fullshard.fully_shard(model, mesh=mesh, reshard_after_forward=True, wire=wire)

    with torch.device("meta"):
        layer, batch = nn.Linear(128, 128, bias=False), torch.empty(3, 128)
    found = fullshard.plan(
        layer, batch=batch, loss=lambda model, x: model(x).sum(), mesh={"shard": 2}, shard=shard
    )
    return sum(one.received_nbytes for one in found.traffic)


def test_a_plan_counts_what_travels() -> None:
    """Two gathers of the other rank's half, and a reduction of half the gradients with flags."""
    assert received(WirePolicy()) == 2 * 8192 * 4 + (8192 + 8) * 4
    assert received(WirePolicy("int8", "bf16")) == 2 * (8192 + 4 * 128) + (8192 + 8) * 2
    assert received(WirePolicy("fp8", "int8")) == 2 * (8192 + 4 * 128) + 8192 + 4 * 128 + 8 * 4
    half = 8192 // 2 + 2 * 128 + 8 * 4
    assert received(WirePolicy("int8", "int4")) == 2 * (8192 + 4 * 128) + half
