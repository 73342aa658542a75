"""Features above the engine, on a device: codecs, optimizers, checkpoints, plans, trainer."""

from __future__ import annotations

import copy
import gc
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fullshard
from bench.contenders import PER_PARAMETER, RAGGED, units
from bench.gpu.costs import peak
from bench.gpu.machine import WORLD, Failed, Machine, Verdict, seconds
from bench.gpu.model import LARGE, SMALL, TINY, Llama, sizes_for, tokens_of, train
from fullshard import checkpoint
from fullshard.comm.codecs import INT4, Blocks
from fullshard.optim import Muon, OwnedOptimizer, ShardedGradScaler, ShardedOptimizer

TRAINER_LIMIT_S = 200


def codecs(machine: Machine) -> Verdict:
    """The device encodes the same bytes as the host; its rate is measured too."""
    torch.manual_seed(0)
    values = torch.randn(WORLD, 1 << 14) * torch.randn(WORLD, 1 << 14).exp()
    values[1, 64:128] = 0
    values[2, 70] = torch.inf
    figures = {}
    for dtype in (torch.float32, torch.bfloat16):
        for kind in (torch.int8, torch.float8_e4m3fn, INT4):
            codec = Blocks(kind, 64)
            here, there = values.to(dtype), values.to(machine.device, dtype)
            ours, its = codec.encode([here]), codec.encode([there])
            one, other = torch.empty_like(here), torch.empty_like(there)
            codec.decode(ours, [one])
            codec.decode(ours.to(machine.device), [other])
            same = one.isclose(other.cpu(), 0, 0, equal_nan=True)
            name = f"{dtype} in {kind}"
            rates = _rates(machine, codec, dtype)
            figures[name] = {
                "bytes that differ": (ours != its.cpu()).sum().item(),
                "values that differ": (~same).sum().item(),
                "encoded GB/s": rates[0],
                "decoded GB/s": rates[1],
            }
    apart = [name for name, one in figures.items() if one["values that differ"]]
    return Verdict(
        passed=not apart, figures=figures, notes=[f"decoded otherwise: {apart}"] * bool(apart)
    )


def _rates(machine: Machine, codec: Blocks, dtype: torch.dtype) -> tuple[float, float]:
    """Bytes of values a second that are encoded, and that come of decoding."""
    numel = 1 << (23 if machine.is_real else 10)
    values = torch.randn(WORLD, numel, device=machine.device).to(dtype)
    sent, output = codec.encode([values]), torch.empty_like(values)
    both = (lambda: codec.encode([values])), (lambda: codec.decode(sent, [output]))
    times = [[seconds(machine, run)[1] for _ in range(6)][2:] for run in both]
    one, other = (values.nbytes / statistics.median(those) / 1e9 for those in times)
    return one, other


def _sharded(model: nn.Module, **options: Any) -> Any:
    return units(fullshard.fully_shard, **options)(model)


def _moved(
    machine: Machine, make: Callable[[nn.Module], torch.optim.Optimizer], shard: bool
) -> tuple[list[Tensor], list[float]]:
    """Weights after some steps, and the losses."""
    sizes = sizes_for(machine, SMALL)
    torch.manual_seed(0)
    model: Any = Llama(sizes).to(machine.device)
    if shard:
        model = _sharded(model)
    optimizer = make(model)
    losses = [train(model, optimizer, tokens_of(machine, sizes, 32)).item() for _ in range(6)]
    return [_whole(param) for param in model.parameters()], losses


def _whole(param: Tensor) -> Tensor:
    whole: Tensor = param.full_tensor() if hasattr(param, "full_tensor") else param
    return whole.detach().cpu().clone()


def _farthest(ones: list[Tensor], others: list[Tensor]) -> float:
    return max((one - other).abs().max().item() for one, other in zip(ones, others, strict=True))


