"""Process groups made like others, with stand-ins for NCCL's, which a CPU build lacks."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fullshard import _torch
from fullshard.comm import mesh
from fullshard.comm.c10d import C10d
from fullshard.comm.ledger import ledger_of


class Options:
    """ProcessGroupNCCL's, as far as anybody sets them."""

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream = is_high_priority_stream
        self.config = "ctas 4"
        self._timeout = timedelta(seconds=600)
        self.split_from: object = None


def group_of(backend: Any) -> Any:
    return SimpleNamespace(
        _device_types=[torch.device("cuda")], _get_backend=lambda device: backend
    )


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_a_group_like_another_has_its_options(
    monkeypatch: pytest.MonkeyPatch, is_wrapped: bool
) -> None:
    options = Options(is_high_priority_stream=True)
    options.config, options._timeout = "ctas 16", timedelta(seconds=7)
    options.split_from = "the default group"  # as a DeviceMesh makes them
    backend = SimpleNamespace(options=options, name=lambda: "nccl")
    if is_wrapped:
        backend = SimpleNamespace(options=options, name=lambda: "wrapper", wrapped_pg=backend)
    asked: dict[str, Any] = {}
    monkeypatch.setattr(dist, "new_group", lambda ranks, **given: asked.update(given))
    monkeypatch.setattr(dist, "get_backend_config", lambda group: "cuda:nccl")
    mesh._new_group([0, 1], like=group_of(backend), device_type="cuda")
    made = asked["pg_options"]
    assert made is not options, "PyTorch writes to them"
    assert (made.is_high_priority_stream, made.config) == (True, "ctas 16")
    assert made.split_from is None
    assert made._timeout == asked["timeout"] == timedelta(seconds=7)


def test_other_backends_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = SimpleNamespace(options=Options(), name=lambda: "gloo")
    asked: dict[str, Any] = {}
    monkeypatch.setattr(dist, "new_group", lambda ranks, **given: asked.update(given))
    monkeypatch.setattr(dist, "get_backend_config", lambda group: "cpu:gloo")
    mesh._new_group([0, 1], like=group_of(backend), device_type="cpu")
    assert asked["pg_options"] is None


def test_a_group_that_serves_gpus_alone_can_be_used() -> None:
    """As torchrun's programs make it by ``init_process_group("nccl")``; the CPU has no backend."""
    dist.init_process_group("cuda:gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        group = dist.group.WORLD
        assert group is not None
        wire = C10d(group, "cuda")
        ledger = ledger_of(group)
        assert ledger.aborts is not None and ledger.breaks is None
        assert wire.over(group).group is group
        assert not _torch.has_peers(group, "cpu")
    finally:
        dist.destroy_process_group()
