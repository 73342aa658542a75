"""Calls of a plain module inside a unit: the error names the module and the remedy."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import fullshard
from fullshard import FullyShardedDataParallel, PerParameter, Ragged, fully_shard
from fullshard.errors import FullshardError, ProtocolError, RaggedOperationError
from fullshard.tensors import uses
from tests.ranks.models import fill, shard_units
from tests.ranks.pool import on_ranks

FACES = ("rows", "ragged", "flat")


class Norm(nn.Module):
    """A norm as in Llama, whose weight is multiplied with a plain tensor."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = Norm(4)
        self.lin = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.conv = nn.Conv1d(1, 2, 1)
        self.block = Inner()
        self.other = nn.Linear(4, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.other(self.block.norm(self.block(self.embed(ids))))
        return self.head(x + self.conv(x[:, None, 0, :1]).mean())


def explain_again() -> None:
    """Enable explanations again after tensor-parallel models of earlier tests disabled them."""
    uses._undo = uses._undo or None


def sharded(face: str) -> Any:
    explain_again()
    torch.manual_seed(0)
    net: Any = Net()
    if face == "flat":
        return FullyShardedDataParallel(net, use_orig_params=False)
    layout = Ragged("element") if face == "ragged" else PerParameter()
    fully_shard(net.other, layout=layout)
    return fully_shard(net, layout=layout)


def caught(call: Callable[[], Any]) -> tuple[type, str]:
    with pytest.raises(FullshardError) as found:
        call()
    assert isinstance(found.value, RuntimeError)
    return type(found.value), str(found.value)


@on_ranks(2)
@pytest.mark.parametrize("face", FACES)
def test_a_module_called_alone_is_named_with_its_unit_and_what_to_do(face: str) -> None:
    net, x, ids = sharded(face), torch.ones(3, 4), torch.arange(6).view(2, 3)
    inside = net.module if face == "flat" else net
    calls: dict[str, Callable[[], Any]] = {
        "block.lin (Linear)": lambda: inside.block(x),
        "block.norm (Norm)": lambda: inside.block.norm(x),
        "embed (Embedding)": lambda: inside.embed(ids),
        "conv (Conv1d)": lambda: inside.conv(torch.ones(1, 1, 3)),
        "head (Linear)": lambda: inside.head(x),  # tied: the error names the module that was called
    }
    ways: list[Callable[[], AbstractContextManager[Any]]] = [
        nullcontext,
        torch.no_grad,
        torch.inference_mode,
        lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    ]
    for name, call in calls.items():
        for way in ways:
            with way():
                kind, text = caught(call)
            assert issubclass(kind, RaggedOperationError if face == "ragged" else ProtocolError)
            assert text.startswith(f"{name} was called while its parameter "), text
            assert ("weight was sharded" if way is nullcontext else " was sharded") in text, text
            assert "unit (root) (Net)" in text or face == "flat", text
            for advice in ("Call the module", "register_fsdp_forward_method", "unshard_params"):
                assert advice in text, text
            called = "block (Inner)" if name.startswith("block.lin") else name
            shard = "wrap" if face == "flat" else "fully_shard"
            assert f"Or: {shard} {called} itself" in text, text
    with fullshard.unshard_params(inside.block), torch.no_grad():
        assert inside.block(x).shape == (3, 4)
    net(ids).sum().backward()  # the model still works after the errors
    assert all(p.grad is not None for p in net.parameters())


class Middle(nn.Module):
    """A unit whose forward calls a plain module of another unit."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.borrowed: list[nn.Module] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.borrowed[0](self.lin(x))

    def encode(self, x: Tensor) -> Tensor:
        return self.lin(x)


@on_ranks(2)
@pytest.mark.parametrize("face", ["rows", "ragged"])
def test_in_the_forward_of_another_unit_the_parameter_is_named(face: str) -> None:
    explain_again()
    layout = Ragged("element") if face == "ragged" else PerParameter()
    net: Any = nn.Sequential(Middle(), nn.Sequential(nn.Linear(4, 4)))
    net[0].borrowed.append(net[1][0])
    shard_units(net, (net[0], net[1]), layout=layout)
    for call in (lambda: net(torch.ones(2, 4)), lambda: net[0](torch.ones(2, 4))):
        kind, text = caught(call)
        assert kind is ProtocolError
        assert text.startswith("the forward of FSDP") and "that was not running" in text
        assert text.endswith("The parameter: 1.0.weight (Linear) of unit 1 (Sequential)"), text
    kind, text = caught(lambda: net[0].encode(torch.ones(2, 4)))
    assert kind is ProtocolError and "encode() used parameters while they were sharded" in text
    assert text.endswith("The parameter: 0.lin.weight (Linear) of unit 0 (Middle)"), text


@on_ranks(2)
def test_functional_use_names_the_parameter() -> None:
    net, x = sharded("rows"), torch.ones(3, 4)
    _, text = caught(lambda: F.linear(x, net.block.lin.weight))
    assert text.startswith("parameter block.lin.weight (Linear) was used while it was sharded")
    assert "unit (root) (Net)" in text and "unshard_params" in text
    _, text = caught(lambda: F.linear(x, net.other.weight))
    assert "unit other (Linear)" in text
    _, text = caught(lambda: x[:, :1] * sharded("ragged").block.lin.weight)
    assert "cut into the same intervals" in text  # the usual error, as no module was called


class OnPurpose(nn.Module):
    """A module with a sharded parameter, whose forward mixes its own DTensor and a plain tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.own: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.own[0]


@on_ranks(2)
def test_dtensors_that_are_mixed_on_purpose_get_no_claim() -> None:
    mesh = init_device_mesh("cpu", (2,))
    own = distribute_tensor(torch.ones(4, 3), mesh, [Shard(0)])
    net: Any = nn.Sequential(OnPurpose(), nn.Linear(4, 4))
    net[0].own.append(own)
    fully_shard(net, mesh=mesh)
    for call in (lambda: net[0](torch.ones(2, 4)), lambda: torch.ones(2, 4) @ own):
        with pytest.raises(RuntimeError, match=r"got mixed torch\.Tensor and DTensor") as found:
            call()
        assert not isinstance(found.value, FullshardError)
    product = distribute_tensor(torch.ones(2, 4), mesh, [Shard(1)]) @ own
    assert isinstance(product, DTensor) and product.full_tensor().sum() == 24


@on_ranks(2)
def test_a_step_meets_none_of_it() -> None:
    """A step calls none of the handlers that explain errors."""
    net, ids = sharded("rows"), torch.arange(6).view(2, 3)
    optims = [
        torch.optim.AdamW(net.parameters(), foreach=False),
        torch.optim.AdamW(net.parameters(), foreach=True),
        torch.optim.SGD(net.parameters(), momentum=0.9),
    ]
    handlers = DTensor._op_dispatcher._custom_op_handlers
    before, seen = dict(handlers), []
    for op in uses._OPS:
        assert op in handlers, op
        handlers[op] = lambda *given, op=op: seen.append(op) or before[op](*given)
    try:
        for optim in optims:
            net(ids).sum().backward()
            optim.step()
            optim.zero_grad()
    finally:
        handlers.update(before)
    assert len(seen) == 0


@on_ranks(2)
def test_tensor_parallel_steps_pay_nothing() -> None:
    """With tensor parallelism, explanations are off and PyTorch's own handlers are restored."""
    handlers = DTensor._op_dispatcher._custom_op_handlers
    own = handlers[torch.ops.aten.convolution.default]
    sharded("rows")
    assert handlers[torch.ops.aten.convolution.default] is not own or uses._undo
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    net = nn.Sequential(nn.Linear(4, 4))
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    parallelize_module(net, mesh["tp"], {"0": ColwiseParallel()})
    fully_shard(net, mesh=mesh["dp"])
    assert torch.ops.aten.mm.default not in handlers
    assert torch.ops.aten.convolution.default in handlers
    assert net(torch.ones(2, 4)).shape == (2, 2)


@on_ranks(2)
def test_a_module_that_peft_returns_is_explained() -> None:
    peft = pytest.importorskip("peft")
    explain_again()
    torch.manual_seed(0)
    config = peft.LoraConfig(target_modules=["lin"], r=2)
    model = peft.get_peft_model(copy.deepcopy(Net()), config)
    fully_shard(model)
    ids = torch.arange(6).view(2, 3)
    with fullshard.unshard_params(model), torch.no_grad():
        inner = model.merge_and_unload()
        inner(ids)
    _, text = caught(lambda: inner(ids))
    assert "(Embedding) was called while its parameter weight was sharded" in text, text
    assert "fully_shard" in text and "(Net) itself" in text


class Scales(nn.Module):
    """A base class whose methods a subclass replaces by other things than functions."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(3, 3)

    def cached(self) -> float:
        raise NotImplementedError

    def shown(self) -> Any:
        raise NotImplementedError

    @staticmethod
    def fixed() -> float:
        return 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x) * self.cached() * self.shown * self.fixed() * self.of_class()

    def of_class(self) -> float:
        raise NotImplementedError


class Overrides(Scales):
    @functools.cache  # noqa: B019
    def cached(self) -> float:
        return 2.0

    @property
    def shown(self) -> float:
        return 3.0

    def fixed(self) -> float:  # type: ignore[override]
        return 5.0

    @classmethod
    def of_class(cls) -> float:
        return 7.0


@on_ranks(2)
def test_overrides_that_are_no_functions_stay() -> None:
    plain = fill(Overrides().double())
    model = fully_shard(copy.deepcopy(plain))
    x = torch.ones(2, 3, dtype=torch.float64)
    assert torch.allclose(model(x), plain(x), rtol=1e-12)
