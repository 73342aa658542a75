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
    """Return the options in a TOML file by parameter name.

    Args:
        path: a file whose keys are names of options, with ``-`` or ``_``.
        kinds: the type, such as ``int | None``, of each existing option.

    Raises:
        ConfigError: the file cannot be read, a key is not an option, or a value has a wrong type.
    """
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--config {path}: cannot be read ({error.strerror})") from error
    except ValueError as error:  # from tomllib, or because of text that is not UTF-8
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
    """Return ``value`` as ``kind``; TOML distinguishes numbers, strings and booleans."""
    kinds = [each for each in typing.get_args(kind) or (kind,) if each is not type(None)]
    if issubclass(kinds[0], enum.Enum):
        choices = [member.value for member in kinds[0]]
        if value in choices:
            return kinds[0](value)
        expected = f"one of {', '.join(choices)}"
    else:
        if type(value) in kinds:  # not isinstance: a bool is an int
            return value
        if float in kinds and type(value) is int:
            return float(value)
        expected = " or ".join(_WORDS[each] for each in kinds)
    raise ConfigError(f"{where} is {value!r}, expected {expected}")
