"""What other packages print on stderr, whatever a program does."""

import re

_WHEN_TORCHAO_IS_IMPORTED = re.compile(
    r"^(Failed to load \S*/torchao/.*|.*torch/utils/_pytree\.py:\d+\].*register_constant.*)\n", re.M
)


def without_noise(err: str) -> str:
    """Return ``err`` without what ``transformers`` causes by importing torchao, if it is there."""
    return _WHEN_TORCHAO_IS_IMPORTED.sub("", err)
