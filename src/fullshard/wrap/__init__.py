"""Which modules of a model become units: the policies of ``torch.distributed.fsdp.wrap``.

``policies`` say which, ``units`` asks them, ``unity`` refuses what cannot be one unit, ``replace``
puts other modules in the place of the chosen ones; ``annotate`` is the other way, by which a model
says it of itself. Nothing here knows what a unit is made of.

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
