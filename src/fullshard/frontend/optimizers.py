"""Check optimizers at their first step: whether they can step the parameters that they hold."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import LBFGS, Adafactor, Muon, Optimizer, SparseAdam
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fullshard._torch import dynamo as _dynamo
from fullshard.comm.text import listed
from fullshard.errors import ConfigError, FullshardError, RaggedOperationError, UnsupportedError
from fullshard.frontend.ownership import names_of_stepped, sharded_twin_of
from fullshard.tensors import RaggedTensor, handle_mixed_lists

# Checked optimizers with their number of parameters, so that later steps cost nothing.
_checked: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()


def check_optimizers_again() -> None:
    """Check all optimizers again, because parameters were replaced by sharded ones."""
    _checked.clear()


@_dynamo.never_compiled
def _check_optimizer(optimizer: Optimizer, *_: Any) -> None:
    """Refuse a step that would train nothing, or not as the unsharded model; change nothing."""
    num_params = sum(len(group["params"]) for group in optimizer.param_groups)
    if _checked.get(optimizer) == num_params:
        return
    params = {param for group in optimizer.param_groups for param in group["params"]}
    _check_replaced(optimizer, params)
    if any(isinstance(param, DTensor) for param in params):
        _check_class(optimizer, params)
    _checked[optimizer] = num_params


register_optimizer_step_pre_hook(_check_optimizer)


def _check_replaced(optimizer: Optimizer, params: set[nn.Parameter]) -> None:
    """Refuse parameters that have been sharded since: their steps would train nothing."""
    for param in params:
        name, sharded = sharded_twin_of(param)
        if sharded is not None and sharded not in params:  # else tied: both are trained
            raise ConfigError(
                f"this {type(optimizer).__name__} was built before fully_shard: its parameter "
                f"{name}, for one, was replaced by a sharded one and would not be trained; build "
                "the optimizer after sharding"
            )


_ELEMENTWISE = "step them with an optimizer that treats every element by itself, such as AdamW"
_OWNERS = (
    "build fullshard.optim.Muon(model) in its stead, which has each matrix stepped whole by one "
    "rank, and everything else by AdamW"
)
_REPLICAS = (
    "keep them whole on every rank: fully_shard(module, mesh=init_device_mesh(device_type, "
    '(num_ranks, 1), mesh_dim_names=("replicate", "shard"))) with layout=PerParameter(), which '
    "replicates the module and shards nothing"
)


def _check_class(optimizer: Optimizer, params: set[nn.Parameter]) -> None:
    """Refuse classes of ``torch.optim`` that fail on our sharded parameters, or step otherwise."""
    cut = names_of_stepped(param for param in params if isinstance(param, DTensor))
    if not cut:
        return
    if isinstance(optimizer, SparseAdam):
        why = "wants sparse gradients, and those of sharded parameters are dense"
        _refuse(optimizer, cut, why, "use Adam")
    if isinstance(optimizer, Adafactor):
        why = "takes means over rows, columns and whole parameters, of which a rank holds a part"
        do = (
            "PyTorch's Adafactor does that for no layout, PerParameter() neither; so "
            f"{_ELEMENTWISE}; or pass them in ignored_params, which leaves them whole and plain, "
            "and take the mean of their gradients over the ranks before each step"
        )
        _refuse(optimizer, cut, why, do)
    if isinstance(optimizer, Muon):
        divided = {param: name for param, name in cut.items() if not _is_whole(param)}
        why = "orthogonalizes whole matrices, of which a rank holds a part"
        _refuse(optimizer, divided, why, f"{_OWNERS}; or {_ELEMENTWISE}; or {_REPLICAS}")
    on_several = len({_mesh_of(param) for param in params}) > 1
    if isinstance(optimizer, LBFGS):
        unjoined = {param: name for param, name in cut.items() if not _is_vector(param)}
        why = "joins all parameters to one vector, for which PyTorch wants them cut evenly in dim 0"
        do = f"{_ELEMENTWISE}; or, where the first dim is larger than 1, {_REPLICAS}"
        _refuse(optimizer, unjoined, why, do)
        why = "joins all parameters to one vector, and these lie on several meshes or on none"
        do = "shard all parameters that it steps, on one mesh"
        _refuse(optimizer, cut if on_several else {}, why, do)
    if on_several:
        handle_mixed_lists()


def _is_whole(param: Tensor) -> bool:
    """Return whether this rank holds all of ``param``, in rows that PyTorch knows."""
    if isinstance(param, RaggedTensor):
        return False
    assert isinstance(param, DTensor)
    sizes = param.device_mesh.shape
    return all(
        size == 1 or placement.is_replicate()
        for size, placement in zip(sizes, param.placements, strict=True)
    )


def _is_vector(param: Tensor) -> bool:
    """Return whether ``param`` can be viewed as a vector; moves nothing, alike on all ranks."""
    try:
        param.detach().view(-1)
    except (RuntimeError, FullshardError):
        return False
    return True


def _mesh_of(param: Tensor) -> object:
    return param.device_mesh if isinstance(param, DTensor) else None


def _refuse(
    optimizer: Optimizer, named: dict[nn.Parameter, str], why: str, what_to_do: str
) -> None:
    """Raise if any parameters are ``named``: the error of ragged operations if all are ragged."""
    is_ragged = all(isinstance(param, RaggedTensor) for param in named)
    cls = RaggedOperationError if is_ragged else UnsupportedError
    if named:
        raise cls(
            f"{type(optimizer).__name__} {why}: {listed(sorted(named.values()), 4)}. Nothing was "
            f"stepped. What to do: {what_to_do}"
        )
