"""Lightning Fabric, unchanged but for one line: its FSDP2 strategy shards with fullshard.

    python examples/frameworks/fabric.py                          # one process
    torchrun --nproc-per-node 2 examples/frameworks/fabric.py     # two

Needs ``pip install lightning-fabric``. A small network learns, is saved, and goes on from there.
The argument ``torch`` leaves PyTorch's own FSDP2 in its place. Writes the folder
``fabric-checkpoint``.
"""

import logging
import os
import sys

import lightning_fabric
import torch
import torch.nn.functional as F
from lightning_fabric.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard

import fullshard
from fullshard.compat import patch_torch

if "torch" not in sys.argv[1:]:
    patch_torch()  # the one line; names that were imported before are replaced as well

STEPS, BATCH, DIM, CLASSES = 20, 32, 64, 10


def parallelize(model, mesh):
    for layer in model[:-1]:
        fully_shard(layer, mesh=mesh["data_parallel"])
    return fully_shard(model, mesh=mesh["data_parallel"])


def build():
    torch.manual_seed(0)  # the same model on every process
    layers = [nn.Sequential(nn.Linear(DIM, DIM), nn.GELU()) for _ in range(3)]
    model = fabric.setup_module(nn.Sequential(*layers, nn.Linear(DIM, CLASSES)))
    return model, fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=3e-3))


def train(model, optimizer, first, last):
    teacher = torch.randn(DIM, CLASSES, generator=torch.Generator().manual_seed(1))
    for step in range(first, last + 1):
        for half in range(2):  # gradients of two batches add up, the second reduces them
            generator = torch.Generator().manual_seed(1000 * step + 10 * fabric.global_rank + half)
            x = torch.randn(BATCH, DIM, generator=generator)
            with fabric.no_backward_sync(model, enabled=half == 0):
                loss = F.cross_entropy(model(x), (x @ teacher).argmax(-1))
                fabric.backward(loss / 2)
        fabric.clip_gradients(model, optimizer, max_norm=10.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 5 == 0:
            fabric.print(f"step {step} loss {fabric.all_reduce(loss).item():.6f}")


logging.getLogger("lightning_fabric").setLevel(logging.WARNING)
world = int(os.environ.get("WORLD_SIZE", "1"))
strategy = ModelParallelStrategy(parallelize, data_parallel_size=world, tensor_parallel_size=1)
fabric = lightning_fabric.Fabric(accelerator="cpu", devices=world, strategy=strategy)
fabric.launch()

model, optimizer = build()
sharded = sum(isinstance(module, fullshard.FSDPModule) for module in model.modules())
fabric.print(f"units of fullshard: {sharded}")
train(model, optimizer, 1, STEPS // 2)
fabric.save("fabric-checkpoint", {"model": model, "optimizer": optimizer, "step": STEPS // 2})

model, optimizer = build()
rest = fabric.load("fabric-checkpoint", {"model": model, "optimizer": optimizer})
train(model, optimizer, rest["step"] + 1, STEPS)
