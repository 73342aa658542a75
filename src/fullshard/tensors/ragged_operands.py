"""Get the local operands of an operation on RaggedTensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from fullshard._torch import dtensor as _dtensor
from fullshard.errors import RaggedOperationError
from fullshard.tensors.pointwise import fits
from fullshard.tensors.ragged_cut import is_ragged

Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]  # op, args, kwargs


def first_ragged(values: Iterable[Any]) -> DTensor:
    """Return the first RaggedTensor among ``values``."""
    found: DTensor = next(value for value in values if is_ragged(value))
    return found


def operand(op: Any, arg: Any, like: Tensor) -> Any:
    """Return the local operand for ``arg`` that goes with this rank's elements of ``like``.

    A plain ``like`` goes with plain tensors of any shape.

    Raises:
        RaggedOperationError: if ``arg`` is a tensor with dims that is not cut like ``like``.
    """
    if fits(arg, like):
        return _dtensor.local_of(arg) if isinstance(arg, DTensor) else arg
    raise RaggedOperationError(
        f"{op}: got {_described(arg)} beside {_described(like)}; expected a tensor cut into the "
        "same intervals on the same mesh, or one without dims. Bring both to one form first, such "
        "as by redistribute() or full_tensor()"
    )


def _described(tensor: Tensor) -> str:
    kind = f"a {type(tensor).__name__} of shape {tuple(tensor.shape)}"
    if not isinstance(tensor, DTensor):
        return kind
    placements = ", ".join(map(repr, tensor.placements))
    return f"{kind} placed as ({placements}) on a mesh of shape {tuple(tensor.device_mesh.shape)}"


def refusal(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> RaggedOperationError:
    """Return the error for an operation whose meaning changes on intervals."""
    found = (value for value in (*args, *kwargs.values()) if is_ragged(value))
    shapes = ", ".join(str(tuple(value.shape)) for value in found) or "a list of tensors"
    return RaggedOperationError(
        f"{op} on RaggedTensor {shapes}: a rank holds an interval of the flattened tensor, which "
        "has no rows, columns or single elements. Call full_tensor() first, work inside of "
        "unshard_params(), or shard with layout=PerParameter(), whose DTensors know matrices; "
        "optimizers must be element-wise, such as AdamW. If a forward did this, it was "
        "not that of the module given to fully_shard, which unshards it"
    )
