"""The options of ``fullshard train`` on the command line and in a TOML file."""

from __future__ import annotations

import dataclasses
import inspect
import tomllib
import typing
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import typer

from fullshard.errors import ConfigError
from fullshard.train.config import Option, TrainConfig, choices_of

# The options that are no attributes of a run: a file with more options, and the run's folder.
_OTHERS = {
    "config_file": Option(
        "Options from a file; those given here win.", "Run", "FILE.toml", str | None, None
    ),
    "name": Option("The run lies in runs/NAME.", "Run", None, str, "default"),
}
_FLAGS = {"config_file": ("--config",), "resume": ("--resume",)}  # else derived from the name


@cache
def options() -> dict[str, Option]:
    """Return the options by name, each with its type and default."""
    kinds = typing.get_type_hints(TrainConfig)
    found = {}
    for field in dataclasses.fields(TrainConfig):
        option: Option | None = field.metadata.get("option")
        if option is not None:
            kind = option.kind or kinds[field.name]
            default = field.default if option.default is ... else option.default
            found[field.name] = option._replace(kind=kind, default=default)
    return found | _OTHERS


def flag(name: str) -> Any:
    """Return the option ``name`` as typer describes it; ``fullshard plan`` shares some."""
    option = options()[name]
    return typer.Option(
        *_FLAGS.get(name, ()),
        help=option.help,
        metavar=option.metavar,
        rich_help_panel=option.group,
    )


def with_options(command: Callable[..., int]) -> Callable[..., int]:
    """Give ``command``, a function of a context and of keywords, a parameter for each option."""
    context = inspect.Parameter(
        "context", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context
    )
    given = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=option.default,
            annotation=Annotated[option.kind, flag(name)],
        )
        for name, option in options().items()
    ]
    command.__signature__ = inspect.Signature([context, *given])  # type: ignore[attr-defined]
    command.__annotations__ = {one.name: one.annotation for one in (context, *given)}
    return command


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
    if chosen := choices_of(kind):
        choices = [member.value for member in chosen]
        if value in choices:
            return chosen(value)
        expected = f"one of {', '.join(choices)}"
    else:
        kinds = [each for each in typing.get_args(kind) or (kind,) if each is not type(None)]
        if type(value) in kinds:  # not isinstance: a bool is an int
            return value
        if float in kinds and type(value) is int:
            return float(value)
        expected = " or ".join(_WORDS[each] for each in kinds)
    raise ConfigError(f"{where} is {value!r}, expected {expected}")
