"""Optimizers with block-quantised state: a test class, torchao's and bitsandbytes'."""

from __future__ import annotations

import importlib.util
import warnings
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer


class Coded(Tensor):
    """Values of 4 bits, two in a byte, with a scale for each block; supports no operation."""

    codes: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor, shape: Any, block: int) -> Coded:
        made = Tensor._make_wrapper_subclass(cls, shape, dtype=scale.dtype)
        made.codes, made.scale, made.block = codes, scale, block
        return made  # type: ignore[no-any-return]

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scale"], (self.shape, self.block)

    @classmethod
    def __tensor_unflatten__(cls, held: Any, context: Any, *_: Any) -> Coded:
        return cls(held["codes"], held["scale"], *context)

    @classmethod
    def __torch_dispatch__(cls, op: Any, *_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"{op} on Coded")

    def decoded(self) -> Tensor:
        codes = torch.stack([self.codes >> 4, self.codes & 15], -1).view(-1, self.block)
        return ((codes.to(self.scale.dtype) - 8) * self.scale.view(-1, 1)).view(self.shape)

    @classmethod
    def coded(cls, values: Tensor, block: int) -> Coded:
        rows = values.reshape(-1, block)
        scale = rows.abs().amax(-1) / 7
        codes = (rows / scale.clamp(min=1e-30).view(-1, 1)).round().add(8).to(torch.uint8).view(-1)
        return cls((codes[::2] << 4) | codes[1::2], scale, values.shape, block)


class CodedMomentum(Optimizer):
    """Momentum SGD with 4 bits for large tensors of whole blocks, else in full precision."""

    def __init__(
        self, params: Any, lr: float = 0.1, block: int = 16, least: int = 4096, drawn: bool = False
    ) -> None:
        super().__init__(params, {"lr": lr, "block": block, "least": least, "drawn": drawn})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Store the learning rate as a tensor, as torchao does."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        group["lr"] = torch.as_tensor(group["lr"])

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            assert isinstance(group["lr"], Tensor)
            for param in group["params"]:
                if param.grad is not None:
                    self._step(param, param.grad, group)

    def _step(self, param: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        own, block = self.state[param], group["block"]
        if not own:
            is_coded = param.numel() >= group["least"] and param.numel() % block == 0
            own["count"] = 0
            own["table"] = torch.arange(block, dtype=torch.float32)
            zeros = torch.zeros_like(param)
            own["moment"] = Coded.coded(zeros, block) if is_coded else zeros
        own["count"] += 1
        known = own["moment"]
        moment = (known.decoded() if isinstance(known, Coded) else known) * 0.9 + grad
        own["moment"] = Coded.coded(moment, block) if isinstance(known, Coded) else moment
        param.sub_(moment * group["lr"] / own["count"] ** 0.5)
        if group["drawn"] and param.dtype == torch.bfloat16:
            param.add_(torch.rand_like(param) * 0.01)


class Kind(NamedTuple):
    """An optimizer class, its arguments, and the number of elements in a quantised block."""

    cls: type[Optimizer]
    kwargs: dict[str, Any]
    block: int


KINDS = {
    "a 4-bit momentum of one's own": "",
    "torchao AdamW8bit": "torchao",
    "torchao AdamW4bit": "torchao",
    "torchao AdamWFp8": "torchao",
    "bitsandbytes AdamW8bit": "bitsandbytes",
}
"""The package that has each class; "" for the test's own class."""


def is_here(name: str) -> bool:
    """Return whether the package that a kind needs is installed."""
    return not KINDS[name] or importlib.util.find_spec(KINDS[name]) is not None


def kinds(*left_out: str) -> Any:
    """Parametrise a test over the kinds; skip those whose package is not installed."""
    marks = [
        pytest.param(
            name,
            marks=pytest.mark.skipif(not is_here(name), reason=f"{KINDS[name]} is not installed"),
        )
        for name in KINDS
        if name not in left_out
    ]
    return pytest.mark.parametrize("kind", marks)


def kind_of(name: str) -> Kind:
    """Return the kind of this name; ignore warnings of the package's import."""
    if not KINDS[name]:
        return Kind(CodedMomentum, {"lr": 0.05}, 16)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = importlib.import_module(f"{KINDS[name]}.optim")
    block = 128 if "4bit" in name else 256
    return Kind(getattr(module, name.split()[1]), {"lr": 0.05}, block)


class Net(nn.Module):
    """Parameters of whole blocks, of blocks with a remainder, and small ones of both sorts."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        for number, shape in enumerate([(96, 80), (80,), (3, 24, 64), (70, 61), (4, 256), (2, 3)]):
            values = torch.sin(torch.arange(torch.Size(shape).numel()) * 0.7 + number).view(shape)
            setattr(self, f"w{number}", nn.Parameter(values.to(dtype)))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(x @ self.w0 + self.w1)
        z = torch.einsum("bi,eij->bj", y[:, :24], self.w2)
        return (z[:, :61] @ self.w3.T)[:, :4] @ self.w4 + self.w5.sum()
