"""Common mistakes of a first cluster job; each check is a function of facts about the ranks."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import wraps
from typing import NamedTuple, TypeVar

from fullshard.comm.text import counted, in_bytes
from fullshard.doctor.facts import Facts, by_host, named_ranks

Subject = TypeVar("Subject")


class Level(enum.StrEnum):
    """The severity of a finding."""

    ERROR = "error"
    """The job would not start, or would compute wrong results."""
    WARNING = "warning"
    """The job would be slow, or may fail later."""


class DoctorFinding(NamedTuple):
    """A mistake and its remedy."""

    name: str
    """The name in docs/doctor.md, which is also the name of the check."""
    level: Level
    what: str
    """The mistake, with the ranks or hosts that have it."""
    advice: str
    """The remedy, as a command."""


Check = Callable[[Sequence[Facts]], DoctorFinding | None]

CHECKS: list[Check] = []
"""All checks of facts, in the order of this file; no check needs a process group."""


def error(what: str, advice: str) -> DoctorFinding:
    """Return an error; ``named`` gives it a name."""
    return DoctorFinding("", Level.ERROR, what, advice)


def warning(what: str, advice: str) -> DoctorFinding:
    """Return a warning; ``named`` gives it a name."""
    return DoctorFinding("", Level.WARNING, what, advice)


def named(
    find: Callable[[Subject], Iterator[DoctorFinding]],
) -> Callable[[Subject], DoctorFinding | None]:
    """Return a check: it gives the first finding of the function ``find``, with its name."""

    @wraps(find)
    def check(subject: Subject) -> DoctorFinding | None:
        return next((found._replace(name=find.__name__) for found in find(subject)), None)

    return check


def _check(find: Callable[[Sequence[Facts]], Iterator[DoctorFinding]]) -> Check:
    """Add a check of all ranks to ``CHECKS``."""
    CHECKS.append(named(find))
    return CHECKS[-1]


def _check_each_host(find: Callable[[Sequence[Facts]], Iterator[DoctorFinding]]) -> Check:
    """Add a check of one host at a time to ``CHECKS``; it reports the first host it fails on."""

    @wraps(find)
    def check(ranks: Sequence[Facts]) -> Iterator[DoctorFinding]:
        for here in by_host(ranks).values():
            yield from find(here)

    return _check(check)


_LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
_NEEDED = (*_LAUNCHED, "MASTER_ADDR", "MASTER_PORT")
_MUST_AGREE = ("python", "torch", "fullshard", "nccl backend")
_CLOCK_S = 1.0  # a larger difference between clocks is reported
_SHM_NBYTES = 500_000_000  # a smaller /dev/shm is reported
_RANK_NBYTES = 1_000_000_000  # less memory per rank is reported


@_check
def half_launched(ranks: Sequence[Facts]) -> Iterator[DoctorFinding]:
    """Find a rank on which only some of the launcher's variables are set."""
    for one in ranks:
        needed = _LAUNCHED if "FULLSHARD_STORE" in one.variables else _NEEDED
        missing = [name for name in needed if name not in one.variables]
        if missing and any(name in one.variables for name in _LAUNCHED):
            given = ", ".join(name for name in needed if name in one.variables)
            yield error(
                f"the environment has {given}, but not {', '.join(missing)}",
                "start with torchrun, which sets all of them, or unset those an earlier job left",
            )


@_check
def loopback_master(ranks: Sequence[Facts]) -> Iterator[DoctorFinding]:
    """Find a loopback MASTER_ADDR in a job of several hosts: each host would reach itself."""
    wrong = [one for one in ranks if _is_loopback(one.variables.get("MASTER_ADDR", ""))]
    if wrong and len(by_host(ranks)) > 1:
        yield error(
            f"MASTER_ADDR is {wrong[0].variables['MASTER_ADDR']} on {named_ranks(wrong)}, "
            f"but there are {len(by_host(ranks))} hosts",
            "set MASTER_ADDR to a name or address of rank 0's host that the other hosts can reach",
        )


@_check
def loopback_hostname(ranks: Sequence[Facts]) -> Iterator[DoctorFinding]:
    """Find hosts whose names resolve to loopback, where other hosts cannot reach gloo."""
    wrong = [
        one
        for one in ranks
        if "GLOO_SOCKET_IFNAME" not in one.variables
        and (not one.host.address or _is_loopback(one.host.address))
    ]
    if wrong and len(by_host(ranks)) > 1:
        host = wrong[0].host
        resolves = f"resolves to {host.address}" if host.address else "resolves to no address"
        yield error(
            f"the name of host {host.name} {resolves} ({named_ranks(wrong)}), so gloo binds to "
            "loopback, where other hosts cannot reach it",
            "set GLOO_SOCKET_IFNAME to the interface of the network, or fix /etc/hosts",
        )


