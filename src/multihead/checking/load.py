"""A file, run statement by statement: what it lacks is supplied or named, what fails in it is a finding, the rest goes on."""

from __future__ import annotations

import ast
import builtins
import linecache
import math
import sys
import types
import typing
import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .build import SIZES, Anything
from .mistakes import CATALOGUE, Text
from .report import Finding
from .source import Place, lines_apart, text

DEFINES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)
WIDE = dict(zip("（），：；【】“”‘’＝。　", "(),:;[]\"\"''=. ", strict=True))
TYPES = ("Optional", "Tuple", "List", "Dict", "Union", "Any", "Callable", "Sequence", "Iterable")
IMPORTS = {
    "torch": "import torch", "nn": "from torch import nn", "F": "import torch.nn.functional as F", "math": "import math",
    "Tensor": "from torch import Tensor", "np": "import numpy as np", "numpy": "import numpy", "copy": "import copy",
    "rearrange": "from einops import rearrange", "repeat": "from einops import repeat", "einsum": "from torch import einsum",
    "reduce": "from einops import reduce", "partial": "from functools import partial",
    "dataclass": "from dataclasses import dataclass",
    "Module": "from torch.nn import Module", "Linear": "from torch.nn import Linear", "Dropout": "from torch.nn import Dropout",
    "Parameter": "from torch.nn import Parameter", "warnings": "import warnings", "os": "import os", "sys": "import sys",
    "softmax": "from torch.nn.functional import softmax", "sqrt": "from math import sqrt",
    **{n: f"from typing import {n}" for n in TYPES},
}  # fmt: skip


