"""Make Hugging Face's Accelerate shard on CPUs if a program gives it the FSDP plugin.

``Accelerator(fsdp_plugin=...)`` looks at the kind of device before it looks at the plugin. On CPUs
it uses DDP without a warning. The trainers of transformers and TRL build on ``Accelerator``, so
they do the same. PyTorch's FSDP once did not run on CPUs; ours does. With this file, the plugin has
the same effect on CPUs as on GPUs. Accelerate is never imported here: it is changed when a program
imports it.
"""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import wraps
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_MODULE = "accelerate.state"


class ShardsOnCpus(MetaPathFinder):
    """The change of Accelerate, now or as soon as it is imported, until ``undo``.

    As a finder, the class only notices the import; other finders find the module. After the import
    the class changes Accelerate's module.
    """

    def __init__(self) -> None:
        self._cls: Any = None
        if _MODULE in sys.modules:
            self._change(sys.modules[_MODULE])
        else:
            sys.meta_path.insert(0, self)

    def undo(self) -> None:
        """Restore the class that was changed, if one was."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        if self._cls is not None and self._cls.__init__ is self._ours:
            self._cls.__init__ = self._theirs

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec that the other finders find, with a loader that reports the import."""
        if fullname != _MODULE:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        specs = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_change(module: ModuleType) -> None:
                load(module)
                if self in sys.meta_path:  # not undone
                    sys.meta_path.remove(self)
                    self._change(module)

            spec.loader.exec_module = load_and_change  # type: ignore[method-assign]
        return spec

    def _change(self, module: ModuleType) -> None:
        cls = getattr(module, "AcceleratorState", None)
        if cls is not None:
            self._cls, self._theirs = cls, cls.__init__
            self._ours = cls.__init__ = _with_fsdp_on_cpus(module, cls.__init__)


def _with_fsdp_on_cpus(module: ModuleType, theirs: Callable[..., None]) -> Callable[..., None]:
    """Return ``AcceleratorState.__init__`` that takes an FSDP plugin on CPUs, too."""

    @wraps(theirs)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        theirs(self, *args, **kwargs)
        given = inspect.signature(theirs).bind(self, *args, **kwargs).arguments
        plugin = given.get("fsdp_plugin")
        if plugin is None or getattr(self.distributed_type, "name", "") != "MULTI_CPU":
            return
        try:
            _take_plugin(module, self, plugin)
        except AttributeError as missing:
            warnings.warn(
                f"An FSDP plugin was given, but this version of accelerate takes DDP on CPUs, and "
                f"fullshard cannot change that here ({missing}): nothing is sharded. Call "
                "accelerate.utils.fsdp2_prepare_model, or fullshard.fully_shard, yourself",
                stacklevel=2,
            )

    return init


def _take_plugin(module: Any, state: Any, plugin: Any) -> None:
    """Set up ``state`` as Accelerate does on accelerators."""
    shared = module.PartialState._shared_state
    kind = type(state.distributed_type).FSDP
    if state.mixed_precision != "no":
        plugin.set_mixed_precision(state.mixed_precision)
    state.fsdp_plugin = plugin
    state.distributed_type = shared["distributed_type"] = kind
