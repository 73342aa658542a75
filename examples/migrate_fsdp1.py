"""A program written for PyTorch's FSDP1, on fullshard: the changed lines are marked.

    python examples/migrate_fsdp1.py
    torchrun --nproc-per-node 2 examples/migrate_fsdp1.py

It wraps by a policy, computes in bf16, accumulates, clips, saves and resumes: seconds on a CPU.
"""

import functools
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

# was: from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, MixedPrecision, ...
from fullshard import FullStateDictConfig, MixedPrecision, StateDictType
from fullshard import FullyShardedDataParallel as FSDP

# was: from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from fullshard.wrap import transformer_auto_wrap_policy

STEPS, MICROBATCHES, BATCH, TIME, DIM = 40, 2, 32, 8, 64


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


# was: dist.init_process_group(), which is done where nobody did it before
torch.manual_seed(0)
model = FSDP(
    Sorter(),
    auto_wrap_policy=functools.partial(
        transformer_auto_wrap_policy, transformer_layer_cls={nn.TransformerEncoderLayer}
    ),
    mixed_precision=MixedPrecision(torch.bfloat16, torch.float32, torch.bfloat16),
    use_orig_params=True,
    # was: device_id=torch.device("cpu"), which runs on a CPU without being asked
)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
torch.manual_seed(1 + dist.get_rank())  # other data on every process


def loss_of_a_batch() -> torch.Tensor:
    digits = torch.randint(10, (BATCH, TIME))
    return cross_entropy(model(digits).flatten(0, 1), digits.sort().values.flatten()) / MICROBATCHES


for step in range(1, STEPS + 1):
    with model.no_sync():
        first = loss_of_a_batch()
        first.backward()
    second = loss_of_a_batch()
    second.backward()
    model.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0 and (step == 1 or step % 10 == 0):
        print(f"step {step} loss {(first + second).item():.3f}")
warnings.simplefilter("ignore", FutureWarning)  # of state_dict_type, as PyTorch's own gives it
with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(True, True)):
    weights, states = model.state_dict(), FSDP.optim_state_dict(model, optimizer)
if dist.get_rank() == 0:
    print(f"saved {len(weights)} tensors, and the moments of {len(states['state'])} parameters")
dist.destroy_process_group()
