"""Make and load full or sharded state dicts of wrapped modules, as the user chose."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from fullshard.checkpoint import (
    full_state_dict,
    load_full_state_dict,
    load_sharded_state_dict,
    sharded_state_dict,
)
from fullshard.checkpoint.state import Tree
from fullshard.errors import AssertedConfigError, ProtocolError, UnsupportedError
from fullshard.flat.lending import warn_of_copies
from fullshard.flat.options import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    OptimStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
    member_of,
)
from fullshard.flat.precision import Precision
from fullshard.frontend.sharded import is_taken_as_it_is, taken_as_it_is
from fullshard.tensors.form import WRAPPED, clean_name

_CONFIGS: dict[StateDictType, tuple[type[StateDictConfig], type[OptimStateDictConfig]]] = {
    StateDictType.FULL_STATE_DICT: (FullStateDictConfig, FullOptimStateDictConfig),
    StateDictType.SHARDED_STATE_DICT: (ShardedStateDictConfig, ShardedOptimStateDictConfig),
}


def _default_settings() -> StateDictSettings:
    return StateDictSettings(
        StateDictType.FULL_STATE_DICT, FullStateDictConfig(), FullOptimStateDictConfig()
    )


class StateDicts(nn.Module):
    """The methods of ``FullyShardedDataParallel`` for state dicts of models."""

    _precision: Precision

    def __init__(self) -> None:
        super().__init__()
        self._settings = _default_settings()

    # the kind of state dict

    @staticmethod
    def set_state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> StateDictSettings | None:
        """Set the state dict settings of all wrappers in ``module``; return the old settings.

        Raises:
            ProtocolError: if a configuration is of another kind than ``state_dict_type``.
            UnsupportedError: for ``LOCAL_STATE_DICT``, which is obsolete.
        """
        _warn_of_types(stacklevel=3)
        chosen = _checked_settings(state_dict_type, state_dict_config, optim_state_dict_config)
        before = StateDicts.get_state_dict_type(module)
        for wrapper in _wrappers(module):
            wrapper._settings = chosen
        return before

    @staticmethod
    def get_state_dict_type(module: nn.Module) -> StateDictSettings | None:
        """Return the settings of all wrappers in ``module``; None if there are no wrappers.

        Raises:
            AssertedConfigError: if wrappers have different settings.
        """
        found = [wrapper._settings for wrapper in _wrappers(module)]
        if any(one != found[0] for one in found[1:]):
            raise AssertedConfigError(
                "All FSDP modules must have the same state dict settings, found "
                f"{', '.join(sorted({one.state_dict_type.name for one in found}))} with their "
                "configurations; set them on the whole model"
            )
        return found[0] if found else None

    @staticmethod
    @contextmanager
    def state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> Iterator[None]:
        """Change settings as ``set_state_dict_type`` does, and restore them after the block."""
        _warn_of_types(stacklevel=4)  # past contextlib
        chosen = _checked_settings(state_dict_type, state_dict_config, optim_state_dict_config)
        before = [(wrapper, wrapper._settings) for wrapper in _wrappers(module)]
        for wrapper, _ in before:
            wrapper._settings = chosen
        try:
            yield
        finally:
            for wrapper, settings in before:
                wrapper._settings = settings

    # models

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return a full or sharded state dict, as set by ``set_state_dict_type``; a collective.

        Names are those of the wrapped module. A full state dict has copies of parameters, and is
        empty on ranks that get none; all other values may share memory with the module.
        """
        if is_taken_as_it_is():
            return super().state_dict(*args, **kwargs)
        named = dict(zip(("destination", "prefix", "keep_vars"), args, strict=False)) | kwargs
        destination, prefix = named.get("destination"), named.get("prefix", "")
        state = self._made()
        target: dict[str, Any] = {} if destination is None else destination
        target.update({prefix + name: value for name, value in state.items()})
        return target

    def _made(self) -> dict[str, Any]:
        config: Any = self._settings.state_dict_config
        if self._settings.state_dict_type is StateDictType.FULL_STATE_DICT:
            warn_of_copies("FullStateDictConfig", config.rank0_only, config.offload_to_cpu)
            state = full_state_dict(
                self, rank0_only=config.rank0_only, cpu=config.offload_to_cpu, copies=False
            )
        else:
            state = sharded_state_dict(self, plain_shards=True, whole_mesh=True)
            if config.offload_to_cpu:
                state = {name: on_cpu(value) for name, value in state.items()}
        for name, dtype in self._own_dtypes().items():
            if name in state:
                state[name] = state[name].to(dtype)
        return state

    def _fqn_modifiers(self) -> Mapping[str, str]:
        """Return a mapping that makes ``torch.distributed.checkpoint.state_dict`` fail.

        Without ``patch_torch``, PyTorch does not know the wrapper: names would keep its prefix, and
        local shards of parameters and of optimizer state would be taken for full tensors.
        """
        return _NotKnown()

    def _own_dtypes(self) -> dict[str, torch.dtype]:
        """Return the original dtypes of cast buffers, by clean name."""
        found, wrappers = {}, _wrappers(self)
        for prefix, module in self.named_modules(remove_duplicate=False):
            for name in module._buffers:
                for wrapper in wrappers:
                    dtype = wrapper._precision.buffers.get((module, name))
                    if dtype is not None:
                        found[clean_name(f"{prefix}.{name}" if prefix else name)] = dtype
        return found

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Load everything inside at once, then put the loaded values into ``state_dict``.

        ``nn.Module`` calls this by position; next, inner modules load their own values once more.
        """
        given = {k[len(prefix) :]: v for k, v in state_dict.items() if k.startswith(prefix)}
        if is_taken_as_it_is() or self._is_loaded(given):
            return  # the wrapper has no parameters itself, and inner modules load theirs
        by_name = {clean_name(name): value for name, value in given.items()}
        rows = list(Tree(self, "load_state_dict", may_be_lent=True).rows())
        names = {row.name for row in rows}
        missing_keys += [prefix + row.name for row in rows if row.name not in by_name]
        unexpected_keys += [prefix + name for name in given if clean_name(name) not in names]
        if self._settings.state_dict_type is StateDictType.FULL_STATE_DICT:
            load_full_state_dict(self, given, strict=False)
        else:
            load_sharded_state_dict(self, given, strict=False)
        have = self._own_values()
        for row in rows:
            if not isinstance(row.value, torch.Tensor) and row.name in by_name:
                have[row.own_name] = by_name[row.name]
        state_dict.update({prefix + name: value for name, value in have.items()})

    def _is_loaded(self, given: Mapping[str, Any]) -> bool:
        """Return whether ``given`` holds our own tensors: an outer wrapper has loaded them."""
        have = self._own_values().items()
        return all(given.get(k) is v for k, v in have if isinstance(v, torch.Tensor))

    def _own_values(self) -> dict[str, Any]:
        """Return the parameters and buffers themselves, by the names they have in modules."""
        with taken_as_it_is():
            return nn.Module.state_dict(self, keep_vars=True)


class _NotKnown(dict[str, str]):
    """A mapping that changes no name, and raises if a name contains a wrapper's prefix."""

    def get(self, name: str, default: Any = None) -> Any:
        """Return ``default``; PyTorch calls this for each part of a parameter's name.

        Raises:
            UnsupportedError: if the part is the prefix that a wrapper adds.
        """
        if name != WRAPPED:
            return default
        raise UnsupportedError(
            "torch.distributed.checkpoint.state_dict got a model with fullshard's "
            "FullyShardedDataParallel in it, of which it knows only PyTorch's own; it would take "
            "pieces of parameters and of optimizer state for whole ones. Call "
            "fullshard.compat.patch_torch() before, or save state_dict() and optim_state_dict() "
            "of FullyShardedDataParallel"
        )


