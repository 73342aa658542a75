"""Every private or version-dependent PyTorch name that fullshard uses (2.11 to 2.15).

Each subsystem has a module. When a PyTorch release breaks fullshard, look here first: ``missing``
is the self-test.

Other files may use names that hardly ever change: operators (``torch._foreach_add_``) and their
``_schema``, the dictionaries of ``nn.Module``, ``torch.utils._pytree``, ``TorchDispatchMode``,
``Tensor._base`` and ``_is_view``, the members of ``GradScaler`` in its subclass, and the attribute
of checkpoint wrappers that is part of parameter names. ``compat``, which replaces names of
PyTorch's FSDP, uses them directly.
"""

from __future__ import annotations

from fullshard._torch import autograd, collectives, device, dtensor, dynamo, memory, mesh, nn, world
from fullshard._torch.names import PrivateName

MODULES = (autograd, collectives, device, dtensor, dynamo, memory, mesh, nn, world)


def missing() -> list[PrivateName]:
    """Return the names that the installed PyTorch lacks, each with the feature that needs it."""
    return [use for module in MODULES for use in module.private.missing()]
