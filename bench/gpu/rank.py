"""One of two ranks that share the first GPU; prints how far it is from the unsharded model."""

from __future__ import annotations

import torch
import torch.distributed as dist

from bench.gpu.programs import pair_rank


def main() -> None:
    """Join, train, print."""
    torch.cuda.set_device(0)
    dist.init_process_group("nccl")
    worst = torch.tensor(pair_rank("cuda:0"), device="cuda")
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        print(worst.item())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
