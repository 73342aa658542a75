"""LoRA adapters of peft, sharded by ``fully_shard`` or FSDP1, saved, loaded and merged."""

import sys

import torch
import torch.distributed as dist
from peft import (
    LoraConfig,
    get_peft_model,
    get_peft_model_state_dict,
    set_peft_model_state_dict,
)
from tiny import llama, rows
from told import tell
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

version = int(sys.argv[1])
dist.init_process_group("gloo")
texts = torch.stack([row["input_ids"] for row in rows()])[dist.get_rank() :: 2]


def build(seed):
    model = llama(seed=0)
    torch.manual_seed(seed)
    adapters = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)
    model = get_peft_model(model, adapters)
    if version == 1:
        return model, FullyShardedDataParallel(
            model,
            auto_wrap_policy=ModuleWrapPolicy({LlamaDecoderLayer}),
            use_orig_params=True,
            device_id=torch.device("cpu"),
        )
    base = model.get_base_model()  # the module that remains after merging
    for layer in base.model.layers:
        fully_shard(layer)
    fully_shard(base)
    return model, model


def loss_of(model, step):
    ids = texts[step % 4 * 2 :][:2]
    loss = model(input_ids=ids, labels=ids).loss
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    return loss, mean.item() / dist.get_world_size()


def train(model, steps):
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for step in steps:
        loss, mean = loss_of(model, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean)
    return losses


inner, model = build(seed=0)
losses = train(model, range(4))
losses += [loss_of(model, step)[1] for step in range(2)]
whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
adapters = get_peft_model_state_dict(inner, whole)

inner, model = build(seed=1)
if version == 1:
    model.load_state_dict(whole)
else:
    set_peft_model_state_dict(inner, adapters)
again = [loss_of(model, step)[1] for step in range(2)]
if version == 2:
    merged = inner.merge_and_unload()
    again = [*again, *(loss_of(merged, step)[1] for step in range(2))]
    losses += losses[-2:]
tell(losses, again, model)
