"""The walls between the rooms: each rule a function from sources to a list of complaints.

Sources are read with ``ast``, never imported; ``test_imports.py`` holds the package to the rules.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2] / "src" / "fullshard"

# In import order: a module imports from its own room and from those before it.
ROOMS = (
    "errors _version progress _torch layout schedule comm watch doctor device tensors engine optim"
    " wrap frontend checkpoint recover flat plan trace compat train cli"
).split()
FACE = "fullshard"  # the package's own __init__, which may import every room
PUBLIC_ONLY = {"train", "cli"}  # written like a user's program, so that users can read them
PUBLIC_MODULES = {
    "fullshard",
    *(
        f"fullshard.{name}"
        for name in "optim checkpoint wrap compat errors plan progress trace doctor".split()
    ),
}
OPTIONAL = {  # the extras, and a module of Python 3.14
    *(
        "transformers",
        "jinja2",
        "peft",
        "bitsandbytes",
        "matplotlib",
        "zstandard",
        "fsspec",
    ),
    "compression",
}
SLOW = {"torch.distributed.checkpoint", "fullshard.checkpoint.dcp"}  # 0.1 s, for few programs

NEW_OR_DEPRECATED = set(
    "all_gather_into_tensor reduce_scatter_tensor all_gather_single reduce_scatter_single".split()
)
COLLECTIVES = NEW_OR_DEPRECATED | set(
    "all_gather all_gather_object all_reduce all_to_all all_to_all_single barrier batch_isend_irecv"
    " broadcast broadcast_object_list gather irecv isend monitored_barrier recv reduce"
    " reduce_scatter scatter send".split()
)
# A name that only these files and folders, relative to the package, may use.
SEAMS = {
    "register_forward_pre_hook": ("frontend/",),
    "register_forward_hook": ("frontend/",),
    "register_post_accumulate_grad_hook": ("engine/autograd.py", "_torch/"),
    "register_multi_grad_hook": ("engine/autograd.py", "_torch/"),
    "register_prehook": ("engine/autograd.py", "_torch/"),
    "queue_callback": ("engine/autograd.py", "_torch/"),
    "register_hook": ("engine/autograd.py", "_torch/"),
    "resize_": ("device/",),
    "record_stream": ("device/",),
} | dict.fromkeys(NEW_OR_DEPRECATED, ("_torch/",))


# The same for names that say something only with their module.
DOTTED_SEAMS = {
    "torch.distributed.fsdp": ("compat/",),
    "torch.distributed._composable": ("compat/", "_torch/"),  # the registry of its functions
    "torch.Stream": ("device/",),
    "torch.Event": ("device/", "train/world.py"),
    "torch.cuda.Stream": ("device/",),
    "torch.cuda.Event": ("device/",),
    "torch.cuda.stream": ("device/",),
    "torch.cuda.current_stream": ("device/",),
    "torch.accelerator.current_stream": ("device/",),
}


@dataclass(frozen=True)
class Source:
    """One parsed file of the package."""

    path: str  # relative to the package: "layout/segment.py"
    tree: ast.Module

    @property
    def module(self) -> str:
        """The dotted name; a package has its folder's."""
        dotted = ".".join(["fullshard", *Path(self.path).with_suffix("").parts])
        return dotted.removesuffix(".__init__")

    @property
    def room(self) -> str:
        """Which room the file stands in."""
        return room_of(self.module)

    def is_in(self, places: Iterable[str]) -> bool:
        """Whether this is one of the files, or lies in one of the folders, named by ``places``."""
        return any(self.path == place or self.path.startswith(place) for place in places)


@dataclass(frozen=True)
class Import:
    """One name that a file imports."""

    module: str  # absolute; "from m import n" names m
    name: str | None  # n, or None in "import m"
    line: int
    in_function: bool
    for_typing: bool

    @property
    def full_name(self) -> str:
        """What it may be a module of: ``from torch import distributed`` is torch.distributed."""
        return self.module if self.name is None else f"{self.module}.{self.name}"