@_check
def wrong_interface(ranks: Sequence[Facts]) -> Iterator[DoctorFinding]:
    """Find a GLOO_SOCKET_IFNAME that names a missing interface, or loopback for several hosts."""
    several = len(by_host(ranks)) > 1
    for one in ranks:
        given = one.variables.get("GLOO_SOCKET_IFNAME")
        for name in () if given is None else given.split(","):
            if name not in one.host.interfaces or (several and name == "lo"):
                yield error(
                    f"GLOO_SOCKET_IFNAME is {given} on rank {one.rank}, but host {one.host.name} "
                    f"has {', '.join(one.host.interfaces)}",
                    "set GLOO_SOCKET_IFNAME to the interface of the network, or unset it",
                )


@_check
def versions_differ(ranks: Sequence[Facts]) -> Iterator[DoctorFinding]:
    """Find ranks whose Python, PyTorch, fullshard or NCCL backend differs from rank 0's."""
    for name in _MUST_AGREE:
        first = ranks[0].versions.get(name, "missing")
        others = [one for one in ranks if one.versions.get(name, "missing") != first]
        if others:
            second = others[0].versions.get(name, "missing")
            yield error(
                f"{name} is {first} on rank 0, but {second} on {named_ranks(others)}",
                "set TORCH_DIST_USE_NCCL2 to the same value on all ranks, or on none"
                if name == "nccl backend" and "missing" not in (first, second)
                else "install the same environment on all hosts, or share one",
            )


@_check_each_host
def gpu_shared(here: Sequence[Facts]) -> Iterator[DoctorFinding]:
    """Find a GPU that several ranks would use."""
    for gpu, count in Counter(one.gpu for one in here if one.gpu is not None).items():
        if count > 1:
            yield error(
                f"{named_ranks([one for one in here if one.gpu == gpu])} would share one GPU of "
                f"host {here[0].host.name}, which NCCL refuses",
                "give each rank of a host its own LOCAL_RANK, and start one rank per GPU",
            )


@_check
def gpu_missing(ranks: Sequence[Facts]) -> Iterator[DoctorFinding]:
    """Find ranks that see GPUs, but none with the number LOCAL_RANK."""
    wrong = [one for one in ranks if one.gpus and one.gpu is None]
    if wrong:
        first = wrong[0]
        visible = first.variables.get("CUDA_VISIBLE_DEVICES")
        masked = "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible})"
        yield error(
            f"rank {first.rank} has LOCAL_RANK {first.local_rank}, but sees "
            f"{counted(len(first.gpus), 'GPU')}{masked}",
            "start as many ranks on a host as it has GPUs, and let each rank see all of them",
        )


@_check_each_host
def gpus_unseen(here: Sequence[Facts]) -> Iterator[DoctorFinding]:
    """Find NVIDIA devices that no rank of the host can use."""
    first = here[0]
    num_seen = len({gpu.uuid for one in here for gpu in one.gpus})
    if first.host.num_nvidia <= num_seen:
        return
    num_there = counted(first.host.num_nvidia, "NVIDIA device")
    what = f"host {first.host.name} has {num_there}, of which its ranks see {num_seen}"
    if "cuda" not in first.versions:
        yield error(
            f"{what}: PyTorch {first.versions['torch']} was built without CUDA",
            "install a build of PyTorch for CUDA (pytorch.org/get-started)",
        )
    elif (mask := first.variables.get("CUDA_VISIBLE_DEVICES")) is not None:
        yield warning(
            f"{what}: CUDA_VISIBLE_DEVICES is {mask!r}",
            "unset CUDA_VISIBLE_DEVICES, unless other jobs use these GPUs",
        )
    else:
        yield error(
            f"{what}: the driver's version is {first.host.driver or 'unknown'}",
            "run nvidia-smi; the driver may be too old for this build of PyTorch",
        )


@_check
def no_nccl(ranks: Sequence[Facts]) -> Iterator[DoctorFinding]:
    """Find ranks that see GPUs, but whose PyTorch has no NCCL to communicate between GPUs."""
    wrong = [one for one in ranks if one.gpus and "nccl" not in one.backends]
    if wrong:
        yield error(
            f"PyTorch on {named_ranks(wrong)} sees GPUs, but its only backends are "
            f"{', '.join(wrong[0].backends)}",
            "install a build of PyTorch with NCCL",
        )


