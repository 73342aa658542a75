"""Save a run on some processes, go on with it on more or fewer.

    torchrun --nproc-per-node 2 examples/checkpoint.py runs/mlp     # trains 30 steps, saves
    torchrun --nproc-per-node 3 examples/checkpoint.py runs/mlp     # loads, trains 30 more, saves
    python examples/checkpoint.py runs/mlp                          # and so on, alone

Each process writes and reads only its own shards. Takes seconds on a CPU.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import fullshard
from fullshard.checkpoint import Checkpointer

STEPS, BATCH = 30, 96
folder = Path(sys.argv[1])

torch.manual_seed(0)
layers = [nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32), nn.GELU()) for _ in range(3)]
model = nn.Sequential(*layers, nn.Linear(32, 1))
fullshard.shard_blocks(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
rank, world = dist.get_rank(), dist.get_world_size()
device = next(model.parameters()).device


def batch(step: int) -> torch.Tensor:
    """This process's share of the step's batch: the same whole on any number of processes."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(BATCH, 32, generator=generator).chunk(world)[rank].to(device)


def loss_at(step: int) -> torch.Tensor:
    """The model learns how long its input is."""
    inputs = batch(step)
    return (model(inputs) - inputs.norm(dim=1, keepdim=True)).square().mean()


def say(what: str) -> None:
    """Print the loss on one batch that is never trained on, the mean over processes."""
    with torch.no_grad():
        loss = loss_at(-1)
    dist.all_reduce(loss)
    if rank == 0:
        print(f"{what} on {world}: loss {loss.item() / world:.5f}")


checkpointer = Checkpointer(folder)
loaded = checkpointer.load(model, optimizer)  # the newest that is intact
step = loaded.step if loaded else 0
say(f"start at step {step}")

end = step + STEPS
while step < end:
    step += 1
    loss_at(step).backward()
    optimizer.step()
    optimizer.zero_grad()
say(f"end at step {step}")

checkpointer.save(model, optimizer, step=step)
dist.destroy_process_group()
