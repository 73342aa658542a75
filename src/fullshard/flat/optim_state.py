"""Make and load state dicts of optimizers of wrapped modules, keyed by parameter names.

The functions are ``optim_state_dict`` and ``optim_state_dict_to_load``, and variants of them with
the names and arguments of PyTorch's older functions.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

from torch import nn
from torch.optim import Optimizer

from fullshard.checkpoint import full_optim_state_dict, sharded_optim_state_dict
from fullshard.checkpoint.state import (
    Tree,
    full_optim_state,
    optim_state_to_load,
    sharded_optim_state,
)
from fullshard.errors import AssertedConfigError, ConfigError
from fullshard.flat.options import (
    FullOptimStateDictConfig,
    OptimStateKeyType,
    StateDictType,
)
from fullshard.flat.state import on_cpu, settings_of
from fullshard.optim.inner import Groups, numbered
from fullshard.tensors.form import clean_name

StateDict = dict[str, Any]


class OptimStateDicts:
    """The methods of ``FullyShardedDataParallel`` for state dicts of optimizers: collectives."""

    @staticmethod
    def optim_state_dict(
        model: nn.Module,
        optim: Optimizer,
        optim_state_dict: StateDict | None = None,
        group: Any = None,
    ) -> StateDict:
        """Return the state of ``optim`` by name, full or sharded as ``set_state_dict_type`` says.

        Args:
            model: the model whose parameters ``optim`` steps.
            optim: the optimizer.
            optim_state_dict: the state, by parameter indices or names; None: that of
                ``optim.state_dict()``. If it has no groups, the result has no groups.
            group: accepted without effect; the ranks are those of the model.

        Raises:
            ConfigError: if ``optim`` has a parameter that is not in ``model``.
        """
        settings = settings_of(model)
        config: Any = settings.optim_state_dict_config
        given = optim.state_dict() if optim_state_dict is None else optim_state_dict
        tree, saved = Tree(model, "optim_state_dict"), _numbered(model, optim, given)
        if settings.state_dict_type is StateDictType.SHARDED_STATE_DICT:
            made = sharded_optim_state(tree, optim, saved, plain_shards=True, whole_mesh=True)
            if config.offload_to_cpu:
                for values in made["state"].values():
                    values.update({key: on_cpu(value) for key, value in values.items()})
        else:
            made = full_optim_state(
                tree, optim, saved, rank0_only=config.rank0_only, cpu=config.offload_to_cpu
            )
        if "param_groups" not in given:
            made.pop("param_groups", None)
        return made

    @staticmethod
    def optim_state_dict_to_load(
        model: nn.Module,
        optim: Optimizer,
        optim_state_dict: StateDict,
        is_named_optimizer: bool = False,
        load_directly: bool = False,
        group: Any = None,
    ) -> StateDict:
        """Return the input of ``optim.load_state_dict`` for a full or sharded state by name.

        Args:
            model: the model whose parameters ``optim`` steps.
            optim: the optimizer.
            optim_state_dict: a result of ``optim_state_dict``, for any wrapping and number of
                ranks; if ``rank0_only`` is set, only that of the first rank is used.
            is_named_optimizer: ``optim`` expects parameter names instead of indices.
            load_directly: load the result into ``optim`` as well.
            group: accepted without effect; the ranks are those of the model.

        Raises:
            ConfigError: if there is no state, or parameters, groups or DTensor shapes do not fit.
        """
        settings = settings_of(model)
        config: Any = settings.optim_state_dict_config
        rank0_only = isinstance(config, FullOptimStateDictConfig) and config.rank0_only
        spread = settings.state_dict_type is StateDictType.SHARDED_STATE_DICT
        what = "optim_state_dict_to_load"
        loaded = optim_state_to_load(
            model,
            optim,
            optim_state_dict,
            what,
            send=rank0_only,
            spread=spread,
            strict=False,
            may_be_empty=False,
        )
        if is_named_optimizer:
            loaded = _by_names(loaded, _names(model, optim, are_clean=False))
        if load_directly:
            optim.load_state_dict(loaded)
        return loaded

    # PyTorch's older functions

    @staticmethod
    def full_optim_state_dict(
        model: nn.Module,
        optim: Optimizer,
        optim_input: Any = None,
        rank0_only: bool = True,
        group: Any = None,
    ) -> StateDict:
        """Return a full ``optim_state_dict``, whatever ``set_state_dict_type`` says."""
        _warn_of_input(optim_input)
        return full_optim_state_dict(model, optim, rank0_only=rank0_only)

    @staticmethod
    def sharded_optim_state_dict(
        model: nn.Module, optim: Optimizer, group: Any = None
    ) -> StateDict:
        """Return a sharded ``optim_state_dict``, whatever ``set_state_dict_type`` says."""
        return sharded_optim_state_dict(model, optim, plain_shards=True, whole_mesh=True)

    @staticmethod
    def shard_full_optim_state_dict(
        full_optim_state_dict: StateDict,
        model: nn.Module,
        optim_input: Any = None,
        optim: Optimizer | None = None,
    ) -> StateDict:
        """Return the result of ``optim_state_dict_to_load`` for a full state dict.

        Groups list only parameters in groups of that state dict; callers add the others.
        """
        given = _groups(model, optim, optim_input)
        return _to_load(model, given, full_optim_state_dict)

    @staticmethod
    def flatten_sharded_optim_state_dict(
        sharded_optim_state_dict: StateDict, model: nn.Module, optim: Optimizer
    ) -> StateDict:
        """Do the same as ``shard_full_optim_state_dict`` for a sharded state dict."""
        return _to_load(model, optim, sharded_optim_state_dict, spread=True)

    @staticmethod
    def scatter_full_optim_state_dict(
        full_optim_state_dict: StateDict | None,
        model: nn.Module,
        optim_input: Any = None,
        optim: Optimizer | None = None,
        group: Any = None,
    ) -> StateDict:
        """Do the same as ``shard_full_optim_state_dict`` for the first rank's state dict."""
        given = _groups(model, optim, optim_input)
        return _to_load(model, given, full_optim_state_dict or {}, send=True)

    @staticmethod
    def rekey_optim_state_dict(
        optim_state_dict: StateDict,
        optim_state_key_type: OptimStateKeyType,
        model: nn.Module,
        optim_input: Any = None,
        optim: Optimizer | None = None,
    ) -> StateDict:
        """Return a full optimizer state dict keyed by indices instead of names, or the reverse.

        ``model`` is unwrapped; without ``optim`` its parameters are numbered in its own order.

        Raises:
            AssertedConfigError: if ``optim_state_key_type`` is not an ``OptimStateKeyType``.
            ConfigError: if keys are neither all names nor all indices, or belong to parameters
                that the model or the optimizer does not have.
        """
        kind = getattr(optim_state_key_type, "name", None)
        if kind not in OptimStateKeyType.__members__:
            raise AssertedConfigError(
                f"rekey_optim_state_dict: got {optim_state_key_type!r}, expected an "
                "OptimStateKeyType"
            )
        groups = optim_state_dict.get("param_groups", ())
        keys = [*optim_state_dict["state"], *chain.from_iterable(g["params"] for g in groups)]
        are_names = all(isinstance(key, str) for key in keys)
        if not are_names and not all(isinstance(key, int) for key in keys):
            raise ConfigError(f"Invalid parameter keys: {keys[:8]}; expected names or numbers")
        if not keys or are_names is (kind == "PARAM_NAME"):
            return optim_state_dict
        names = _names(model, _groups(model, optim, optim_input))
        if not are_names:
            return _by_names(optim_state_dict, names)
        rekeyed = _rekeyed(optim_state_dict, {name: i for i, name in enumerate(names)})
        for group in rekeyed["param_groups"]:
            group["params"].sort()  # optimizers match parameters by order
        return rekeyed


