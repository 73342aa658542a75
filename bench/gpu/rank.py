"""One of the ranks that share the first GPU; the first prints what was found, as JSON."""

from __future__ import annotations

import json

import torch
import torch.distributed as dist

from bench.gpu.ranks import check_all


def main() -> None:
    """Join, train, compare, print."""
    torch.cuda.set_device(0)
    dist.init_process_group("nccl")
    every: list[dict[str, object]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(every, check_all("cuda:0"))
    found, *others = every
    for other in others:
        found["wrong"] = sorted({*found["wrong"], *other["wrong"]})  # type: ignore[misc]
    if dist.get_rank() == 0:
        print(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
