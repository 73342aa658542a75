"""A program written for PyTorch's fully_shard, on fullshard: the changed lines are marked.

    python examples/migrate_fsdp2.py
    torchrun --nproc-per-node 2 examples/migrate_fsdp2.py

One import is all that must change. What may change is marked, too: equal shards that are gathered
without a copy, and an optimizer that steps on them. Takes seconds on a CPU.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

# was: from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from fullshard import MixedPrecisionPolicy, Ragged, fully_shard
from fullshard.optim import ShardedOptimizer, clip_grad_norm_

STEPS, BATCH, TIME, DIM = 40, 64, 8, 64


class Sorter(nn.Module):
    """Digits in, logits of the sorted digits out."""

    def __init__(self) -> None:
        super().__init__()
        self.digits, self.places = nn.Embedding(10, DIM), nn.Embedding(TIME, DIM)
        self.blocks = nn.Sequential(
            *(nn.TransformerEncoderLayer(DIM, 4, 4 * DIM, 0.0, batch_first=True) for _ in range(2))
        )
        self.head = nn.Linear(DIM, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.digits(x) + self.places.weight)).float()


torch.manual_seed(0)
model = Sorter()
options = {
    "mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32),
    "layout": Ragged(),  # new, and may be left out
}
for block in model.blocks:
    fully_shard(block, **options)
fully_shard(model, **options)
# was: torch.optim.AdamW(model.parameters(), lr=3e-3), which works as well
optimizer = ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=3e-3)
torch.manual_seed(1 + dist.get_rank())  # other data on every process

for step in range(1, STEPS + 1):
    digits = torch.randint(10, (BATCH, TIME))
    loss = cross_entropy(model(digits).flatten(0, 1), digits.sort().values.flatten())
    loss.backward()
    # was: torch.nn.utils.clip_grad_norm_(...).full_tensor(), which works as well
    norm = clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0 and (step == 1 or step % 10 == 0):
        print(f"step {step} loss {loss.item():.3f} gradient norm {norm.item():.2f}")

weight = model.blocks[0].linear1.weight
if dist.get_rank() == 0:
    print(f"{type(weight).__name__} of {tuple(weight.shape)}, this process keeps", end=" ")
    print(f"{weight.to_local().numel() / weight.numel():.0%}")
dist.destroy_process_group()
