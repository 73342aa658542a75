"""Warn programs that patch the implementation of PyTorch's FSDP: such patches have no effect."""

from __future__ import annotations

import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import torch

from fullshard.compat.states import torch_file

_IMPLEMENTATION = {
    "_fully_shard._fsdp_collectives": (),
    "_fully_shard._fsdp_init": (),
    "_fully_shard._fsdp_param": ("FSDPParam",),
    "_fully_shard._fsdp_param_group": ("FSDPParamGroup",),
    "_fully_shard._fsdp_state": ("FSDPState",),
    "_flat_param": ("FlatParamHandle",),
    "_runtime_utils": (),
    "_state_dict_utils": (),
}
"""Files of PyTorch's FSDP whose functions we do not run, with the classes that we have views of."""


class IneffectivePatches:
    """Warns, once for each name, of functions with which a program replaced PyTorch's."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def warn(self) -> None:
        """Warn of the functions that were replaced since the last call."""
        new = [name for name in _replaced() if name not in self._told]
        self._told |= set(new)
        if new:
            warnings.warn(
                f"this program replaced {', '.join(new)} of torch.distributed.fsdp. Modules that "
                "fullshard shards do not call these functions, so the replacements have no effect; "
                "docs/compat.md lists the methods and hooks to use instead",
                stacklevel=3,
            )


def _replaced() -> Iterator[str]:
    """Yield the names of PyTorch's functions and methods that a program has replaced."""
    for name, classes in _IMPLEMENTATION.items():
        module = torch_file(name)
        yield from _foreign("", module)
        for cls in classes:
            yield from _foreign(f"{cls}.", getattr(module, cls, None))


def _foreign(prefix: str, holder: ModuleType | type | None) -> Iterator[str]:
    for name, value in vars(holder).items() if holder is not None else ():
        function = getattr(value, "fget", None) or getattr(value, "__func__", value)
        code = getattr(function, "__code__", None)
        if code is not None and not _is_known(code.co_filename):
            yield prefix + name


_KNOWN = ("<", str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
_STANDARD = sysconfig.get_paths()["stdlib"]


def _is_known(file: str) -> bool:
    """Return whether ``file`` belongs to PyTorch, to fullshard, or to packages of PyTorch."""
    if file.startswith(_KNOWN) or file.endswith("typing_extensions.py"):
        return True
    if Path(file).parent.name == "spmd_types":  # imported by PyTorch 2.15 if it is installed
        return True
    return file.startswith(_STANDARD) and "-packages" not in file.removeprefix(_STANDARD)
