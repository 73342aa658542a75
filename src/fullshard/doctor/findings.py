"""Common mistakes of a first cluster job, each found by a function from facts about all ranks."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from typing import NamedTuple, TypeVar

from fullshard.doctor.facts import Facts, by_host

Subject = TypeVar("Subject")


class Level(enum.StrEnum):
    """How bad it is."""

    ERROR = "error"
    """A job would not start, or compute something else."""
    WARNING = "warning"
    """A job would be slow, or may fail later."""


class DoctorFinding(NamedTuple):
    """A mistake, and what to do."""

    name: str
    level: Level
    what: str
    advice: str


Check = Callable[[Sequence[Facts]], DoctorFinding | None]

CHECKS: list[Check] = []
"""The checks that need no process group, in the order of this file."""


def error(what: str, advice: str) -> DoctorFinding:
    """Return an error that has no name yet."""
    return DoctorFinding("", Level.ERROR, what, advice)


def warning(what: str, advice: str) -> DoctorFinding:
    """Return a warning that has no name yet."""
    return DoctorFinding("", Level.WARNING, what, advice)


def named(
    find: Callable[[Subject], DoctorFinding | None],
) -> Callable[[Subject], DoctorFinding | None]:
    """Decorate a check: name each finding after the function that returns it."""

    @wraps(find)
    def check(looked_at: Subject) -> DoctorFinding | None:
        found = find(looked_at)
        return None if found is None else found._replace(name=find.__name__)

    return check


def _check(find: Check) -> Check:
    CHECKS.append(named(find))
    return CHECKS[-1]


def _check_each_host(find: Check) -> Check:
    """Call the check with the ranks of one host at a time, up to the first finding."""

    @wraps(find)
    def check(ranks: Sequence[Facts]) -> DoctorFinding | None:
        found = map(find, by_host(ranks).values())
        return next((finding for finding in found if finding is not None), None)

    return _check(check)


_LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
_NEEDED = (*_LAUNCHED, "MASTER_ADDR", "MASTER_PORT")
_MUST_AGREE = ("python", "torch", "fullshard", "nccl backend")
_CLOCK_S = 1.0
_SHM_NBYTES = 512 << 20
_RANK_NBYTES = 1 << 30


@_check
def half_launched(ranks: Sequence[Facts]) -> DoctorFinding | None:
    """Find a rank with a launcher's environment of which a part is missing."""
    for one in ranks:
        missing = [name for name in _NEEDED if name not in one.variables]
        if missing and any(name in one.variables for name in _LAUNCHED):
            given = ", ".join(name for name in _NEEDED if name in one.variables)
            return error(
                f"{given} set, but not {', '.join(missing)}",
                "start by torchrun, which sets all of them, or unset what an earlier job left",
            )
    return None


@_check
def loopback_master(ranks: Sequence[Facts]) -> DoctorFinding | None:
    """Find a MASTER_ADDR that means another machine on each host."""
    wrong = [one for one in ranks if _is_loopback(one.variables.get("MASTER_ADDR", ""))]
    if not wrong or len(by_host(ranks)) == 1:
        return None
    return error(
        f"MASTER_ADDR is {wrong[0].variables['MASTER_ADDR']} on {_ranks(wrong)}, "
        f"but there are {len(by_host(ranks))} hosts",
        "set it to a name or address of rank 0's host that the other hosts reach",
    )


@_check
def loopback_hostname(ranks: Sequence[Facts]) -> DoctorFinding | None:
    """Find hosts whose name leads gloo to an address that other hosts cannot reach."""
    wrong = [
        one
        for one in ranks
        if "GLOO_SOCKET_IFNAME" not in one.variables
        and (not one.host.address or _is_loopback(one.host.address))
    ]
    if not wrong or len(by_host(ranks)) == 1:
        return None
    host = wrong[0].host
    resolves = f"resolves to {host.address}" if host.address else "resolves to no address"
    return error(
        f"the name of host {host.name} {resolves} ({_ranks(wrong)}), so gloo binds to loopback, "
        "where other hosts do not reach it",
        "set GLOO_SOCKET_IFNAME to the interface of the network, or mend /etc/hosts",
    )


