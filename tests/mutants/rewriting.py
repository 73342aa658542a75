"""A copy of ``src`` that can note the blocks it enters, and can have one defect switched on.

All mutants are in the same copy; the environment variable ``FULLSHARD_MUTANT`` switches one on.
"""

from __future__ import annotations

import ast
import copy
import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

MODULE = "fullshard_mutants"
"""Name of the module that the copy imports; the file is next to the package."""

_SOURCE = """\
import mmap
import os

_path = os.environ.get("FULLSHARD_ENTERED")
entered = mmap.mmap(os.open(_path, os.O_RDWR), 0) if _path else bytearray({size})
mutant = int(os.environ.get("FULLSHARD_MUTANT", "-1"))
"""

_OPPOSITE: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.And: ast.Or,
    ast.Or: ast.And,
}


@dataclass(frozen=True)
class Mutant:
    """One possible defect.

    Attributes:
        number: its index in the list of all mutants.
        block: number of the block that it is in.
        place: file and line.
        change: the kind of change.
    """

    number: int
    block: int
    place: str
    change: str


@dataclass
class Inventory:
    """The blocks and the possible mutants of the source."""

    num_blocks: int
    mutants: list[Mutant]


def rewrite(source: Path, target: Path, chosen: Collection[int], *, marked: bool) -> Inventory:
    """Copy the package at ``source`` to ``target``, rewritten.

    Args:
        source: folder of the package.
        target: folder of the copy.
        chosen: numbers of the mutants that the copy can have in force.
        marked: whether the copy notes which blocks it enters.
    """
    found = Inventory(0, [])
    for path in sorted(source.rglob("*.py")):
        rewriter = _Rewriter(str(path.relative_to(source)), found, chosen, marked=marked)
        tree = rewriter.visit(ast.parse(path.read_text()))
        copied = target / path.relative_to(source)
        copied.parent.mkdir(parents=True, exist_ok=True)
        copied.write_text(ast.unparse(ast.fix_missing_locations(tree)) + "\n")
    target.with_name(f"{MODULE}.py").write_text(_SOURCE.format(size=found.num_blocks))
    return found


def sample(mutants: Sequence[Mutant], count: int, seed: int = 0) -> list[Mutant]:
    """Return ``count`` of ``mutants``, drawn at random; a smaller count gives a prefix."""
    return random.Random(seed).sample(mutants, len(mutants))[:count]


