"""Clearer messages for common errors, and the names of parameters in them.

A call may be given a part of a model, so names are looked for from the outermost module.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import wraps
from inspect import isfunction
from itertools import chain, islice
from traceback import walk_stack
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fullshard._torch import memory as _memory
from fullshard.engine import Unit
from fullshard.errors import ConfigError, ProtocolError, RaggedOperationError, UnsupportedError
from fullshard.frontend.ownership import members_of, owned_places, owner_of, unit_of, units_below
from fullshard.frontend.places import Place, places_of
from fullshard.tensors import MIXED, AbsentParameter, RaggedTensor, explanations, local_part
from fullshard.tensors.form import clean_name


def _used_while_sharded(error: Exception) -> bool:
    """Return whether ``error`` comes from computing with a sharded parameter."""
    return MIXED in str(error) or isinstance(error, (_UsedWhileSharded, RaggedOperationError))


class _UsedWhileSharded(ProtocolError):
    """A sharded DTensor was used; ``which`` names the parameter and its unit."""

    which = ""


class _UsedRagged(RaggedOperationError, ProtocolError):
    """The same for a RaggedTensor."""

    which = ""


def explain_use(tensors: Sequence[Tensor], error: Exception) -> Exception | None:
    """Return a clearer error if one of ``tensors`` is a sharded parameter, else None.

    ``error`` was raised by an operation on ``tensors``. The error names the module that holds the
    parameter, if its forward is on the stack: a plain module that was called without its unit.
    """
    running = _running_modules()
    found = _sharded_among(tensors, running)
    if found is None:
        return None
    place, unit = found
    is_ragged = isinstance(error, RaggedOperationError)
    is_flat = any(isinstance(one, AbsentParameter) for one in tensors)
    if place.module in running:
        text = _called_alone(place, unit, running[-1], "wrap" if is_flat else "fully_shard")
    elif is_ragged or is_flat:
        return None  # perhaps no module was to use it: the error has its own advice
    else:
        text = (
            f"parameter {name_of(place)} was used while it was sharded: unit {_described(unit)} "
            "gathers it only for its own forward. Use it in that forward, or inside of "
            "`with fullshard.unshard_params(module):`"
        )
    if is_flat:
        return ProtocolError(f"{text}. {error}")
    clearer = _UsedRagged(text) if is_ragged else _UsedWhileSharded(text)
    clearer.which = f"{name_of(place)} of unit {_described(unit)}"
    return clearer


explanations.append(explain_use)


def _called_alone(place: Place, unit: Unit, called: nn.Module, shard: str) -> str:
    """Return what to do about ``called``, a plain module that was called without its unit."""
    return (
        f"{_module_name(place.module)} was called while its parameter {place.name} was sharded: "
        f"unit {_described(unit)} owns it, and gathers it only for its own forward. Call the "
        f"module of that unit instead. Or: {shard} {_module_name(called)} itself, before the "
        "modules around it; name a method of the unit's module that makes this call by "
        "fullshard.register_fsdp_forward_method(module, name); or make the call inside of "
        "`with fullshard.unshard_params(module):`"
    )


def _described(unit: Unit) -> str:
    kinds = ", ".join(type(one).__name__.removeprefix("FSDP") for one in members_of(unit)[:4])
    return f"{unit.shown_name}{f' ({kinds})' if kinds and unit.name != kinds else ''}"


def _module_name(module: nn.Module) -> str:
    kind = type(module).__name__
    name = names_of(Place(module, ""))[0].rstrip(".")
    return f"{name} ({kind})" if name else kind


def _running_modules() -> list[nn.Module]:
    """Return the plain modules whose forward is on the stack, innermost first, up to a unit."""
    found: list[nn.Module] = []
    for frame, _ in walk_stack(sys._getframe(1)):
        module = frame.f_locals.get("self") if frame.f_code.co_name == "forward" else None
        if isinstance(module, nn.Module):
            if unit_of(module) is not None:
                break
            found.append(module)
    return found


def _sharded_among(
    tensors: Sequence[Tensor], running: Sequence[nn.Module]
) -> tuple[Place, Unit] | None:
    """Return the place and the unit of a sharded parameter among ``tensors``, if there is one.

    Of the places of a tied parameter, one in a running module is returned.
    """
    first: tuple[Place, Unit] | None = None
    for place, unit in owned_places():
        shown = place.module._parameters.get(place.name)
        if shown is None:  # it is a part of a flat parameter
            shown = vars(place.module).get(place.name)
        is_running = place.module in running
        if any(_is_from(one, shown, is_running=is_running) for one in tensors):
            if is_running:
                return place, unit
            first = first or (place, unit)
    return first


def _is_from(tensor: Tensor, shown: Any, *, is_running: bool) -> bool:
    """Return whether ``tensor`` is ``shown``, a view of it or, in a running module, a cast."""
    if tensor is shown:
        return True
    if not isinstance(tensor, DTensor) or not isinstance(shown, DTensor):
        return False
    if tensor.device_mesh != shown.device_mesh or sorted(tensor.shape) != sorted(shown.shape):
        return False
    return is_running or _memory.shares_storage(local_part(tensor), local_part(shown))


def explain_forward(module: nn.Module, error: Exception) -> None:
    """Raise a clearer error if ``error``, which left the forward of ``module``, has a known cause.

    Raises:
        ProtocolError: if a parameter was used while it was sharded.
    """
    if not _used_while_sharded(error):
        return
    unit = unit_of(module)
    engine: Any = None if unit is None else unit.engine
    buckets = [] if engine is None else [b for one in engine.units for b in one.buckets]
    if MIXED in str(error) and any(any(bucket.spec.parallel or ()) for bucket in buckets):
        return  # a module with tensor parallelism computes with DTensors of its own
    inner = [u.name for u in units_below([module]) if u is not unit and u.buckets]
    hint = f" (units inside of it: {', '.join(inner[:8])})" if inner else ""
    raise ProtocolError(
        f"the forward of {type(module).__name__} used a parameter that was sharded: one of a unit "
        f"that was not running{hint}. A module that reads another module's parameter directly must "
        "be in the same unit: leave out fully_shard on the inner one, or give both to one call, "
        f"as a list{_which(error)}"
    ) from error


def _which(error: Exception) -> str:
    which = getattr(error, "which", "")
    return f". The parameter: {which}" if which else ""


def guarded_methods(cls: type[nn.Module]) -> dict[str, Callable[..., Any]]:
    """Return the public methods that ``cls`` adds to ``nn.Module``, wrapped to explain errors.

    Only ``forward`` unshards parameters. Other methods that compute with parameters find them
    sharded; the error then says what to do. ``resize_token_embeddings`` has an error of its own.
    """
    bases = cls.__mro__[: cls.__mro__.index(nn.Module)]
    found: dict[str, Callable[..., Any]] = {}
    for name, value in chain.from_iterable(vars(base).items() for base in reversed(bases)):
        if isfunction(value) and not name.startswith("_") and not hasattr(nn.Module, name):
            found[name] = guard_resize(value) if name == RESIZE else _guard(name, value)
        else:  # such as a property or a cached function in place of a method of a base
            found.pop(name, None)
    return found


def _guard(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def guarded(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except RuntimeError as error:
            unit = unit_of(self)
            is_unsharded = unit is not None and not places_of(unit).shows_sharded
            if is_unsharded or not _used_while_sharded(error):
                raise
            raise ProtocolError(
                f"{type(self).__name__}.{name}() used parameters while they were sharded: only "
                "forward unshards them by itself. Call fullshard.register_fsdp_forward_method("
                f"module, {name!r}) once, or module.unshard() before. If the method writes to "
                f"parameters, call it inside of fullshard.unshard_params(module){_which(error)}"
            ) from error

    return guarded


_LOAD_FULL = (
    "load a full state dict with torch.distributed.checkpoint.state_dict."
    "set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True))"
)


def check_full_tensors(module: nn.Module, state: Mapping[str, Any], *, assign: bool) -> None:
    """Refuse a state dict that ``load_state_dict`` cannot load, before anything is changed.

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


