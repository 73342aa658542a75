"""The meaning of the granularities of `Ragged`."""

from __future__ import annotations

import pytest

from fullshard.errors import ArgumentTypeError, ConfigError
from fullshard.layout import Granularity, Layout, ParamSpec, Ragged
from tests.pure.layout_model import PADDING, scatter, starts_of_pieces, values


def drawn(layout: Layout, names: str) -> str:
    """Draw the elements of shards as the docstring of `Ragged` does."""
    shards = scatter(layout, values(layout))
    return " | ".join(
        " ".join(
            "." if value is PADDING else f"{names[value // 1_000_000]}{value % 1_000_000}"
            for value in shard
        )
        for shard in shards
    )


@pytest.mark.parametrize("call", ["Ragged()", 'Ragged("row")', "Ragged(4)", 'Ragged("tensor")'])
def test_the_drawing_of_the_granularities_is_true(call: str) -> None:
    ragged: Ragged = eval(call)
    text = drawn(ragged.build([ParamSpec("w", (5, 2)), ParamSpec("b", (5,))], 3, 1), "wb")
    (line,) = (line for line in str(Ragged.__doc__).splitlines() if line.strip().startswith(call))
    shown, dots, _ = " ".join(line.split()[1:]).partition("...")
    assert text.startswith(shown) if dots else text == shown


@pytest.mark.parametrize(
    ("granularity", "shape", "pieces"),
    [
        ("element", (4, 3, 5), [0, 20, 40]),
        ("row", (4, 3, 5), [0, 20, 40]),  # rows of the last dim, not of the first
        ("row", (4, 3, 7), [0, 28, 56]),
        ("row", (60,), [0]),
        ("row", (), [0]),
        ("tensor", (4, 3, 5), [0]),
        (9, (4, 3, 5), [0, 27, 54]),  # the last block is shorter
        (100, (4, 3, 5), [0]),
        (lambda spec: "tensor" if spec.ndim == 3 else 1, (4, 3, 5), [0]),
        (lambda spec: "tensor" if spec.ndim == 3 else 1, (12, 5), [0, 20, 40]),
    ],
)
def test_a_parameter_is_cut_between_its_blocks(
    granularity: Granularity, shape: tuple[int, ...], pieces: list[int]
) -> None:
    layout = Ragged(granularity).build([ParamSpec("w", shape)], 3, 1)
    assert starts_of_pieces(layout, 0) == pieces


def test_the_function_sees_the_parameter() -> None:
    seen = []

    def granularity(spec: ParamSpec) -> str | int:
        seen.append((spec.name, spec.shape, spec.ndim))
        return "row"

    Ragged(granularity).build([ParamSpec("a.w", (5, 2)), ParamSpec("a.b", (5,))], 2, 1)
    assert seen == [("a.w", (5, 2), 2), ("a.b", (5,), 1)]


def test_what_may_be_cut_fills_the_room_beside_what_may_not() -> None:
    params = [ParamSpec("embed", (38,)), *(ParamSpec(f"w{i}", (3, 7)) for i in range(4))]
    ragged = Ragged(lambda spec: "tensor" if spec.ndim == 2 else "element")
    layout = ragged.build(params, 2, 1)
    assert layout.padding_numel == 0 and layout.shard_numel == 61
    assert starts_of_pieces(layout, 0) == [0, 19]  # both halves beside two whole matrices


# Refusals.


@pytest.mark.parametrize(
    ("granularity", "error", "given_as"),
    [
        ("rows", ConfigError, "'rows'"),
        ("", ConfigError, "''"),
        (0, ConfigError, "0"),
        (-4, ConfigError, "-4"),
        (True, ArgumentTypeError, "True"),
        (2.0, ArgumentTypeError, "2.0"),
        (None, ArgumentTypeError, "None"),
    ],
)
def test_what_is_no_granularity_is_refused(
    granularity: Granularity, error: type[ConfigError], given_as: str
) -> None:
    expected = "expected 'element', 'row', 'tensor', a positive number of elements"
    with pytest.raises(error) as of_unit:
        Ragged(granularity)
    assert str(of_unit.value) == (
        f"Ragged: got granularity={given_as}, {expected}, or a function of the parameter"
    )
    by_function = Ragged(lambda spec: granularity if spec.name == "b" else "row")
    params = [ParamSpec("w", (5, 2)), ParamSpec("b", (5,))]
    for ask in (by_function.build, by_function.shard_numel_bound):
        with pytest.raises(error) as of_parameter:
            ask(params, 2, 1)
        assert str(of_parameter.value) == (
            f"parameter 'b' of shape (5,): its granularity is {given_as}, {expected}"
        )
    assert of_unit.type is of_parameter.type is error


def test_a_function_that_returns_a_function_is_refused() -> None:
    with pytest.raises(ArgumentTypeError, match=r"'w'.*its granularity is <function"):
        Ragged(lambda spec: lambda spec: "row").build([ParamSpec("w", (5,))], 2, 1)  # type: ignore
