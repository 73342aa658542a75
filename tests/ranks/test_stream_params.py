"""``stream_params``: full weights in buckets, from every layout to any ranks."""

from __future__ import annotations

import copy
import gc
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import fullshard
from fullshard import checkpoint, fully_shard, stream_params, unshard_params
from fullshard.errors import BusyError, ConfigError, ProtocolError
from tests.kit.checkpoint_files import WAYS, plain
from tests.ranks.models import noise, shard_units
from tests.ranks.pool import RankPool, on_ranks

SIZES = (1, 3000, 100_000, 1 << 30)


def whole(model: Any) -> dict[str, Tensor]:
    return checkpoint.full_state_dict(model, rank0_only=False)


def streamed(stream: Any) -> dict[str, Tensor]:
    """Return all streamed tensors, compared with the metadata."""
    found: dict[str, Tensor] = {}
    for number, bucket in enumerate(stream):
        announced = [one for one in stream.metadata if one.bucket == number]
        assert [one.name for one in announced] == [*bucket]
        packed = bucket.packed.clone()
        for one in announced:
            tensor = bucket[one.name]
            assert (tuple(tensor.shape), tensor.dtype) == (one.shape, one.dtype)
            assert tensor.is_contiguous()
            own = packed[one.offset :][: tensor.numel() * tensor.element_size()]
            assert torch.equal(own.view(one.dtype).view(one.shape), tensor.clone())
            found[one.name] = tensor.clone()
        assert found.keys() or not announced
    return found


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        assert type(found[name]) is Tensor
        assert torch.equal(found[name], value), name


