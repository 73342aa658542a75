"""Choose the modules of a model that become units.

``policies`` has the policies, and ``wrap``, by which a model marks its own modules. ``units``
applies a policy to a model, refuses choices that cannot be units, and can replace the chosen
modules. Nothing here depends on how a unit is built.

    shard_blocks(model, policy=ModuleWrapPolicy({Block}))
"""

from __future__ import annotations

from fullshard.wrap.policies import (
    CustomPolicy,
    ModuleWrapPolicy,
    always_wrap_policy,
    enable_wrap,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
    wrap,
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
