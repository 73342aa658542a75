"""Compares a sharded model and its optimizer with the reference."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fullshard import iter_full_params, unshard_params
from fullshard.checkpoint import full_optim_state_dict, full_state_dict
from fullshard.tensors.form import clean_name
from tests.fuzz.reference import Reference

TOLERANCE = 1e-10


class Differs(AssertionError):
    """The sharded model differs from the reference."""


def compare_tensors(what: str, have: Tensor | None, expected: Tensor | None) -> None:
    """Raise if the tensors differ by more than rounding; None equals zeros."""
    if have is None or expected is None:
        one = have if expected is None else expected
        if one is not None and one.numel() and one.abs().max() > TOLERANCE:
            raise Differs(f"{what}: {'not there' if have is None else 'there'}, unlike the other")
        return
    have, expected = have.detach(), expected.detach()
    if have.shape != expected.shape or have.dtype != expected.dtype:
        raise Differs(
            f"{what}: {tuple(have.shape)} {have.dtype}, expected "
            f"{tuple(expected.shape)} {expected.dtype}"
        )
    if not have.numel():
        return
    scale = max(1.0, expected.abs().max().item())
    apart = (have - expected).abs().max().item()
    if not apart <= TOLERANCE * scale:
        raise Differs(f"{what}: {apart:.1e} apart, of {scale:.1e}")


def compare_all(model: nn.Module, optimizer: Optimizer, reference: Reference) -> None:
    """Compare parameters, gradients and optimizer state; a collective."""
    compare_values(model, reference, rank0_only=False)
    compare_gradients(model, reference)
    compare_optimizers(model, optimizer, reference)


def compare_values(model: nn.Module, reference: Reference, *, rank0_only: bool) -> None:
    """Compare all parameters one by one, in the order of the unsharded ``named_parameters()``."""
    have = dict(iter_full_params(model, rank0_only=rank0_only))
    expected = dict(reference.model.named_parameters())
    _compare_named("iter_full_params", have, expected, rank0_only=rank0_only)


def _compare_named(
    what: str, have: Mapping[str, Tensor], expected: Mapping[str, Tensor], *, rank0_only: bool
) -> None:
    if rank0_only and torch.distributed.get_rank():
        if have:
            raise Differs(f"{what}(rank0_only=True) gave something to another rank")
        return
    if list(have) != list(expected):
        raise Differs(f"names of {what}: {list(have)}, expected {list(expected)}")
    for name, value in have.items():
        compare_tensors(f"parameter {name} of {what}", value, expected[name])


def compare_gradients(model: nn.Module, reference: Reference) -> None:
    """Compare all gradients in ``unshard_params``."""
    expected = dict(reference.model.named_parameters())
    with unshard_params(model, with_grads=True, writeback=False):
        have = {clean_name(name): param.grad for name, param in model.named_parameters()}
        flags = {clean_name(name): param.requires_grad for name, param in model.named_parameters()}
    if have.keys() != expected.keys():
        raise Differs(f"names: {list(have)}, expected {list(expected)}")
    for name, grad in have.items():
        compare_tensors(f"gradient of {name}", grad, expected[name].grad)
    wanted = {name: param.requires_grad for name, param in expected.items()}
    if not reference.is_flat and flags != wanted:
        raise Differs(f"requires_grad: {flags}, expected {wanted}")


def compare_optimizers(model: nn.Module, optimizer: Optimizer, reference: Reference) -> None:
    """Compare the full states of the optimizers."""
    have = full_optim_state_dict(model, optimizer, rank0_only=False)["state"]
    names = {param: name for name, param in reference.model.named_parameters()}
    expected = {names[p]: state for p, state in reference.optimizer.state.items() if state}
    if reference.is_flat:
        have = {name: have[name] for name in have if name in expected}
    if have.keys() != expected.keys():
        raise Differs(f"optimizer state: {sorted(have)}, expected {sorted(expected)}")
    for name, state in have.items():
        if state.keys() != expected[name].keys():
            raise Differs(f"state of {name}: {list(state)}, expected {list(expected[name])}")
        for key, value in state.items():
            _compare_state(f"{key} of {name}", value, expected[name][key])


def _compare_state(what: str, have: Any, expected: Any) -> None:
    if isinstance(have, Tensor) and isinstance(expected, Tensor):
        compare_tensors(what, have.double(), expected.double())
    elif have != expected:
        raise Differs(f"{what}: {have!r}, expected {expected!r}")


def compare_states(model: nn.Module, expected: Mapping[str, Any], *, rank0_only: bool) -> None:
    """Compare full state dicts, buffers included."""
    have = full_state_dict(model, rank0_only=rank0_only)
    _compare_named("full_state_dict", have, expected, rank0_only=rank0_only)
