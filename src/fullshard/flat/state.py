"""State dicts of wrapped modules: full or sharded, as the user chose for the model."""

from __future__ import annotations

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
from fullshard.checkpoint.tree import Tree
from fullshard.errors import AssertedConfigError, ProtocolError, UnsupportedError
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
from fullshard.frontend.contexts import WRAPPED, clean_name
from fullshard.frontend.sharded import is_taken_as_it_is, taken_as_it_is

_CONFIGS: dict[StateDictType, tuple[type[StateDictConfig], type[OptimStateDictConfig]]] = {
    StateDictType.FULL_STATE_DICT: (FullStateDictConfig, FullOptimStateDictConfig),
    StateDictType.SHARDED_STATE_DICT: (ShardedStateDictConfig, ShardedOptimStateDictConfig),
}


def _default_settings() -> StateDictSettings:
    return StateDictSettings(
        StateDictType.FULL_STATE_DICT, FullStateDictConfig(), FullOptimStateDictConfig()
    )


class StateDicts(nn.Module):
    """What ``FullyShardedDataParallel`` does about state dicts."""

    _precision: Precision

    def __init__(self) -> None:
        super().__init__()
        self._settings = _default_settings()
        self._loads_itself = False  # what comes next is what it has already

    # which kind

    @staticmethod
    def set_state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> StateDictSettings | None:
        """Choose the kind of state dicts of all wrappers in ``module``; returns what it was.

        Raises:
            ProtocolError: a configuration of another kind.
            UnsupportedError: ``LOCAL_STATE_DICT``, which is historical.
        """
        chosen = _checked_settings(state_dict_type, state_dict_config, optim_state_dict_config)
        before = StateDicts.get_state_dict_type(module)
        for wrapper in _wrappers(module):
            wrapper._settings = chosen
        return before

    @staticmethod
    def get_state_dict_type(module: nn.Module) -> StateDictSettings | None:
        """The settings of all wrappers in ``module``; None if there are none.

        Raises:
            AssertedConfigError: they differ.
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
        """``set_state_dict_type`` for the time of a ``with`` block, however that ends."""
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
        """Full or sharded, see ``set_state_dict_type``; names are those of the module inside.

        A collective, unless sharded. Whole parameters are copies, and all else is the module's
        own, as in any state dict; on ranks that get none of a full one the dictionary is empty.
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
            state = full_state_dict(
                self, rank0_only=config.rank0_only, cpu=config.offload_to_cpu, copies=False
            )
        else:
            state = sharded_state_dict(self, plain_shards=True, whole_mesh=True)
            if config.offload_to_cpu:
                state = {name: _on_cpu(value) for name, value in state.items()}
        for name, dtype in self._own_dtypes().items():
            if name in state:
                state[name] = state[name].to(dtype)
        return state

    def _fqn_modifiers(self) -> Mapping[str, str]:
        """Return what ``torch.distributed.checkpoint.state_dict`` asks of modules it does not know.

        Without ``patch_torch`` it takes a wrapper for one, keeps its prefix in names and takes
        pieces of parameters and of optimizer state for whole tensors.
        """
        return _NotKnown()

    def _own_dtypes(self) -> dict[str, torch.dtype]:
        """Of buffers that are cast by now."""
        found = {}
        for prefix, module in self.named_modules():
            for name in module._buffers:
                for wrapper in _wrappers(self):
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
        """Load what belongs to the wrapper, all at once; what is inside then finds its own.

        The signature is that of ``nn.Module``, which calls it by position.
        """
        own, self._loads_itself = self._loads_itself, False
        if own or is_taken_as_it_is():
            return  # it has no parameters itself, and what is inside finds its own
        given = {k[len(prefix) :]: v for k, v in state_dict.items() if k.startswith(prefix)}
        by_name = {clean_name(name): value for name, value in given.items()}
        rows = list(Tree(self, "load_state_dict").rows())
        names = {row.name for row in rows}
        missing_keys += [prefix + row.name for row in rows if row.name not in by_name]
        unexpected_keys += [prefix + name for name in given if clean_name(name) not in names]
        if self._settings.state_dict_type is StateDictType.FULL_STATE_DICT:
            load_full_state_dict(self, given, strict=False)
        else:
            load_sharded_state_dict(self, given, strict=False)
        for wrapper in _wrappers(self):
            wrapper._loads_itself = wrapper is not self
        with taken_as_it_is():
            have = nn.Module.state_dict(self, keep_vars=True)
        for row in rows:
            if not isinstance(row.value, torch.Tensor) and row.name in by_name:
                have[row.own_name] = by_name[row.name]
        state_dict.update({prefix + name: value for name, value in have.items()})


class _NotKnown(dict[str, str]):
    """Changes no name, and refuses to be asked for that of the wrapped module."""

    def get(self, name: str, default: Any = None) -> Any:
        """Return None; PyTorch calls this for each part of a parameter's name.

        Raises:
            UnsupportedError: the part is what a wrapper adds.
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


def settings_of(module: nn.Module) -> StateDictSettings:
    """Those of the wrappers in ``module``, or what is usual."""
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
        elif type(one).__name__ != cls.__name__:  # PyTorch's own is as good
            raise ProtocolError(
                f"Expected {name} of type {cls.__name__} with {kind.name}, got {type(one).__name__}"
            )
        if kind is StateDictType.SHARDED_STATE_DICT:
            one = replace(one, _use_dtensor=True)
        chosen.append(one)
    return StateDictSettings(kind, *chosen)


def _on_cpu(value: Any) -> Any:
    return value.cpu() if isinstance(value, torch.Tensor) else value
