"""Objects that other parts of PyTorch expect from FSDP, implemented with our engine.

All attribute names, including private ones, are the names that PyTorch looks up.
"""

from __future__ import annotations

from torch import nn
from torch.distributed.fsdp import wrap as torch_wrap
from torch.distributed.fsdp._fully_shard import _fully_shard as torch_fully_shard

from fullshard import wrap
from fullshard.engine import MixedPrecisionPolicy
from fullshard.frontend import FSDPModule


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


def get_cls_to_fsdp_cls() -> dict[type, type]:
    """Return PyTorch's and our map of module classes to sharded classes, which Dynamo reads."""
    subclasses = FSDPModule.__subclasses__()
    ours = {cls.__bases__[1]: cls for cls in subclasses if len(cls.__bases__) == 2}
    return torch_fully_shard.cls_to_fsdp_cls | ours
