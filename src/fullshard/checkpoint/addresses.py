"""The address at which a rank can be reached from other hosts, found as gloo finds it."""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

from fullshard.errors import UnsupportedError

__all__ = ["dial", "listener"]

_SIOCGIFADDR = 0x8915
_PLAIN = {"", "TCP", "UV"}
"""Values of GLOO_DEVICE_TRANSPORT for which bytes travel unencrypted over TCP."""


def listener() -> tuple[socket.socket, bytes]:
    """Return a socket that listens at our address, and the address, an IPv6 one or mapped to one.

    The address is that of the first interface in GLOO_SOCKET_IFNAME; without that variable, the
    first address of the host's name that works.

    Raises:
        OSError: if there is no such address.
        UnsupportedError: gloo is to use something else than plain TCP.
    """
    transport = os.environ.get("GLOO_DEVICE_TRANSPORT", "").upper()
    if transport not in _PLAIN:
        raise UnsupportedError(f"gloo uses {transport}")
    failure = OSError("no address")
    for host in _hosts():
        try:
            packed = ipaddress.ip_address(host)
            listening = socket.create_server((host, 0), family=_family(packed), backlog=1024)
        except OSError as error:
            failure = error
            continue
        listening.setblocking(False)
        mapped = packed if packed.version == 6 else ipaddress.ip_address(f"::ffff:{packed}")
        return listening, mapped.packed
    raise failure


def dial(address: bytes, port: int) -> socket.socket:
    """Return a socket that is connecting to ``address``, as ``listener`` returned it."""
    host = ipaddress.IPv6Address(address)
    target = host.ipv4_mapped or host
    connection = socket.socket(_family(target))
    connection.setblocking(False)
    connection.connect_ex((str(target), port))
    return connection


def _family(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> socket.AddressFamily:
    return socket.AF_INET if address.version == 4 else socket.AF_INET6


def _hosts() -> Iterator[str]:
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0].strip()
    if interface:
        yield from _addresses_of(interface)
        return
    for found in socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM):
        yield str(found[4][0])


def _addresses_of(interface: str) -> Iterator[str]:
    """Yield the IPv4 address of ``interface``, then its IPv6 addresses beyond the link."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            asked = struct.pack("256s", interface[:15].encode())
            answer = fcntl.ioctl(any_socket.fileno(), _SIOCGIFADDR, asked)
            yield socket.inet_ntoa(answer[20:24])
        except OSError:
            pass  # it has none
    table = Path("/proc/net/if_inet6")  # address, index, length of prefix, scope, flags, name
    for line in table.read_text().splitlines() if table.exists() else []:
        address, _, _, scope, _, name = line.split()
        if name == interface and scope != "20":
            yield str(ipaddress.IPv6Address(bytes.fromhex(address)))
