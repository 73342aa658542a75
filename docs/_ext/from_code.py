"""Text that pages take from the code, and from the files beside ``docs``.

A comment in a page is replaced by the text, so that the page is plain Markdown elsewhere:

    <!-- names: fullshard.optim -->
    <!-- commands -->
    <!-- page: ../CONTRIBUTING.md -->
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType
from typing import Any

import typer
from sphinx.ext.napoleon import Config, GoogleDocstring
from sphinx.pycode import ModuleAnalyzer

from fullshard.cli import app as command_line

ROOT = Path(__file__).parents[2]
MODULES = [
    "fullshard",
    *(
        f"fullshard.{name}"
        for name in "optim checkpoint wrap plan progress trace doctor compat errors".split()
    ),
]
HOMES = {  # files beside docs that are pages of the site
    ROOT / "README.md": ROOT / "docs" / "index.md",
    ROOT / "CONTRIBUTING.md": ROOT / "docs" / "contributing.md",
    ROOT / "CHANGELOG.md": ROOT / "docs" / "changelog.md",
}
GROUPS = {  # the names of ``fullshard`` by the package that they come from
    "frontend": "Shard a model",
    "engine": "Policies",
    "layout tensors": "Layouts",
    "checkpoint": "Stream weights",
    "recover": "Go on after faults",
    "plan": "Plan",
    "trace": "Trace",
    "comm": "Collectives of your own",
    "flat": "FSDP1",
}


def public_names(module: str) -> dict[str, Any]:
    """Return the public objects of a module by their full names, without modules."""
    found = importlib.import_module(module)
    names = getattr(found, "__all__", None) or [
        name
        for name, value in vars(found).items()
        if not name.startswith("_") and name != "annotations"
    ]
    objects = {f"{module}.{name}": getattr(found, name) for name in names}
    return {name: value for name, value in objects.items() if not inspect.ismodule(value)}


PUBLIC = {name: value for module in MODULES for name, value in public_names(module).items()}
FIRST: dict[int, str] = {}
"""The name under which an object has its entry, by the object's id."""
for _name, _value in PUBLIC.items():
    FIRST.setdefault(id(_value), _name)
HOME_OF = {
    f"{value.__module__}.{value.__qualname__}": FIRST[id(value)]
    for value in PUBLIC.values()
    if callable(value)
}
"""The public name by the place of the definition, as in ``fullshard.engine.policy.WirePolicy``."""


ELSEWHERE = {
    "Path": "pathlib.Path",
    "Placement": "torch.distributed.tensor.placement_types.Placement",
    "Tensor": "torch.Tensor",
    "torch.amp.grad_scaler.GradScaler": "torch.amp.GradScaler",
    "torch.distributed.checkpoint.default_planner.DefaultLoadPlanner": (
        "torch.distributed.checkpoint.DefaultLoadPlanner"
    ),
    "torch.distributed.distributed_c10d.ProcessGroup": "torch.distributed.ProcessGroup",
    "torch.distributed.distributed_c10d.Store": "torch.distributed.Store",
    "torch.nn.modules.module.Module": "torch.nn.Module",
    "torch.optim.optimizer.Optimizer": "torch.optim.Optimizer",
}
"""The documented name by another that signatures show."""


# Pages


def expand(text: str, page: Path, *, plain: bool = False) -> str:
    """Return a page with its comments replaced; plain: by Markdown without directives."""
    base, front = page.parent, ""
    if replaced := re.search(r"<!-- page: (\S+) -->", text):
        file = base / replaced[1]
        text, base = file.read_text(), file.resolve().parent
        front = "" if plain else "---\nno-search: true\n---\n"  # pages for readers of the source
    text = re.sub(r"<!-- names: (\S+) -->", lambda found: names(found[1], plain=plain), text)
    text = text.replace("<!-- commands -->", commands(plain=plain))
    return front + re.sub(r"\]\(([^)#:\s]+)(?=[)#])", lambda found: _link(found, base, page), text)


def _link(found: re.Match[str], base: Path, page: Path) -> str:
    """Return the start of a link, to the page of a file that has one."""
    target = (base / found[1]).resolve()
    if not target.is_file():
        return found[0]
    return "](" + os.path.relpath(HOMES.get(target, target), page.parent)


# Names


def names(module: str, *, plain: bool = False) -> str:
    """Return the reference of a module: its docstring, then an entry for each public name."""
    own = dict(sorted(public_names(module).items(), key=lambda one: inspect.isclass(one[1])))
    if module != "fullshard":
        return "\n\n".join([_module(module, plain), *(_entry(name, plain) for name in own)])
    parts = [_module(module, plain)]
    for rooms, title in GROUPS.items():
        parts.append(f"## {title}")
        parts += [_entry(name, plain) for name, value in own.items() if _room(value) in rooms]
    return "\n\n".join(parts)