def room_of(module: str) -> str:
    """``fullshard.layout.segment`` stands in ``layout``, ``fullshard`` itself is the face."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else FACE


def package_sources() -> list[Source]:
    """Every file of the package."""
    files = sorted(ROOT.rglob("*.py"))
    assert files, f"no sources under {ROOT}"
    return [source(path.relative_to(ROOT).as_posix(), path.read_text("utf-8")) for path in files]


def source(path: str, text: str) -> Source:
    """One file from its text; the self-tests write theirs in place."""
    return Source(path, ast.parse(text, filename=path))


def imports_of(file: Source) -> Iterator[Import]:
    """Every import of the file, wherever it stands."""
    yield from _imports_below(file, file.tree, in_function=False, for_typing=False)


def _imports_below(
    file: Source, node: ast.AST, *, in_function: bool, for_typing: bool
) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield Import(alias.name, None, child.lineno, in_function, for_typing)
        elif isinstance(child, ast.ImportFrom):
            module = absolute(file, child)
            for alias in child.names:
                yield Import(module, alias.name, child.lineno, in_function, for_typing)
        else:
            is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
            typing = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
            yield from _imports_below(
                file,
                child,
                in_function=in_function or is_function,
                for_typing=for_typing or typing,
            )


def absolute(file: Source, node: ast.ImportFrom) -> str:
    """The module that ``from .x import y`` means in this file."""
    if node.level == 0:
        return node.module or ""
    parts = file.module.split(".")
    up = node.level - (1 if file.path.endswith("__init__.py") else 0)
    base = parts[: len(parts) - up]
    return ".".join([*base, *([node.module] if node.module else [])])


def is_or_below(name: str, module: str) -> bool:
    """Whether ``name`` is the module or something in it."""
    return name == module or name.startswith(f"{module}.")


def complain(file: Source, line: int, what: str) -> str:
    """One finding, in the form that editors make a link of."""
    return f"src/fullshard/{file.path}:{line}: {what}"


def imports_against_the_order(files: Iterable[Source]) -> list[str]:
    """Imports that point to a later room, or past the public names from where only those count."""
    found = []
    for file in files:
        if file.room != FACE and file.room not in ROOMS:
            found.append(complain(file, 1, f"room {file.room!r} has no place in the order"))
            continue
        for item in imports_of(file):
            if not is_or_below(item.module, "fullshard") or file.room == FACE:
                continue
            target = room_of(item.full_name)
            if target not in ROOMS:
                target = FACE  # "from fullshard import fully_shard"
            if not _may_import(file.room, target, item.module):
                what = f"{file.room} may not import {item.full_name}"
                found.append(complain(file, item.line, what))
    return found


def _may_import(room: str, target: str, module: str) -> bool:
    if room == target:
        return True
    if room in PUBLIC_ONLY:
        return module in PUBLIC_MODULES or (room == "cli" and target == "train")
    return target != FACE and ROOMS.index(target) < ROOMS.index(room)


def imports_past_a_face(files: Sequence[Source]) -> list[str]:
    """Imports from inside of another sub-package, or of what its ``__init__`` does not import.

    ``fullshard.optim.flat`` is a sub-package of the room ``optim``; tests may look inside.
    """
    faces = {
        file.module: {item.name for item in imports_of(file)}
        for file in files
        if file.path.endswith("__init__.py") and file.module.count(".") == 2
    }
    return [
        complain(file, item.line, f"{item.full_name} is not in the face of {face}")
        for file in files
        for item in imports_of(file)
        for face in faces
        if is_or_below(item.module, face) and not is_or_below(file.module, face)
        if item.module != face or item.name not in faces[face]
    ]


def imports_of_torch(files: Iterable[Source], rooms: set[str]) -> list[str]:
    """Ways, through any number of our modules, from these rooms to torch."""
    by_name = {file.module: file for file in files}
    return [
        complain(file, 1, "imports torch: " + " -> ".join(chain))
        for file in by_name.values()
        if file.room in rooms and (chain := _way_to_torch(file, by_name, frozenset()))
    ]


def _way_to_torch(file: Source, by_name: dict[str, Source], seen: frozenset[str]) -> list[str]:
    seen |= {file.module}
    for item in imports_of(file):
        if is_or_below(item.module, "torch"):
            return [file.module, item.full_name]
        target = _our_module(item, by_name)
        if target is not None and target not in seen:
            rest = _way_to_torch(by_name[target], by_name, seen)
            if rest:
                return [file.module, *rest]
    return []


def _our_module(item: Import, by_name: dict[str, Source]) -> str | None:
    """Which of our modules an import runs; the face is nobody's (the order sees to that)."""
    for name in (item.full_name, item.module):
        if name in by_name and name != FACE:
            return name
    return None


def dotted_uses_outside_their_seam(files: Iterable[Source]) -> list[str]:
    """Imports of, and dotted ways to, the names of ``DOTTED_SEAMS`` where they may not be used."""
    found = []
    for file in files:
        uses = {(item.full_name, item.line) for item in imports_of(file)}
        uses |= {
            (ast.unparse(node), node.lineno)
            for node in ast.walk(file.tree)
            if isinstance(node, ast.Attribute)
        }
        found += [
            complain(file, line, f"{name} belongs to {' or '.join(places)}")
            for name, places in DOTTED_SEAMS.items()
            for line in sorted({line for use, line in uses if is_or_below(use, name)})
            if not file.is_in(places)
        ]
    return found


def uses_outside_their_seam(files: Iterable[Source]) -> list[str]:
    """Names of ``SEAMS`` in a file that may not use them; ``getattr(x, "name")`` counts too."""
    return [
        complain(file, line, f"{name} belongs to {' or '.join(SEAMS[name])}")
        for file in files
        for name, line in _names(file)
        if name in SEAMS and not file.is_in(SEAMS[name])
    ]