class _Rewriter(ast.NodeTransformer):
    def __init__(
        self, path: str, found: Inventory, chosen: Collection[int], *, marked: bool
    ) -> None:
        self._path = path
        self._found = found
        self._chosen = chosen
        self._marked = marked
        self._block: int | None = None  # None at the top level of a module or class

    def visit_Module(self, node: ast.Module) -> ast.AST:
        self.generic_visit(node)
        first = 0
        while first < len(node.body) and _must_come_first(node.body[first]):
            first += 1
        names = [ast.alias("entered", "__entered__"), ast.alias("mutant", "__mutant__")]
        node.body.insert(first, ast.ImportFrom(MODULE, names, 0))
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        before, self._block = self._block, None
        node.body = [self.visit(each) for each in node.body]
        self._block = before
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return self._function(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AST:
        return self._function(node)

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> ast.AST:
        if any("jit" in ast.unparse(each) for each in node.decorator_list):
            return node  # a compiler reads its source
        documented = [node.body.pop(0)] if ast.get_docstring(node, clean=False) else []
        node.body = [*documented, *self._entering(node.body)] if node.body else documented
        return node

    def _entering(self, body: list[ast.stmt]) -> list[ast.stmt]:
        """Return ``body`` as a block of its own."""
        before, self._block = self._block, self._found.num_blocks
        self._found.num_blocks += 1
        mark = ast.parse(f"__entered__[{self._block}] = 1").body if self._marked else []
        new: list[ast.stmt] = [*mark, *(self.visit(each) for each in body)]
        self._block = before
        return new

    def visit_If(self, node: ast.If) -> ast.AST:
        has_opposite = isinstance(node.test, ast.Compare | ast.UnaryOp)
        node.test = self.visit(node.test)
        if not has_opposite:
            negated = self._mutant(node.test, "if not", lambda new: ast.UnaryOp(ast.Not(), new))
            node.test = negated
        node.body = self._entering(node.body)
        node.orelse = self._entering(node.orelse) if node.orelse else []
        return node

    def visit_For(self, node: ast.For) -> ast.AST:
        node.iter = self.visit(node.iter)
        node.body = self._entering(node.body)
        node.orelse = self._entering(node.orelse) if node.orelse else []
        return node

    def visit_While(self, node: ast.While) -> ast.AST:
        node.test = self.visit(node.test)
        node.body = self._entering(node.body)
        return node

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> ast.AST:
        node.body = self._entering(node.body)
        return node

    def visit_match_case(self, node: ast.match_case) -> ast.AST:
        node.body = self._entering(node.body)
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        if node.value is not None:
            node.value = self.visit(node.value)
        return node

    def visit_arguments(self, node: ast.arguments) -> ast.AST:
        return node

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        return node

    def visit_Raise(self, node: ast.Raise) -> ast.AST:
        return node

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.generic_visit(node)
        if len(node.ops) > 1:
            return node
        return self._mutant(node, "comparison", _with_opposite("ops"))

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        self.generic_visit(node)
        return self._mutant(node, "and, or", _with_opposite("op"))

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        may_be_text = isinstance(node.left, ast.Constant | ast.JoinedStr)
        self.generic_visit(node)
        if type(node.op) not in _OPPOSITE or may_be_text:
            return node
        return self._mutant(node, "arithmetic", _with_opposite("op"))

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        self.generic_visit(node)
        if not isinstance(node.op, ast.Not):
            return node
        return self._mutant(node, "without not", lambda new: new.operand)

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if isinstance(node.value, bool):
            return self._mutant(node, "constant", lambda _: ast.Constant(not node.value))
        if isinstance(node.value, int):
            return self._mutant(node, "constant", lambda _: ast.Constant(node.value + 1))
        return node

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        if not isinstance(node.value, ast.Call):
            return node
        self.generic_visit(node)
        number = self._number(node, "call left out")
        if number not in self._chosen:
            return node
        return ast.If(_mutant_is(number, ast.NotEq()), [node], [])

    def _mutant(
        self, node: ast.expr, change: str, make: Callable[[ast.expr], ast.expr]
    ) -> ast.expr:
        number = self._number(node, change)
        if number not in self._chosen:
            return node
        new = ast.IfExp(_mutant_is(number, ast.Eq()), make(copy.deepcopy(node)), node)
        return ast.copy_location(new, node)

    def _number(self, node: ast.AST, change: str) -> int:
        """Return the number of a possible mutant; -1 at the top level."""
        if self._block is None:
            return -1
        number = len(self._found.mutants)
        place = f"{self._path}:{getattr(node, 'lineno', 0)}"
        self._found.mutants.append(Mutant(number, self._block, place, change))
        return number


def _with_opposite(name: str) -> Callable[[ast.expr], ast.expr]:
    def make(node: ast.expr) -> ast.expr:
        value = getattr(node, name)
        if isinstance(value, list):
            setattr(node, name, [_OPPOSITE[type(each)]() for each in value])
        else:
            setattr(node, name, _OPPOSITE[type(value)]())
        return node

    return make


def _mutant_is(number: int, operator: ast.cmpop) -> ast.expr:
    return ast.Compare(ast.Name("__mutant__", ast.Load()), [operator], [ast.Constant(number)])


def _must_come_first(node: ast.stmt) -> bool:
    is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return is_text or (isinstance(node, ast.ImportFrom) and node.module == "__future__")