def _room(value: Any) -> str:
    return str(value.__module__.split(".")[1])


def _module(name: str, plain: bool) -> str:
    if plain:
        return inspect.getdoc(importlib.import_module(name)) or ""
    also_a_function = name in PUBLIC
    return _rst(f"automodule:: {name}", "no-members:", *["no-index:"] * also_a_function)


def _entry(name: str, plain: bool) -> str:
    """Return the entry of a name, or a link if the object has an entry under another name."""
    module, _, short = name.rpartition(".")
    value = PUBLIC[name]
    first = FIRST[id(value)]
    if plain:
        return _plain(name, value) if first == name else f"### `{name}`\n\nThe same as `{first}`."
    if not callable(value):
        return _rst(f"py:data:: {short}", f"module: {module}", text=_data_docstring(name, value))
    kind = "class" if inspect.isclass(value) else "function"
    if first != name:
        same = f"The same as :py:obj:`{first}`."
        return _rst(f"py:{kind}:: {short}", f"module: {module}", text=same)
    options: list[str] = []
    if kind == "class":
        others = [base.__name__ for base in value.__mro__ if base not in own_classes(value)]
        options = ["members:", f"inherited-members: {', '.join(others)}"]
    if kind == "class" and value.__bases__ != (object,):
        options.append("show-inheritance:")
    if kind == "class" and hasattr(value, "__members__"):
        options.append("undoc-members:")  # of an enum
    return _rst(f"auto{kind}:: {name}", *options)


def own_classes(value: type) -> list[type]:
    """Return a class and its bases that are fullshard's own; some of them are not public."""
    return [base for base in value.__mro__ if base.__module__.startswith("fullshard")]


def _data_docstring(name: str, value: Any) -> str:
    """Return the text below a value, in the module that defines it."""
    package, _, short = name.rpartition(".")
    for module, found in list(sys.modules.items()):
        if module.startswith(f"{package}.") and vars(found).get(short) is value:
            docs = ModuleAnalyzer.for_module(module).find_attr_docs()
            if ("", short) in docs:
                return " ".join(docs["", short]).strip()
    raise LookupError(f"{name} has no docstring")


def _rst(directive: str, *options: str, text: str = "") -> str:
    lines = [f".. {directive}", *(f"   :{option}" for option in options), "", f"   {text}"]
    return "\n".join(["```{eval-rst}", *lines, "```"])


def _plain(name: str, value: Any) -> str:
    """Return a name with its signature and docstring, then its public fields and methods."""
    parts = [f"### `{name}{_signature(value)}`", inspect.getdoc(value) or ""]
    bases = own_classes(value) if inspect.isclass(value) else []
    parts += [f"- `{field}`: {text}" for base in bases for field, text in _fields(base)]
    members = {member: one for base in reversed(bases) for member, one in vars(base).items()}
    for member, one in members.items():
        if not member.startswith("_") and isinstance(one, FunctionType | property) and one.__doc__:
            parts += [f"#### `{member}{_signature(one)}`", inspect.getdoc(one) or ""]
    return "\n\n".join(part for part in parts if part)


def _fields(value: type) -> Iterator[tuple[str, str]]:
    """Yield the public fields of a class that have text below them, with this text."""
    docs = ModuleAnalyzer.for_module(value.__module__).find_attr_docs()
    for (owner, field), lines in docs.items():
        if owner == value.__qualname__ and not field.startswith("_"):
            yield field, " ".join(lines).strip()


class _Bare(str):
    """An annotation that a signature shows without quotes."""

    __repr__ = str.__str__


def _signature(value: Any) -> str:
    try:
        found = inspect.signature(value)
    except (TypeError, ValueError):
        return ""
    return str(
        found.replace(
            parameters=[_bare(one, "annotation") for one in found.parameters.values()],
            return_annotation=_bare(found, "return_annotation").return_annotation,
        )
    )


def _bare(one: Any, name: str) -> Any:
    annotation = getattr(one, name)
    return one.replace(**{name: _Bare(annotation)}) if isinstance(annotation, str) else one


# Commands


def walk_commands(command: Any = None, name: str = "fullshard") -> Iterator[tuple[str, Any]]:
    """Yield each command of the command line with its full name, groups before what they hold."""
    command = command or typer.main.get_command(command_line)
    yield name, command
    for part, inner in getattr(command, "commands", {}).items():
        yield from walk_commands(inner, f"{name} {part}")