_MOST_NAMES = 8  # names looked for; a module in more places than that needs no list of all


def names_of(place: Place) -> list[str]:
    """Return the FQNs of ``place`` from the outermost modules around it, shortest first.

    ``fully_shard`` is given a part of a model, without its name in the model. So this function
    looks for modules around the part among all objects of the process. The search takes as long as
    a garbage collection: call the function for errors only.
    """
    parents: _Parents = {}
    for one in gc.get_objects():
        if issubclass(type(one), nn.Module):  # isinstance() asks proxies, which may do anything
            for name, child in (vars(one).get("_modules") or {}).items():
                parents.setdefault(id(child), []).append((one, name))
    paths = _paths(place.module, parents, frozenset())
    found = {clean_name(".".join((*path, place.name))) for path in paths}
    return sorted(found, key=lambda name: (len(name), name))


def name_of(place: Place) -> str:
    """Return the FQN of ``place``, with the class of its module, such as "head.weight (Linear)"."""
    kind = type(place.module).__name__.removeprefix("FSDP")
    return f"{' = '.join(names_of(place))} ({kind})"


_Parents = dict[int, list[tuple[nn.Module, str]]]
"""The parents of modules, by the ``id`` of the child, with the name that the child has there."""


def _paths(module: nn.Module, parents: _Parents, below: frozenset[int]) -> Iterator[Sequence[str]]:
    """Yield the ways to ``module`` from modules that are in no other, at most ``_MOST_NAMES``."""
    around = [pair for pair in parents.get(id(module), ()) if id(pair[0]) not in below]
    if not around:
        yield ()
    found = (
        (*path, name)
        for parent, name in around
        for path in _paths(parent, parents, below | {id(module)})
    )
    yield from islice(found, _MOST_NAMES)