@_check
def uneven_hosts(ranks: Sequence[Facts]) -> Iterator[DoctorFinding]:
    """Find hosts with different numbers of ranks."""
    counts = [(len(here), here[0].host.name) for here in by_host(ranks).values()]
    if len({count for count, _ in counts}) > 1:
        listed = ", ".join(f"{count} on {name}" for count, name in counts)
        yield warning(
            f"hosts have different numbers of ranks: {listed}",
            "start equally many ranks on each host; one replica per host (HSDP) needs that",
        )


@_check
def clocks_differ(ranks: Sequence[Facts]) -> Iterator[DoctorFinding]:
    """Find ranks whose clock differs from that of rank 0."""
    wrong = [one for one in ranks if one.clock_error_s > _CLOCK_S]
    if wrong:
        worst_s = max(one.clock_error_s for one in wrong)
        yield warning(
            f"the clock of {named_ranks(wrong)} differs from rank 0's by at least {worst_s:.1f} s",
            "synchronise the clocks (NTP), so that times in logs and checkpoints can be compared",
        )


@_check_each_host
def too_many_threads(here: Sequence[Facts]) -> Iterator[DoctorFinding]:
    """Find hosts whose ranks have more threads than cores."""
    cores, threads = _num_cores(here), sum(one.num_threads for one in here)
    if threads > cores:
        per_rank = cores // len(here)
        yield warning(
            f"host {here[0].host.name} runs {counted(threads, 'thread')} of "
            f"{counted(len(here), 'rank')} on {counted(cores, 'core')}",
            f"set OMP_NUM_THREADS={per_rank}" if per_rank else "start fewer ranks",
        )


@_check_each_host
def idle_cores(here: Sequence[Facts]) -> Iterator[DoctorFinding]:
    """Find hosts without GPUs whose ranks use less than half of the cores."""
    cores, threads = _num_cores(here), sum(one.num_threads for one in here)
    if 2 * threads <= cores and not any(one.gpus for one in here):
        yield warning(
            f"host {here[0].host.name} runs {counted(threads, 'thread')} of "
            f"{counted(len(here), 'rank')} on {cores} cores, and has no GPU",
            f"set OMP_NUM_THREADS={cores // len(here)}; torchrun sets it to 1",
        )


@_check_each_host
def little_memory(here: Sequence[Facts]) -> Iterator[DoctorFinding]:
    """Find hosts with less memory per rank than PyTorch and a small model need."""
    host = here[0].host
    each = host.usable_nbytes // len(here)
    if each < _RANK_NBYTES:
        why = "the machine has" if host.limit_nbytes is None else "the control group allows"
        yield warning(
            f"each rank on host {host.name} has {in_bytes(each)} of memory: {why} "
            f"{in_bytes(host.usable_nbytes)} for {counted(len(here), 'rank')}",
            "request more memory, or start fewer ranks; a process that exceeds it is killed "
            "silently",
        )


@_check_each_host
def little_shared_memory(here: Sequence[Facts]) -> Iterator[DoctorFinding]:
    """Find a /dev/shm that is too small for NCCL and for DataLoader workers."""
    host = here[0].host
    if host.shm_nbytes is not None and host.shm_nbytes < _SHM_NBYTES:
        yield warning(
            f"/dev/shm has {in_bytes(host.shm_nbytes)} on host {host.name}; NCCL and DataLoader "
            "workers need more (fullshard's own shared memory does not use it)",
            "start the container with --ipc=host or --shm-size=8g",
        )


@_check
def few_open_files(ranks: Sequence[Facts]) -> Iterator[DoctorFinding]:
    """Find a limit of open files that connections to all ranks may exceed.

    A rank opens a socket to each other rank in each of two or three process groups, and a file per
    rank that it shares memory with.
    """
    needed = 200 + 4 * (len(ranks) - 1)
    wrong = [one for one in ranks if 0 <= one.max_files < needed]
    if wrong:
        yield warning(
            f"{named_ranks(wrong)} may open {wrong[0].max_files} files; {len(ranks)} ranks may "
            f"need {needed}",
            "raise the limit before the start: ulimit -n 65536",
        )


def _is_loopback(address: str) -> bool:
    return address in ("localhost", "::1") or address.startswith("127.")


def _num_cores(here: Iterable[Facts]) -> int:
    return len(set().union(*(one.cores for one in here)))


def findings_of(ranks: Sequence[Facts]) -> list[DoctorFinding]:
    """Return the findings of all checks, errors first."""
    found = [finding for check in CHECKS if (finding := check(ranks)) is not None]
    return sorted(found, key=lambda finding: finding.level is not Level.ERROR)
