"""Muon on full matrices, as one optimizer for matrices of any shapes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from fullshard.errors import ArgumentTypeError, ConfigError, UnsupportedError
from fullshard.optim.inner import label_of, loss_of
from fullshard.optim.muon.newton_schulz import COEFFICIENTS, orthogonalise

BUFFER = "momentum_buffer"
"""The only state of a parameter."""

SCALES: dict[str, Callable[[int, int], float]] = {
    "original": lambda rows, columns: math.sqrt(max(1.0, rows / columns)),
    "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
    "spectral_unclamped": lambda rows, columns: math.sqrt(rows / columns),
}
"""By ``adjust_lr_fn``, the factor of the learning rate for a matrix of (rows, columns)."""

NS_DTYPES = ("bfloat16", "float16", "float32", "float64")


DEFAULTS: dict[str, Any] = {
    "lr": 1e-3,
    "weight_decay": 0.1,
    "momentum": 0.95,
    "nesterov": True,
    "ns_coefficients": COEFFICIENTS,
    "eps": 1e-7,
    "ns_steps": 5,
    "adjust_lr_fn": None,
    "ns_dtype": "bfloat16",
    "batched": None,
    "stacked": 0,  # the number of leading dims that count matrices
}


class FullMuon(Optimizer):
    """Muon, with the arithmetic of ``torch.optim.Muon`` and its state, ``momentum_buffer``.

    Matrices of one shape are orthogonalised together. A parameter of more than two dims is a
    matrix of its first dim by all others, like the weights of a convolution. With the option
    ``stacked`` of its group, it is a stack of such matrices, like the weights of experts.

    This class sees full tensors; ``OwnedOptimizer`` runs it on sharded parameters.
    """

    def __init__(self, params: ParamsT, **options: Any) -> None:
        """Create the optimizer; options are those in ``DEFAULTS``, see ``Muon``.

        Raises:
            ConfigError: an option has a value that cannot work.
            ArgumentTypeError: the name of an option is unknown.
            UnsupportedError: a parameter is no matrix and no stack of them.
        """
        unknown = options.keys() - DEFAULTS.keys()
        if unknown:
            raise ArgumentTypeError(f"Muon: got {sorted(unknown)}, expected {[*DEFAULTS]}")
        super().__init__(params, {**DEFAULTS, **options})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group.

        Raises:
            ConfigError, UnsupportedError: as on construction.
        """
        check_options({**self.defaults, **param_group})
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for param in group["params"]:
            if param.dim() < 2 + group["stacked"] or param.is_complex():
                label = label_of(self.param_groups, param)
                self.param_groups.pop()
                raise not_a_matrix(label, param.shape, group["stacked"], param.dtype)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step all parameters that have gradients; return the result of ``closure``, or None."""
        loss = loss_of(closure)
        for group in self.param_groups:
            for params in _alike(group["params"], group["stacked"]):
                self._step_alike(params, group)
        return loss

    def _step_alike(self, params: Sequence[Tensor], group: dict[str, Any]) -> None:
        """Step parameters that are matrices of one shape, or stacks of these."""
        grads = [param.grad for param in params if param.grad is not None]
        buffers = [self._buffer(param, grad) for param, grad in zip(params, grads, strict=True)]
        torch._foreach_lerp_(buffers, grads, 1 - group["momentum"])
        updates = buffers
        if group["nesterov"]:
            updates = list(torch._foreach_lerp(grads, buffers, group["momentum"]))
        matrices = [matrices_of(update, group["stacked"]) for update in updates]
        rows, columns = matrices[0][0].shape
        found = orthogonalise(
            [matrix for own in matrices for matrix in own],
            coefficients=tuple(group["ns_coefficients"]),
            steps=group["ns_steps"],
            eps=group["eps"],
            dtype=getattr(torch, group["ns_dtype"]),
            batched=group["batched"],
        )
        lr = group["lr"]  # as a tensor, products with it have its dtype
        scaled = float(lr * SCALES[group["adjust_lr_fn"] or "original"](rows, columns))
        torch._foreach_mul_(list(params), float(1 - lr * group["weight_decay"]))
        done = 0
        for param, own in zip(params, matrices, strict=True):
            parts, done = found[done : done + len(own)], done + len(own)
            update = parts[0] if len(parts) == 1 else torch.stack(parts)
            param.add_(update.reshape(param.shape), alpha=-scaled)

    def _buffer(self, param: Tensor, grad: Tensor) -> Tensor:
        state = self.state[param]
        if BUFFER not in state:
            state[BUFFER] = torch.zeros_like(grad, memory_format=torch.preserve_format)
        buffer: Tensor = state[BUFFER]
        return buffer


def matrices_of(tensor: Tensor, stacked: int) -> list[Tensor]:
    """Return the matrices of which ``tensor`` is made, views of it where that can be.

    >>> [tuple(one.shape) for one in matrices_of(torch.zeros(3, 4, 5), stacked=1)]
    [(4, 5), (4, 5), (4, 5)]
    >>> [tuple(one.shape) for one in matrices_of(torch.zeros(3, 4, 5), stacked=0)]
    [(3, 20)]
    """
    rows = tensor if tensor.dim() == stacked + 2 else tensor.flatten(stacked + 1)
    return [rows] if not stacked else list(rows.flatten(0, stacked - 1))


def check_options(options: dict[str, Any]) -> None:
    """Refuse values that cannot work.

    Raises:
        ConfigError: an option has such a value; the message names it.
    """
    for name in ("lr", "weight_decay", "momentum"):
        if not options[name] >= 0:
            raise ConfigError(f"Muon({name}={options[name]}): expected 0 or more")
    steps, coefficients = options["ns_steps"], options["ns_coefficients"]
    if isinstance(steps, bool) or not isinstance(steps, int) or not 0 <= steps < 100:
        raise ConfigError(f"Muon(ns_steps={steps!r}): expected an integer from 0 to 99")
    if len(coefficients) != 3:
        raise ConfigError(f"Muon(ns_coefficients={coefficients!r}): expected three numbers")
    for name, known in (("adjust_lr_fn", (None, *SCALES)), ("ns_dtype", NS_DTYPES)):
        if options[name] not in known:
            expected = ", ".join(map(repr, known))
            raise ConfigError(f"Muon({name}={options[name]!r}): expected one of {expected}")


def not_a_matrix(
    label: str, shape: Sequence[int], stacked: int, dtype: torch.dtype
) -> UnsupportedError:
    """Return the error for a parameter that Muon cannot step."""
    what = "complex" if dtype.is_complex else f"of shape {tuple(shape)}"
    wanted = "real matrices" if not stacked else f"stacks of matrices, {stacked + 2} dims or more"
    return UnsupportedError(
        f"Muon: {label} is {what}, expected {wanted}; step it with AdamW, as the default rule does"
    )


def _alike(params: Iterable[Tensor], stacked: int) -> list[list[Tensor]]:
    """Return the parameters that have gradients, in lists of equal matrices on one device."""
    found: dict[tuple[Any, ...], list[Tensor]] = {}
    for param in params:
        if param.grad is None:
            continue
        if param.grad.is_sparse:
            raise UnsupportedError("Muon: a gradient is sparse, expected a dense one")
        shape = (*param.shape[stacked : stacked + 1], math.prod(param.shape[stacked + 1 :]))
        kind = (shape, param.dtype, param.grad.dtype, param.device)
        found.setdefault(kind, []).append(param)
    return list(found.values())
