"""Facts about one rank and the host it runs on, for ``fullshard doctor``."""

from __future__ import annotations

import os
import platform
import re
import resource
import shutil
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fullshard._torch import collectives as _collectives
from fullshard._version import __version__
from fullshard.comm import text as _text
from fullshard.comm.rendezvous import own_host

_SEEN = set(
    "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT GLOO_SOCKET_IFNAME"
    " CUDA_VISIBLE_DEVICES OMP_NUM_THREADS".split()
)
_SEEN_BY_PREFIX = ("NCCL_", "TORCH_DIST_", "TORCH_NCCL_", "FULLSHARD_")
_BACKENDS = ("nccl", "gloo", "mpi", "ucc", "xccl")


@dataclass(frozen=True)
class Gpu:
    """A GPU that PyTorch can use in this process."""

    name: str
    uuid: str
    memory_nbytes: int


@dataclass(frozen=True)
class HostFacts:
    """A machine or container, as one process on it sees it."""

    name: str
    key: str
    """A key that is equal for all processes of one host."""
    address: str
    """The IPv4 address that the host's name resolves to; empty if the name does not resolve."""
    interfaces: tuple[str, ...]
    num_cpus: int
    memory_nbytes: int
    limit_nbytes: int | None
    """The memory limit of the process's control group; None: no limit."""
    shm_nbytes: int | None
    """The size of /dev/shm; None: no such folder."""
    num_nvidia: int
    """The number of NVIDIA devices, including those that PyTorch cannot use."""
    driver: str
    """The version of the NVIDIA driver; empty: no driver found."""

    @property
    def usable_nbytes(self) -> int:
        """Return the bytes of memory that all processes of the host may use together."""
        return min(self.memory_nbytes, self.limit_nbytes or self.memory_nbytes)


@dataclass(frozen=True)
class Facts:
    """One rank, its host and its environment."""

    rank: int
    host: HostFacts
    versions: Mapping[str, str]
    backends: tuple[str, ...]
    cores: tuple[int, ...]
    """The numbers of the CPU cores that the rank may run on."""
    num_threads: int
    """The threads that PyTorch uses for one operation on a CPU."""
    max_files: int
    """The limit of open files; negative: unlimited."""
    gpus: tuple[Gpu, ...]
    """The GPUs that the rank sees, by their numbers."""
    variables: Mapping[str, str]
    """The environment variables of launchers, backends and fullshard that are set."""
    clock_error_s: float = 0.0
    """A lower bound, in seconds, of the difference between the clocks of this rank and rank 0."""

    @property
    def local_rank(self) -> int:
        """Return LOCAL_RANK, the number of the rank on its host; 0 without a launcher."""
        return int(self.variables.get("LOCAL_RANK", "0"))

    @property
    def gpu(self) -> Gpu | None:
        """Return the GPU with the number ``local_rank``; None: the rank sees no such GPU."""
        return self.gpus[self.local_rank] if self.local_rank < len(self.gpus) else None

    @classmethod
    def from_json(cls, read: Mapping[str, Any]) -> Facts:
        """Return the facts from a dictionary made by ``dataclasses.asdict`` and sent as JSON."""
        host = {**read["host"], "interfaces": tuple(read["host"]["interfaces"])}
        lists = {name: tuple(read[name]) for name in ("backends", "cores")}
        gpus = tuple(Gpu(**gpu) for gpu in read["gpus"])
        return cls(**{**read, **lists, "host": HostFacts(**host), "gpus": gpus})


def facts_here(rank: int = 0) -> Facts:
    """Return the facts about this process."""
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return Facts(
        rank,
        _host(),
        _versions(),
        tuple(name for name in _BACKENDS if dist.is_backend_available(name)),
        _cores(),
        torch.get_num_threads(),
        resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        tuple(map(_gpu, range(num_gpus))),
        launch_variables(os.environ),
    )


def launch_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that decide how ranks start and communicate, and no others."""
    return {
        name: environment[name]
        for name in sorted(environment)
        if name in _SEEN or name.startswith(_SEEN_BY_PREFIX)
    }


def by_host(ranks: Iterable[Facts]) -> dict[str, list[Facts]]:
    """Return the ranks of each host, by the host's key."""
    hosts: dict[str, list[Facts]] = {}
    for one in ranks:
        hosts.setdefault(one.host.key, []).append(one)
    return hosts


def named_ranks(ranks: Sequence[Facts]) -> str:
    """Return "rank 3", or "ranks 0, 1, 2, 3 and 12 more"."""
    return _text.named_ranks([one.rank for one in ranks], most=4)


def _versions() -> dict[str, str]:
    found = {
        "fullshard": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    if torch.version.cuda is not None:
        found["cuda"] = torch.version.cuda
    if dist.is_nccl_available():
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        found["nccl backend"] = _collectives.nccl_of_programs()
    return found


def _cores() -> tuple[int, ...]:
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def _gpu(index: int) -> Gpu:
    found = torch.cuda.get_device_properties(index)
    return Gpu(found.name, str(found.uuid), found.total_memory)


def _host() -> HostFacts:
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError:
        address = ""
    shm = Path("/dev/shm")
    return HostFacts(
        name,
        own_host().hex(),
        address,
        tuple(interface for _, interface in socket.if_nameindex()),
        os.cpu_count() or 1,
        os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        memory_limit(),
        shutil.disk_usage(shm).total if shm.is_dir() else None,
        sum(bool(re.fullmatch(r"nvidia\d+", each.name)) for each in Path("/dev").glob("nvidia*")),
        _driver(),
    )


def _driver() -> str:
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
    except OSError:
        return ""
    found = re.search(r"\b\d{3,}\.\d+(\.\d+)?\b", text)
    return found.group() if found else ""


def memory_limit(
    own: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")
) -> int | None:
    """Return the smallest memory limit of this process's control groups; None: no limit.

    Args:
        own: the file that names the control groups of the process.
        root: the folder that the control groups are mounted at.
    """
    folders = [root, root / "memory"]  # of control groups v2 (in a container) and v1
    if own.is_file():
        for line in own.read_text(encoding="utf-8").splitlines():
            path = Path(line.split(":", 2)[2].lstrip("/"))
            folders += [base / each for base in folders[:2] for each in (path, *path.parents)]
    limits = [_limit(folder / name) for folder in set(folders) for name in _LIMITS]
    return min((limit for limit in limits if limit is not None), default=None)


_LIMITS = ("memory.max", "memory.limit_in_bytes")
_NO_LIMIT = 1 << 60  # control groups v1 write about 2 ** 63 for "no limit"


def _limit(path: Path) -> int | None:
    try:
        text = path.read_text(encoding="utf-8").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() and int(text) < _NO_LIMIT else None