def owners(machine: Machine) -> Verdict:
    """Optimizers of whole matrices, on a sharded model and on the model as it is."""

    def matrices(model: nn.Module) -> list[nn.Parameter]:
        return [param for param in model.parameters() if param.dim() == 2]

    makers: dict[str, Any] = {
        "Muon": (lambda model: Muon(model, 1e-3), lambda model: Muon(model, 1e-3)),
        "OwnedOptimizer(torch.optim.Muon)": (
            lambda model: torch.optim.Muon(matrices(model), 1e-3),
            lambda model: OwnedOptimizer(matrices(model), torch.optim.Muon, lr=1e-3),
        ),
        "ShardedOptimizer(AdamW, fused)": (
            lambda model: torch.optim.AdamW(model.parameters(), 1e-3, fused=True),
            lambda model: ShardedOptimizer(
                model.parameters(), torch.optim.AdamW, lr=1e-3, fused=True
            ),
        ),
    }
    figures, notes = {}, []
    with machine.alone():
        for name, (plain, ours) in makers.items():
            weights, losses = _moved(machine, plain, shard=False)
            found, its = _moved(machine, ours, shard=True)
            figures[name] = {
                "farthest weight": _farthest(weights, found),
                "first loss": losses[0],
                "last loss": losses[-1],
                "ours": its[-1],
            }
            if figures[name]["farthest weight"] > 1e-3 or not its[-1] < its[0]:
                notes.append(f"{name}: {figures[name]}")
    return Verdict(passed=not notes, figures=figures, notes=notes)


def host_states(machine: Machine) -> Verdict:
    """State of AdamW in host memory: the same bits as on the device, and milliseconds of a step."""
    figures: dict[str, Any] = {}
    with machine.alone():
        whole = None
        for fraction in (0.0, 0.5, 1.0):
            make = partial(_hosted, fraction=fraction)
            weights, _ = _moved(machine, make, shard=True)
            whole = whole or weights
            if _farthest(whole, weights):
                raise Failed(
                    f"host_fraction={fraction}: weights are not those of state on the device"
                )
        for fraction in (0.0, 0.5, 1.0):
            figures[f"host_fraction={fraction}"] = _step_of_states(machine, fraction)
    return Verdict(passed=True, figures=figures)


def _hosted(model: nn.Module, fraction: float) -> torch.optim.Optimizer:
    return ShardedOptimizer(
        model.parameters(), torch.optim.AdamW, lr=1e-3, fused=True, host_fraction=fraction
    )


def _step_of_states(machine: Machine, fraction: float) -> dict[str, float]:
    gc.collect()  # models are cycles
    sizes = sizes_for(machine, LARGE)
    model = _sharded(Llama(sizes).to(machine.device))
    optimizer = _hosted(model, fraction)
    tokens = tokens_of(machine, sizes, 256 if machine.is_real else 8)
    train(model, optimizer, tokens)
    model(tokens).backward()
    times = [seconds(machine, optimizer.step)[1] for _ in range(6 if machine.is_real else 2)]
    states = [s for one in optimizer.state.values() for s in one.values() if isinstance(s, Tensor)]
    return {
        "optimizer step ms": 1e3 * statistics.median(times[1:]),
        "GB of state": sum(s.nbytes for s in states) / 1e9,
        "GB on the device": torch.cuda.memory_allocated() / 1e9 if machine.is_real else 0.0,
    }


