"""The report of ``fullshard doctor`` as text and tables."""

from __future__ import annotations

from collections import Counter

from fullshard import doctor
from fullshard.cli.printing import print_table
from fullshard.plan import in_bytes

_SHOWN_RANKS = 16


def print_report(report: doctor.Report) -> None:
    """Print all sections of the report that have contents."""
    _print_environment(report)
    _print_ranks(report)
    _print_wires(report)
    _print_speeds(report)
    _print_findings(report)


def _print_environment(report: doctor.Report) -> None:
    first = report.ranks[0]
    host = first.host
    versions = ", ".join(f"{name} {version}" for name, version in first.versions.items())
    print(f"versions  {versions}")
    print(f"backends  {', '.join(first.backends)}")
    limit = "" if host.limit_nbytes is None else f", limited to {in_bytes(host.limit_nbytes)}"
    shm = "" if host.shm_nbytes is None else f", /dev/shm {in_bytes(host.shm_nbytes)}"
    print(f"host      {host.name} ({host.address or 'no address'}), {host.num_cpus} CPUs")
    print(f"memory    {in_bytes(host.memory_nbytes)}{limit}{shm}")
    gpus = ", ".join(f"{gpu.name} {in_bytes(gpu.memory_nbytes)}" for gpu in first.gpus)
    driver = f" (driver {host.driver})" if host.driver else ""
    print(f"GPUs      {gpus or 'none'}{driver}")
    for name, value in first.variables.items():
        print(f"          {name}={value}")


def _print_ranks(report: doctor.Report) -> None:
    mesh = " x ".join(f"{name} {ranks}" for name, ranks in report.shape.items())
    print(f"\n{report.world} rank(s) on {report.device}, mesh: {mesh or 'none'}\n")
    rows = [
        (
            str(one.rank),
            one.host.name,
            str(one.local_rank),
            "-" if one.gpu is None else one.gpu.name,
            f"{one.num_threads} for {len(one.cores)} core(s)",
            str(one.max_files),
        )
        for one in report.ranks[:_SHOWN_RANKS]
    ]
    print_table(("rank", "host", "local rank", "GPU", "threads", "open files"), rows)
    if len(report.ranks) > _SHOWN_RANKS:
        print(f"and {len(report.ranks) - _SHOWN_RANKS} more (--json has all)")


def _print_wires(report: doctor.Report) -> None:
    for dim in report.dims:
        print(f"\ndim {dim.name}: {len(dim.groups)} group(s) of {dim.size}")
        for text, count in Counter(_wire(report, group) for group in dim.groups).items():
            print(f"  {count} x {text}")
        if dim.timings:
            print("  medians; all groups of the dim at once\n")
            rows = [
                (
                    one.what,
                    in_bytes(one.nbytes),
                    f"{one.seconds * 1e6:.0f} us",
                    f"{one.bandwidth(dim.size) / 1e9:.3f} GB/s",
                )
                for one in sorted(dim.timings, key=lambda one: (one.what, one.nbytes))
            ]
            print_table(("collective", "bytes", "time", "received by a rank"), rows)


def _wire(report: doctor.Report, group: doctor.GroupTimings) -> str:
    return f"{group.wire.gathers}: {doctor.reason(group.wire, report.ranks)}"


def _print_speeds(report: doctor.Report) -> None:
    if not report.speeds:
        return
    print("\nspeed of each rank while all compute\n")
    dtypes = list(report.speeds[0].flops)
    rows = [
        (
            str(rank),
            *(f"{speed.flops[dtype] / 1e9:.1f} GFLOP/s" for dtype in dtypes),
            f"{speed.memory_bandwidth / 1e9:.1f} GB/s",
            "-" if speed.op_s is None else f"{speed.op_s * 1e6:.1f} us",
        )
        for rank, speed in enumerate(report.speeds[:_SHOWN_RANKS])
    ]
    print_table(("rank", *dtypes, "memory", "an operation"), rows)


def _print_findings(report: doctor.Report) -> None:
    print()
    for failure in report.failures:
        print(f"failed: {failure}")
    for finding in report.findings:
        print(f"{finding.level}: {finding.what} [{finding.name}]\n  -> {finding.advice}")
    if not report.findings:
        print("no common mistake was found" + (" that explains it" if report.failures else ""))
