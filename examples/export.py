"""Train sharded, export whole: a file for programs that know nothing of sharding.

    python examples/export.py model.safetensors
    torchrun --nproc-per-node 2 examples/export.py model.safetensors

The first process keeps a moving average of the whole parameters, which come to it one at a time
while the others hold their shards alone; in the end it writes the average to a file, loads that
into a model that was never sharded, and compares. Takes seconds on a CPU.
"""

import sys

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import fullshard
from fullshard.checkpoint import full_state_dict

STEPS, BATCH, KEEP = 40, 64, 0.8
path = sys.argv[1]


def build() -> nn.Module:
    """The model, the same on every process."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.GELU()) for _ in range(3)]
    return nn.Sequential(*layers, nn.Linear(32, 1))


def loss_of(model: nn.Module, step: int) -> Tensor:
    """The model learns how long its input is."""
    inputs = torch.randn(BATCH, 32, generator=torch.Generator().manual_seed(step)).to(device)
    return (model(inputs) - inputs.norm(dim=1, keepdim=True)).square().mean()


model = build()
fullshard.shard_blocks(model)
optimizer = fullshard.optim.ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2)
device = next(model.parameters()).device
is_first = dist.get_rank() == 0

average: dict[str, Tensor] = {}
for step in range(STEPS):
    loss_of(model, step).backward()
    optimizer.step()
    optimizer.zero_grad()
    for name, value in fullshard.iter_full_params(model, rank0_only=True):  # elsewhere: no turns
        average.setdefault(name, value.cpu()).lerp_(value.cpu(), 1 - KEEP)

state = full_state_dict(model)  # {} but on the first process; with buffers, and tied names
if is_first:
    save_file({**state, **average}, path)

# Try the average: lend the whole model, put the average in, and take it out again.
model.eval()
trained = loss_of(model, -1).item()
with torch.no_grad(), fullshard.unshard_params(model, rank0_only=True):
    if is_first:
        for name, parameter in model.named_parameters():
            parameter.copy_(average[name])
averaged = loss_of(model, -1).item()

if is_first:
    plain = build().to(device)
    plain.load_state_dict(load_file(path))
    plain.eval()
    print(f"loss {trained:.5f}, of the average {averaged:.5f}, of the file", end=" ")
    print(f"{loss_of(plain, -1).item():.5f}")
dist.destroy_process_group()