def _names(model: nn.Module, optim: Optimizer | Groups, *, are_clean: bool = True) -> list[str]:
    """Return the parameter names in the order of ``optim``, clean or with wrappers' prefixes."""
    groups = optim if isinstance(optim, Sequence) else optim.param_groups
    name_of = {
        id(param): clean_name(name) if are_clean else name
        for name, param in model.named_parameters()
    }
    return [name_of[id(param)] for _, param in numbered(groups)]


# Groups list only parameters in groups of the state dict, as with PyTorch's older functions.
_to_load = partial(
    optim_state_to_load, what="the optimizer's state dict", strict=False, all_params=False
)


def _by_names(state: Mapping[str, Any], names: list[str]) -> StateDict:
    return _rekeyed(state, dict(enumerate(names)))


def _rekeyed(state: Mapping[str, Any], new: Mapping[Any, Any]) -> StateDict:
    groups: Iterable[Mapping[str, Any]] = state.get("param_groups", ())
    keys = dict.fromkeys([*state["state"], *chain.from_iterable(g["params"] for g in groups)])
    unknown = [key for key in keys if key not in new]
    if unknown:
        raise ConfigError(
            f"optimizer state of {unknown[:8]}, which the model and its optimizer do not have; "
            "give those that were saved, or remove that state"
        )
    rekeyed: StateDict = {"state": {new[key]: kept for key, kept in state["state"].items()}}
    rekeyed["param_groups"] = [
        {**group, "params": sorted((new[key] for key in group["params"]), key=str)}
        if isinstance(next(iter(group["params"]), 0), int)
        else {**group, "params": [new[key] for key in group["params"]]}
        for group in groups
    ]
    return rekeyed


def _groups(model: nn.Module, optim: Optimizer | None, optim_input: Any) -> Optimizer | Groups:
    """Return ``optim``, or the groups in ``optim_input``, or one group of all parameters."""
    _warn_of_input(optim_input)
    if optim is not None:
        return optim
    given = list(model.parameters() if optim_input is None else optim_input)
    are_groups = bool(given) and isinstance(given[0], dict)
    groups = given if are_groups else [{"params": given}]
    return [{**group, "params": list(group["params"])} for group in groups]


def _warn_of_input(optim_input: Any) -> None:
    if optim_input is not None:
        warnings.warn(
            "The `optim_input` argument is deprecated; pass the optimizer as `optim` instead, "
            "which knows its parameters",
            FutureWarning,
            stacklevel=4,
        )


def _numbered(model: nn.Module, optim: Optimizer, saved: StateDict) -> StateDict:
    """Return ``saved``, keyed by indices or names, with the parameter indices of ``optim``."""
    state: dict[Any, Any] = saved["state"]
    if not all(isinstance(key, int) for key in state):
        number_of = {name: number for number, name in enumerate(_names(model, optim))}
        state = {number_of[clean_name(key)]: kept for key, kept in state.items()}
    groups, first = [], 0
    for own, kept in zip(
        optim.param_groups, saved.get("param_groups", optim.param_groups), strict=True
    ):
        end = first + len(own["params"])
        groups.append({**kept, "params": list(range(first, end))})
        first = end
    return {"state": state, "param_groups": groups}
