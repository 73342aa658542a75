"""New process groups copy the options of others; stand-ins replace NCCL, which CPU builds lack."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from fullshard._torch import collectives as _collectives
from fullshard._torch import world as _world
from fullshard.comm import mesh
from fullshard.comm.c10d import C10d
from fullshard.comm.ledger import ledger_of


class Options:
    """A stand-in for NCCL's options before 2.15."""

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream = is_high_priority_stream
        self.config = "ctas 4"
        self._timeout = timedelta(seconds=600)
        self.split_from: object = None


class LaterOptions(Options):
    """A stand-in for NCCL's options since 2.15."""

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        super().__init__(is_high_priority_stream)
        self.lazy_init = False


class Backend:
    """A stand-in for an NCCL backend, which counts simultaneous aborts."""

    def __init__(self, name: str, options: Options, *, fails: bool = False) -> None:
        self.options = options
        self.num_aborts = self.most_at_once = 0
        self._name = name
        self._fails = fails
        self._inside = 0

    def name(self) -> str:
        return self._name

    def abort(self) -> None:
        self._inside += 1
        self.num_aborts += 1
        self.most_at_once = max(self.most_at_once, self._inside)
        time.sleep(0.05)
        self._inside -= 1
        if self._fails:
            raise RuntimeError("NCCL Abort failed")


class Group:
    """A stand-in for a process group; hashable and weakly referenceable, as PyTorch's."""

    def __init__(self, backend: Any, kinds: Sequence[str] = ("cuda",)) -> None:
        self._device_types = [torch.device(kind) for kind in kinds]
        self._backend = backend
        self.bound_device_id: torch.device | None = None

    def _get_backend(self, device: torch.device) -> Any:
        return SimpleNamespace(name=lambda: "gloo") if device.type == "cpu" else self._backend


def group_of(backend: Any, kinds: Sequence[str] = ("cuda",)) -> Any:
    return Group(backend, kinds)


LEGACY = [("nccl", Options), ("nccl2", Options), ("nccl", LaterOptions)]
"""Before 2.15; ``nccl2`` of 2.14; and since 2.15 TORCH_DIST_USE_NCCL2=0, or "nccl-legacy"."""

LATER = [("nccl2", LaterOptions), ("nccl-lazy", LaterOptions)]


def made_like(group: Any, monkeypatch: pytest.MonkeyPatch, device_type: str) -> dict[str, Any]:
    """Return the arguments of ``new_group``, and the device of the default group meanwhile."""
    asked: dict[str, Any] = {}
    world = SimpleNamespace(bound_device_id=torch.device("cuda", 3))

    def new_group(ranks: list[int], **given: Any) -> None:
        asked.update(given, bound=world.bound_device_id)

    monkeypatch.setattr(dist, "new_group", new_group)
    monkeypatch.setattr(dist, "get_backend_config", lambda group: "cpu:gloo,cuda:nccl")
    monkeypatch.setattr(c10d._world, "default_pg", world)
    monkeypatch.setattr(_collectives, "timeout_of", lambda group, kind: timedelta(seconds=7))
    mesh._new_group([0, 1], like=group, device_type=device_type)
    assert world.bound_device_id == torch.device("cuda", 3)
    return asked


@pytest.mark.parametrize("device_type", ["cuda", "cpu"])
@pytest.mark.parametrize("is_wrapped", [False, True])
@pytest.mark.parametrize(("name", "kind"), [*LEGACY, *LATER])
def test_a_group_like_another_has_its_options(
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    kind: type[Options],
    is_wrapped: bool,
    device_type: str,
) -> None:
    options = kind(is_high_priority_stream=True)
    options.config, options._timeout = "ctas 16", timedelta(seconds=7)
    options.split_from = "the default group"  # a DeviceMesh sets it
    backend: Any = Backend(name, options)
    if is_wrapped:
        backend = SimpleNamespace(options=options, name=lambda: "wrapper", wrapped_pg=backend)
    asked = made_like(group_of(backend, ("cpu", "cuda")), monkeypatch, device_type)
    made = asked["pg_options"]
    assert made is not options, "PyTorch writes to options, so they must be a copy"
    assert (made.is_high_priority_stream, made.config) == (True, "ctas 16")
    assert made.split_from is None
    assert made._timeout == asked["timeout"] == timedelta(seconds=7)


@pytest.mark.parametrize(("name", "kind"), [*LEGACY, *LATER])
def test_a_new_group_connects_later_on_the_device_of_the_default_group(
    monkeypatch: pytest.MonkeyPatch, name: str, kind: type[Options]
) -> None:
    """Otherwise ``nccl2`` would take device number LOCAL_RANK, and connect at once."""
    asked = made_like(group_of(Backend(name, kind())), monkeypatch, "cuda")
    if (name, kind) in LEGACY:  # connects on first use, on the device of the tensors
        assert asked["bound"] is None and not getattr(asked["pg_options"], "lazy_init", False)
    else:
        assert asked["bound"] == torch.device("cuda", 3) and asked["pg_options"].lazy_init


