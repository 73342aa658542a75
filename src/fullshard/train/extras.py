"""Optional packages of the trainer."""

from __future__ import annotations

import importlib
from typing import Any

from fullshard.errors import ConfigError


def imported(module: str, option: str, *, extra: str, package: str | None = None) -> Any:
    """Import a module of an optional package, by default the package of its own name.

    Raises:
        ConfigError: ``option`` needs the package, which is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        own = module.partition(".")[0]
        is_missing = isinstance(error, ModuleNotFoundError) and error.name in (own, module)
        raise ConfigError(
            f"{option} needs {package or own}: pip install -e '.[{extra}]' in a clone of fullshard"
            + ("" if is_missing else f" ({error})")
        ) from error