@_check
def wrong_interface(ranks: Sequence[Facts]) -> DoctorFinding | None:
    """Find a GLOO_SOCKET_IFNAME that names no interface, or loopback for several hosts."""
    several = len(by_host(ranks)) > 1
    for one in ranks:
        given = one.variables.get("GLOO_SOCKET_IFNAME")
        for name in () if given is None else given.split(","):
            if name not in one.host.interfaces or (several and name == "lo"):
                return error(
                    f"GLOO_SOCKET_IFNAME is {given} on rank {one.rank}; host {one.host.name} has "
                    f"{', '.join(one.host.interfaces)}",
                    "name the interface of the network among the hosts, or unset it",
                )
    return None


@_check
def versions_differ(ranks: Sequence[Facts]) -> DoctorFinding | None:
    """Find ranks whose Python, PyTorch, fullshard or NCCL backend differs from rank 0's."""
    for name in _MUST_AGREE:
        first = ranks[0].versions.get(name, "missing")
        others = [one for one in ranks if one.versions.get(name, "missing") != first]
        if others:
            second = others[0].versions.get(name, "missing")
            return error(
                f"{name} is {first} on rank 0, but {second} on {_ranks(others)}",
                "set TORCH_DIST_USE_NCCL2 alike on all ranks, or nowhere"
                if name == "nccl backend" and "missing" not in (first, second)
                else "install the same environment on all hosts, or share it",
            )
    return None


@_check_each_host
def gpu_shared(here: Sequence[Facts]) -> DoctorFinding | None:
    """Find GPUs that several ranks would use."""
    used = Counter(one.gpu for one in here if one.gpu is not None)
    shared = next((gpu for gpu, count in used.items() if count > 1), None)
    if shared is None:
        return None
    return error(
        f"{_ranks([one for one in here if one.gpu == shared])} are all on one GPU of "
        f"{here[0].host.name}, which NCCL refuses",
        "give each rank of a host a LOCAL_RANK of its own, and start as many as GPUs",
    )


@_check
def gpu_missing(ranks: Sequence[Facts]) -> DoctorFinding | None:
    """Find ranks whose LOCAL_RANK is the number of no GPU that they see."""
    wrong = [one for one in ranks if one.gpus and one.gpu is None]
    if not wrong:
        return None
    first = wrong[0]
    visible = first.variables.get("CUDA_VISIBLE_DEVICES")
    masked = "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible})"
    return error(
        f"rank {first.rank} has LOCAL_RANK {first.local_rank}, but sees {len(first.gpus)} GPU(s)"
        f"{masked}",
        "start as many ranks on a host as it has GPUs, and let each see all of them",
    )


@_check_each_host
def gpus_unseen(here: Sequence[Facts]) -> DoctorFinding | None:
    """Find NVIDIA devices that no rank of their host can use."""
    first = here[0]
    num_seen = len({gpu.uuid for one in here for gpu in one.gpus})
    if first.host.num_nvidia <= num_seen:
        return None
    what = f"{first.host.num_nvidia} NVIDIA device(s) on {first.host.name}, of which ranks see"
    if "cuda" not in first.versions:
        return error(
            f"{what} {num_seen}: PyTorch {first.versions['torch']} has no CUDA",
            "install a build of PyTorch for CUDA (pytorch.org/get-started)",
        )
    if (mask := first.variables.get("CUDA_VISIBLE_DEVICES")) is not None:
        return warning(
            f"{what} {num_seen}: CUDA_VISIBLE_DEVICES is {mask!r}",
            "unset it, unless others use these GPUs",
        )
    return error(
        f"{what} {num_seen}: the driver is {first.host.driver or 'unknown'}",
        "run nvidia-smi; the driver may be too old for this build of PyTorch",
    )


@_check
def no_nccl(ranks: Sequence[Facts]) -> DoctorFinding | None:
    """Find ranks with a GPU whose PyTorch cannot let GPUs communicate."""
    wrong = [one for one in ranks if one.gpus and "nccl" not in one.backends]
    if not wrong:
        return None
    return error(
        f"{_ranks(wrong)} have GPUs, but PyTorch only has {', '.join(wrong[0].backends)}",
        "install a build of PyTorch with NCCL",
    )


@_check
def uneven_hosts(ranks: Sequence[Facts]) -> DoctorFinding | None:
    """Find hosts with different numbers of ranks."""
    counts = {here[0].host.name: len(here) for here in by_host(ranks).values()}
    if len(set(counts.values())) < 2:
        return None
    listed = ", ".join(f"{count} on {name}" for name, count in counts.items())
    return warning(
        f"hosts have different numbers of ranks: {listed}",
        "a copy of the model for each host (HSDP) needs equal numbers; give each host as many",
    )