def checkpoints(machine: Machine) -> Verdict:
    """An asynchronous save holds the state at the call; it loads bit for bit."""
    figures: dict[str, Any] = {}
    with machine.alone(), tempfile.TemporaryDirectory() as root:
        sizes = sizes_for(machine, LARGE)
        for layout in (fullshard.PerParameter(), fullshard.Ragged()):
            name = type(layout).__name__
            torch.manual_seed(0)
            model = _sharded(Llama(sizes).to(machine.device), layout=layout)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
            tokens = tokens_of(machine, sizes, 64)
            for _ in range(3):
                train(model, optimizer, tokens)
            step = partial(train, model, optimizer, tokens)
            usual = seconds(machine, step)[1]
            before = _state(model, optimizer)
            path = Path(root, name)
            saves: list[Any] = []
            save = partial(checkpoint.save, path, model, optimizer, step=4, mode="async")
            _, call = seconds(machine, lambda s=saves, f=save: s.append(f()))
            during = [seconds(machine, step)[1] for _ in range(3)]
            saves[0].wait()
            torch.manual_seed(1)
            other = _sharded(Llama(sizes).to(machine.device), layout=layout)
            its = torch.optim.AdamW(other.parameters(), lr=1e-3, fused=True)
            _, load = seconds(machine, partial(checkpoint.load, path, other, its))
            after = _state(other, its)
            if before.keys() != after.keys() or any(
                not torch.equal(one, after[key]) for key, one in before.items()
            ):
                raise Failed(f"{name}: what was loaded is not what was saved")
            figures[name] = {
                "usual step ms": 1e3 * usual,
                "save returns after ms": 1e3 * call,
                "first step after it ms": 1e3 * during[0],
                "third ms": 1e3 * during[2],
                "load s": load,
                "GB": sum(one.nbytes for one in before.values()) / 1e9,
            }
            del model, optimizer, other, its, before, after, step, save, saves
    return Verdict(passed=True, figures=figures)


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Copies of shards and states on the host, by name."""
    found = {name: p.to_local().detach().cpu().clone() for name, p in model.named_parameters()}  # type: ignore[attr-defined]
    for name, param in model.named_parameters():
        for key, value in optimizer.state[param].items():
            local = value.to_local() if hasattr(value, "to_local") else value
            found[f"{name}.{key}"] = local.detach().cpu().clone()
    return found


def scaling(machine: Machine) -> Verdict:
    """Loss scaling in fp16: an overflow skips a step, and the next ones are made; clipped norms."""
    sizes = sizes_for(machine, SMALL)
    low = fullshard.MixedPrecisionPolicy(torch.float16, torch.float16)
    with machine.alone():
        torch.manual_seed(0)
        model = _sharded(Llama(sizes).to(machine.device), mp_policy=low)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        scaler = ShardedGradScaler(machine.device.type, init_scale=2.0**40)
        losses, skipped = [], 0
        for _ in range(60):
            before = _whole(model.head.weight)
            loss = model(tokens_of(machine, sizes, 32))
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            norm = fullshard.optim.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            overflowed = not torch.isfinite(norm).item()
            stays = torch.equal(before, _whole(model.head.weight))
            if overflowed != stays:
                raise Failed(f"norm {norm.item()}, and weights stayed: {stays}")
            skipped += overflowed
            losses.append(loss.item())
    figures = {"skipped": skipped, "first loss": losses[0], "last": losses[-1]}
    return Verdict(passed=0 < skipped < 60 and losses[-1] < losses[0], figures=figures)


def plans(machine: Machine) -> Verdict:
    """The peak that a plan tells, and the one that is measured, of a rank of eight."""
    figures = {}
    sizes = sizes_for(machine, LARGE) if machine.is_real else TINY
    length = 1024 if machine.is_real else 16
    low = fullshard.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    with torch.device("meta"):
        model = Llama(sizes)
        batch = torch.empty(1, length + 1, dtype=torch.int64)
    for name, layout in {
        PER_PARAMETER: fullshard.PerParameter(),
        RAGGED: fullshard.Ragged(),
    }.items():

        def shard(copied: Any, mesh: Any, layout: Any = layout) -> None:
            _sharded(copied, mesh=mesh, mp_policy=low, layout=layout)

        planned = fullshard.plan(
            copy.deepcopy(model), batch=batch, world_size=WORLD, hardware="h100", shard=shard
        )
        found = machine.apart(peak, name, 1)["peak allocated"]
        figures[name] = {
            "planned GB": planned.peak.nbytes / 1e9,
            "measured GB": found / 1e9,
            "planned by measured": planned.peak.nbytes / found if found else 0.0,
        }
    return Verdict(passed=True, figures=figures)


def trainer(machine: Machine) -> Verdict:
    """``fullshard train`` and ``fullshard doctor`` as a user starts them, on one rank."""
    figures: dict[str, Any] = {}
    notes = []
    with tempfile.TemporaryDirectory() as root:
        common = ["train", "--nproc", "1", "--steps", "60", "--out"]
        for name, more in {
            "train": [],
            "train in bf16, ragged, recomputed, traced": [
                *("--dtype", "bf16", "--layout", "ragged", "--checkpoint-activations", "--trace"),
            ],
            "doctor": None,
        }.items():
            place = str(Path(root, re.sub(r"\W+", "-", name)))
            args = ["doctor", "--nproc", "1"] if more is None else [*common, place, *more]
            if not machine.is_real and more is not None:
                args += ["--seq", "16", "--batch", "1"]
            command = [sys.executable, "-m", "fullshard.cli", *args]
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=TRAINER_LIMIT_S, check=False
            )
            if done.returncode:
                notes.append(f"{name}: ended with {done.returncode}: {done.stderr[-1500:]}")
            figures[name] = done.stdout[-1500:] if more is None else _last_of(place)
    return Verdict(passed=not notes, figures=figures, notes=notes)


def _last_of(place: str) -> str:
    rows = Path(place, "metrics.jsonl")
    return rows.read_text().splitlines()[-1] if rows.exists() else "no metrics"