@pytest.mark.parametrize(("name", "kind"), [*LEGACY, *LATER])
def test_every_nccl_averages(name: str, kind: type[Options]) -> None:
    group = group_of(Backend(name, kind()), ("cpu", "cuda"))
    assert _collectives.has_average(group, "cuda") and not _collectives.has_average(group, "cpu")


def test_a_later_default_group_keeps_how_it_connects() -> None:
    given = LaterOptions()
    again = _collectives.options_like(given)
    assert again is not given and not again.lazy_init
    given.lazy_init = True
    assert _collectives.options_like(given).lazy_init


@contextmanager
def alone(monkeypatch: pytest.MonkeyPatch, backend: Backend) -> Iterator[Any]:
    """Make a gloo default group, and one that serves GPUs only."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    own = dist.group.WORLD
    group = group_of(backend)
    monkeypatch.setattr(_collectives, "has_peers", lambda group, kind: kind == "cuda")
    monkeypatch.setitem(c10d._world.pg_map, group, ("nccl", None))
    try:
        yield group
    finally:
        if dist.is_initialized():
            c10d._world.pg_map.pop(group, None)
            dist.destroy_process_group(own)


def test_a_group_is_aborted_by_one_thread_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault starts aborts in threads, and leaving the job aborts again."""
    backend = Backend("nccl2", LaterOptions())
    plain = c10d._abort_process_group

    def aborted() -> None:
        backend.abort()  # PyTorch does this for each group
        plain()

    monkeypatch.setattr(c10d, "_abort_process_group", aborted)
    with alone(monkeypatch, backend) as group:
        _collectives.begin_abort(group, "cuda")
        c10d._world.pg_map.pop(group)
        _world.drop_groups()
    assert (backend.num_aborts, backend.most_at_once) == (2, 1)


@pytest.mark.parametrize("way", ["raises", "hangs"])
def test_an_abort_that_does_not_end_leaves_no_default_group(
    monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    backend = Backend("nccl2", LaterOptions(), fails=way == "raises")
    goes_on = threading.Event()
    if way == "hangs":
        monkeypatch.setattr(backend, "abort", lambda: goes_on.wait(20))

    def fails() -> None:
        assert way == "raises", "PyTorch must not abort while a thread hangs in an abort"
        raise RuntimeError("Failed to deregister memory with NCCL")

    with alone(monkeypatch, backend):
        monkeypatch.setattr(c10d, "_abort_process_group", fails)
        try:
            _world.drop_groups(abort_s=0.2)
        finally:
            goes_on.set()
        assert not dist.is_initialized()
    monkeypatch.undo()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dist.destroy_process_group()


def test_the_time_out_of_a_group_is_set_without_a_warning() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        group = dist.group.WORLD
        assert group is not None
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            _world.set_timeout(group, timedelta(seconds=77))
        assert _collectives.timeout_of(group, "cpu") == timedelta(seconds=77)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(("local_rank", "bound"), [(None, "cuda:1"), ("1", "cuda:1"), ("0", None)])
def test_a_default_group_is_made_for_the_current_device(
    monkeypatch: pytest.MonkeyPatch, local_rank: str | None, bound: str | None
) -> None:
    monkeypatch.setattr(c10d, "_nccl2_device", None, raising=False)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if local_rank is not None:
        monkeypatch.setenv("LOCAL_RANK", local_rank)
    assert _world.device_to_bind() == (None if bound is None else torch.device(bound))


def test_a_group_serves_the_device_that_it_is_bound_to() -> None:
    group = group_of(Backend("nccl2", LaterOptions()))
    group.bound_device_id = torch.device("cuda", 3)  # the program has set no current device
    assert mesh.served_by(group, torch.device("cpu")) == torch.device("cuda", 3)


def test_other_backends_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = made_like(group_of(None, ("cpu",)), monkeypatch, "cpu")
    assert asked["pg_options"] is None


def test_a_group_that_serves_gpus_alone_can_be_used() -> None:
    """``init_process_group("nccl")`` makes such a group, without a backend for the CPU."""
    dist.init_process_group("cuda:gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        group = dist.group.WORLD
        assert group is not None
        wire = C10d(group, "cuda")
        ledger = ledger_of(group)
        assert ledger.aborts is not None and ledger.breaks is None
        assert wire.over(group).group is group
        assert not _collectives.has_peers(group, "cpu")
    finally:
        dist.destroy_process_group()
