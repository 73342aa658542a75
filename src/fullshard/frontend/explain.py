"""Clearer messages for common errors that PyTorch words in its own terms."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from inspect import isfunction
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from fullshard.errors import ConfigError, ProtocolError, RaggedOperationError
from fullshard.frontend.ownership import unit_of, units_below
from fullshard.frontend.resizing import RESIZE, guard_resize
from fullshard.tensors import RaggedTensor


def _used_while_sharded(error: Exception) -> bool:
    """Return whether ``error`` comes from computing with a sharded parameter."""
    mixed = "got mixed torch.Tensor and DTensor" in str(error)
    return mixed or isinstance(error, RaggedOperationError)


def explain_forward(module: nn.Module, error: Exception) -> None:
    """Raise a clearer error if ``error``, which left the forward of ``module``, has a known cause.

    Raises:
        ProtocolError: if a parameter was used while it was sharded.
    """
    if not _used_while_sharded(error):
        return
    unit = unit_of(module)
    inner = [u.name for u in units_below([module]) if u is not unit and u.buckets]
    hint = f" (units inside of it: {', '.join(inner[:8])})" if inner else ""
    raise ProtocolError(
        f"the forward of {type(module).__name__} used a parameter that was sharded: one of a unit "
        f"that was not running{hint}. A module that reads another's parameter, instead of calling "
        "it, has to be in one unit with it: leave out fully_shard on the inner one, or give both "
        "to one call, as a list"
    ) from error


def guarded_methods(cls: type[nn.Module]) -> dict[str, Callable[..., Any]]:
    """Return the public methods that ``cls`` adds to ``nn.Module``, wrapped to explain errors.

    Only ``forward`` unshards parameters. Other methods that compute with parameters find them
    sharded; the error then says what to do, which for ``resize_token_embeddings`` is another thing.
    """
    bases = cls.__mro__[: cls.__mro__.index(nn.Module)]
    return {
        name: guard_resize(function) if name == RESIZE else _guard(name, function)
        for base in reversed(bases)
        for name, function in vars(base).items()
        if isfunction(function) and not name.startswith("_") and not hasattr(nn.Module, name)
    }


def _guard(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def guarded(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except RuntimeError as error:
            if not _used_while_sharded(error):
                raise
            raise ProtocolError(
                f"{type(self).__name__}.{name}() used parameters while they were sharded: only "
                "forward unshards them by itself. Call fullshard.register_fsdp_forward_method("
                f"module, {name!r}) once, or module.unshard() before; what writes to them, call "
                "inside of fullshard.unshard_params(module)"
            ) from error

    return guarded


_LOAD_FULL = (
    "load a full state dict with torch.distributed.checkpoint.state_dict."
    "set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True))"
)


def check_full_tensors(module: nn.Module, state: Mapping[str, Any], *, assign: bool) -> None:
    """Refuse what ``load_state_dict`` cannot load, before it changes anything.

    Raises:
        ConfigError: if plain tensors are given for sharded parameters that cannot copy their part.
        BusyError: if another rank has full parameters on loan.
    """
    for unit in units_below([module]):
        unit.check_shown("load_state_dict()")
    own = module.state_dict()
    plain = [
        name
        for name, value in state.items()
        if isinstance(own.get(name), DTensor) and not isinstance(value, DTensor)
    ]
    takes_own_part = all(isinstance(own[name], RaggedTensor) for name in plain)
    if plain and (assign or not takes_own_part):
        raise _PlainTensors(
            f"load_state_dict of sharded {type(module).__name__}: got plain tensors for the "
            f"sharded parameters {', '.join(plain[:4])}{' and more' if len(plain) > 4 else ''}; "
            + ("load them with assign=False" if takes_own_part else _LOAD_FULL)
        )


class _PlainTensors(ConfigError, RuntimeError):
    """Plain tensors for sharded parameters, where PyTorch raises a RuntimeError."""
