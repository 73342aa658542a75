"""Offloading, and tensors with hooks around their all-gather, compared with PyTorch's."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.kit.extensions import Halves, split
from tests.ranks.models import fill, full_parameters, noise
from tests.ranks.net import batch, make
from tests.ranks.pool import RankPool
from tests.ranks.rows import check_alike, each, grads, outcomes, raised, shard


class Quiet(Halves):
    """A tensor that writes as PyTorch requires: unseen by autograd and by version counters."""

    def fsdp_post_all_gather(
        self, outputs: Any, metadata: Any, dtype: Any, *, out: Tensor | None = None
    ) -> Any:
        if out is None:
            return super().fsdp_post_all_gather(outputs, metadata, dtype)
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
            return super().fsdp_post_all_gather(outputs, metadata, dtype, out=out)


class OldQuiet(Quiet):
    def fsdp_pre_all_gather(self, mesh: Any) -> Any:  # type: ignore[override]
        return split(self.data_inside)


def offload_policies(fsdp: Any) -> Any:
    policy = fsdp.CPUOffloadPolicy()
    names = [(f.name, getattr(policy, f.name)) for f in fields(policy)]
    model = shard(fsdp, make(), offload_policy=fsdp.OffloadPolicy())
    model(batch()).sum().backward()
    return [names, isinstance(policy, fsdp.OffloadPolicy), grads(model)]


def offloaded(fsdp: Any) -> Any:
    policy = fsdp.CPUOffloadPolicy(pin_memory=False)
    model = shard(fsdp, make(), offload_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    places = []
    for number in range(3):
        model(batch(number + dist.get_rank())).square().mean().backward()
        places += [str(p.grad.device) for p in model.parameters()]
        total = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    whole_norm = total.full_tensor().item()  # type: ignore[attr-defined]
    return [places, whole_norm, full_parameters(model)]


def wrapped(cls: Any) -> Any:
    """Return a model whose sizes divide evenly: with PyTorch, hooks have to pad."""
    model: Any = fill(nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 4)).double())
    for layer in (model[0], model[2]):
        layer.weight = nn.Parameter(cls(layer.weight.detach()))
    return model


def gathered_by_hooks(fsdp: Any) -> Any:
    seen: list[Any] = []
    for cls in (Quiet, OldQuiet):
        for reshard in (True, False):
            model = fsdp.fully_shard(wrapped(cls), reshard_after_forward=reshard)
            for number in range(2):
                out = model(noise(3, 6, seed=number + dist.get_rank()))
                out.square().sum().backward()
            local = [type(p.to_local()).__name__ for p in model.parameters()]
            kinds = [type(p.grad.to_local()).__name__ for p in model.parameters()]
            seen.append([out.detach(), local, kinds, grads(model)])
    return seen


def what_hooks_are_told(fsdp: Any) -> Any:
    Halves.calls.clear()
    model = wrapped(Halves)
    policy = fsdp.MixedPrecisionPolicy(output_dtype=torch.float32)
    fsdp.fully_shard(model, mp_policy=policy)
    model(noise(3, 6))
    return [
        (mesh.size(), tuple(size), stride, type(module).__name__, got == policy, tuple(shape))
        for mesh, size, stride, module, got, shape in Halves.calls
    ]


@each(offload_policies, offloaded, gathered_by_hooks, what_hooks_are_told)
def test_as_in_pytorch(pool: RankPool, program: Any) -> None:
    check_alike(pool, program)


def pinned_without_accelerator(fsdp: Any) -> Any:
    return raised(lambda: shard(fsdp, make(), offload_policy=fsdp.CPUOffloadPolicy())(batch()))


def test_pinning_where_there_is_nothing_to_pin_for(pool: RankPool) -> None:
    for theirs, ours in pool.run(2, outcomes, pinned_without_accelerator):
        assert theirs.kinds[0] == "RuntimeError" and ours == "nothing raised"


def several_tensors(fsdp: Any) -> Any:
    model = fsdp.fully_shard(wrapped(Halves))
    return raised(lambda: model(noise(3, 6)).sum().backward())


def test_defect_8_several_tensors_with_one_shard(pool: RankPool) -> None:
    ((theirs, ours),) = pool.run(1, outcomes, several_tensors)
    assert theirs.kinds[0] == "ValueError" and ours == "nothing raised"