def commands(*, plain: bool = False) -> str:
    """Return the reference of the command line: each command with its arguments and options."""
    return "\n\n".join(
        part for name, command in walk_commands() for part in _command(name, command, plain)
    )


def _command(name: str, command: Any, plain: bool) -> Iterator[str]:
    context = typer.Context(command, info_name=name)
    yield f"## {name}"
    yield inspect.cleandoc(command.help or "")
    yield "```text\n" + " ".join([name, *command.collect_usage_pieces(context)]) + "\n```"
    if not plain:
        yield f"```{{program}} {name}\n```"
    for shown, text in parameters(command, context):
        yield f"- `{shown}`: {text}" if plain else f"```{{option}} {shown}\n{text}\n```"


def parameters(command: Any, context: Any) -> Iterator[tuple[str, str]]:
    """Yield each argument and option as it is typed, with its help."""
    for one in command.get_params(context):
        if one.param_type_name == "argument":
            yield one.get_usage_pieces(context)[0].strip("[]{}"), one.help or ""
        elif "--help" not in one.opts:
            shown, text = one.get_help_record(context)
            for kind, value in (("int", "N"), ("int range", "N"), ("float", "X"), ("str", "TEXT")):
                shown = shown.replace(f"<{kind}>", value)
            yield re.sub(r"[<>]", "", shown).replace(" / ", ", "), " ".join(text.split())


# Docstrings


def as_restructured_text(
    app: Any, what: str, name: str, value: Any, options: Any, lines: list[str]
) -> None:
    """Rewrite a docstring as reStructuredText; a block indented after an empty line is literal.

    Sections are those of Google's style. The text below a field has no sections, so a colon there
    does not begin one.
    """
    if what == "attribute" and lines and lines[0].startswith("Alias for field number"):
        lines[:] = [_FIELDS.get(name, ""), ""]
    if what == "class" and hasattr(value, "_fields"):
        _take_fields(name, lines)
    _mark_literal_blocks(lines)
    if what not in ("attribute", "property", "module"):
        lines[:] = GoogleDocstring(lines, _SECTIONS, app, what, name, value, options).lines()


_SECTIONS = Config(napoleon_use_rtype=False)


def _mark_literal_blocks(lines: list[str]) -> None:
    new: list[str] = []
    above, literal = "", -1  # the last line with text; how far the text around a block is indented
    for line in lines:
        here, around = _indent(line), _indent(above)
        if line and here <= literal:
            literal = -1
        if line and literal < 0 and new[-1:] == [""] and here >= around + 4:
            literal = around
            new += [] if above.endswith("::") else [" " * around + "::", ""]
        above = line or above
        new.append(line)
    lines[:] = new


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


_FIELDS: dict[str, str] = {}


def _take_fields(name: str, lines: list[str]) -> None:
    """Take the section "Attributes" of a named tuple out, for the entries of its fields."""
    if "Attributes:" not in lines:
        return
    start = lines.index("Attributes:")
    section = "\n".join(lines[start + 1 :])
    for field, text in re.findall(r"^    (\w+): (.*(?:\n {5,}.*)*)", section, re.MULTILINE):
        text = " ".join(text.split())
        _FIELDS[f"{name}.{field}"] = text[:1].upper() + text[1:]
    del lines[start:]


def public_place(app: Any, env: Any, node: Any, contnode: Any) -> Any:
    """Resolve a name in a signature that is defined elsewhere than where it is public."""
    target = node.get("reftarget", "")
    if target not in HOME_OF:
        node["reftarget"] = ELSEWHERE.get(target, target)  # for intersphinx, which comes next
        return None
    target = HOME_OF[target]
    domain = env.domains["py"]
    return domain.resolve_xref(env, node["refdoc"], app.builder, "obj", target, node, contnode)


def setup(app: Any) -> dict[str, Any]:
    """Connect to Sphinx."""
    app.connect("source-read", _read)
    app.connect("autodoc-process-docstring", as_restructured_text, priority=1)
    app.connect("missing-reference", public_place, priority=1)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def _read(app: Any, docname: str, source: list[str]) -> None:
    page = Path(app.env.doc2path(docname))
    source[0] = re.sub(
        r"^[\w/]+\*$",  # in a navigation; Sphinx warns of one that finds no page
        lambda found: found[0] if any(page.parent.glob(f"{found[0]}.md")) else "",
        expand(source[0], page),
        flags=re.MULTILINE,
    )
