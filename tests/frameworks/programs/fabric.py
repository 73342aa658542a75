"""Lightning Fabric with ``FSDPStrategy`` (1) or ``ModelParallelStrategy`` (2)."""

import os
import sys

import lightning_fabric
import torch
from lightning_fabric.strategies import FSDPStrategy, ModelParallelStrategy
from tiny import Block, inputs, loss_of, mlp
from told import tell
from torch.distributed.fsdp import fully_shard

version = int(sys.argv[1])
world = int(os.environ["WORLD_SIZE"])


def parallelize(model, mesh):
    for layer in model[:-1]:
        fully_shard(layer, mesh=mesh["data_parallel"])
    return fully_shard(model, mesh=mesh["data_parallel"])


def build(seed):
    torch.manual_seed(seed)
    model = fabric.setup_module(mlp())
    return model, fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-2))


def train(model, optimizer, steps):
    losses = []
    for step in steps:
        for half in range(2):  # accumulate two gradients, reduce with the second
            x = inputs(100 * step + 10 * half + fabric.global_rank)
            with fabric.no_backward_sync(model, enabled=half == 0):
                loss = loss_of(model, x)
                fabric.backward(loss / 2)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(fabric.all_reduce(loss.detach()).item())
    return losses


if version == 1:
    strategy = FSDPStrategy(auto_wrap_policy={Block}, state_dict_type=sys.argv[2])
else:
    strategy = ModelParallelStrategy(
        parallelize,
        data_parallel_size=world,
        tensor_parallel_size=1,
        save_distributed_checkpoint=sys.argv[2] == "sharded",
    )
fabric = lightning_fabric.Fabric(accelerator="cpu", devices=world, strategy=strategy)
fabric.launch()

model, optimizer = build(seed=0)
losses = train(model, optimizer, range(4))
fabric.save("saved", {"model": model, "optimizer": optimizer, "step": 4})
losses += train(model, optimizer, range(4, 8))

model, optimizer = build(seed=1)
rest = fabric.load("saved", {"model": model, "optimizer": optimizer})
again = train(model, optimizer, range(rest["step"], 8))
tell(losses, again, model.module)
