"""NeMo AutoModel's own FSDP2 manager around a model of transformers: two microbatches a step."""

import copy
import warnings

import torch
import torch.distributed as dist
from nemo_automodel.components.distributed.config import FSDP2Config
from nemo_automodel.components.distributed.fsdp2 import FSDP2Manager
from nemo_automodel.components.distributed.mesh import MeshContext
from tiny import llama, rows
from told import tell
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import MixedPrecisionPolicy

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
texts = torch.stack([row["input_ids"] for row in rows()])
WHOLE = StateDictOptions(full_state_dict=True)


def build(seed):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = FSDP2Config(mp_policy=MixedPrecisionPolicy())
        mesh = MeshContext.build(config, world_size=world).device_mesh
        model = FSDP2Manager(config, mesh).parallelize(llama(seed))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(model, optimizer, steps):
    losses = []
    for step in steps:
        ids = texts[(step % 4) * 4 + rank :: 2][:2]
        total = torch.zeros(())
        for last, part in ((False, ids[:1]), (True, ids[1:])):
            model.set_requires_gradient_sync(last)  # as with ``defer_fsdp_grad_sync``
            model.set_is_last_backward(last)
            loss = model(input_ids=part, labels=part).loss / 2
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        losses.append(total.item() / world)
    return losses


model, optimizer = build(seed=0)
losses = train(model, optimizer, range(3))
saved = get_model_state_dict(model, options=WHOLE)
state = get_optimizer_state_dict(model, optimizer, options=WHOLE)
box = copy.deepcopy([saved, state])  # the state dict shares its step counts with the optimizer
dist.broadcast_object_list(box)  # only the first rank has full state dicts
saved, state = box
losses += train(model, optimizer, range(3, 6))

model, optimizer = build(seed=1)
set_model_state_dict(model, saved, options=WHOLE)
set_optimizer_state_dict(model, optimizer, state, options=WHOLE)
again = train(model, optimizer, range(3, 6))
tell(losses, again, model)
