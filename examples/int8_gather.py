"""A tensor that decides how it is gathered: fp32 weights travel as int8, with a scale per row.

    python examples/int8_gather.py
    torchrun --nproc-per-node 2 examples/int8_gather.py

A tensor class with the methods fsdp_pre_all_gather and fsdp_post_all_gather says what is sent and
what is made of it; here a quarter of the bytes. The optimizer goes on in fp32, so what rounding
takes from a forward is not lost for good. Classes written for PyTorch's fully_shard work the same.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils._pytree import tree_map_only

import fullshard

STEPS, BATCH, DIM = 40, 128, 128
aten = torch.ops.aten
STAYS = {aten.detach, aten.clone, aten.new_zeros, aten.slice, aten.view, aten._to_copy}


class Int8Gathered(Tensor):
    """An fp32 matrix that is gathered in int8."""

    @staticmethod
    def __new__(cls, master: Tensor):
        return Tensor._make_wrapper_subclass(
            cls, master.shape, master.stride(), dtype=master.dtype, device=master.device
        )

    def __init__(self, master: Tensor):
        self.master = master

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        args, kwargs = tree_map_only(cls, lambda t: t.master, (args, kwargs or {}))
        result = func(*args, **kwargs)
        return cls(result) if func.overloadpacket in STAYS else result

    def fsdp_pre_all_gather(self, mesh):
        scale = self.master.abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / 127
        return ((self.master / scale).round().to(torch.int8), scale), None

    def fsdp_post_all_gather(self, outputs, metadata, param_dtype, *, out=None):
        rounded, scale = outputs
        whole = torch.mul(rounded, scale) if out is None else torch.mul(rounded, scale, out=out)
        return (whole, (rounded, scale, whole)) if out is None else None


torch.manual_seed(0)  # the same model on every process
model = nn.Sequential(nn.Linear(10, DIM), nn.ReLU(), nn.Linear(DIM, DIM), nn.ReLU())
model.append(nn.Linear(DIM, 10))
for layer in (model[2], model[4]):
    layer.weight = nn.Parameter(Int8Gathered(layer.weight.detach()))
for layer in model:
    if isinstance(layer, nn.Linear):
        fullshard.fully_shard(layer)
fullshard.fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

rank = dist.get_rank()
torch.manual_seed(1 + rank)  # other data on every process
for step in range(1, STEPS + 1):
    numbers = torch.randn(BATCH, 10)
    loss = cross_entropy(model(numbers), numbers.argmax(dim=1))  # which is the largest?
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0 and (step == 1 or step % 10 == 0):
        print(f"step {step} loss {loss.item():.3f}")

sent, _ = model[2].weight.to_local().fsdp_pre_all_gather(None)
if rank == 0:
    share = sum(t.nbytes for t in sent) / model[2].weight.to_local().nbytes
    print(f"{type(model[2].weight.to_local()).__name__} sends {share:.0%} of its bytes")
dist.destroy_process_group()
