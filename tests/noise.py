"""Filters output of other packages on stderr."""

import re

_WHEN_TORCHAO_IS_IMPORTED = re.compile(
    r"^(Failed to load \S*/torchao/.*|.*torch/utils/_pytree\.py:\d+\].*register_constant.*)\n", re.M
)


def without_noise(err: str) -> str:
    """Return ``err`` without the warnings of importing torchao, which ``transformers`` imports."""
    return _WHEN_TORCHAO_IS_IMPORTED.sub("", err)
