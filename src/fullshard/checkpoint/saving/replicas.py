"""Plain parameters that ranks hold under one name have to be equal: one rank's are saved.

Each rank digests its own as if it wrote them. Without this check, pipeline stages that use one name
for different layers would load each other's parameters.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from torch import Tensor

from fullshard.checkpoint.format import bytes_of, digest_of, digests_of_blocks, memory_of
from fullshard.comm.consensus import Consensus
from fullshard.comm.text import listed
from fullshard.errors import ConfigError


def digests_of(replicas: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the digests of replicas, as they are when a checkpoint is written."""
    blocks = {name: digests_of_blocks(memory_of(bytes_of(one))) for name, one in replicas.items()}
    return {name: digest_of("".join(those).encode()) for name, those in blocks.items()}


def shared_digests(consensus: Consensus, digests: Mapping[str, str]) -> str:
    """Hand digests to the first rank; return a key for ``refuse_apart``, empty without digests."""
    return consensus.share(json.dumps(digests)) if digests else ""


def refuse_apart(consensus: Consensus, keys: Sequence[str]) -> None:
    """Refuse replicas that differ, by name.

    Args:
        consensus: of all ranks.
        keys: what ``shared_digests`` returned on each rank; the digest of a buffer, which may
            differ, is empty.

    Raises:
        ConfigError: on the first rank, for all.
    """
    texts = {key: json.loads(consensus.take(key)) for key in dict.fromkeys(keys) if key}
    found: dict[str, tuple[str, int]] = {}
    problems: dict[str, str] = {}
    for key, digests in texts.items():
        rank = keys.index(key)
        for name, digest in digests.items():
            first, its = found.setdefault(name, (digest, rank))
            if first != digest and "" in (first, digest):
                raise ConfigError(
                    "a plain tensor is a parameter on one rank and a buffer on another; register "
                    "each tensor in the same way on all ranks that have it"
                )
            if first != digest:
                problems.setdefault(name, f"{name} on ranks {its} and {rank}")
    if problems:
        raise ConfigError(
            f"ranks hold plain tensors of one name with different values: "
            f"{listed(problems.values())}. If they are different tensors, as in stages of a "
            "pipeline, prefix their names by stage; if they are copies of one, broadcast it from "
            "one rank"
        )
