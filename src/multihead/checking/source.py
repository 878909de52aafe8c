"""The author's own lines: which files a module comes from, whole statements by line, and a line put right as a diff."""

from __future__ import annotations

import ast
import difflib
import inspect
import linecache
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

TORCH = str(Path(torch.__file__).parent)
OURS = str(Path(__file__).parent)

PURE = {
    "masked_fill", "softmax", "transpose", "permute", "view", "reshape", "contiguous", "unsqueeze", "squeeze",
    "repeat_interleave", "flatten", "type_as", "masked_scatter", "log_softmax", "unflatten",
}  # fmt: skip


@dataclass(frozen=True)
class Place:
    """A statement in a file: its first and last line, counted from 1, and its text."""

    file: str
    line: int
    last: int
    text: str


@dataclass(frozen=True)
class Unit:
    """A piece of a file that belongs to a module: a class or function, its lines and its syntax tree."""

    file: str
    first: int
    last: int
    tree: ast.AST


class Source:
    """The code behind a module: its class, the classes of its parts, and the functions of the same files that they may call."""

    def __init__(self, module: nn.Module, function: Any = None) -> None:
        kinds = [function] if function is not None else []
        kinds += [kind for kind in dict.fromkeys(k for m in module.modules() for k in type(m).__mro__) if _theirs(kind)]
        self.units = [unit for kind in kinds for unit in _unit(kind)]
        self.files = {unit.file for unit in self.units}
        functions = [f for file in self.files for f in _functions(file)]
        self.units += [f for f in functions if not any(f.file == u.file and u.first <= f.first <= u.last for u in self.units)]

    def place(self, file: str, line: int) -> Place:
        """The whole simple statement around a line."""
        found = next(
            (s for u in self.units if u.file == file for s in _statements(u.tree) if s.lineno <= line <= _end(s)), None
        )
        first, last = (line, line) if found is None else (found.lineno, _end(found))
        return Place(file, first, last, text(file, first, last))

    def grep(self, pattern: str, inside: str = "") -> list[Place]:
        """The statements whose text matches; inside: the name of the function around them."""
        found: list[Place] = []
        for unit in self.units:
            for node in _within(unit.tree, inside):
                for s in _statements(node):
                    said = text(unit.file, s.lineno, _end(s))
                    if re.search(pattern, said):
                        found.append(Place(unit.file, s.lineno, _end(s), said))
        return list(dict.fromkeys(found))

    def assigned(self, name: str) -> Place | None:
        """Where self.name is set: by an assignment, or as a buffer or parameter that is registered."""
        for unit in self.units:
            for s in _statements(unit.tree):
                targets = s.targets if isinstance(s, ast.Assign) else [s.target] if isinstance(s, ast.AnnAssign) else []
                attributes = [n.attr for t in targets for n in ast.walk(t) if isinstance(n, ast.Attribute)]
                called = s.value if isinstance(s, ast.Expr) and isinstance(s.value, ast.Call) else None
                registered = called is not None and any(isinstance(a, ast.Constant) and a.value == name for a in called.args)
                if name in attributes or registered:
                    return Place(unit.file, s.lineno, _end(s), text(unit.file, s.lineno, _end(s)))
        return None

    def definition(self, name: str) -> Place | None:
        """The line `def name` or `class name`."""
        for unit in self.units:
            for node in ast.walk(unit.tree):
                if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
                    return Place(unit.file, node.lineno, node.lineno, text(unit.file, node.lineno, node.lineno))
        return None

    def discarded(self) -> list[Place]:
        """Statements that compute a tensor and do nothing with it."""
        found = [
            (u, s) for u in self.units for s in _statements(u.tree) if isinstance(s, ast.Expr) and isinstance(s.value, ast.Call)
        ]
        return [
            Place(u.file, s.lineno, _end(s), text(u.file, s.lineno, _end(s)))
            for u, s in found
            if isinstance(s.value, ast.Call) and isinstance(s.value.func, ast.Attribute) and s.value.func.attr in PURE
        ]

    def words(self) -> str:
        """Docstrings and comments of the units, for what the author claims."""
        said: list[str] = []
        for unit in self.units:
            lines = text(unit.file, unit.first, unit.last)
            said += re.findall(r"#.*", lines) + re.findall(r'"""(?:.|\n)*?"""|' + r"'''(?:.|\n)*?'''", lines)
        return "\n".join(said)


def text(file: str, first: int, last: int) -> str:
    return "".join(linecache.getlines(file)[first - 1 : last]).rstrip("\n")


def diff(place: Place, swaps: tuple[tuple[str, str], ...]) -> str | None:
    """The statement with the first swap that changes it and leaves it Python; None where none does."""
    for pattern, replacement in swaps:
        changed = re.sub(pattern, replacement, place.text, flags=re.M)
        if changed != place.text and _parses(changed):
            return lines_apart(place.text, changed)
    return None


def lines_apart(old: str, new: str) -> str:
    """Two texts as a diff without context."""
    rows = difflib.ndiff(textwrap.dedent(old).splitlines(), textwrap.dedent(new).splitlines())
    return "\n".join(f"{row[0]} {row[2:]}" for row in rows if row[0] in "+-")


def _parses(code: str) -> bool:
    code = textwrap.dedent(code)
    code = f"{code}\n    pass" if code.rstrip().endswith(":") else code
    try:
        ast.parse(f"def f():\n{textwrap.indent(code, '    ')}")
    except SyntaxError:
        return False
    return True


def _theirs(kind: type) -> bool:
    try:
        file = inspect.getsourcefile(kind) or ""
    except (TypeError, OSError):
        return False
    return not file.startswith((TORCH, OURS))


def _unit(kind: Any) -> Iterator[Unit]:
    try:
        lines, first = inspect.getsourcelines(kind)
        file = inspect.getsourcefile(kind) or ""
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, TypeError, SyntaxError, IndentationError):
        return
    ast.increment_lineno(tree, first - 1)
    yield Unit(file, first, first + len(lines) - 1, tree)


def _functions(file: str) -> Iterator[Unit]:
    """The functions at the top of a file."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield Unit(file, node.lineno, _end(node), node)


def _within(tree: ast.AST, name: str) -> Iterator[ast.AST]:
    if not name:
        yield tree
    for node in ast.walk(tree):
        if name and isinstance(node, ast.FunctionDef) and re.fullmatch(name, node.name):
            yield node


def _statements(tree: ast.AST) -> Iterator[ast.stmt]:
    """Statements that hold no other statements."""
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt) and not hasattr(node, "body"):
            yield node


def _end(node: ast.stmt) -> int:
    return node.end_lineno or node.lineno
