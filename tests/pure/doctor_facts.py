"""Made-up facts about ranks, for the tests of ``fullshard doctor``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fullshard.doctor.facts import Facts, Gpu, HostFacts

GIB = 1 << 30


def a_host(name: str = "one", **changes: Any) -> HostFacts:
    key = name.encode().ljust(16, b".").hex()
    host = HostFacts(name, key, "10.0.0.1", ("lo", "eth0"), 8, 64 * GIB, None, 8 * GIB, 0, "")
    return replace(host, **changes)


def a_rank(rank: int = 0, host: HostFacts | None = None, **changes: Any) -> Facts:
    """Return facts of a healthy rank: two threads, eight cores, no GPU."""
    versions = {"python": "3.12.0", "torch": "2.13.0", "fullshard": "0.1.0", "cuda": "13.0"}
    variables = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank % 2)}
    variables |= {"MASTER_ADDR": "head", "MASTER_PORT": "29500"}
    variables |= changes.pop("variables", {})
    facts = Facts(
        rank, host or a_host(), versions, ("gloo",), tuple(range(8)), 4, 1024, (), variables
    )
    return replace(facts, **changes)


def a_gpu(uuid: str) -> Gpu:
    return Gpu("H100", uuid, 80 * GIB)


def two_hosts(**changes: Any) -> list[Facts]:
    return [
        a_rank(0, a_host("one", **changes), num_threads=8),
        a_rank(1, a_host("two"), num_threads=8),
    ]


def with_gpus(*uuids: str, backends: Sequence[str] = ("nccl", "gloo")) -> list[Facts]:
    """Return facts of two ranks that see GPUs with these UUIDs."""
    gpus = tuple(map(a_gpu, uuids))
    host = a_host(num_nvidia=len(uuids), driver="570.10")
    return [a_rank(rank, host, gpus=gpus, backends=tuple(backends)) for rank in (0, 1)]


def with_variables(ranks: Sequence[Facts], **variables: str) -> list[Facts]:
    return [replace(one, variables={**one.variables, **variables}) for one in ranks]


WELL = [a_rank(0), a_rank(1)]
