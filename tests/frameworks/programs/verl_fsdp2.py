"""verl's own FSDP2 functions in the order of its actor: shard, load, clip, offload."""

import copy

import torch
import torch.distributed as dist
from tiny import llama, rows
from told import tell
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from verl.utils import fsdp_utils

fsdp_utils.get_device_id = lambda: "cpu"  # verl expects an accelerator
fsdp_utils.get_device_name = lambda: "cpu"

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
texts = torch.stack([row["input_ids"] for row in rows()])
WHOLE = StateDictOptions(full_state_dict=True)


def build(weights):
    """Shard a model as ``transformer_impl`` does; only the first rank has real weights."""
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("fsdp",))
    if rank == 0:
        model = llama(seed=0)
        if weights is not None:
            model.load_state_dict(weights)
    else:
        with torch.device("meta"):
            model = llama(seed=0)
    full_state = model.state_dict()
    options = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(cast_forward_inputs=True),
        "offload_policy": None,
        "reshard_after_forward": True,
    }
    fsdp_utils.apply_fsdp2(model, options, {"forward_prefetch": True})
    fsdp_utils.fsdp2_load_full_state_dict(model, full_state, mesh, None)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(model, optimizer, steps):
    losses = []
    for step in steps:
        fsdp_utils.load_fsdp2_model_to_gpu(model)
        fsdp_utils.load_fsdp_optimizer(optimizer, "cpu")
        ids = texts[(step % 4) * 4 + rank :: 2][:2]
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        fsdp_utils.fsdp2_clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss.detach_())
        losses.append(loss.item() / world)
        fsdp_utils.offload_fsdp2_model_to_cpu(model, empty_cache=False)
        fsdp_utils.offload_fsdp_optimizer(optimizer)
    return losses


model, optimizer = build(None)
losses = train(model, optimizer, range(3))
saved = fsdp_utils.get_fsdp_full_state_dict(model)
state = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=WHOLE))
losses += train(model, optimizer, range(3, 6))

model, optimizer = build(saved)
set_optimizer_state_dict(model, optimizer, state, options=WHOLE)
again = train(model, optimizer, range(3, 6))
tell(losses, again, model)
