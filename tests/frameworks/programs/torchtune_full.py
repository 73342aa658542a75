"""torchtune's model and the functions by which its recipes shard, save and load it."""

from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from told import tell
from torchtune import training
from torchtune.models.llama2 import llama2

dist.init_process_group("gloo")
rank, device = dist.get_rank(), torch.device("cpu")
VOCABULARY = 32
texts = torch.randint(VOCABULARY, (16, 9), generator=torch.Generator().manual_seed(0))


def whole(seed):
    torch.manual_seed(seed)
    return llama2(
        vocab_size=VOCABULARY,
        num_layers=2,
        num_heads=2,
        num_kv_heads=2,
        embed_dim=16,
        max_seq_len=16,
        intermediate_dim=32,
    )


def build(weights):
    with torch.device("meta"):
        model = whole(seed=0)
    conditions = [partial(training.get_shard_conditions, names_to_match=None)]
    training.shard_model(model, conditions, cpu_offload=False)
    with device:  # buffers that are in no state dict
        for module in model.modules():
            if hasattr(module, "rope_init"):
                module.rope_init()
    training.load_from_full_model_state_dict(model, weights, device, strict=True)
    training.validate_no_params_on_meta_device(model)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(model, optimizer, steps):
    losses = []
    for step in steps:
        ids = texts[(step % 4) * 4 + rank :: 2][:2]
        logits = model(ids[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss.detach_())
        losses.append(loss.item() / dist.get_world_size())
    return losses


model, optimizer = build(whole(seed=0).state_dict())
losses = train(model, optimizer, range(3))
weights = training.gather_cpu_state_dict(model, rank == 0, device)
state = training.get_full_optimizer_state_dict(model, optimizer, rank == 0, device)
if rank == 0:
    torch.save([weights, state], "saved.pt")
dist.barrier()
losses += train(model, optimizer, range(3, 6))

weights, state = torch.load("saved.pt")
model, optimizer = build(weights)
training.load_from_full_optimizer_state_dict(model, optimizer, state, device)
again = train(model, optimizer, range(3, 6))
tell(losses, again, model)
