"""One rank of a small training job with an injected fault."""

from __future__ import annotations

import atexit
import ctypes
import enum
import faulthandler
import logging
import os
import signal
import sys
import threading
import time
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn

from fullshard import FullyShardedDataParallel, checkpoint, fully_shard, optim
from fullshard.optim import StepGuard
from tests.faults.device_wire import on_device
from tests.faults.rows import (
    ALONE_AT_THE_END,
    EXPECTED,
    Expectation,
    Fault,
    Phase,
    What,
    without_waits,
)
from tests.faults.strike import MESSAGE, Diary, Strike, watch_gathers

# Jobs are forked from a process that has imported this module and all imports of an optimizer.
torch.set_num_threads(1)
torch.optim.AdamW([nn.Parameter(torch.zeros(1))])

WIDTH, NUM_BLOCKS, BATCH = 16, 4, 4
PATIENCE_S, GLOO_TIMEOUT_S = 2.0, 30.0
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG


class Engine(enum.Enum):
    """The implementation that shards; the value is a column of the table."""

    UNITS = "`fully_shard`"
    FLAT = "`FullyShardedDataParallel`"
    TORCH = "PyTorch's FSDP2"


class Wire(enum.Enum):
    """The transport between ranks.

    With NCCL all ranks use the first GPU. Each rank claims to be a host of its own, because NCCL
    refuses two ranks of one host on one GPU. DEVICE is a fake device, see
    ``tests/faults/device.py``.
    """

    SHARED = "shared"
    SOCKETS = "sockets"
    NCCL = "nccl"
    DEVICE = "device"

    @property
    def switch(self) -> str:
        """The value of FULLSHARD_SHARED_MEMORY; only gloo's groups on CPUs read this variable."""
        return str(int(self is Wire.SHARED))

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", 0) if self is Wire.NCCL else torch.device("cpu")


ON_CPUS = (Wire.SHARED, Wire.SOCKETS)


@dataclass(frozen=True)
class Job:
    """A training of a few steps in which ``fault`` happens to rank ``victim`` in step ``at_step``.

    Attributes:
        saves: whether a checkpoint is saved after each step, even if the fault needs none.
    """

    fault: Fault
    engine: Engine
    wire: Wire
    world: int
    victim: int = 1
    at_step: int = 3
    steps: int = 5
    saves: bool = False

    @property
    def expected(self) -> Expectation:
        """The expected messages and endings of the ranks."""
        others_end = {
            What.CLIP_ALONE: not self.saves,
            What.WHOLE_ALONE: not self.saves,
            What.SAVE_ALONE: True,
        }
        if self.at_step == self.steps and others_end.get(self.fault.what):
            return ALONE_AT_THE_END
        expected = EXPECTED[self.fault.what]
        return without_waits(expected) if self.wire in (Wire.NCCL, Wire.DEVICE) else expected

    @property
    def unit(self) -> str:
        """A regular expression for the unit that must be named; empty if none must."""
        fault = self.fault
        return self.expected.units.get(fault.phase, "").replace("{block}", str(fault.block))


class Block(nn.Module):
    def __init__(self, hidden: int, number: int, strike: Strike) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)
        self._number, self._strike = number, strike

    def forward(self, x: Tensor) -> Tensor:
        self._strike.meet(Phase.FORWARD, self._number)
        return self.down(self._strike.in_backward(torch.tanh(self.up(x)), self._number))


class Model(nn.Module):
    """Blocks with residual connections between two layers of the root."""

    def __init__(self, strike: Strike) -> None:
        super().__init__()
        what, number = strike.fault.what, strike.fault.block
        widths = [2 * WIDTH] * (NUM_BLOCKS + (what is What.MORE_LAYERS))
        if what is What.OTHER_WIDTH:
            widths[number] += 8
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.blocks = nn.ModuleList(Block(one, n, strike) for n, one in enumerate(widths))
        self._strike = strike

    def forward(self, x: Tensor) -> Tensor:
        strike, order = self._strike, list(range(len(self.blocks)))
        one = strike.fault.block
        if strike.is_due(What.SKIP, Phase.FORWARD):
            order.remove(one)
        if strike.is_due(What.SWAP, Phase.FORWARD):
            order[one], order[one + 1] = one + 1, one
        cut = one if strike.is_due(What.DETACH, Phase.BACKWARD) else None
        x = self.first(x)
        for number in order:
            change = self.blocks[number](x)
            x = x + (change.detach() if number == cut else change)
        return self.last(x)


