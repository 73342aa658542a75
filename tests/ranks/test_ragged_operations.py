"""PyTorch's operations on RaggedTensors give the results of full tensors, or are refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from fullshard.errors import RaggedOperationError
from tests.ranks.pool import RankPool
from tests.ranks.ragged import CUT, ragged

RANDOM = ("dropout", "rrelu", "native_dropout", "alpha_dropout", "_fused_dropout")
UNFILLED = ("empty", "new_empty", "resize", "set_data")
LEFT_OUT = (*RANDOM, *UNFILLED, "_add_batch_dim", "_remove_batch_dim")


def operations(*, on_lists: bool) -> Iterator[Any]:
    """Yield all overloads of PyTorch's own operations: those on lists, or the others."""
    for full in sorted(torch._C._dispatch_get_all_op_names()):
        space, _, name = full.partition("::")
        name, _, overload = name.partition(".")
        is_list = name.startswith(("_foreach_", "_fused_"))
        if space != "aten" or is_list is not on_lists or name.startswith(LEFT_OUT):
            continue
        op = getattr(getattr(torch.ops.aten, name), overload or "default", None)
        if op is not None and torch.Tag.nondeterministic_seeded not in op.tags:
            yield op


def arguments_of(op: Any, of: Callable[[int], Tensor]) -> tuple[list[Any], dict[str, Any]] | None:
    """Return arguments for ``op`` by its schema; None if an argument has another type."""
    is_list = any(str(argument.type) == "List[Tensor]" for argument in op._schema.arguments)
    args: list[Any] = []
    named: dict[str, Any] = {}
    for number, argument in enumerate(op._schema.arguments):
        if argument.has_default_value() and not argument.is_out:
            continue
        kind = str(argument.type)
        if kind == "Tensor" and is_list:
            value: Any = torch.tensor(2.0)
        elif kind == "Tensor":
            value = of(number)
        elif kind == "List[Tensor]":
            value = [of(number), of(number + 1)]
        elif kind in MADE:
            value = MADE[kind]
        else:
            return None
        if argument.kwarg_only:
            named[argument.name] = value
        else:
            args.append(value)
    return (args, named) if any(isinstance(arg, (Tensor, list)) for arg in args) else None


MADE: dict[str, Any] = {"number": 2, "List[number]": [2, 3], "int": 1, "float": 0.5, "bool": True}


def tensors_of(found: Any) -> Iterator[Tensor]:
    if isinstance(found, Tensor):
        yield found.full_tensor() if isinstance(found, DTensor) else found
    elif isinstance(found, dict):
        yield from tensors_of(list(found.values()))
    elif isinstance(found, (list, tuple)):
        for one in found:
            yield from tensors_of(one)


def alike(ours: Any, theirs: Any) -> bool:
    try:
        pairs = list(tensors_of(ours)), list(tensors_of(theirs))
        torch.testing.assert_close(*pairs, equal_nan=True)
    except Exception:  # or the result has pieces of no full tensor
        return False
    return True


def outcomes(on_lists: bool, dtype: torch.dtype) -> dict[str, str]:
    """Return by operation: alike, wrong, refused or raised."""
    mesh = init_device_mesh("cpu", (2,))
    count = torch.arange(1, 16).view(5, 3)
    whole = [(count * (seed + 3) % 17 / 20).to(dtype) for seed in range(12)]
    if not dtype.is_floating_point:
        whole = [(count * (seed + 3) % 17).to(dtype) for seed in range(12)]
    found = {}
    for op in operations(on_lists=on_lists):
        ours = arguments_of(op, lambda number: ragged(whole[number % 12], mesh, (CUT,)))
        if ours is None:
            continue
        try:
            result = op(*ours[0], **ours[1])
        except RaggedOperationError:
            found[str(op)] = "refused"
            continue
        except Exception:
            found[str(op)] = "raised"
            continue
        theirs = arguments_of(op, lambda number: whole[number % 12].clone())
        assert theirs is not None
        try:
            wanted = op(*theirs[0], **theirs[1])
        except Exception:
            found[str(op)] = "wrong: PyTorch raises"
            continue
        same = alike([result, *ours], [wanted, *theirs])
        found[str(op)] = "alike" if same else "wrong"
    return found


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64], ids=str)
@pytest.mark.parametrize("on_lists", [True, False], ids=["lists", "tensors"])
def test_an_operation_gives_what_it_gives_on_whole_tensors_or_raises(
    pool: RankPool, on_lists: bool, dtype: torch.dtype
) -> None:
    one, other = pool.run(2, outcomes, on_lists, dtype)
    assert one == other
    assert {name: it for name, it in one.items() if it.startswith("wrong")} == {}
    assert sum(it == "alike" for it in one.values()) > 40
    assert sum(it == "refused" for it in one.values()) > 3
