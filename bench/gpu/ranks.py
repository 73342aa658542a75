"""Several ranks on one GPU, over NCCL: each says that it is a host of its own.

NCCL refuses two ranks of one host on one GPU. Ranks of two hosts talk through sockets, here those
of the machine itself, so results are those of a cluster, and times are not.
"""

from __future__ import annotations

import copy
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fullshard
from bench.contenders import units
from bench.gpu.machine import Machine, Verdict
from bench.gpu.model import SMALL, Llama, sizes_for, tokens_of
from fullshard import checkpoint
from fullshard.optim import Muon

LIMIT_S = 150
_HAS_NCCL2 = hasattr(dist.distributed_c10d, "ProcessGroupNCCL2")
WORLDS = (2, 4)
STEPS = 3
NEAR = 1e-4
"""How far losses may be from those of the unsharded model, in fp32."""
ROUNDED = 0.05
"""The same where parameters and gradients travel rounded."""

Shard = Callable[[Any], Any]


_by_blocks = partial(units, fullshard.fully_shard)


def _flat(model: Any) -> Any:
    for number, block in enumerate(model.blocks):
        model.blocks[number] = fullshard.FullyShardedDataParallel(block, use_orig_params=True)
    return fullshard.FullyShardedDataParallel(model, use_orig_params=True)


def _ways(device: str, world: int) -> dict[str, tuple[Shard, float]]:
    ways: dict[str, tuple[Shard, float]] = {
        "per-parameter": (_by_blocks(), NEAR),
        "ragged": (_by_blocks(layout=fullshard.Ragged()), NEAR),
        "kept after forward": (_by_blocks(reshard_after_forward=False), NEAR),
        "flat": (_flat, NEAR),
    }
    for kind in ("int8", "fp8"):
        wire = fullshard.WirePolicy(gather=kind, reduce=kind)
        ways[f"{kind} on the wire"] = (_by_blocks(wire=wire), ROUNDED)
    if world == 4:
        mesh = init_device_mesh(device, (2, 2), mesh_dim_names=("replicate", "shard"))
        ways["two replicas"] = (_by_blocks(mesh=mesh), NEAR)
        ways["two replicas, ragged"] = (_by_blocks(mesh=mesh, layout=fullshard.Ragged()), NEAR)
        ways["groups of two"] = (_by_blocks(reshard_after_forward=2), NEAR)
        wire = fullshard.WirePolicy(reduce="int4")
        ways["two replicas, int4 gradients"] = (_by_blocks(mesh=mesh, wire=wire), ROUNDED)
    return ways


def check_all(device: str) -> dict[str, Any]:
    """On each rank: how far losses are from the unsharded model's, by what was tried.

    Figures that are too large are told under "wrong".
    """
    machine = Machine(torch.device(device))
    torch.manual_seed(0)
    plain = Llama(sizes_for(machine, SMALL)).to(machine.device)
    found: dict[str, Any] = {"wrong": []}

    def compare(name: str, shard: Shard, make: Callable[[Any], Any], allowed: float) -> Any:
        model, far = _trained(machine, plain, shard, make)
        found[name] = far
        if not far <= allowed:
            found["wrong"].append(name)
        return model

    for name, (shard, allowed) in _ways(machine.device.type, dist.get_world_size()).items():
        compare(name, shard, lambda model: torch.optim.SGD(model.parameters(), lr=0.1), allowed)
    compare("Muon", _by_blocks(), lambda model: Muon(model, 1e-3), NEAR)
    model = compare("AdamW", _by_blocks(), lambda m: torch.optim.AdamW(m.parameters()), NEAR)
    if not _loads(model, copy.deepcopy(plain)):
        found["wrong"].append("a checkpoint")
    return found


def _trained(
    machine: Machine, plain: nn.Module, shard: Shard, make: Callable[[Any], Any]
) -> tuple[Any, float]:
    sizes, rank, world = sizes_for(machine, SMALL), dist.get_rank(), dist.get_world_size()
    whole, model = copy.deepcopy(plain), shard(copy.deepcopy(plain))
    optimizers = [make(whole), make(model)]
    far = 0.0
    for number in range(STEPS):
        batches = [tokens_of(machine, sizes, 32, world * number + one) for one in range(world)]
        expected = torch.stack([whole(tokens) for tokens in batches])
        expected.mean().backward()
        loss = model(batches[rank])
        loss.backward()
        norms = [_norm(whole), float(fullshard.optim.clip_grad_norm_(model.parameters(), 1e9))]
        far = max(far, (expected[rank] - loss).abs().item(), abs(norms[0] / norms[1] - 1))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return model, far


