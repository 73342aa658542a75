"""The types of options; ``make check`` fails if an ``ignore`` here is not needed."""

from __future__ import annotations

import typing

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchPolicy

import fullshard
from fullshard.frontend.fully_shard import ShardOptions, fully_shard


def right(model: nn.Sequential) -> None:
    """Valid options, and methods after an ``isinstance`` check, as in the quickstart."""
    fullshard.shard_blocks(model, mp_policy=fullshard.MixedPrecisionPolicy(torch.bfloat16))
    fullshard.shard_blocks(model, mp_policy=TorchPolicy(), layout=fullshard.Ragged())
    fullshard.fully_shard(model, mp_policy=TorchPolicy())
    assert isinstance(model, fullshard.FSDPModule)
    model.set_requires_gradient_sync(False)


def wrong(model: nn.Module) -> None:
    """Misspelled options, and values of wrong types."""
    fullshard.shard_blocks(model, layuot=fullshard.Ragged())  # type: ignore[call-arg]
    fullshard.shard_blocks(model, mp_policy="bf16")  # type: ignore[arg-type]
    fullshard.shard_blocks(model, wire="bf16")  # type: ignore[arg-type]
    fullshard.fully_shard(model, mp_policy="bf16")  # type: ignore[arg-type]


def test_shard_blocks_takes_the_options_of_fully_shard() -> None:
    """Except the options that it declares itself."""
    named = {"module", "mesh", "reshard_after_forward", "ignored_params", "return"}
    ours, theirs = typing.get_type_hints(ShardOptions), typing.get_type_hints(fully_shard)
    assert ours == {name: kind for name, kind in theirs.items() if name not in named}
