"""Values that are no tensors of a model, as JSON: no value can run code when it is read.

JSON knows neither tuples, nor keys that are not strings, nor infinity; these become objects with
one key that begins with ``$``, for example ``{"$tuple": [0.9, 0.999]}``.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fullshard.errors import CheckpointError, ConfigError

_LARGEST_NBYTES = 1 << 20


def encode(value: Any, name: str) -> Any:
    """Return ``value`` in JSON's types.

    Raises:
        ConfigError: ``name`` or something inside of it has a type that cannot be written.
    """
    if value is None or isinstance(value, (bool, str)) or type(value) is int:
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if isinstance(value, list):
        return [encode(one, f"{name}[{at}]") for at, one in enumerate(value)]
    if isinstance(value, tuple):
        return {"$tuple": [encode(one, f"{name}[{at}]") for at, one in enumerate(value)]}
    if isinstance(value, Mapping):
        return _encode_mapping(value, name)
    if isinstance(value, bytes):
        return {"$bytes": _text(value)}
    if isinstance(value, Tensor) and type(value.detach()) is Tensor:
        own = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
        flat = own.reshape(-1).view(torch.uint8)
        kind = str(value.dtype).removeprefix("torch.")
        return {"$tensor": [kind, list(value.shape), _text(_small(flat.numpy().tobytes(), name))]}
    if isinstance(value, (numpy.ndarray, numpy.generic)) and value.dtype.kind in "biufcSU":
        data = _small(value.tobytes(), name)
        return {"$array": [value.dtype.str, list(value.shape), _text(data)]}
    kind = "a DTensor" if isinstance(value, DTensor) else f"of type {type(value).__name__}"
    raise ConfigError(
        f"{name} is {kind}; outside the model a checkpoint holds numbers, strings, None, lists, "
        "tuples, dictionaries, bytes, plain tensors and arrays: convert it to one of these"
    )


def _encode_mapping(value: Mapping[Any, Any], name: str) -> Any:
    if all(isinstance(key, str) and not key.startswith("$") for key in value):
        return {key: encode(one, f"{name}[{key!r}]") for key, one in value.items()}
    pairs = ((key, f"{name}[{key!r}]", one) for key, one in value.items())
    return {"$dict": [[encode(key, at), encode(one, at)] for key, at, one in pairs]}


def _small(data: bytes, name: str) -> bytes:
    if len(data) > _LARGEST_NBYTES:
        raise ConfigError(
            f"{name} has {len(data):,} bytes; values outside the model may have at most "
            f"{_LARGEST_NBYTES:,}: make it a buffer of the model, or a file of its own"
        )
    return data


def decode(value: Any) -> Any:
    """Return the value that ``encode`` was given.

    Raises:
        CheckpointError: ``encode`` cannot have written this.
    """
    try:
        return _decode(value)
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise CheckpointError(f"a value does not follow its format ({error!r})") from error


def _decode(value: Any) -> Any:
    if isinstance(value, list):
        return [_decode(one) for one in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        ((kind, inner),) = value.items()
        if kind.startswith("$"):
            return _DECODERS[kind](inner)
    return {key: _decode(one) for key, one in value.items()}


def _tensor(inner: Any) -> Tensor:
    kind, shape, data = inner
    dtype = getattr(torch, kind)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"{kind} is no dtype")
    flat = torch.tensor(list(base64.b64decode(data)), dtype=torch.uint8, device="cpu")
    return flat.view(dtype).reshape(shape)


def _array(inner: Any) -> Any:
    kind, shape, data = inner
    array = numpy.frombuffer(base64.b64decode(data), dtype=numpy.dtype(kind)).reshape(shape)
    return array.copy() if shape else array[()]


_DECODERS: dict[str, Callable[[Any], Any]] = {
    "$float": float,
    "$tuple": lambda inner: tuple(map(_decode, inner)),
    "$dict": lambda inner: {_decode(key): _decode(one) for key, one in inner},
    "$bytes": base64.b64decode,
    "$tensor": _tensor,
    "$array": _array,
}


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()