RESIZE = "resize_token_embeddings"


def guard_resize(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``resize_token_embeddings``, bound or not, so that it refuses sharded embeddings.

    ``transformers`` assigns new data to existing parameters. A layout is fixed when a unit is
    sharded, so it cannot follow, not even inside of ``unshard_params``.
    """
    bound = getattr(method, "__self__", None)

    @wraps(method)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        model, given = (args[0], args[1:]) if bound is None else (bound, args)
        _check_resize(model, *given[:2], **kwargs)
        return method(*args, **kwargs)

    return guarded


def _check_resize(
    model: nn.Module,
    new_num_tokens: int | None = None,
    pad_to_multiple_of: int | None = None,
    **_: Any,
) -> None:
    embeddings = _embeddings(model)
    places = [place for place in embeddings if owner_of(place) is not None]
    if not places:
        return
    inputs: Any = embeddings[0].module
    rows = int(getattr(inputs, "num_embeddings", None) or inputs.weight.shape[0])  # pieces are 1-D
    wanted = rows if new_num_tokens is None else new_num_tokens
    if pad_to_multiple_of:
        wanted = -(-wanted // pad_to_multiple_of) * pad_to_multiple_of
    if wanted != rows:
        raise UnsupportedError(
            f"{RESIZE}: {wanted} rows instead of {rows}, but {name_of(places[0])} is already "
            "sharded. Nothing was changed. Resize before sharding, or: "
            "fullshard.checkpoint.full_state_dict(model, rank0_only=False), load it into a new "
            "model that is not sharded, resize that, and shard it"
        )


def _embeddings(model: Any) -> list[Place]:
    """Return the places of the weights that go with tokens, of the inputs first."""
    getters = (getattr(model, f"get_{side}_embeddings", None) for side in ("input", "output"))
    modules = [getter() for getter in getters if callable(getter)]
    return [Place(one, "weight") for one in modules if isinstance(one, nn.Module)]
