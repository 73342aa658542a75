"""Modules, parameters and optimizers: classes, and marks by which PyTorch and frameworks know them.

``nn.Module`` keeps its dictionaries in attributes such as ``_parameters``, which never change: they
are used everywhere, and do not count as private.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from traceback import walk_stack
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from fullshard._torch.names import Private, PrivateName

private = Private(__name__, "modules")

BatchNorm = private.get("torch.nn.modules.batchnorm._BatchNorm", "batch norms in FSDP1", instead=())
ConvNd = private.get("torch.nn.modules.conv._ConvNd", "convolutions in Muon", instead=())
_HOOKED = "torch.optim.Optimizer.profile_hook_step"
_hooked = private.get(_HOOKED, "steps that run in other threads", instead=lambda step: step)
CALLS_STEP_HOOKS = _hooked(Optimizer.step).__code__
"""Code of the wrapper that ``Optimizer.__init__`` puts around the ``step`` method of each class."""


def stepping_optimizers() -> list[int]:
    """Return the ids of optimizers in the middle of ``step``, in any thread, once for each call."""
    stacks = map(walk_stack, sys._current_frames().values())
    running = (frame for stack in stacks for frame, _ in stack if frame.f_code is CALLS_STEP_HOOKS)
    return [id(frame.f_locals["self"]) for frame in running if "self" in frame.f_locals]


def is_replicated(module: nn.Module) -> bool:
    """Return whether ``replicate``, the function for DDP, was applied to ``module``."""
    contract = _contract()
    return contract is not None and "replicate" in module.__dict__.get(contract.REGISTRY_KEY, ())


def mark_sharded(module: nn.Module) -> None:
    """Mark ``module`` as sharded, so that ``replicate`` around it leaves its parameters to us."""
    contract = _contract()
    if contract is not None:
        registry = module.__dict__.setdefault(contract.REGISTRY_KEY, {})
        registry.setdefault("fully_shard", contract.RegistryItem())


def _contract() -> Any:
    """Return the module in which ``replicate`` registers; None if it has not been imported."""
    contract = sys.modules.get("torch.distributed._composable.contract")
    return contract if all(hasattr(contract, name) for name in _CONTRACT) else None


_CONTRACT = ("REGISTRY_KEY", "RegistryItem")  # not looked up here: the import takes time
private.uses += [
    PrivateName(f"torch.distributed._composable.contract.{name}", "`replicate`")
    for name in _CONTRACT
]


def mark_managed(module: nn.Module, *, shows_originals: bool) -> None:
    """Make Dynamo treat ``module`` as sharded, with its original parameters or a flat one."""
    module._is_fsdp_managed_module = True  # type: ignore[assignment]
    module._fsdp_use_orig_params = shows_originals  # type: ignore[assignment]


def is_managed(module: nn.Module) -> bool:
    """Return whether Dynamo treats ``module`` as sharded, by fullshard or by PyTorch."""
    return hasattr(module, "_is_fsdp_managed_module")


def mark_flattened(param: Tensor, fqns: Iterable[str] | None = None) -> None:
    """Make ``param`` known as a parameter of a ``FullyShardedDataParallel`` wrapper.

    Frameworks ask parameters for this attribute. With ``fqns``, the names of all that it holds,
    it is a flat parameter: ``isinstance(param, torch.distributed.fsdp.FlatParameter)`` is true, and
    ``torch.distributed.checkpoint.state_dict`` finds the names.
    """
    param._fsdp_flattened = True  # type: ignore[attr-defined]
    if fqns is not None:
        param._is_flat_param = True  # type: ignore[attr-defined]
        param._fqns = tuple(fqns)  # type: ignore[attr-defined]


def overrides_setattr(module: nn.Module) -> bool:
    """Return whether the class of ``module`` overrides ``nn.Module.__setattr__``."""
    return type(module).__setattr__ is not nn.Module.__setattr__
