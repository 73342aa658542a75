"""One rank of a small training job that saves after every step; it may be killed at any moment."""

from __future__ import annotations

import faulthandler
import hashlib
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fullshard import PerParameter, Ragged, checkpoint, fully_shard

# Jobs are forked from a process that has imported this module, and what an optimizer imports.
torch.set_num_threads(1)
torch.optim.AdamW([nn.Parameter(torch.zeros(1))])

LAYOUTS = {"rows": PerParameter(), "ragged": Ragged()}
KEEP = 2
_PATIENCE_S = 0.2


def work(rank: int, world: int, folder: str, port: int, layout: str, steps: int) -> None:
    """Train to ``steps`` from the newest checkpoint in ``folder``.

    The store of the process group is on ``port`` of this machine.
    Sums over two ranks do not depend on the order, so results are equal to the bit in any layout.
    """
    root = Path(folder)
    errors = os.open(root / f"errors-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(errors, 2)  # ranks that others left alone say so
    faulthandler.enable()
    os.environ["FULLSHARD_PATIENCE_S"] = str(_PATIENCE_S)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=20))
    dist.init_process_group(  # waits so long for a rank that was killed before it came here
        "gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=20)
    )
    (root / f"joined-{rank}").touch()
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(48, 64), nn.Tanh(), nn.Linear(64, 7)).double()
    for layer in (model[0], model[2], model):
        fully_shard(layer, layout=LAYOUTS[layout])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    checkpointer = checkpoint.Checkpointer(root / "checkpoints", keep=KEEP)
    loaded = checkpointer.load(model, optimizer)
    first = loaded.step if loaded else 0
    assert loaded is None or loaded.extra == {"step": first}
    tell(root, rank, f"loaded {first}")
    for step in range(first + 1, steps + 1):
        noise = torch.Generator().manual_seed(step * world + rank)
        x = torch.randn(4, 48, generator=noise, dtype=torch.float64)
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        tell(root, rank, f"saving {step}")
        checkpointer.save(model, optimizer, {"step": step}, step=step)
        tell(root, rank, f"saved {step}")
    tell(root, rank, f"done {digest(model)}")
    dist.barrier()
    os._exit(0)


def digest(model: nn.Module) -> str:
    """Return a digest of all parameters; a collective."""
    found = hashlib.sha256()
    for value in checkpoint.full_state_dict(model, rank0_only=False).values():
        found.update(value.numpy().tobytes())
    return found.hexdigest()[:16]


def tell(root: Path, rank: int, what: str) -> None:
    """Append a line to the log of a rank, in one write."""
    number = os.open(root / f"log-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(number, f"{what}\n".encode())
    os.close(number)