def _norm(model: nn.Module) -> float:
    return float(nn.utils.clip_grad_norm_(model.parameters(), 1e9))


def _loads(model: Any, fresh: Any) -> bool:
    """Save beside, load into another layout, compare."""
    given = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(given)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    save = checkpoint.save(Path(str(given[0]), "one"), model, optimizer, step=1, mode="async")
    save.wait()
    other = _by_blocks(layout=fullshard.Ragged())(fresh)
    checkpoint.load(Path(str(given[0]), "one"), other)
    ones, others = (_whole(one) for one in (model, other))
    return all(torch.equal(one, others[name]) for name, one in ones.items())


def _whole(model: nn.Module) -> dict[str, Tensor]:
    return checkpoint.full_state_dict(model, rank0_only=False)


def _start(module: list[str], world: int, logs: Path) -> list[subprocess.Popen[bytes]]:
    """Processes of a job, as a launcher would start them on hosts of one GPU each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = []
    for rank in range(world):
        env = os.environ | {
            "RANK": str(rank),
            "WORLD_SIZE": str(world),
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "GROUP_RANK": str(rank),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "NCCL_HOSTID": f"host {rank}",
            "NCCL_SOCKET_IFNAME": "lo",
            "NCCL_IB_DISABLE": "1",
            "NCCL_DEBUG": "WARN",
        }
        with Path(logs, f"{rank}.txt").open("w") as out:
            command = [sys.executable, *module]
            started.append(subprocess.Popen(command, env=env, stdout=out, stderr=subprocess.STDOUT))
    return started


def _run(module: list[str], world: int, **more: str) -> tuple[bool, list[str]]:
    """Run a job with ``more`` variables; return if all ranks ended well, and what each printed."""
    with tempfile.TemporaryDirectory() as logs, patch.dict(os.environ, more):
        started = _start(module, world, Path(logs))
        try:
            codes = [one.wait(LIMIT_S) for one in started]
        except subprocess.TimeoutExpired:
            codes = [1]
        finally:
            for one in started:
                one.kill()
                one.wait()
        printed = [Path(logs, f"{rank}.txt").read_text() for rank in range(world)]
    return not any(codes), printed


def ranks(machine: Machine) -> Verdict:
    """Two and four ranks with real collectives among them, against the unsharded model."""
    if not machine.is_real:
        return Verdict(passed=None, notes=["tests run its ranks by themselves"])
    figures: dict[str, Any] = {}
    notes = []
    backends = {"nccl2": "1", "nccl": "0"} if _HAS_NCCL2 else {"nccl": "0"}
    for world, (backend, chosen) in product(WORLDS, backends.items()):
        what = f"{world} ranks, {backend}"
        good, printed = _run(["-m", "bench.gpu.rank"], world, TORCH_DIST_USE_NCCL2=chosen)
        if not good:
            notes.append(f"{what} did not end well: " + " | ".join(one[-1500:] for one in printed))
            continue
        found = json.loads(printed[0].splitlines()[-1])
        notes += [f"{what}: {name} is wrong" for name in found.pop("wrong")]
        figures[f"{what}, farthest loss"] = found
    return Verdict(passed=not notes, figures=figures, notes=notes)


def jobs(machine: Machine) -> Verdict:
    """``fullshard train`` on two and four ranks: losses of as many tokens a step are alike."""
    if not machine.is_real:
        return Verdict(passed=None, notes=["it takes a minute and shows nothing here"])
    figures: dict[str, Any] = {}
    notes = []
    for name, (world, options) in {
        "two ranks": (2, ""),
        "two ranks, ragged, bf16, int8 on the wire": (
            2, "--layout ragged --dtype bf16 --wire gather=int8,reduce=int8",
        ),
        "four ranks, two replicas, Muon": (4, "--replicas 2 --optimizer muon"),
    }.items():  # fmt: skip
        with tempfile.TemporaryDirectory() as out:
            common = f"--steps 40 --batch {16 // world} --save-every 20 --out {out}/run"
            command = f"-m fullshard.train {common} {options}".split()
            good, printed = _run(command, world)
            rows = Path(out, "run", "metrics.jsonl")
            lines = rows.read_text().splitlines() if rows.exists() else []
        if not good or len(lines) != 40:
            notes.append(f"{name}: did not end well: " + " | ".join(one[-1500:] for one in printed))
            continue
        first, last = (json.loads(lines[at]) for at in (0, -1))
        figures[name] = {
            "first loss": first["loss"],
            "last loss": last["loss"],
            "tokens a second": last["tokens_per_s"],
        }
    return Verdict(passed=not notes, figures=figures, notes=notes)
