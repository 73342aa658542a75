"""Accelerate: an ``Accelerator`` with an FSDP plugin; ``save_state``, ``load_state``."""

import sys

import torch
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin
from tiny import inputs, loss_of, mlp
from told import tell

version, state_dict_type = int(sys.argv[1]), sys.argv[2]
use_orig_params = {"use_orig_params": "orig" in sys.argv} if version == 1 else {}
plugin = FullyShardedDataParallelPlugin(
    fsdp_version=version,
    auto_wrap_policy="transformer_based_wrap",
    transformer_cls_names_to_wrap=["Block"],
    state_dict_type=state_dict_type,
    **use_orig_params,
)
accelerator = Accelerator(cpu=True, fsdp_plugin=plugin, gradient_accumulation_steps=2)


def build(seed):
    torch.manual_seed(seed)
    model = mlp()
    if version == 1:  # FSDP1 optimizers must be made from sharded parameters
        model = accelerator.prepare(model)
        optimizer = accelerator.prepare(torch.optim.AdamW(model.parameters(), lr=1e-2))
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model, optimizer = accelerator.prepare(model, optimizer)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=8)
    return model, optimizer, accelerator.prepare(scheduler)


def train(model, optimizer, scheduler, batches):
    losses = []
    for batch in batches:
        x = inputs(10 * batch + accelerator.process_index)
        with accelerator.accumulate(model):
            loss = loss_of(model, x)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    return losses


first = build(seed=0)
losses = train(*first, range(8))
accelerator.save_state("state")
losses += train(*first, range(8, 14))

accelerator.free_memory()
second = build(seed=1)
accelerator.load_state("state")
again = train(*second, range(8, 14))
tell(losses, again, second[0])