def _names(file: Source) -> Iterator[tuple[str, int]]:
    for node in ast.walk(file.tree):
        if isinstance(node, ast.Name):
            yield node.id, node.lineno
        elif isinstance(node, ast.Attribute):
            yield node.attr, node.lineno
        elif isinstance(node, ast.alias | ast.FunctionDef):
            yield node.name, node.lineno
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value, node.lineno


def collectives_outside_comm(files: Iterable[Source]) -> list[str]:
    """Collectives of ``torch.distributed`` anywhere but on the wire and in the trainer."""
    found = []
    for file in files:
        if file.is_in(("comm/", "train/", "_torch/")):
            continue
        aliases = set(_names_of_torch_distributed(file))
        for node in ast.walk(file.tree):
            if not isinstance(node, ast.Attribute) or node.attr not in COLLECTIVES:
                continue
            if ast.unparse(node.value) in aliases:
                found.append(complain(file, node.lineno, ast.unparse(node)))
        found += [
            complain(file, item.line, item.full_name)
            for item in imports_of(file)
            if is_or_below(item.module, "torch.distributed") and item.name in COLLECTIVES
        ]
    return found


def _names_of_torch_distributed(file: Source) -> Iterator[str]:
    """What ``torch.distributed`` is called in this file."""
    yield "torch.distributed"
    for node in ast.walk(file.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("torch.distributed") and alias.asname:
                    yield alias.asname
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            for alias in node.names:
                if alias.name in ("distributed", "distributed_c10d"):
                    yield alias.asname or alias.name


def import_cycles(files: Iterable[Source]) -> list[str]:
    """Rings of module-level imports, those for type checkers alone included."""
    by_name = {file.module: file for file in files}
    edges = {
        name: {
            target
            for item in imports_of(file)
            if not item.in_function
            if (target := _our_module(item, by_name)) is not None and target != name
        }
        for name, file in by_name.items()
    }
    # Take away what imports nothing that is left, until only the rings and their users remain;
    # then what nothing imports, until only the rings remain.
    for _ in range(2):
        while free := {name for name, targets in edges.items() if not targets}:
            edges = {name: edges[name] - free for name in edges.keys() - free}
        edges = {name: {other for other in edges if name in edges[other]} for name in edges}
    return [f"{name} and {', '.join(sorted(edges[name]))}" for name in sorted(edges)]


# What does not count as private, see ``fullshard._torch``; names of Python's, in the last line.
NOT_COUNTED = set(
    "torch.utils._pytree torch.utils._python_dispatch"
    " _parameters _modules _buffers _forward_hooks _base _is_view _schema _overloadname"
    " _checkpoint_wrapped_module _enabled _scale _per_optimizer_states"
    " _replace _asdict _getframe _current_frames".split()
)
OPERATORS = ("torch.", "aten.", "_aten.", "torch.ops.aten.")


def private_names_outside_their_seam(files: Iterable[Source]) -> list[str]:
    """Private names that ``_torch`` does not look up: imports, and attributes that are not ours."""
    files = [file for file in files if not file.is_in(("compat/",))]
    ours = NOT_COUNTED | {name for file in files for name in _defined(file)}
    found = []
    for file in files:
        for item in imports_of(file):
            is_private = "._" in item.full_name and is_or_below(item.module, "torch")
            if is_private and not item.for_typing and item.module not in NOT_COUNTED:
                found.append(complain(file, item.line, item.full_name))
        if file.room == "_torch":
            continue
        found += [
            complain(file, node.lineno, ast.unparse(node))
            for node in ast.walk(file.tree)
            if isinstance(node, ast.Attribute)
            and node.attr.startswith("_")
            and not node.attr.startswith("__")
            and node.attr not in ours
            and ast.unparse(node).removesuffix(node.attr) not in OPERATORS
        ]
    return found


def _defined(file: Source) -> Iterator[str]:
    """Names of functions, classes and variables, and attributes of ``self`` that are set."""
    for node in ast.walk(file.tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        elif isinstance(node, ast.ImportFrom):
            yield from (alias.asname or alias.name for alias in node.names)


def misplaced_imports(files: Iterable[Source]) -> list[str]:
    """Imports inside functions, unless of an extra or slow; and such imports elsewhere."""
    found = []
    for file in files:
        for item in imports_of(file):
            is_late = any(is_or_below(item.full_name, module) for module in OPTIONAL | SLOW)
            if item.in_function and not is_late:
                found.append(complain(file, item.line, f"{item.full_name} inside a function"))
            if is_late and file.module not in SLOW and not (item.in_function or item.for_typing):
                found.append(complain(file, item.line, f"{item.full_name} is slow or missing"))
    return found
