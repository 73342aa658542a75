"""Copies of a machine's checkpoint in the memory of other machines, over TCP."""

from __future__ import annotations

import fcntl
import hmac
import os
import secrets
import socket
import struct
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path

from fullshard.checkpoint.format import CHUNK_NBYTES, new_file
from fullshard.comm.heartbeat import stall_s
from fullshard.errors import CheckpointError, UnsupportedError

_SIOCGIFADDR = 0x8915
_PLAIN = {"", "TCP", "UV"}
"""Values of GLOO_DEVICE_TRANSPORT for which bytes travel unencrypted over TCP."""


def _listener() -> socket.socket:
    """Return a socket that listens at our address.

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
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            return socket.create_server((host, 0), family=family, backlog=1024)
        except OSError as error:
            failure = error
    raise failure


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
            yield socket.inet_ntop(socket.AF_INET6, bytes.fromhex(address))


_KEY_NBYTES = 32
_REQUEST = struct.Struct(f"={_KEY_NBYTES}s3q")  # key, number of the file, offset, bytes


class Server:
    """Serves files to other machines, each in a thread; a context.

    Args:
        folder: of the files.
        names: of the files, which are asked for by their numbers here.

    Attributes:
        address: what ``PeerFile`` needs to know.

    Raises:
        OSError: this machine has no address.
        UnsupportedError: gloo is to use something else than plain TCP; files would be sent in
            plain, too.
    """

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        self._paths = [folder / name for name in names]
        self._key = secrets.token_bytes(_KEY_NBYTES)
        self._listening = _listener()
        host, port, *_ = self._listening.getsockname()
        self.address = f"{host} {port} {self._key.hex()}"
        self._connections: set[socket.socket] = set()
        threading.Thread(target=self._accept, name="fullshard files", daemon=True).start()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        for one in (self._listening, *self._connections):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits for it
            one.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listening.accept()
            except OSError:  # closed
                return
            self._connections.add(connection)
            serving = threading.Thread(
                target=self._serve, args=(connection,), name="fullshard files", daemon=True
            )
            try:
                serving.start()
            except RuntimeError:  # too many threads: close, so that this reader gets an error
                self._connections.discard(connection)
                connection.close()

    def _serve(self, connection: socket.socket) -> None:
        with suppress(OSError), connection:
            while True:
                connection.settimeout(None)  # who reads may wait for other ranks in between
                if not connection.recv(1, socket.MSG_PEEK):
                    break
                connection.settimeout(stall_s())
                request = bytearray(_REQUEST.size)
                if not _receive(connection, memoryview(request)):
                    break
                key, number, offset, nbytes = _REQUEST.unpack(request)
                if not hmac.compare_digest(key, self._key) or number not in range(len(self._paths)):
                    break
                if offset < 0 or nbytes <= 0:
                    break
                with self._paths[number].open("rb") as file:
                    if connection.sendfile(file, offset, nbytes) != nbytes:
                        break
        self._connections.discard(connection)


class PeerFile:
    """A data file that a ``Server`` on another machine has; the counterpart of ``LocalFile``.

    Args:
        address: the server's.
        number: of the file there.
        name: for messages.
        nbytes: size of the file.
    """

    def __init__(self, address: str, number: int, name: str, nbytes: int) -> None:
        self.name = name
        self.nbytes = nbytes
        self._host, self._port, key = address.split()
        self._key, self._number = bytes.fromhex(key), number
        self._connection: socket.socket | None = None

    def read(self, offset: int, into: memoryview) -> None:
        """Read from ``offset`` on, as many bytes as ``into`` has.

        Raises:
            CheckpointError: the other machine does not send them, for ``stall_s`` without a byte.
        """
        try:
            if self._connection is None:
                where = self._host, int(self._port)
                self._connection = socket.create_connection(where, stall_s())
            self._connection.sendall(_REQUEST.pack(self._key, self._number, offset, into.nbytes))
            why = "" if _receive(self._connection, into) else "it hung up"
        except OSError as error:
            why = str(error)
        if why:
            raise CheckpointError(
                f"{self.name}: the machine that has it does not send byte {offset} ({why})"
            )

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.close()


def copy(source: PeerFile, target: Path) -> None:
    """Write all of ``source`` to the new file ``target``, flushed.

    Raises:
        CheckpointError: the other machine does not send it.
        OSError: it cannot be written.
    """
    memory = memoryview(bytearray(min(CHUNK_NBYTES, source.nbytes)))
    with closing(new_file(target, source.nbytes)) as file:
        for offset in range(0, source.nbytes, CHUNK_NBYTES):
            data = memory[: source.nbytes - offset]
            source.read(offset, data)
            file.write(data)


def _receive(connection: socket.socket, into: memoryview) -> bool:
    """Fill ``into``; return False if the other end hangs up before that."""
    while into:
        count = connection.recv_into(into)
        if not count:
            return False
        into = into[count:]
    return True
