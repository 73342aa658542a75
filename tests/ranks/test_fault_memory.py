"""Memory of collectives that a fault prevents from finishing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fullshard import MixedPrecisionPolicy, PerParameter, Ragged, fully_shard
from fullshard._torch import collectives as _collectives
from fullshard.device import Buffer
from fullshard.errors import PeerError
from tests.kit.extensions import Halves
from tests.kit.watch import Tower
from tests.ranks.models import Trouble, fill, noise
from tests.ranks.pool import RankPool

POLICIES = {
    "fp64": MixedPrecisionPolicy(),
    "bf16": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16),
}


class _Work:
    """A collective of the backend with the memory that it uses until it finishes."""

    busy: list[_Work]

    def __init__(self, work: dist.Work, tensors: list[Tensor]) -> None:
        self._work = work
        self.memory = {one.untyped_storage().data_ptr() for one in tensors}
        self.busy.append(self)

    def wait(self) -> None:
        self._work.wait()
        self.busy.remove(self)


def _recorded(start: Callable[..., dist.Work | None]) -> Callable[..., Any]:
    def recorded(group: dist.ProcessGroup, *args: Any, **options: Any) -> Any:
        work = start(group, *args, **options)
        flat = [one for arg in args for one in (arg if isinstance(arg, list) else [arg])]
        tensors = [one for one in flat if isinstance(one, Tensor)]
        return None if work is None else _Work(work, tensors)

    return recorded


def freed_in_use(fault: str, layout: str, policy: str) -> tuple[int, list[str]]:
    """Fail on rank 1; return the number of unfinished collectives and the buffers freed in use."""
    _Work.busy = []
    freed: list[str] = []

    def free(buffer: Buffer) -> None:
        address = buffer.tensor.untyped_storage().data_ptr()
        if buffer.allocated and any(address in work.memory for work in _Work.busy):
            freed.append(buffer.kind.value)
        original(buffer)

    original = Buffer.free
    group = dist.new_group()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FULLSHARD_TRANSPORT", "backend")
        patch.setenv("FULLSHARD_PATIENCE_S", "3")
        for name in ("all_gather", "all_to_all", "reduce_scatter"):
            patch.setattr(_collectives, name, _recorded(getattr(_collectives, name)))
        patch.setattr(Buffer, "free", free)
        model = fill(Tower(), scale=0.4)
        kind = Ragged() if layout == "ragged" else PerParameter()
        for block in model.blocks:
            if layout == "hooked":
                block.weight = nn.Parameter(Halves(block.weight.detach()))
            options = {"mesh": DeviceMesh.from_group(group, "cpu"), "layout": kind}
            fully_shard(block, mp_policy=POLICIES[policy], **options)
        fully_shard(model, mp_policy=POLICIES[policy], **options)
        for number in range(3):
            model.fault = fault if number == 2 and dist.get_rank() == 1 else ""
            try:
                model(noise(3, 6, seed=number)).square().sum().backward()
            except Trouble:
                return 0, freed
            except PeerError:
                return len(_Work.busy), freed
    raise AssertionError


@pytest.mark.parametrize(
    ("layout", "policy"),
    [("rows", "fp64"), ("rows", "bf16"), ("ragged", "bf16"), ("hooked", "fp64")],
)
@pytest.mark.parametrize("fault", ["forward", "backward"])
def test_what_a_collective_may_still_use_is_not_freed(
    pool: RankPool, fault: str, layout: str, policy: str
) -> None:
    (hung, freed), (_, freed_there) = pool.run(2, freed_in_use, fault, layout, policy)
    assert hung > 0
    assert freed == freed_there == []
