"""Options from a TOML file: ``fullshard train --config FILE.toml``.

steps = 2000
data = "corpus.jsonl"
checkpoint-activations = true
"""

from __future__ import annotations

import enum
import tomllib
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fullshard.errors import ConfigError

_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a string"}


def read_options(path: Path, kinds: Mapping[str, Any]) -> dict[str, Any]:
    """The file's options, by parameter name.

    Args:
        path: its keys are the options' names, with ``-`` or ``_``.
        kinds: which options there are, and the type of each, such as ``int | None``.

    Raises:
        ConfigError: if it cannot be read, a key is no option, or a value is of another type.
    """
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--config {path}: cannot be read ({error.strerror})") from error
    except ValueError as error:  # tomllib's own, and text that is no UTF-8
        raise ConfigError(f"--config {path}: not TOML ({error})") from error
    options = {}
    for key, value in table.items():
        name = key.replace("-", "_")
        if name not in kinds:
            known = ", ".join(option.replace("_", "-") for option in kinds)
            raise ConfigError(f"--config {path}: unknown option {key!r}; known are {known}")
        options[name] = _checked(value, kinds[name], f"--config {path}: {key}")
    return options


def _checked(value: Any, kind: Any, where: str) -> Any:
    """``value`` as ``kind`` wants it; TOML tells numbers, strings and booleans apart."""
    wanted = next(each for each in typing.get_args(kind) or (kind,) if each is not type(None))
    if issubclass(wanted, enum.Enum):
        choices = [member.value for member in wanted]
        if value in choices:
            return wanted(value)
        expected = f"one of {', '.join(choices)}"
    else:
        if type(value) is wanted:  # not isinstance: a bool is an int
            return value
        if wanted is float and type(value) is int:
            return float(value)
        expected = _WORDS[wanted]
    raise ConfigError(f"{where} is {value!r}, expected {expected}")
