"""Objects that other parts of PyTorch expect from FSDP, implemented with our engine.

All attribute names, including private ones, are the names that PyTorch looks up.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed import _state_dict_utils
from torch.distributed.fsdp import wrap as torch_wrap
from torch.distributed.fsdp._fully_shard import _fully_shard as torch_fully_shard

from fullshard import wrap
from fullshard.engine import MixedPrecisionPolicy
from fullshard.frontend import FSDPModule
from fullshard.tensors import RaggedTensor


def policy_for_param(policy: MixedPrecisionPolicy, param: nn.Parameter) -> MixedPrecisionPolicy:
    """Implement ``policy._resolve_for_param``, which PyTorch's ``replicate`` calls from 2.15 on."""
    return policy.for_param("of a module given to replicate", param)


class CustomPolicy(wrap.CustomPolicy, torch_wrap._Policy):
    """A ``CustomPolicy`` that PyTorch's ``apply_activation_checkpointing`` accepts too.

    It takes only callables, which a ``ModuleWrapPolicy`` is, and instances of ``_Policy``.
    """

    def _run_policy(
        self,
        root_module: nn.Module,
        ignored_modules: set[nn.Module],
        root_kwargs: wrap.policies.Options,
    ) -> dict[nn.Module, wrap.policies.Options]:
        chosen = self.choose(root_module, ignored_modules)
        return {module: {**root_kwargs, **options} for module, options in chosen.items()}


_their_distribute = _state_dict_utils._distribute_tensors


def distribute_tensors(
    local_state_dict: dict[str, Any], keys: list[str], device: Any, pg: Any = None
) -> None:
    """Replace pairs of a tensor and its whole value by the tensor with this rank's part of it.

    ``set_model_state_dict`` calls this on whole state dicts; PyTorch's takes slices for all.
    """
    rest = []
    for key in keys:
        pair = local_state_dict.get(key)
        if isinstance(pair, tuple) and isinstance(pair[0], RaggedTensor):
            target, value = pair[0].detach(), pair[1]
            if target.is_meta:
                target = torch.empty_like(target, device=value.device)
            local_state_dict[key] = target.copy_(value)
        else:
            rest.append(key)
    _their_distribute(local_state_dict, rest, device, pg)


def get_cls_to_fsdp_cls() -> dict[type, type]:
    """Return PyTorch's and our map of module classes to sharded classes, which Dynamo reads."""
    subclasses = FSDPModule.__subclasses__()
    ours = {cls.__bases__[1]: cls for cls in subclasses if len(cls.__bases__) == 2}
    return torch_fully_shard.cls_to_fsdp_cls | ours
