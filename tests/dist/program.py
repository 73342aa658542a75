"""A user's program, checked by strict type checkers against the installed wheel, then run."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor, nn

import fullshard
from fullshard import checkpoint
from fullshard.errors import FullshardError
from fullshard.optim import ShardedOptimizer, clip_grad_norm_


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.linear = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        return x + torch.relu(y)


def train(folder: Path, num_steps: int = 3) -> list[float]:
    """Return the losses."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(16) for _ in range(3)))
    for block in model:
        fullshard.fully_shard(block, layout=fullshard.Ragged())
    fullshard.fully_shard(model, layout=fullshard.Ragged(), reshard_after_forward=False)
    optimizer = ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2)
    losses: list[float] = []
    for _ in range(num_steps):
        loss: Tensor = model(torch.ones(4, 16)).square().mean()
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    with fullshard.unshard_params(model, writeback=False):
        assert all(param.shape == (16,) or param.shape == (16, 16) for param in model.parameters())
    checkpoint.save(folder / "step", model, optimizer, {"seen": 4 * num_steps}, step=num_steps)
    assert checkpoint.load(folder / "step", model, optimizer) == {"seen": 4 * num_steps}
    return losses


if __name__ == "__main__":
    try:
        found = train(Path(sys.argv[1]))
    except FullshardError as error:
        sys.exit(str(error))
    assert found[-1] < found[0]
    print(f"fullshard {fullshard.__version__}: {found[0]:.3f} to {found[-1]:.3f}")