def sharded(job: Job, strike: Strike) -> nn.Module:
    """Return this rank's model, sharded."""
    torch.manual_seed(0)
    model = Model(strike).double().to(job.wire.device)
    if strike.fault.phase is Phase.BUILD:
        strike.note()
    if strike.fault.what is What.OTHER_DTYPE:
        model.float()
    if job.engine is Engine.FLAT:
        for number, block in enumerate(model.blocks):
            model.blocks[number] = FullyShardedDataParallel(block, use_orig_params=True)
        return FullyShardedDataParallel(model, use_orig_params=True)
    shard: Any = fully_shard if job.engine is Engine.UNITS else torch_fsdp.fully_shard
    mesh = dist.init_device_mesh(job.wire.device.type, (job.world,))
    for block in model.blocks:
        shard(block, mesh=mesh)
    return shard(model, mesh=mesh)


def train(job: Job, rank: int, folder: Path, strike: Strike, diary: Diary) -> nn.Module:
    """Train with a loop like a user's, and return the model."""
    model = sharded(job, strike)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    optimizer.register_step_pre_hook(lambda *_: strike.meet(Phase.OPTIMIZER))
    ends = {What.EXTRA_STEP: 1, What.EARLY_END: -1}.get(strike.fault.what, 0)
    for step in range(1, job.steps + ends + 1):
        strike.step = step
        if ends and step > job.steps:
            strike.note()
        if job.fault.what is What.LEFT_OUT and step == job.at_step:
            continue
        try:
            one_step(job, model, optimizer, batch(job, rank, step, strike), strike)
        except Exception as error:
            is_own = job.fault.what is What.CAUGHT_ALONE and str(error) == MESSAGE
            if job.fault.what is not What.CAUGHT and not is_own:
                raise
            diary.note("caught", **described(error))
        optimizer.zero_grad()
        if strike.is_due(What.WHOLE_ALONE, Phase.SAVE):
            weights(job, model)
        if job.saves or job.fault.what is What.DISK_FULL:
            strike.meet(Phase.SAVE)
            save(job, model, optimizer, folder / "checkpoints", step)
        if strike.is_due(What.SAVE_ALONE, Phase.SAVE):
            save(job, model, optimizer, folder / "alone", step)
    if ends < 0:
        strike.note()
    return model


def batch(job: Job, rank: int, step: int, strike: Strike) -> Tensor:
    """Return this rank's data of a step."""
    strike.meet(Phase.DATA)
    noise = torch.Generator().manual_seed(step * job.world + rank)
    dtype = torch.float32 if strike.fault.what is What.OTHER_DTYPE else torch.float64
    return torch.randn(BATCH, WIDTH, generator=noise, dtype=torch.float64).to(
        job.wire.device, dtype
    )


def one_step(job: Job, model: nn.Module, optimizer: Any, x: Tensor, strike: Strike) -> None:
    """Train on one batch."""
    loss = model(x).square().mean()
    if strike.is_due(What.NAN, Phase.FORWARD):
        loss = loss * float("nan")
    loss.backward()
    if strike.is_due(What.CLIP_ALONE, Phase.CLIP):
        clip: Any = nn.utils if job.engine is Engine.TORCH else optim
        clip.clip_grad_norm_(model.parameters(), 1e9)
    if job.fault.what is not What.NAN:
        optimizer.step()
    elif job.engine is Engine.TORCH:
        nn.utils.clip_grad_norm_(model.parameters(), 1e9, error_if_nonfinite=True)
        optimizer.step()
    else:
        StepGuard(model, optimizer, max_skipped=0).step(loss)
    if job.wire is Wire.DEVICE and strike.step % 2 == 0:
        loss.item()  # programs log the loss every few steps