class File:
    """A user's file as a module, with what was found on the way."""

    def __init__(self, path: str, tell: Callable[[int], None] = lambda line: None) -> None:
        self.path, self.tell = path, tell
        self.findings: list[Finding] = []
        self.module = types.ModuleType(Path(path).stem or "checked")
        self.module.__file__ = path
        self.code = Path(path).read_text("utf-8", "replace")

    def run(self, definitions_only: bool = False) -> types.ModuleType:
        """Execute it; definitions_only leaves out statements that do something."""
        tree = self._parsed()
        if tree is None:
            return self.module
        linecache.cache[self.path] = len(self.code), None, self.code.splitlines(keepends=True), self.path
        sys.modules[self.module.__name__] = self.module
        sys.path.insert(0, str(Path(self.path).parent))
        self._supply(tree)
        for node in tree.body:
            self.tell(node.lineno)
            if definitions_only and not isinstance(node, (*DEFINES, ast.Assign, ast.AnnAssign)):
                continue
            if isinstance(node, ast.If) and "__main__" in ast.unparse(node.test):
                continue
            if not self._statement(node):
                break
        self.tell(0)
        return self.module

    # ---- parsing ----------------------------------------------------------------------------------------------------

    def _parsed(self) -> ast.Module | None:
        """The tree; of a file with full-width punctuation, of the file as it was meant."""
        self.code = self.code.lstrip("\ufeff").replace("\r\n", "\n")
        wide: list[tuple[int, str, str]] = []
        for _ in range(200):
            try:
                tree = ast.parse(self.code, self.path)
                break
            except SyntaxError as error:
                mended = _mended(self.code, error)
                if mended is None:
                    self._syntax(error)
                    return None
                wide.append(
                    (
                        error.lineno or 1,
                        self.code.splitlines()[(error.lineno or 1) - 1],
                        mended.splitlines()[(error.lineno or 1) - 1],
                    )
                )
                self.code = mended
            except (ValueError, RecursionError, MemoryError) as error:
                self._found("syntax", f"{type(error).__name__}: {error}", 1)
                return None
        else:
            return None
        if wide:
            line = wide[0][0]
            old, new = next(w[1] for w in wide if w[0] == line), [w[2] for w in wide if w[0] == line][-1]
            said = Text(
                f"{len(wide)} characters in {len({w[0] for w in wide})} lines; the rest was checked as if they were mended",
                f"{len({w[0] for w in wide})} 行中共 {len(wide)} 处；其余部分按改正后的代码检查",
            )
            self._found("punctuation", said, line, old, lines_apart(old, new))
        return tree

    def _syntax(self, error: SyntaxError) -> None:
        line = error.lineno or 1
        rows = self.code.splitlines()
        said = f"{error.msg}" + (f", column {error.offset}" if error.offset else "")
        self._found("syntax", said, line, rows[line - 1] if 0 < line <= len(rows) else "")

    # ---- names ------------------------------------------------------------------------------------------------------

    def _supply(self, tree: ast.Module) -> None:
        """Names that are used and never made: the usual imports, what a textbook's package has, or a stand-in."""
        lacking: dict[str, list[tuple[str, int]]] = {"import": [], "stand-in": [], "unknown": []}
        for name, line in sorted(undefined(tree).items(), key=lambda x: x[1]):
            if name in IMPORTS and self._try(IMPORTS[name]):
                lacking["import"].append((name, line))
            elif (stand := stand_in(name)) is not None:
                setattr(self.module, name, stand)
                lacking["stand-in"].append((name, line))
            else:
                lacking["unknown"].append((name, line))
        for kind, found in lacking.items():
            if found:
                names, line = ", ".join(n for n, _ in found), found[0][1]
                said = {
                    "import": Text(f"{names}: was checked with these imports", f"{names}：检查时补上了这些导入"),
                    "stand-in": Text(f"{names}: was checked with stand-ins of ours", f"{names}：检查时用了我们的替代实现"),
                    "unknown": Text(names, names),
                }[kind]
                fix = "\n".join(f"+ {IMPORTS[n]}" for n, _ in found) if kind == "import" else None
                self._found("undefined", said, line, fix=fix)
                if kind == "stand-in":
                    self.findings[-1] = replace(self.findings[-1], level="note")

    def _try(self, statement: str) -> bool:
        try:
            exec(statement, self.module.__dict__)
        except ImportError:
            return False
        return True

    # ---- running ----------------------------------------------------------------------------------------------------

    def _statement(self, node: ast.stmt) -> bool:
        """Run one; returns whether to go on."""
        if isinstance(node, ast.Import | ast.ImportFrom):
            self._import(node)
            return True
        code = compile(ast.Module([node], []), self.path, "exec", dont_inherit=True, flags=self._flags())
        try:
            exec(code, self.module.__dict__)
        except SystemExit as error:
            self._found("import_runs", f"SystemExit({error.code!r})", node.lineno)
        except MemoryError:
            self._found("limit", Text("MemoryError at import", "导入时内存不足（MemoryError）"), node.lineno)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            said = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            self._found("import_runs", said, node.lineno)
        return True

    def _flags(self) -> int:
        import __future__

        names = [
            a.name
            for n in ast.parse(self.code).body
            if isinstance(n, ast.ImportFrom) and n.module == "__future__"
            for a in n.names
        ]
        return sum(getattr(__future__, n).compiler_flag for n in names if hasattr(__future__, n))

    def _import(self, node: ast.Import | ast.ImportFrom) -> None:
        if isinstance(node, ast.ImportFrom) and node.module == "__future__":
            return
        try:
            exec(compile(ast.Module([node], []), self.path, "exec"), self.module.__dict__)
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
            names = [a.asname or a.name.partition(".")[0] for a in node.names]
            used = {n.id for n in ast.walk(ast.parse(self.code)) if isinstance(n, ast.Name)}
            for name in names:
                setattr(self.module, name, stand_in(name) or _Missing(name))
            if used & set(names):
                self._found("import_fails", said, node.lineno)
            else:
                needless = Text(f"{said}; the name is never used: delete the line", f"{said}；这个名字从未用到，删掉这一行即可")
                self._found("import_fails", needless, node.lineno, fix=f"- {text(self.path, node.lineno, node.lineno)}")
        except SystemExit as error:
            self._found("import_runs", f"SystemExit({error.code!r})", node.lineno)

    def _found(self, name: str, said: str | Text, line: int, row: str | None = None, fix: str | None = None) -> None:
        evidence = said if isinstance(said, Text) else Text(said, said)
        rows = self.code.splitlines()
        row = row if row is not None else rows[line - 1] if 0 < line <= len(rows) else ""
        self.findings.append(Finding(name, CATALOGUE[name].level, True, evidence, Place(self.path, line, line, row), fix))


