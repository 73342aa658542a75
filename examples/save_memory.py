"""Larger batches in less memory: four measures in one training loop.

    python examples/save_memory.py
    torchrun --nproc-per-node 2 examples/save_memory.py

Mixed precision (bf16 for computing, fp32 for weights, gradients and their sums), activation
checkpoints, gradient accumulation over two microbatches, and gradient clipping. The model learns
to sort eight digits. Takes seconds on a CPU.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

import fullshard

STEPS, MICROBATCHES, BATCH, TIME, DIM = 30, 2, 32, 8, 64


class Sorter(nn.Module):
    """Digits in, logits of the sorted digits out."""

    def __init__(self) -> None:
        super().__init__()
        self.digits, self.places = nn.Embedding(10, DIM), nn.Embedding(TIME, DIM)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(DIM, 4, 4 * DIM, dropout=0.0, batch_first=True)
            for _ in range(2)
        )
        self.head = nn.Linear(DIM, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.digits(x) + self.places.weight
        for block in self.blocks:  # backward runs each block again instead of keeping what it saved
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x).float()


torch.manual_seed(0)  # the same model on every process
model = Sorter()
fullshard.shard_blocks(
    model,
    mp_policy=fullshard.MixedPrecisionPolicy(
        param_dtype=torch.bfloat16,  # of the gathered parameters, and of what is computed with them
        reduce_dtype=torch.float32,  # of the sum over processes
    ),
)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)  # sees fp32 shards

rank, device = dist.get_rank(), next(model.parameters()).device
torch.manual_seed(1 + rank)  # other data on every process

for step in range(1, STEPS + 1):
    total = 0.0
    for i in range(MICROBATCHES):
        # Only the last one reduces. Before it whole gradients add up: less traffic, more memory.
        model.set_requires_gradient_sync(i == MICROBATCHES - 1)
        digits = torch.randint(10, (BATCH, TIME), device=device)
        loss = cross_entropy(model(digits).flatten(0, 1), digits.sort().values.flatten())
        (loss / MICROBATCHES).backward()
        total += loss.item() / MICROBATCHES
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)  # of the whole model
    norm = norm.full_tensor()  # collective: on every process, printed or not
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0 and (step == 1 or step % 10 == 0):
        print(f"step {step} loss {total:.3f} gradient norm {norm.item():.2f}")

weight = model.blocks[0].linear1.weight
if rank == 0:
    print(f"weights stay {weight.dtype}, this process keeps {tuple(weight.to_local().shape)}")
dist.destroy_process_group()
