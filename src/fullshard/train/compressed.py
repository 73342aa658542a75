"""Compressed files of ``--data``."""

from __future__ import annotations

import bz2
import gzip
import lzma
from collections.abc import Callable
from pathlib import Path

from fullshard.errors import ConfigError


def is_compressed(path: Path) -> bool:
    """Return whether ``read_bytes`` decompresses this file."""
    return path.suffix in _DECOMPRESS


def read_bytes(path: Path) -> bytes:
    """Return what a file holds, without compression.

    Raises:
        ConfigError: it cannot be read, or needs a package that is not installed.
    """
    decompress = _DECOMPRESS.get(path.suffix, bytes)
    try:
        return decompress(path.read_bytes())
    except ImportError as error:
        raise ConfigError(
            f"--data {path} needs zstandard: pip install -e '.[zstd]' in a clone of fullshard, or "
            "Python 3.14"
        ) from error
    except Exception as error:  # each of the modules has its own
        raise ConfigError(f"--data {path}: cannot be read ({error})") from error


def _zstd(data: bytes) -> bytes:
    """Decompress all frames by Python's own module, from 3.14 on, or by ``zstandard``."""
    try:
        from compression import zstd
    except ImportError:
        import zstandard

        with zstandard.ZstdDecompressor().stream_reader(data, read_across_frames=True) as stream:
            found: bytes = stream.read()
        return found
    decompressed: bytes = zstd.decompress(data)
    return decompressed


_DECOMPRESS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.decompress,
    ".bz2": bz2.decompress,
    ".xz": lzma.decompress,
    ".zst": _zstd,
}