@_check
def clocks_differ(ranks: Sequence[Facts]) -> DoctorFinding | None:
    """Find hosts whose clocks are wrong."""
    wrong = [one for one in ranks if one.clock_error_s > _CLOCK_S]
    if not wrong:
        return None
    worst_s = max(one.clock_error_s for one in wrong)
    return warning(
        f"the clock of {_ranks(wrong)} differs from rank 0's by at least {worst_s:.1f} s",
        "synchronise the hosts (NTP), or times in logs and checkpoints cannot be compared",
    )


@_check_each_host
def too_many_threads(here: Sequence[Facts]) -> DoctorFinding | None:
    """Find hosts whose ranks have more threads than cores."""
    cores, threads = _num_cores(here), sum(one.num_threads for one in here)
    if threads <= cores:
        return None
    few = f"set OMP_NUM_THREADS={cores // len(here)}" if cores >= len(here) else "start fewer ranks"
    return warning(
        f"{len(here)} rank(s) on {here[0].host.name} have {threads} threads for {cores} core(s)",
        few,
    )


@_check_each_host
def idle_cores(here: Sequence[Facts]) -> DoctorFinding | None:
    """Find hosts without GPUs whose ranks use less than half of the cores."""
    cores, threads = _num_cores(here), sum(one.num_threads for one in here)
    if 2 * threads > cores or any(one.gpus for one in here):
        return None
    return warning(
        f"{len(here)} rank(s) on {here[0].host.name} have {threads} thread(s) for {cores} cores, "
        "and no GPU",
        f"set OMP_NUM_THREADS={cores // len(here)}: torchrun sets it to 1",
    )


@_check_each_host
def little_memory(here: Sequence[Facts]) -> DoctorFinding | None:
    """Find hosts that cannot give each rank as much memory as PyTorch and a small model take."""
    host = here[0].host
    each = host.usable_nbytes // len(here)
    if each >= _RANK_NBYTES:
        return None
    why = "the machine has" if host.limit_nbytes is None else "its control group allows"
    return warning(
        f"{each >> 20} MiB of memory for each of {len(here)} rank(s) on {host.name}: "
        f"{why} {host.usable_nbytes >> 20} MiB",
        "ask for more, or start fewer ranks: the kernel kills a process without a message",
    )


@_check_each_host
def little_shared_memory(here: Sequence[Facts]) -> DoctorFinding | None:
    """Find a /dev/shm too small for NCCL and for workers of a DataLoader."""
    host = here[0].host
    if host.shm_nbytes is None or host.shm_nbytes >= _SHM_NBYTES:
        return None
    return warning(
        f"/dev/shm has {host.shm_nbytes >> 20} MiB on {host.name}; NCCL and workers of a "
        "DataLoader need it (our own exchanges do not)",
        "start the container with --ipc=host or --shm-size=8g",
    )


@_check
def few_open_files(ranks: Sequence[Facts]) -> DoctorFinding | None:
    """Find a limit of open files that connections to all ranks may exceed.

    A rank has a socket to each other rank for every process group that spans them, of which there
    are two or three, and, where memory is shared, a file of each.
    """
    needed = 200 + 4 * (len(ranks) - 1)
    wrong = [one for one in ranks if 0 <= one.max_files < needed]
    if not wrong:
        return None
    return warning(
        f"{_ranks(wrong)} may open {wrong[0].max_files} files; {len(ranks)} ranks may need "
        f"{needed}",
        "raise it before the start: ulimit -n 65536",
    )


def _is_loopback(address: str) -> bool:
    return address in ("localhost", "::1") or address.startswith("127.")


def _num_cores(here: Iterable[Facts]) -> int:
    return len(set().union(*(one.cores for one in here)))


def _ranks(ranks: Sequence[Facts]) -> str:
    """Return "rank 3", or "ranks 0, 1, 2, 3 and 12 more"."""
    numbers = [str(one.rank) for one in ranks]
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    more = f" and {len(numbers) - 4} more" if len(numbers) > 4 else ""
    return f"ranks {', '.join(numbers[:4])}{more}"


def findings_of(ranks: Sequence[Facts]) -> list[DoctorFinding]:
    """Return what the checks find, errors first."""
    found = [finding for check in CHECKS if (finding := check(ranks)) is not None]
    return sorted(found, key=lambda finding: finding.level is not Level.ERROR)
