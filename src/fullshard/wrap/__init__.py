"""Choose the modules of a model that become units, by ``torch.distributed.fsdp.wrap`` policies.

``policies`` has the policies, ``units`` applies a policy to a model, ``unity`` refuses choices that
cannot be units, and ``replace`` puts new modules in place of the chosen modules. Alternatively, a
model marks its own modules with ``annotate``. Nothing here depends on how a unit is built.

    shard_blocks(model, policy=ModuleWrapPolicy({Block}))
"""

from __future__ import annotations

from fullshard.wrap.annotate import enable_wrap, wrap
from fullshard.wrap.policies import (
    CustomPolicy,
    ModuleWrapPolicy,
    always_wrap_policy,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)

__all__ = [
    "CustomPolicy",
    "ModuleWrapPolicy",
    "always_wrap_policy",
    "enable_wrap",
    "lambda_auto_wrap_policy",
    "size_based_auto_wrap_policy",
    "transformer_auto_wrap_policy",
    "wrap",
]
