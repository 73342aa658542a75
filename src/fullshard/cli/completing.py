"""``fullshard completion``: a script with which a shell completes commands and options.

The script contains all commands and options, so a completion does not start Python, where importing
PyTorch takes seconds.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from typing import Annotated, Any

import typer


class Shell(enum.StrEnum):
    """The shells that a script is made for."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


def completion_command(
    context: typer.Context,
    shell: Annotated[Shell, typer.Argument(metavar="bash|zsh|fish", help="The shell.")],
) -> None:
    """Print a script that makes a shell complete commands and options."""
    program = context.find_root().command
    words = dict(_words("", program))
    print("\n".join(_fish(words) if shell is Shell.FISH else _bash(words, shell)))


def _words(path: str, command: Any) -> Iterator[tuple[str, list[str]]]:
    """Yield each command by its path, such as "checkpoint list", and the words after it."""
    inner = getattr(command, "commands", {})
    shown = (one for one in command.params if not getattr(one, "hidden", False))
    options = [name for one in shown for name in (*one.opts, *one.secondary_opts)]
    yield path, [*inner, *(name for name in options if name.startswith("--")), "--help"]
    for name, own in inner.items():
        yield from _words(f"{path} {name}".strip(), own)


def _bash(words: dict[str, list[str]], shell: Shell) -> Iterator[str]:
    if shell is Shell.ZSH:
        yield "autoload -U +X compinit bashcompinit && compinit && bashcompinit"
    yield "_fullshard() {"
    yield '    local word="${COMP_WORDS[COMP_CWORD]}" words'
    yield '    case "${COMP_WORDS[*]:1:COMP_CWORD-1} " in'
    for path in sorted(words, key=len, reverse=True):
        yield f'        "{path} "*) words="{" ".join(words[path])}" ;;'.replace('" "*', "*")
    yield "    esac"
    yield '    COMPREPLY=($(compgen -W "$words" -- "$word"))'
    yield "}"
    yield "complete -o default -F _fullshard fullshard"


def _fish(words: dict[str, list[str]]) -> Iterator[str]:
    for path, own in words.items():
        seen = " and ".join(f"__fish_seen_subcommand_from {name}" for name in path.split())
        condition = f"'{seen.replace(' and ', '; and ')}'" if path else "__fish_use_subcommand"
        for word in own:
            kind = f"-l {word[2:]}" if word.startswith("--") else f"-a {word}"
            yield f"complete -c fullshard -n {condition} {kind}"
