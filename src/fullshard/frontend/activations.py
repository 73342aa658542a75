"""``checkpoint_blocks``: recompute the activations of a model's blocks in backward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from fullshard.engine import Unit
from fullshard.errors import ArgumentTypeError, ConfigError
from fullshard.frontend.blocks import Why, choose, recompute, recomputes, unwrapped
from fullshard.frontend.ownership import units_below
from fullshard.frontend.places import Place, places_of
from fullshard.tensors.form import clean_name
from fullshard.wrap.policies import PolicyLike
from fullshard.wrap.units import Ignored, units_of


def checkpoint_blocks(
    model: nn.Module, *, policy: PolicyLike | None = None, offload: bool = False
) -> tuple[str, ...]:
    """Recompute the activations of the repeated blocks of ``model`` in backward.

    Each block then keeps its inputs alone, and backward runs its forward again
    (``torch.utils.checkpoint``, non-reentrant). The blocks are those that ``shard_blocks`` chooses.
    Call this before or after the model is sharded, with ``fully_shard``, ``shard_blocks`` or
    ``FullyShardedDataParallel``. Names of parameters and modules stay as they are.

    Args:
        model: the whole model, or a part of one.
        policy: one of ``fullshard.wrap``, which chooses the blocks instead.
        offload: keep the inputs of the blocks in host memory until backward
            (``torch.autograd.graph.save_on_cpu``).

    Returns:
        The names of the blocks, in the order of the model.

    Raises:
        ArgumentTypeError: if ``model`` is not a module, or ``policy`` not a policy.
        ConfigError: if no block was found, or one recomputes its activations already; nothing was
            changed.
    """
    if not isinstance(model, nn.Module):
        raise ArgumentTypeError(
            f"checkpoint_blocks: got {type(model).__name__}, expected an nn.Module"
        )
    with _showing_shapes(model):
        names = _chosen(model, policy)
    found = [unwrapped(model.get_submodule(name)) for name in names]
    blocks = {clean_name(f"{name}.")[:-1]: one for name, one in zip(names, found, strict=True)}
    if not blocks:
        raise ConfigError(
            f"checkpoint_blocks: found no repeated blocks in {type(model).__name__}; choose them "
            "by policy=ModuleWrapPolicy({Block}) of fullshard.wrap"
        )
    twice = [name for name, block in blocks.items() if recomputes(block)]
    if twice:
        raise ConfigError(
            f"checkpoint_blocks: {twice[0]} recomputes its activations already; call "
            "checkpoint_blocks once, or not with a plan that recomputes blocks"
        )
    recompute(dict.fromkeys(blocks.values()), offload=offload)
    return tuple(blocks)


def _chosen(model: nn.Module, policy: PolicyLike | None) -> list[str]:
    if policy is None:
        return [unit.name for unit in choose(model, set()) if unit.why is Why.BLOCK]
    order = {name: at for at, (name, _) in enumerate(model.named_modules())}
    return sorted(
        (one.name for one in units_of(model, policy, Ignored.of())), key=order.__getitem__
    )


@contextmanager
def _showing_shapes(model: nn.Module) -> Iterator[None]:
    """Show parameters of the original shapes in the block, without values.

    Blocks are recognized by the shapes of their parameters, which pieces do not have.
    """
    units = units_below([model])
    holders = {place.module for unit in units for place in _places(unit)}
    before = {module: dict(module._parameters) for module in holders}
    try:
        for unit in units:
            places = places_of(unit)
            for place in places.in_their_place():
                place.module._parameters.pop(place.name, None)
            shown = {
                (number, index): nn.Parameter(torch.empty(param.shape, device="meta"))
                for number, bucket in enumerate(unit.buckets)
                for index, param in enumerate(bucket.spec.layout.params)
            }
            for slot in places.slots():
                slot.params[slot.name] = shown[slot.bucket, slot.number]
        yield
    finally:
        for module, own in before.items():
            module._parameters.clear()
            module._parameters.update(own)


def _places(unit: Unit) -> list[Place]:
    places = places_of(unit)
    return [*(slot.place for slot in places.slots()), *places.in_their_place()]