def _warn_of_types(*, stacklevel: int) -> None:
    warnings.warn(
        "FullyShardedDataParallel.state_dict_type() and set_state_dict_type() are deprecated in "
        "PyTorch; get_state_dict() and set_state_dict() of torch.distributed.checkpoint.state_dict "
        "take both faces, after fullshard.compat.patch_torch()",
        FutureWarning,
        stacklevel=stacklevel,
    )


def settings_of(module: nn.Module) -> StateDictSettings:
    """Return the settings of the wrappers in ``module``, or the default settings."""
    return StateDicts.get_state_dict_type(module) or _default_settings()


def _wrappers(module: nn.Module) -> list[StateDicts]:
    return [one for one in module.modules() if isinstance(one, StateDicts)]


def _checked_settings(kind: Any, config: Any, optim_config: Any) -> StateDictSettings:
    kind = member_of(StateDictType, kind, "state_dict_type")
    if kind not in _CONFIGS:
        raise UnsupportedError(
            "LOCAL_STATE_DICT is historical: it saves flat parameters, which only the same model, "
            "wrapped and sharded in the same way, can load. Use SHARDED_STATE_DICT with "
            "torch.distributed.checkpoint"
        )
    chosen = []
    given = ((config, "state_dict_config"), (optim_config, "optim_state_dict_config"))
    for cls, (one, name) in zip(_CONFIGS[kind], given, strict=True):
        if one is None:
            one = cls()
        elif type(one).__name__ != cls.__name__:  # PyTorch's own class is accepted too
            raise ProtocolError(
                f"Expected {name} of type {cls.__name__} with {kind.name}, got {type(one).__name__}"
            )
        if kind is StateDictType.SHARDED_STATE_DICT:
            one = replace(one, _use_dtensor=True)
        chosen.append(one)
    return StateDictSettings(kind, *chosen)


def on_cpu(value: Any) -> Any:
    """Return a tensor on the CPU; anything else as it is."""
    return value.cpu() if isinstance(value, torch.Tensor) else value
