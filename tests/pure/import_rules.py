"""The import rules: each is a function from sources to a list of complaints.

Sources are parsed with ``ast``, never imported. ``test_imports.py`` checks the package.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2] / "src" / "fullshard"

# In import order: a module imports only from its own room and from earlier ones.
ROOMS = (
    "errors _version progress _torch layout schedule comm watch doctor device tensors engine optim"
    " wrap frontend checkpoint recover flat plan trace compat train cli"
).split()
FACE = "fullshard"  # the package's own __init__, which may import every room
PUBLIC_ONLY = {"train", "cli"}  # written like users' programs, as examples
PUBLIC_MODULES = {
    "fullshard",
    *(
        f"fullshard.{name}"
        for name in "optim checkpoint wrap compat errors plan progress trace doctor".split()
    ),
}
OPTIONAL = {  # packages of the extras, and a module of Python 3.14
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
SLOW = {"torch.distributed.checkpoint", "fullshard.checkpoint.dcp"}  # 0.1 s, rarely needed

NEW_OR_DEPRECATED = set(
    "all_gather_into_tensor reduce_scatter_tensor all_gather_single reduce_scatter_single".split()
)
COLLECTIVES = NEW_OR_DEPRECATED | set(
    "all_gather all_gather_object all_reduce all_to_all all_to_all_single barrier batch_isend_irecv"
    " broadcast broadcast_object_list gather irecv isend monitored_barrier recv reduce"
    " reduce_scatter scatter send".split()
)
# Names that only these files and folders may use; paths are relative to the package.
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


# The same for names that need their module to be recognized.
DOTTED_SEAMS = {
    "torch.distributed.fsdp": ("compat/",),
    "torch.distributed._composable": ("compat/", "_torch/"),  # its registry of functions
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
        """The dotted name of the module; that of a package for its ``__init__``."""
        dotted = ".".join(["fullshard", *Path(self.path).with_suffix("").parts])
        return dotted.removesuffix(".__init__")

    @property
    def room(self) -> str:
        """The room of the file."""
        return room_of(self.module)

    def is_in(self, places: Iterable[str]) -> bool:
        """Return whether the file is one of ``places``, or is inside one of them."""
        return any(self.path == place or self.path.startswith(place) for place in places)


@dataclass(frozen=True)
class Import:
    """One name that a file imports."""

    module: str  # absolute; for "from m import n" it is m
    name: str | None  # n, or None in "import m"
    line: int
    in_function: bool
    for_typing: bool

    @property
    def full_name(self) -> str:
        """The full dotted name: ``from torch import distributed`` gives torch.distributed."""
        return self.module if self.name is None else f"{self.module}.{self.name}"


def room_of(module: str) -> str:
    """Return the room of a module: ``layout`` for ``fullshard.layout.segment``."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else FACE


def package_sources() -> list[Source]:
    """Return all files of the package."""
    files = sorted(ROOT.rglob("*.py"))
    assert files, f"no sources under {ROOT}"
    return [source(path.relative_to(ROOT).as_posix(), path.read_text("utf-8")) for path in files]


def source(path: str, text: str) -> Source:
    """Return a parsed file; the self-tests pass short texts."""
    return Source(path, ast.parse(text, filename=path))


def imports_of(file: Source) -> Iterator[Import]:
    """Yield every import of the file, inside functions too."""
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
    """Return the absolute name of the module in ``from .x import y``."""
    if node.level == 0:
        return node.module or ""
    parts = file.module.split(".")
    up = node.level - (1 if file.path.endswith("__init__.py") else 0)
    base = parts[: len(parts) - up]
    return ".".join([*base, *([node.module] if node.module else [])])


def is_or_below(name: str, module: str) -> bool:
    """Return whether ``name`` is the module, or is inside it."""
    return name == module or name.startswith(f"{module}.")


def complain(file: Source, line: int, what: str) -> str:
    """Return a complaint that begins with file and line, which editors turn into a link."""
    return f"src/fullshard/{file.path}:{line}: {what}"


def imports_against_the_order(files: Iterable[Source]) -> list[str]:
    """Find imports of later rooms, and private imports by rooms that use public names only."""
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
    """Find imports from inside another sub-package, or of names that its ``__init__`` lacks.

    ``fullshard.optim.flat`` is a sub-package of the room ``optim``. Tests may import from inside.
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
    """Find chains of imports from these rooms to torch."""
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
    """Return the module of this package that an import runs; the top ``__init__`` is skipped."""
    for name in (item.full_name, item.module):
        if name in by_name and name != FACE:
            return name
    return None


def dotted_uses_outside_their_seam(files: Iterable[Source]) -> list[str]:
    """Find uses of ``DOTTED_SEAMS`` in other files: imports and dotted names."""
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
    """Find uses of ``SEAMS`` in other files; ``getattr(x, "name")`` counts too."""
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
    """Find collectives of ``torch.distributed`` outside of ``comm`` and the trainer."""
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
    """Yield the names of ``torch.distributed`` in this file."""
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
    """Find cycles of module-level imports, including imports for type checkers alone."""
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
    # Remove modules without imports until only cycles and their importers remain; then remove
    # modules that nothing imports, until only cycles remain.
    for _ in range(2):
        while free := {name for name, targets in edges.items() if not targets}:
            edges = {name: edges[name] - free for name in edges.keys() - free}
        edges = {name: {other for other in edges if name in edges[other]} for name in edges}
    return [f"{name} and {', '.join(sorted(edges[name]))}" for name in sorted(edges)]


# Names that do not count as private, see ``fullshard._torch``; the last line is Python's own.
NOT_COUNTED = set(
    "torch.utils._pytree torch.utils._python_dispatch"
    " _parameters _modules _buffers _forward_hooks _base _is_view _schema _overloadname"
    " _checkpoint_wrapped_module _enabled _scale _per_optimizer_states"
    " _replace _asdict _getframe _current_frames".split()
)
OPERATORS = ("torch.", "aten.", "_aten.", "torch.ops.aten.")


def private_names_outside_their_seam(files: Iterable[Source]) -> list[str]:
    """Find private names that bypass ``_torch``: imports, and attributes of foreign objects."""
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
    """Yield the names that a file defines, attributes of ``self`` included."""
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
    """Find imports inside functions, unless optional or slow, and module-level imports that are."""
    found = []
    for file in files:
        for item in imports_of(file):
            is_late = any(is_or_below(item.full_name, module) for module in OPTIONAL | SLOW)
            if item.in_function and not is_late:
                found.append(complain(file, item.line, f"{item.full_name} inside a function"))
            if is_late and file.module not in SLOW and not (item.in_function or item.for_typing):
                found.append(complain(file, item.line, f"{item.full_name} is slow or missing"))
    return found
