"""Explain the errors of operations that meet a sharded parameter beside a plain tensor.

PyTorch raises "got mixed torch.Tensor and DTensor" in C++, where no code of ours runs. The handlers
here are on the way to that error. They belong to operations that modules run and optimizers do not,
so a step of a sharded model never calls them. A tensor-parallel model computes with DTensors in
each step, so the handlers are removed as soon as there is one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from fullshard._torch import dtensor as _dtensor
from fullshard.tensors.parts import aten_ops

explanations: list[Callable[[Sequence[Tensor], Exception], Exception | None]] = []
"""Called with the tensors of an operation and its error; return a clearer error, or None."""

MIXED = "got mixed torch.Tensor and DTensor"
"""The text of PyTorch's error for an operation on a DTensor and a plain tensor."""

_OPS = aten_ops(
    "addmm.default addmv.default baddbmm.default bmm.default linear.default matmul.default"
    " mm.default mv.default mul.Tensor embedding.default _embedding_bag.default convolution.default"
    " native_layer_norm.default native_group_norm.default native_batch_norm.default"
    " _native_batch_norm_legit.default cudnn_batch_norm.default batch_norm.default"
    " _fused_rms_norm.default _prelu_kernel.default _grouped_mm.default"
    # not decomposed in inference mode
    " conv1d.default conv2d.default conv3d.default conv1d.padding conv2d.padding conv3d.padding"
    " conv_transpose1d.default conv_transpose2d.input conv_transpose3d.input layer_norm.default"
    " group_norm.default rms_norm.default embedding_bag.default prelu.default"
)
"""First operations on parameters in the forwards of modules."""

_undo: list[Callable[[], None]] | None = None


def explain_uses(*, parallel: bool) -> None:
    """Explain errors of mixed operations, until there is a tensor-parallel (``parallel``) unit."""
    global _undo
    if parallel:
        for undo in _undo or ():
            undo()
        _undo = []
    elif _undo is None:
        _undo = [_dtensor.surround_dtensor_op(op, _explaining) for op in _OPS]


def _explaining(run: Callable[..., Any], op: Any, args: Any, kwargs: Any) -> object:
    try:
        return run(op, args, kwargs)
    except RuntimeError as error:
        if MIXED not in str(error):
            raise
        raise_explained((args, kwargs), error)
        raise


def raise_explained(given: Any, error: Exception) -> None:
    """Raise a clearer error than ``error``, which an operation on ``given`` raised, if there is."""
    tensors = [one for one in tree_leaves(given) if isinstance(one, Tensor)]
    for explain in explanations:
        clearer = explain(tensors, error)
        if clearer is not None:
            raise clearer from error
