"""State that one rank cannot load: all ranks raise at once, and nothing changes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fullshard import Ragged, checkpoint
from fullshard.checkpoint import Checkpointer, load_newest
from fullshard.errors import ConfigError
from tests.ranks.models import full_parameters
from tests.ranks.net import make, optimizer_of, shard, step
from tests.ranks.pool import RankPool, on_ranks


def on_some_ranks(what: str) -> list[str]:
    """Load with state on some ranks only, in several ways; return the errors in order."""
    model = shard(make(), layout=Ragged())
    optimizer = optimizer_of(model)
    step(model, optimizer)
    before = full_parameters(model)
    is_first = dist.get_rank() == 0
    if what == "model":
        state = checkpoint.full_state_dict(model)
        sharded = checkpoint.sharded_state_dict(model)
    else:
        state = checkpoint.full_optim_state_dict(model, optimizer)
        sharded = checkpoint.sharded_optim_state_dict(model, optimizer)

    def load(given: object, kind: str = "full", **options: bool) -> None:
        name = f"load_{kind}_state_dict" if what == "model" else f"load_{kind}_optim_state_dict"
        to = (model,) if what == "model" else (model, optimizer)
        getattr(checkpoint, name)(*to, given, **options)

    shortened = {n: v for n, v in sharded.items() if n != "scale"} if what == "model" else {}
    said = []
    for given, options in (
        (state, {}),  # {} on all ranks but the first
        (state if is_first else None, {}),
        (state, {"broadcast_from_rank0": is_first}),
        (sharded if is_first else shortened, {"kind": "sharded"}),
        ([1] if is_first else state, {}),
    ):
        with pytest.raises((ValueError, AttributeError)) as caught:
            load(given, **options)  # type: ignore[arg-type]
        said.append("\n".join([str(caught.value), *getattr(caught.value, "__notes__", ())]))
    load(state, broadcast_from_rank0=True)
    after = full_parameters(model)
    assert all(torch.equal(before[name], after[name]) for name in before)
    step(model, optimizer)
    return said


@pytest.mark.parametrize("what", ["model", "optimizer"])
def test_all_ranks_raise_if_some_have_no_state(pool: RankPool, what: str) -> None:
    first, second = pool.run(2, on_some_ranks, what)
    for said in (first, second):
        for message in said[:2]:
            assert "broadcast_from_rank0=True on all ranks" in message
            assert "1 of 2 ranks" in message
        assert "broadcast_from_rank0 is True on rank 0 and False on the others" in said[2]
    assert first[0].startswith("rank 1: ")
    assert first[0].removeprefix("rank 1: ") == second[0]


def options_of_the_second_rank(path: Path, **options: Any) -> tuple[str, bool]:
    """Load with other options on rank 1; return the error, and whether nothing changed."""
    model = shard(make(), layout=Ragged())
    optimizer = optimizer_of(model)
    step(model, optimizer)
    checkpoint.save(path, model, optimizer, step=1)
    step(model, optimizer)
    before = full_parameters(model)
    given = {"optimizer": optimizer, **(options if dist.get_rank() == 1 else {})}
    with pytest.raises(ConfigError) as caught:
        checkpoint.load(path, model, **given)
    after = full_parameters(model)
    return str(caught.value), all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"optimizer": None}, "optimizer of rank 1 .* rank 0, .*: None, not an optimizer"),
        ({"strict": False}, "strict of rank 1 .*: False, not True"),
    ],
)
def test_all_ranks_raise_if_options_differ(
    pool: RankPool, tmp_path: Path, options: dict[str, Any], what: str
) -> None:
    for said, is_kept in pool.run(2, options_of_the_second_rank, tmp_path / "c", **options):
        assert re.search(what, said), said
        assert is_kept


@on_ranks(2, timeout_s=20.0)
@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("keep", "rank 1 has Checkpointer(keep=2, copies=None), rank 0 Checkpointer(keep=1"),
        ("copies", "rank 1 has Checkpointer(keep=1, copies=2), rank 0 Checkpointer(keep=1"),
        ("none", "rank 1 has no Checkpointer, rank 0 Checkpointer(keep=1, copies=None)"),
    ],
)
def test_all_ranks_raise_if_checkpointers_differ(tmp_path: Path, what: str, told: str) -> None:
    """All ranks raise if rank 1 has another ``Checkpointer``, or none."""
    model, odd = shard(make()), dist.get_rank() == 1
    keep, copies = (2 if what == "keep" and odd else 1), (2 if what == "copies" and odd else None)
    one = Checkpointer(tmp_path, keep=keep, copies=copies)
    with pytest.raises(ConfigError) as caught:
        if what == "none":
            load_newest([] if odd else [one], model)
        else:
            one.save(model, step=1)
    assert not list(tmp_path.glob("step-*"))
    said = str(caught.value)
    assert told in said