def from_every_layout(way: str) -> None:
    model = WAYS[way](plain(1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    streams = [stream_params(model, bucket_nbytes=size) for size in SIZES]
    for _ in range(2):  # each loop gives the current weights
        model(noise(4, 192, seed=1)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        expected = whole(model)
        for size, stream in zip(SIZES, streams, strict=True):
            same(streamed(stream), expected)
            sizes: dict[int, list[int]] = {}
            for one in stream.metadata:
                nbytes = torch.Size(one.shape).numel() * one.dtype.itemsize
                sizes.setdefault(one.bucket, []).append(nbytes)
            assert all(sum(own) <= size or len(own) == 1 for own in sizes.values())
            assert len(stream) == len(sizes)


def cut_unevenly() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(1)
    model: Any = nn.Sequential(nn.Linear(6, 7), nn.Linear(7, 6))
    plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
    model = parallelize_module(model, mesh["tp"], plan)
    fully_shard(model, mesh=mesh["dp"], layout=fullshard.Ragged())
    same(streamed(stream_params(model, bucket_nbytes=1 << 20)), whole(model))


def test_ranks_may_cut_a_tensor_at_different_places(pool: RankPool) -> None:
    """Tensor-parallel ranks hold 4 and 3 of 7 rows, which ragged shards cut further."""
    pool.run(4, cut_unevenly)


@pytest.mark.parametrize("way", list(WAYS))
def test_every_layout_gives_what_the_unsharded_model_has(pool: RankPool, way: str) -> None:
    for world in (1, 2, 3, 4):
        pool.run(world, from_every_layout, way)


def to_some(ranks: list[int]) -> None:
    for way in ("rows", "ragged", "hsdp", "one flat"):
        model = WAYS[way](plain(1))
        expected = whole(model)
        stream = stream_params(model, bucket_nbytes=100_000, ranks=ranks)
        found = streamed(stream)
        same(found, expected if dist.get_rank() in ranks else {})


def test_some_ranks_get_tensors_and_the_others_send(pool: RankPool) -> None:
    for ranks in ([0], [2], [0, 3], [1, 2, 3]):
        pool.run(4, to_some, ranks)
    pool.run(2, to_some, [1])


def cast_and_chosen() -> None:
    model = WAYS["ragged"](plain(1))
    expected = whole(model)
    names = ["blocks.1.up.weight", "norm.running_mean", "norm.num_batches_tracked"]
    stream = stream_params(model, bucket_nbytes=1 << 20, dtype=torch.bfloat16, names=names)
    wanted = {
        name: value.bfloat16() if value.is_floating_point() else value
        for name, value in expected.items()
        if name in names
    }
    same(streamed(stream), wanted)
    assert {one.name for one in stream.metadata} == set(names)
    same(streamed(stream_params(model, bucket_nbytes=5, names=[])), {})


def test_dtypes_are_cast_and_names_are_chosen(pool: RankPool) -> None:
    pool.run(1, cast_and_chosen)
    pool.run(3, cast_and_chosen)


@on_ranks(2)
def test_a_tensor_of_an_earlier_bucket_raises() -> None:
    model = WAYS["rows"](plain(1))
    expected = whole(model)
    stream = stream_params(model, bucket_nbytes=1)
    kept: list[tuple[str, Tensor, Tensor]] = []
    for bucket in stream:
        for name, tensor in bucket.items():
            if tensor.dim() == 2:
                view = tensor[1:].t()
                assert torch.equal(view * 1, expected[name][1:].t())
                param = nn.Parameter(torch.empty_like(tensor))
                param.data.copy_(tensor)
                assert type(param.data) is Tensor and torch.equal(param, expected[name])
                assert torch.equal(torch.cat(tensor.chunk(2)), expected[name])
                assert str(expected[name][0, 0].item())[:5] in repr(tensor)
                kept.append((name, tensor, view))
    assert kept
    for name, tensor, view in kept:
        uses = [
            lambda t=tensor: t + 1,
            lambda t=tensor: t.clone(),
            lambda t=tensor: torch.zeros_like(t).copy_(t),
            lambda t=view: t.sum(),
            lambda t=view: t[0],
            lambda t=view: repr(t),
        ]
        for use in uses:
            with pytest.raises(ProtocolError, match="after the next bucket was asked for"):
                use()
        for late in (tensor.data_ptr, tensor.numpy, tensor.tolist, tensor.untyped_storage):
            with pytest.raises(ProtocolError, match="after the next bucket was asked for"):
                late()
        assert tensor.shape == expected[name].shape


@on_ranks(2)
def test_memory_that_was_given_away_is_not_used_again() -> None:
    """Neither a tensor's memory nor a bucket's is used again once the user has it."""
    model = WAYS["ragged"](plain(1))
    expected = whole(model)
    kept = {}
    for bucket in stream_params(model, bucket_nbytes=500_000):
        for name, tensor in bucket.items():
            assert tensor.tolist() == expected[name].tolist()
            assert tensor.data_ptr() == tensor.untyped_storage().data_ptr() + (
                tensor.data_ptr() - bucket.packed.data_ptr()
            )
            kept[name] = tensor.numpy()
    assert all(torch.equal(torch.from_numpy(kept[name]), expected[name]) for name in kept)
    stream = stream_params(model, bucket_nbytes=500_000)
    packed = [bucket.packed for bucket in stream]
    assert len(packed) > 2
    for one in stream.metadata:
        nbytes = torch.Size(one.shape).numel() * one.dtype.itemsize
        own = packed[one.bucket][one.offset : one.offset + nbytes]
        assert torch.equal(own.view(one.dtype).view(one.shape), expected[one.name])


@on_ranks(4)
@pytest.mark.parametrize("ranks", [None, [1]])
@pytest.mark.parametrize("way", ["rows", "ragged", "flat", "hsdp"])
def test_two_buckets_are_enough(way: str, ranks: list[int] | None) -> None:
    """A rank holds at most two buckets, also if it only sends."""
    model = WAYS[way](plain(1))
    largest = max(value.nbytes for value in whole(model).values())
    size = largest + 1000
    made: list[int] = []
    empty = torch.empty

    def counted(*args: Any, **kwargs: Any) -> Tensor:
        found = empty(*args, **kwargs)
        if kwargs.get("dtype") is torch.uint8:
            made.append(found.nbytes)
        return found

    with pytest.MonkeyPatch.context() as patch:
        stream = stream_params(model, bucket_nbytes=size, ranks=ranks)
        patch.setattr(torch, "empty", counted)
        for _ in stream:
            pass
    assert len(stream) > 4
    # A smaller buffer is freed before a larger one is allocated, so the two largest count.
    assert sum(sorted(made)[-2:]) <= 2 * size
    gc.collect()


@on_ranks(2)
def test_wrong_use_is_refused_by_name() -> None:
    model = WAYS["rows"](plain(1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for options, said in (
        ({"bucket_nbytes": 0}, "expected a positive number"),
        ({"bucket_nbytes": 1.5}, "expected a number of bytes"),
        ({"bucket_nbytes": 5, "dtype": torch.int8}, "expected a floating-point dtype"),
        ({"bucket_nbytes": 5, "names": ["what"]}, "the model has no what"),
        ({"bucket_nbytes": 5, "ranks": [2]}, "expected some of 0 to 1"),
        ({"bucket_nbytes": 5, "ranks": []}, "expected some of 0 to 1"),
        ({"bucket_nbytes": 5 + dist.get_rank()}, "ranks differ in their options"),
    ):
        with pytest.raises(ConfigError, match=said):
            stream_params(model, **options)  # type: ignore[arg-type]
    stream = stream_params(model, bucket_nbytes=1000)
    with unshard_params(model):
        with pytest.raises(BusyError, match="while unshard_params"):
            stream_params(model, bucket_nbytes=1000)
        with pytest.raises(BusyError, match="while unshard_params"):
            iter(stream)
    with pytest.raises(ProtocolError, match="written to while they were streamed"):
        for number, _ in enumerate(stream):
            with pytest.raises(ProtocolError, match="has not ended"):
                iter(stream)
            if number == 1:
                model(noise(4, 192, seed=1)).square().mean().backward()
                optimizer.step()
    same(streamed(stream), whole(model))  # the stream still works
    for bucket in stream:
        assert len(bucket)
        break
    gc.collect()
    same(streamed(stream), whole(model))
    model.register_buffer("more", torch.ones(3))
    with pytest.raises(ProtocolError, match="make a new one"):
        iter(stream)


@on_ranks(2, timeout_s=120.0)
def test_names_are_those_of_transformers() -> None:
    """Names, experts in one tensor and tied weights are those of transformers' checkpoints."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=65, num_local_experts=4, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    model = MixtralForCausalLM(config)
    twin = copy.deepcopy(model)
    shard_units(model, model.model.layers, layout=fullshard.Ragged())
    found = streamed(stream_params(model, bucket_nbytes=1 << 14, dtype=torch.bfloat16))
    assert "lm_head.weight" not in found
    expert = found["model.layers.1.block_sparse_moe.experts.3.w2.weight"]
    assert torch.equal(expert, twin.model.layers[1].mlp.experts.down_proj[3].bfloat16())


def test_a_tensor_without_elements_may_come_first() -> None:
    """An unsharded model with buffers may begin with a tensor without elements."""
    first = nn.ParameterDict({"empty": torch.empty(0, 3), "full": torch.ones(2)})
    model = nn.Sequential(first, nn.BatchNorm1d(3))
    for size in (7, 64):
        same(streamed(stream_params(model, bucket_nbytes=size)), dict(model.state_dict()))


@on_ranks(2)
@pytest.mark.skipif(
    torch.backends.cuda.is_built() and not torch.cuda.is_available(),
    reason="a CUDA build needs a driver here",
)
def test_sharding_and_streaming_make_no_process_groups() -> None:
    """Streaming makes no process group, even on a host with a GPU that gloo does not serve."""
    made = 0
    new_group = dist.new_group

    def counted(*args: Any, **options: Any) -> Any:
        nonlocal made
        made += 1
        return new_group(*args, **options)

    with (
        mock.patch("torch.distributed.device_mesh.new_group", counted),
        mock.patch.object(dist, "new_group", counted),
        mock.patch("torch.cuda.is_available", lambda: True),
    ):
        streamed(stream_params(fully_shard(plain(1)), bucket_nbytes=SIZES[0]))
    assert made == 0
