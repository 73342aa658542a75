"""Two ways to cut a model at once: tensor parallelism, and sharding what is left of each parameter.

    python examples/tensor_parallel.py
    torchrun --nproc-per-node 2 examples/tensor_parallel.py  # or 4

Pairs of processes share each matrix (`parallelize_module`); processes with the same half of it cut
that half again (`fully_shard`). The model learns to add two digits. Takes seconds on a CPU.
"""

import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy

import fullshard

STEPS, BATCH, DIM = 60, 64, 48


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Adder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.digits = nn.Embedding(20, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(DIM, 19)  # logits of the sum

    def forward(self, pairs: Tensor) -> Tensor:
        x = self.digits(pairs + torch.tensor([0, 10], device=pairs.device)).sum(1)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


world = int(os.environ.get("WORLD_SIZE", "1"))
tp_size = 2 if world % 2 == 0 else 1
if "RANK" not in os.environ:  # started by itself: a world of one
    dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
device_type = "cuda" if torch.cuda.is_available() else "cpu"
mesh = init_device_mesh(device_type, (world // tp_size, tp_size), mesh_dim_names=("dp", "tp"))

torch.manual_seed(0)  # the same model on every process
model = Adder().to(device_type)
for block in model.blocks:
    parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fullshard.fully_shard(block, mesh=mesh["dp"])
fullshard.fully_shard(model, mesh=mesh["dp"])
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

torch.manual_seed(1 + mesh["dp"].get_local_rank())  # the same data for those who share matrices
for step in range(1, STEPS + 1):
    pairs = torch.randint(10, (BATCH, 2), device=device_type)
    loss = cross_entropy(model(pairs), pairs.sum(1))
    loss.backward()
    fullshard.optim.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0 and (step == 1 or step % 20 == 0):
        print(f"step {step} loss {loss.item():.3f}")

if dist.get_rank() == 0:
    up = model.blocks[0].up.weight
    print(f"{tuple(up.shape)} placed {up.placements}, here {tuple(up.to_local().shape)}")
dist.destroy_process_group()
