"""The identity of the weights in a folder, which frozen weights of a resumed run must keep."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

from fullshard.errors import ConfigError

_SAMPLE_NBYTES = 1 << 12  # bytes of each tensor, from its middle


def weights_key(folder: Path) -> str:
    """Return a digest of the names, dtypes, shapes and a sample of all weights in ``folder``.

    The digest does not depend on the files that hold the tensors. A sample suffices, because other
    weights, such as those of another training, differ in all tensors that were trained.

    Raises:
        ConfigError: a file cannot be read.
    """
    files = sorted(folder.glob("*.safetensors"))
    return hashlib.sha256(b"".join(sorted(d for file in files for d in _digests(file)))).hexdigest()


def _digests(path: Path) -> Iterator[bytes]:
    """Yield a digest for each tensor of a file."""
    try:
        with path.open("rb") as file:
            begin = 8 + int.from_bytes(file.read(8), "little")
            size = path.stat().st_size
            for name, facts in json.loads(file.read(min(begin, size) - 8)).items():
                if name == "__metadata__":
                    continue
                start, end = facts["data_offsets"]
                skipped = max(0, end - start - _SAMPLE_NBYTES) // 2
                file.seek(begin + start + skipped)
                sample = file.read(min(_SAMPLE_NBYTES, end - start))
                own = json.dumps([name, facts["dtype"], facts["shape"]]).encode()
                yield hashlib.sha256(own + b"\n" + sample).digest()
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"--init {path}: cannot be read as safetensors ({error})") from error
