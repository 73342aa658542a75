"""Refuse to resize embeddings that are sharded, which transformers would do by writing to them."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import nn

from fullshard.errors import UnsupportedError
from fullshard.frontend.naming import name_of
from fullshard.frontend.ownership import owner_of
from fullshard.frontend.places import Place

RESIZE = "resize_token_embeddings"


def guard_resize(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``resize_token_embeddings``, bound or not, so that it refuses sharded embeddings.

    The layout of a unit is made when it is sharded and never changes, so what ``transformers``
    does, new values in old parameters, would leave the unit behind. That is so inside of a loan
    as well, whose end writes back what it lent.
    """
    bound = getattr(method, "__self__", None)

    @wraps(method)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        model, given = (args[0], args[1:]) if bound is None else (bound, args)
        _check(model, *given[:2], **kwargs)
        return method(*args, **kwargs)

    return guarded


def _check(
    model: nn.Module,
    new_num_tokens: int | None = None,
    pad_to_multiple_of: int | None = None,
    **_: Any,
) -> None:
    places = [place for place in _embeddings(model) if owner_of(place) is not None]
    if not places:
        return
    rows = _num_rows(model)
    wanted = rows if new_num_tokens is None else new_num_tokens
    if pad_to_multiple_of:
        wanted = -(-wanted // pad_to_multiple_of) * pad_to_multiple_of
    if wanted == rows:
        return
    raise UnsupportedError(
        f"{RESIZE}: {wanted} rows instead of {rows}, but {name_of(places[0])} is sharded, and what "
        "a rank holds of it was decided when it was. Nothing was changed. Resize before sharding; "
        "a model that is sharded already: take fullshard.checkpoint.full_state_dict(model, "
        "rank0_only=False), load it into a new model that is not sharded, resize that, and shard it"
    )


def _num_rows(model: nn.Module) -> int:
    inputs: Any = _embeddings(model)[0].module
    return int(getattr(inputs, "num_embeddings", None) or inputs.weight.shape[0])  # pieces are 1-D


def _embeddings(model: Any) -> list[Place]:
    """Return the places of the weights that go with tokens, of the inputs first."""
    getters = (getattr(model, f"get_{side}_embeddings", None) for side in ("input", "output"))
    modules = [getter() for getter in getters if callable(getter)]
    return [Place(one, "weight") for one in modules if isinstance(one, nn.Module)]
