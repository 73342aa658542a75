"""A dry run copies the results of operations that it has seen, instead of computing them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fullshard.plan.values import Unknown, Values, _Results, tensors_in


class Run(TorchDispatchMode):
    """Runs operations as a dry run does."""

    def __init__(self) -> None:
        super().__init__()
        self.values = Values()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        return self.values.run(op, args, kwargs, tensors_in(args) + tensors_in(kwargs))


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def in_place(x: Tensor) -> list[Tensor]:
    x.add_(1).mul_(x)
    return [x]


def foreach(x: Tensor) -> list[Tensor]:
    some = [x, meta(3)]
    torch._foreach_mul_(some, 2.0)
    return [*some, *torch._foreach_add(some, 1.0)]


def looks_change(x: Tensor) -> list[Tensor]:
    x.t_()
    return [x, x + 1]


def out_is_given(x: Tensor) -> list[Tensor]:
    return [torch.add(x, 1, out=meta(0))]


DOES: dict[str, Callable[[Tensor], Any]] = {
    "new": lambda x: [x * 2, x.transpose(0, 1).relu(), x.to(torch.bfloat16)],
    "view": lambda x: [x[1:], x.reshape(-1), x.split(2)[0]],
    "in place": in_place,
    "foreach": foreach,
    "looks change": looks_change,
    "out": out_is_given,
    "several": lambda x: [*x.max(dim=0), *torch.native_dropout(x, 0.5, True)],
    "numbers differ": lambda x: [x * 1, x * True, (x > 0) * 1, (x > 0) * True, (x > 0) * 1.0],
    "list": lambda x: [torch.cat([x, x]), torch.cat([x]), torch.stack([x, x], 1)],
    "expanded": lambda x: [x[:, :1].expand(4, 6), x[:, :1].expand(4, 6) + x[:, :1].expand(4, 6)],
}


def described(found: list[Tensor]) -> list[object]:
    return [
        (x.shape, x.stride(), x.dtype, x.storage_offset(), x.untyped_storage().nbytes())
        for x in found
    ]


@pytest.mark.parametrize("does", DOES)
def test_results_look_as_pytorch_makes_them(does: str) -> None:
    expected = described(DOES[does](meta(4, 6)))
    with Run():
        for _ in range(3):
            x = meta(4, 6)
            found = DOES[does](x)
            assert described(found) == expected
            if does == "in place":
                assert found[0] is x
            if does == "view":
                assert all(
                    one.untyped_storage()._cdata == x.untyped_storage()._cdata for one in found
                )


def test_pytorch_computes_a_block_once() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(6)))
    model.to("meta")
    computed = []

    class Counted(_Results):
        def of(self, op: Any, args: Any, kwargs: Any, given: Any) -> Any:
            def counted(*args: Any, **kwargs: Any) -> Any:
                computed.append(str(op))
                return op(*args, **kwargs)

            counted.__dict__.update(namespace=op.namespace, tags=op.tags, _schema=op._schema)
            return super().of(COUNTED.setdefault(op, counted), args, kwargs, given)

    COUNTED: dict[object, Any] = {}
    with mock.patch("fullshard.plan.values._Results", Counted), Run():
        model(meta(2, 8)).sum().backward()
    assert computed.count("aten.gelu.default") == 1
    assert computed.count("aten.gelu_backward.default") == 2  # the first gradient has strides of 0


def test_nothing_is_kept() -> None:
    with Run():
        x = meta(4, 6)
        storages = [weakref.ref((x * 2).untyped_storage()) for _ in range(2)]
        assert all(one() is None for one in storages)


def test_unknown_values_stay_unknown() -> None:
    with Run():
        for _ in range(2):
            with pytest.raises(Unknown):
                meta(3).sum().item()
