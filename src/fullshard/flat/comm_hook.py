"""Reduce gradients by a function of the user, for ``register_comm_hook``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fullshard.comm import HookedCopies, HookedShards, Settled, SingleRank
from fullshard.engine import Bucket, Unit
from fullshard.errors import AssertedConfigError, AssertedProtocolError, ConfigError
from fullshard.frontend.hooks import engine_of


def reduce_by_hook(units: Sequence[Unit], state: Any, hook: Callable[..., object]) -> None:
    """Reduce the gradients of ``units``, which belong to one engine, by ``hook`` from now on.

    Raises:
        ConfigError: if ``hook`` is not callable, or ``wire`` of a unit says how to reduce.
        AssertedConfigError: if a unit has a hybrid strategy: several copies, each of them sharded.
        AssertedProtocolError: if there is a hook already.
    """
    if not callable(hook):
        raise ConfigError(
            f"register_comm_hook: The communication hook must be callable but got {hook!r}"
        )
    buckets = [bucket for unit in units for bucket in unit.buckets]
    for bucket in buckets:
        if isinstance(bucket.spec.reducing, HookedShards):
            raise AssertedProtocolError(
                "register_comm_hook: communication hook is already registered; there can be one"
            )
        if bucket.spec.wire.reduce is not None:
            raise ConfigError(
                f"register_comm_hook: the unit of {', '.join(bucket.names[:3])} was wrapped with "
                f"wire={bucket.spec.wire}, which decides how gradients travel; leave reduce out "
                "of it, or the hook"
            )
        if bucket.spec.replicas is not None and bucket.spec.comm.world > 1:
            raise AssertedConfigError(
                "register_comm_hook: Communication hook is currently not supported for hybrid "
                f"sharding strategies, such as that of {', '.join(bucket.names[:3])}"
            )
    if units:
        engine_of(units[0]).reset_wires(units)
    for bucket in buckets:
        bucket.rewire(**_wires(bucket, state, hook))


def _wires(bucket: Bucket, state: Any, hook: Callable[..., object]) -> dict[str, Any]:
    spec = bucket.spec
    numel = spec.layout.shard_numel
    if spec.comm.world > 1:
        return {
            "reducer": HookedShards(spec.reducing, state, hook, numel),
            "clean_padding": True,
        }
    replicas = spec.replicas
    return {
        "reducer": HookedCopies(replicas or SingleRank(), state, hook, numel),
        "clean_padding": True,
        "replicas": None if replicas is None else Settled(replicas),
    }
