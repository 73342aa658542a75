"""Tensors inside inputs and outputs are found, and casts keep everything around them."""

from __future__ import annotations

import dataclasses
import sys
from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence

from fullshard.errors import UnsupportedError
from fullshard.tensors import find_tensors, map_tensors

ONE = torch.ones(2)


def cast(value: Any, **options: Any) -> Any:
    return map_tensors(lambda t: t.half() if t.is_floating_point() else t, value, **options)


@dataclasses.dataclass
class Context:
    value: Tensor
    derived: Any = dataclasses.field(init=False, default=None)
    inits: int = dataclasses.field(init=False, default=0)
    parent: Any = None

    def __post_init__(self) -> None:
        self.inits += 1
        self.derived = self.value * 3


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    value: Tensor
    label: str


class Pair(NamedTuple):
    left: Tensor
    right: Any


class Checked(Pair):
    """Has attributes, and a constructor with other arguments."""

    note: str

    def __new__(cls, left: Tensor) -> Checked:
        made = super().__new__(cls, left, left)
        made.note = "new"
        return made


class ReadOnly(dict[str, Any]):
    def __init__(self, name: str, **items: Any) -> None:
        dict.update(self, items)
        self.name = name

    def __setitem__(self, key: str, value: Any) -> None:
        raise TypeError("read-only")


class Rows(list[Any]):
    def __init__(self, name: str, *rows: Any) -> None:
        super().__init__(rows)
        self.name = name


@dataclasses.dataclass
class Output(OrderedDict[str, Any]):
    """Its fields are items too, as in outputs of transformers."""

    loss: Any = None
    logits: Any = None

    def __post_init__(self) -> None:
        self.update({k: v for k, v in vars(self).items() if v is not None})

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)


class Lazy(Mapping[str, Any]):
    """Fails if it is read."""

    def __getitem__(self, key: str) -> Any:
        raise AssertionError(key)

    def __iter__(self) -> Iterator[str]:
        raise AssertionError

    def __len__(self) -> int:
        return 1


class LazyDict(dict[str, Any]):
    """Fails if its values are read, as they would be computed."""

    def __getitem__(self, key: str) -> Any:
        raise AssertionError(key)

    def values(self) -> Any:
        raise AssertionError

    def items(self) -> Any:
        raise AssertionError


class Stubborn(OrderedDict[str, Any]):
    def __copy__(self) -> Stubborn:
        return self


def test_a_dataclass_keeps_all_that_it_has() -> None:
    given = Context(ONE)
    given.extra = "kept"  # type: ignore[attr-defined]
    got = cast(given)
    assert type(got) is Context and got is not given
    assert (got.value.dtype, got.derived.dtype) == (torch.float16, torch.float16)
    assert (got.inits, got.extra) == (1, "kept")
    assert given.value is ONE
    frozen = cast(Frozen(ONE, "a"))
    assert (frozen.value.dtype, frozen.label) == (torch.float16, "a")


def test_named_tuples_and_lists_keep_class_and_attributes() -> None:
    given = Checked(ONE)
    given.note = "changed"
    got = cast(given)
    assert type(got) is Checked and got.note == "changed" and got.right.dtype is torch.float16
    rows = cast(Rows("name", ONE, 3))
    assert (type(rows), rows.name, rows[0].dtype, rows[1]) == (Rows, "name", torch.float16, 3)
    pair = cast(torch.ones(2, 3).max(dim=0))
    assert pair.values.dtype is torch.float16 and pair.indices.dtype is torch.int64


def test_mappings_keep_class_attributes_and_order() -> None:
    read_only = cast(ReadOnly("name", a=ONE))
    assert (type(read_only), read_only.name) == (ReadOnly, "name")
    assert read_only["a"].dtype is torch.float16
    default = cast(defaultdict(list, a=ONE))
    assert default.default_factory is list and default["a"].dtype is torch.float16
    ordered = OrderedDict(a=ONE, b=ONE)
    ordered.move_to_end("a")
    assert list(cast(ordered)) == ["b", "a"] and next(find_tensors(ordered)) is ordered["b"]
    user = UserDict(a=ONE)
    assert type(cast(user)) is UserDict and cast(user)["a"].dtype is torch.float16
    assert user["a"] is ONE
    output = cast(Output(logits=ONE))
    assert type(output) is Output and list(output) == ["logits"]
    assert output.logits is output["logits"] and output.logits.dtype is torch.float16


@pytest.mark.parametrize("value", [Lazy(), LazyDict(a=3)], ids=["mapping", "dict"])
def test_what_computes_on_access_is_not_read(value: Any) -> None:
    assert cast(value) is value
    assert list(find_tensors([value, ONE])) == [ONE]


def test_what_holds_itself_is_copied_with_itself() -> None:
    given = Context(ONE)
    given.parent = [(given,)]
    got = cast(given)
    assert got.parent[0][0] is got and got.value.dtype is torch.float16
    assert given.parent[0][0] is given
    assert [id(t) for t in find_tensors(given)] == [id(ONE), id(given.derived)]
    loop: list[Any] = [3]
    loop.append(loop)
    assert cast(loop) is loop and list(find_tensors(loop)) == []


def test_nesting_has_no_limit() -> None:
    given: Any = ONE
    for _ in range(2 * sys.getrecursionlimit()):
        given = {"next": given}
    assert list(find_tensors(given)) == [ONE]
    got = cast(given)
    while isinstance(got, dict):
        got = got["next"]
    assert got.dtype is torch.float16


def test_what_does_not_change_is_not_copied() -> None:
    same = Context(torch.arange(2))
    given = [same, {"a": ONE}, pack_sequence([ONE]), object()]
    got = cast(given)
    assert got is not given
    assert all(got[n] is given[n] for n in (0, 2, 3))
    assert cast([same]) is not None and cast(same) is same
    twice = cast([ONE, (ONE, {ONE})])
    assert twice[0] is twice[1][0] and twice[1][1] == {twice[0]}


def test_what_cannot_be_copied_is_left_or_refused_by_name() -> None:
    given = Stubborn(a=ONE)
    with pytest.warns(UserWarning, match="a Stubborn among the inputs"):
        got = cast([(given, 3), ONE])
    assert got[0][0] is given and given["a"] is ONE and got[1].dtype is torch.float16
    with pytest.raises(UnsupportedError, match="a Stubborn among the inputs"):
        cast([(given, 3), ONE], must_copy=True)
