"""Names of parameters, as users know them."""

from __future__ import annotations

WRAPPED = "_fsdp_wrapped_module"
"""The attribute of ``FullyShardedDataParallel`` for the module inside, so a part of names."""

_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.", f"{WRAPPED}.")


def clean_name(name: str) -> str:
    """Return ``name`` without what wrappers add: activation checkpoints, the compiler, ours."""
    for prefix in _WRAPPERS:
        name = name.replace(prefix, "")
    return name