def save(job: Job, model: nn.Module, optimizer: Any, folder: Path, step: int) -> None:
    """Save a checkpoint of this step."""
    if job.engine is Engine.TORCH:
        dcp.save({"model": model.state_dict()}, checkpoint_id=folder / f"{step}")
    else:
        checkpoint.save(folder / f"step-{step}", model, optimizer, step=step)


def weights(job: Job, model: nn.Module) -> Tensor:
    """Return all parameters, unsharded, as one vector; a collective."""
    if job.engine is Engine.TORCH:
        parts = [p.full_tensor() for p in model.parameters()]  # type: ignore[attr-defined]
    else:
        parts = list(checkpoint.full_state_dict(model, rank0_only=False).values())
    return torch.cat([one.detach().flatten().cpu() for one in parts])


class _Copying(logging.Handler):
    """Copies fullshard's log records to the diary."""

    def __init__(self, diary: Diary) -> None:
        super().__init__(logging.INFO)
        self._diary = diary

    def emit(self, record: logging.LogRecord) -> None:
        self._diary.note("log", level=record.levelname, text=record.getMessage())


def described(error: BaseException) -> dict[str, str]:
    """Return the class and the text of an error, with its notes."""
    notes = getattr(error, "__notes__", [])
    return {"kind": type(error).__name__, "text": "\n".join([str(error), *notes])}


def begin(root: Path, rank: int, wire: Wire, patience_s: float) -> Diary:
    """Set up the process of a rank; write its output and diary to files in ``root``."""
    if sys.platform == "linux":  # end a stopped rank when its parent ends
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    out = os.open(root / f"printed-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    faulthandler.enable()
    os.environ |= {
        "FULLSHARD_PATIENCE_S": str(patience_s),
        "FULLSHARD_SHARED_MEMORY": wire.switch,
    }
    diary = Diary(root, rank)
    logging.getLogger("fullshard").setLevel(logging.INFO)
    logging.getLogger("fullshard").addHandler(_Copying(diary))
    return diary


def join(
    world: int,
    rank: int,
    port: int,
    *,
    backend: str = "gloo",
    store_s: float = 60.0,
    timeout_s: float = GLOO_TIMEOUT_S,
) -> None:
    """Join the process group whose store is on ``port`` of this machine."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=store_s))
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=world, timeout=timedelta(seconds=timeout_s)
    )


def work(job: Job, rank: int, folder: str, port: int) -> None:
    """Run one rank of ``job``, whose store is on ``port``; end the process as a program ends.

    A child of multiprocessing does not call ``sys.excepthook``, which fullshard may have replaced,
    so this function calls the hook itself.
    """
    root = Path(folder)
    diary = begin(root, rank, job.wire, PATIENCE_S)
    if job.wire is Wire.NCCL:
        os.environ |= {
            "NCCL_HOSTID": f"host {rank}",
            "NCCL_SOCKET_IFNAME": "lo",
            "NCCL_IB_DISABLE": "1",
        }
        torch.cuda.set_device(job.wire.device)
    code = 0
    try:
        _join_and_train(job, rank, root, port, diary)
        diary.note("ended", kind="", text="")
    except SystemExit as error:
        diary.note("ended", **described(error))
        code = error.code if isinstance(error.code, int) else 1
    except BaseException as error:
        diary.note("ended", **described(error))
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
        if job.fault.what is What.LINGER and rank == job.victim:
            time.sleep(job.fault.stall_s)  # programs may upload their logs before they end
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    diary.note("gone")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _join_and_train(job: Job, rank: int, root: Path, port: int, diary: Diary) -> None:
    """Join the job and train; write the weights to the folder if the judge needs them."""
    join(job.world, rank, port, backend="nccl" if job.wire is Wire.NCCL else "gloo")
    strike = Strike(job.fault if rank == job.victim else None, job.at_step, diary)
    watch_gathers(strike)
    diary.note("joined")
    with on_device(root) if job.wire is Wire.DEVICE else nullcontext() as device:
        model = train(job, rank, root, strike, diary)
        if job.fault.what in (What.CAUGHT, What.LEFT_OUT):
            torch.save(weights(job, model), root / f"weights-{rank}.pt")
        if device is not None:
            device.current_stream().synchronize()  # the end of an NCCL communicator waits as well
    dist.destroy_process_group()