class _Missing:
    """Stands for a name whose import failed; whoever uses it hears so."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        found = stand_in(name)
        return found if found is not None else _Missing(f"{self._name}.{name}")

    def __call__(self, *args: Any, **_: Any) -> Any:
        if len(args) == 1 and callable(args[0]):  # a decorator: the function as it is
            return args[0]
        raise NameError(f"name '{self._name}' is not defined: its import failed")


def _mended(code: str, error: SyntaxError) -> str | None:
    """The code with the full-width character that the error points at as the plain one."""
    rows, line = code.splitlines(), (error.lineno or 0) - 1
    if not 0 <= line < len(rows):
        return None
    row = rows[line]
    at = next(
        (i for i in _columns(row, (error.offset or 1) - 1) if row[i] in WIDE or unicodedata.east_asian_width(row[i]) == "F"),
        None,
    )
    if at is None:
        return None
    plain = WIDE.get(row[at]) or unicodedata.normalize("NFKC", row[at])
    rows[line] = row[:at] + plain + row[at + 1 :]
    return "\n".join(rows) + "\n"


def _columns(row: str, offset: int) -> Iterator[int]:
    """The error's column, then all others, outside comments."""
    end = row.find("#") if "#" in row else len(row)
    if 0 <= offset < end:
        yield offset
    yield from range(end)


def undefined(tree: ast.Module) -> dict[str, int]:
    """Names that are read somewhere and bound nowhere, with the line where they are read first."""
    bound, read = set(dir(builtins)) | {"__file__", "__name__", "__class__"}, dict[str, int]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            if isinstance(node.ctx, ast.Load):
                read[node.id] = min(node.lineno, read.get(node.id, node.lineno))
            else:
                bound.add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            bound.add(node.name)
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            bound |= {a.asname or a.name.partition(".")[0] for a in node.names}
            if any(a.name == "*" for a in node.names):
                return {}
        elif isinstance(node, ast.ExceptHandler) and node.name:
            bound.add(node.name)
    return {n: line for n, line in read.items() if n not in bound}


# ---- what textbooks bring along ---------------------------------------------------------------------------------------


def masked_softmax(scores: Tensor, valid_lens: Tensor | None) -> Tensor:
    """d2l's: keys from the valid length on get −1e6."""
    if valid_lens is None:
        return scores.softmax(-1)
    lens = valid_lens.repeat_interleave(scores.shape[1]) if valid_lens.ndim == 1 else valid_lens.reshape(-1)
    flat = scores.reshape(-1, scores.shape[-1])
    beyond = torch.arange(flat.shape[1], device=scores.device) >= lens[:, None]
    return flat.masked_fill(beyond, -1e6).reshape(scores.shape).softmax(-1)


class DotProductAttention(nn.Module):
    """d2l's."""

    def __init__(self, dropout: float = 0.0, **_: Any) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)

    def forward(self, queries: Tensor, keys: Tensor, values: Tensor, valid_lens: Tensor | None = None) -> Tensor:
        """queries [batch, q, d], keys and values [batch, k, d]"""
        scores = torch.bmm(queries, keys.transpose(1, 2)) / math.sqrt(queries.shape[-1])
        return torch.bmm(self.dropout(masked_softmax(scores, valid_lens)), values)


def transpose_qkv(x: Tensor, num_heads: int) -> Tensor:
    """d2l's: [batch, tokens, hiddens] → [batch · heads, tokens, dim]"""
    x = x.reshape(x.shape[0], x.shape[1], num_heads, -1).permute(0, 2, 1, 3)
    return x.reshape(-1, x.shape[2], x.shape[3])


def transpose_output(x: Tensor, num_heads: int) -> Tensor:
    """d2l's: back again."""
    x = x.reshape(-1, num_heads, x.shape[1], x.shape[2]).permute(0, 2, 1, 3)
    return x.reshape(x.shape[0], x.shape[1], -1)


D2L = {
    "DotProductAttention": DotProductAttention, "masked_softmax": masked_softmax, "transpose_qkv": transpose_qkv,
    "transpose_output": transpose_output, "Module": nn.Module, "torch": torch, "nn": nn, "F": F,
}  # fmt: skip


class _Args(Anything):
    """A configuration of our sizes, whatever it is made with."""

    def __init__(self, *_: Any, **given: Any) -> None:
        super().__init__(SIZES[0], given)


def stand_in(name: str) -> Any:
    """What usually goes by this name in fragments of notes and textbooks."""
    if name == "d2l":
        return types.SimpleNamespace(**D2L)
    if name in D2L and name not in ("torch", "nn", "F", "Module"):
        return D2L[name]
    if name.lower().endswith(("args", "config", "configuration")) and name[:1].isupper():
        return type(name, (_Args,), {})
    if name in ("Optional", "Tuple", "List", "Dict", "Union"):
        return getattr(typing, name)
    return None
