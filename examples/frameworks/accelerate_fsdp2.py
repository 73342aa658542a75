"""Accelerate's FSDP2 path, unchanged but for one line: it shards with fullshard.

    python examples/frameworks/accelerate_fsdp2.py                          # one process
    torchrun --nproc-per-node 2 examples/frameworks/accelerate_fsdp2.py     # two

Needs ``pip install accelerate``. ``Accelerator`` takes DDP on CPUs, so this calls what it calls on
accelerators. A small network learns, is saved, and goes on from there. The argument ``torch``
leaves PyTorch's own FSDP2 in its place. Writes the folder ``accelerate-checkpoint``.
"""

import os
import sys
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from accelerate.utils import FullyShardedDataParallelPlugin, fsdp2_prepare_model
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import fullshard
from fullshard.compat import patch_torch

if "torch" not in sys.argv[1:]:
    patch_torch()  # the one line

STEPS, BATCH, DIM, CLASSES = 20, 32, 64, 10


class Block(nn.Sequential):
    def __init__(self):
        super().__init__(nn.LayerNorm(DIM), nn.Linear(DIM, DIM), nn.GELU())


def build():
    torch.manual_seed(rank)  # the first process has the weights that all get
    model = nn.Sequential(*(Block() for _ in range(3)), nn.Linear(DIM, CLASSES))
    model = fsdp2_prepare_model(accelerator, model)
    return model, torch.optim.AdamW(model.parameters(), lr=3e-3)


def train(model, optimizer, first, last):
    teacher = torch.randn(DIM, CLASSES, generator=torch.Generator().manual_seed(1))
    for step in range(first, last + 1):
        x = torch.randn(BATCH, DIM, generator=torch.Generator().manual_seed(10 * step + rank))
        loss = F.cross_entropy(model(x), (x @ teacher).argmax(-1))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 5 == 0 and rank == 0:
            print(f"step {step} loss {loss.item():.6f}")


alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
dist.init_process_group("gloo", **alone)
rank = dist.get_rank()
wrap = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["Block"]}
plugin = FullyShardedDataParallelPlugin(fsdp_version=2, cpu_ram_efficient_loading=True, **wrap)
accelerator = SimpleNamespace(state=SimpleNamespace(fsdp_plugin=plugin), mixed_precision="no")
accelerator.device, accelerator.is_main_process = torch.device("cpu"), rank == 0

model, optimizer = build()
if rank == 0:
    units = sum(isinstance(module, fullshard.FSDPModule) for module in model.modules())
    print(f"units of fullshard: {units}")
train(model, optimizer, 1, STEPS // 2)
dcp.save(dict(enumerate(get_state_dict(model, optimizer))), checkpoint_id="accelerate-checkpoint")

model, optimizer = build()
states = dict(enumerate(get_state_dict(model, optimizer)))
dcp.load(states, checkpoint_id="accelerate-checkpoint")
set_state_dict(model, optimizer, model_state_dict=states[0], optim_state_dict=states[1])
train(model, optimizer, STEPS // 2 + 1, STEPS)
dist.destroy_process_group()
