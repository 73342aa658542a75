"""A model that transformers itself shards while loading, by its ``DistributedConfig``."""

import torch
import torch.distributed as dist
from tiny import llama, rows
from told import tell
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig
from transformers.distributed.checkpoint import (
    load_optimizer_distributed,
    save_optimizer_distributed,
)

dist.init_process_group("gloo")
rank = dist.get_rank()
texts = torch.stack([row["input_ids"] for row in rows()])


def load(folder):
    sharding = DistributedConfig(fsdp_size=dist.get_world_size())
    model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=sharding)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(model, optimizer, steps):
    losses = []
    for step in steps:
        ids = texts[(step % 4) * 4 + rank :: 2][:2]
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss.detach_())
        losses.append(loss.item() / dist.get_world_size())
    return losses


if rank == 0:
    llama(seed=0).save_pretrained("start")
dist.barrier()
model, optimizer = load("start")
losses = train(model, optimizer, range(3))
model.save_pretrained("saved")
save_optimizer_distributed(model, optimizer, "optimizer")
losses += train(model, optimizer, range(3, 6))

model, optimizer = load("saved")
load_optimizer_distributed(model, optimizer, "optimizer")
again = train(model, optimizer, range(3, 6))
tell(losses, again, model)
