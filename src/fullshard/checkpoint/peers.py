"""Data files in folders of other machines: served over TCP to who shows the key.

A rank serves files of one folder while a ``Server`` is open; it says its address and its key in the
line ``Server.address``, which goes through the store of the process group. What travels is not
encrypted; ``DataFile`` verifies it.

A request is the key, the number of a file, an offset and a number of bytes; the answer is that many
bytes of the file. Whatever does not fit is hung up on.
"""

from __future__ import annotations

import hmac
import os
import secrets
import socket
import struct
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from fullshard.checkpoint.addresses import dial, listener
from fullshard.checkpoint.datafile import CHUNK_NBYTES, write_all
from fullshard.comm.heartbeat import stall_s
from fullshard.errors import CheckpointError

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
        self._listening, packed = listener()
        self._listening.setblocking(True)
        port = self._listening.getsockname()[1]
        self.address = f"{packed.hex()} {port} {self._key.hex()}"
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
        packed, port, key = address.split()
        self._key, self._number = bytes.fromhex(key), number
        self._connection = dial(bytes.fromhex(packed), int(port))
        self._connection.settimeout(stall_s())

    def read(self, offset: int, into: memoryview) -> None:
        """Read from ``offset`` on, as many bytes as ``into`` has.

        Raises:
            CheckpointError: the other machine does not send them, for ``stall_s`` without a byte.
        """
        try:
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
        self._connection.close()


def copy(source: PeerFile, target: Path) -> None:
    """Write all of ``source`` to the new file ``target``, flushed.

    Raises:
        CheckpointError: the other machine does not send it.
        OSError: it cannot be written.
    """
    memory = memoryview(bytearray(min(CHUNK_NBYTES, source.nbytes)))
    with target.open("xb", buffering=0) as file:
        for offset in range(0, source.nbytes, CHUNK_NBYTES):
            data = memory[: source.nbytes - offset]
            source.read(offset, data)
            write_all(file, data)
        os.fsync(file.fileno())


def _receive(connection: socket.socket, into: memoryview) -> bool:
    """Fill ``into``; return False if the other end hangs up before that."""
    while into:
        count = connection.recv_into(into)
        if not count:
            return False
        into = into[count:]
    return True
