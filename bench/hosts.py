"""Network namespaces as hosts: each has one interface, all are on one switch, with a limited rate.

Nothing of the machine's own network is touched: the switch is in a namespace, too. Needs root.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

INTERFACE = "eth0"
_CLONE_NEWNET = 0x40000000
_MBIT = 1_000_000


class NoHosts(Exception):
    """Namespaces cannot be made here; the text says why."""


@contextlib.contextmanager
def hosts(count: int, mbits: int | None = None) -> Iterator[list[str]]:
    """Make ``count`` hosts, each of which sends at most ``mbits`` million bits a second.

    Yields:
        The names of the namespaces, which processes ``enter``; they end with the block.

    Raises:
        NoHosts: the system or its rights do not allow it.
    """
    if os.geteuid() or not all(map(shutil.which, ("ip", "tc"))):
        raise NoHosts("network namespaces take root, ip and tc")
    switch = f"fullshard-{os.getpid()}"
    names = [f"{switch}-{number}" for number in range(count)]
    try:
        _run(f"ip netns add {switch}")
        _run(f"ip -n {switch} link add switch type bridge")
        _run(f"ip -n {switch} link set switch up")
        for number, name in enumerate(names):
            _run(f"ip netns add {name}")
            _run(
                f"ip link add {INTERFACE} netns {name} type veth peer name port{number} "
                f"netns {switch}"
            )
            _run(f"ip -n {switch} link set port{number} master switch up")
            _run(f"ip -n {name} address add 10.77.0.{number + 1}/24 dev {INTERFACE}")
            _run(f"ip -n {name} link set lo up")
            _run(f"ip -n {name} link set {INTERFACE} up")
            if mbits is not None:
                burst = max(32_000, mbits * _MBIT // 8 // 500)  # bytes of two milliseconds
                _run(
                    f"tc -n {name} qdisc add dev {INTERFACE} root tbf rate {mbits}mbit "
                    f"burst {burst} latency 50ms"
                )
        yield names
    finally:
        for name in (*names, switch):
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def _run(command: str) -> None:
    done = subprocess.run(command.split(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise NoHosts(f"{command}: {done.stderr.strip()}")


def enter(name: str) -> None:
    """Let this thread, and all that it starts from now on, be on the host ``name``."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path("/run/netns", name).open() as namespace:
        if libc.setns(namespace.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter {name}")
    os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE


def sent_nbytes() -> int:
    """Return how many bytes this host has sent."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == INTERFACE:
            return int(counts.split()[8])
    raise OSError(f"no {INTERFACE}")
