"""Mistakes made by a machine: implementations that were written before the catalogue, changed over their syntax trees.

MUTATIONS: each walks a tree and changes one place after the other; with it goes the name of the mistake it makes.
"""

import ast
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass

FLIP = "def _flip(x):\n    return x.reshape(x.shape[0], x.shape[2], x.shape[1], *x.shape[3:])\n"
VIEWS = {"view", "reshape", "unflatten"}
Change = Callable[[ast.AST], ast.AST | None]


@dataclass(frozen=True)
class Mutant:
    """Changed code; expected: the names of which one must be found; line: where it was changed."""

    mutation: str
    expected: frozenset[str]
    line: int
    code: str


def called(node: ast.AST) -> str:
    """The last name of what a call calls."""
    if not isinstance(node, ast.Call):
        return ""
    return node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id if isinstance(node.func, ast.Name) else ""


def _numbers(node: ast.Call) -> list[object]:
    try:
        return [ast.literal_eval(a) for a in node.args]
    except (ValueError, TypeError):
        return []


def _flipped(node: ast.AST, split: bool) -> ast.AST | None:
    turns = called(node) == "transpose" and isinstance(node.func, ast.Attribute) and _numbers(node) == [1, 2]
    if turns and (called(node.func.value) in VIEWS) == split:
        return ast.Call(ast.Name("_flip", ast.Load()), [node.func.value], [])
    if called(node) == "permute" and isinstance(node.func, ast.Attribute) and _numbers(node) == [0, 2, 1, 3]:
        return ast.Call(ast.Name("_flip", ast.Load()), [node.func.value], [])
    return None


def _axis(node: ast.AST, axis: int) -> ast.AST | None:
    if called(node) not in ("softmax", "_softmax"):
        return None
    changed = copy.deepcopy(node)
    for k in changed.keywords:
        if k.arg == "dim":
            k.value = ast.Constant(axis)
            return changed
    if changed.args and isinstance(changed.args[-1], ast.UnaryOp | ast.Constant):
        changed.args[-1] = ast.Constant(axis)
        return changed
    return None


def _no_softmax(node: ast.AST) -> ast.AST | None:
    if called(node) != "softmax":
        return None
    own = (
        isinstance(node.func, ast.Attribute)
        and not (isinstance(node.func.value, ast.Name) and node.func.value.id in ("F", "torch"))
        and not (isinstance(node.func.value, ast.Attribute) and node.func.value.attr == "functional")
    )
    return node.func.value if own else node.args[0]


def _twice(node: ast.AST) -> ast.AST | None:
    if called(node) != "softmax":
        return None
    return ast.Call(ast.Attribute(copy.deepcopy(node), "softmax", ast.Load()), [ast.Constant(-1)], [])


def _is_sqrt(node: ast.AST) -> bool:
    return called(node) == "sqrt" or (
        isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow) and _half(node.right) is not None
    )


def _half(node: ast.AST) -> float | None:
    try:
        value = ast.literal_eval(node)
    except (ValueError, TypeError):
        return None
    return value if value in (0.5, -0.5) else None


def _no_root(node: ast.AST) -> ast.AST | None:
    if called(node) == "sqrt" and node.args:
        return node.args[0]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow) and (power := _half(node.right)) is not None:
        return ast.BinOp(node.left, ast.Pow(), ast.Constant(2 * power))
    return None


def _no_scale(node: ast.AST) -> ast.AST | None:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div | ast.Mult):
        names = {
            n.attr if isinstance(n, ast.Attribute) else n.id
            for n in ast.walk(node.right)
            if isinstance(n, ast.Attribute | ast.Name)
        }
        if (_is_sqrt(node.right) and isinstance(node.op, ast.Div)) or names & {"scale", "scaling"}:
            return node.left
    return None


def _inverted(node: ast.AST) -> ast.AST | None:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div) and _is_sqrt(node.right):
        return ast.BinOp(node.left, ast.Mult(), node.right)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow) and _half(node.right) == -0.5:
        return ast.BinOp(node.left, ast.Pow(), ast.Constant(0.5))
    return None


def _other_projection(node: ast.AST, of: str, by: str) -> ast.AST | None:
    """self.v_proj(x) → self.k_proj(x), for every way in which they are named."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        name = node.func.attr
        for pair in ("{}_proj", "{}_linear", "W_{}", "w{}", "to_{}", "{}_lin"):
            if name == pair.format(of):
                changed = copy.deepcopy(node)
                changed.func.attr = pair.format(by)
                return changed
        words = {"q": "query", "k": "key", "v": "value"}
        if name == words[of]:
            changed = copy.deepcopy(node)
            changed.func.attr = words[by]
            return changed
    return None


def _no_out(node: ast.AST) -> ast.AST | None:
    names = ("o_proj", "c_proj", "o_linear", "W_o", "wo", "to_out", "out_lin", "out_proj", "proj")
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and len(node.args) == 1 and node.func.attr in names:
        return node.args[0]
    return None


def _always_drops(node: ast.AST) -> ast.AST | None:
    if called(node) == "dropout":
        changed = copy.deepcopy(node)
        for k in changed.keywords:
            if k.arg == "training":
                k.value = ast.Constant(True)
                return changed
    return None


def _mask_equals(node: ast.AST) -> ast.AST | None:
    if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Eq) and ast.unparse(node.comparators[0]) == "0":
        return ast.Compare(node.left, node.ops, [ast.Constant(1)])
    return None


def _tiny(node: ast.AST) -> ast.AST | None:
    minus = isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and isinstance(node.operand, ast.Constant)
    if minus and isinstance(node.operand.value, float) and node.operand.value >= 1e5:
        return ast.Constant(-1e-9)
    return None


def _diagonal(node: ast.AST, by: int) -> ast.AST | None:
    if called(node) not in ("triu", "tril"):
        return None
    changed = copy.deepcopy(node)
    for k in changed.keywords:
        if k.arg == "diagonal":
            k.value = ast.Constant(ast.literal_eval(k.value) + by)
            return changed
    place = (
        1
        if isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name) and node.func.value.id == "torch"
        else 0
    )
    try:
        now = ast.literal_eval(changed.args[place]) if len(changed.args) > place else 0
    except ValueError:
        return None
    changed.args[place:] = [ast.Constant(now + by)]
    return changed


def _tiled(node: ast.AST) -> ast.AST | None:
    if called(node) == "repeat_interleave" and isinstance(node.func, ast.Attribute) and len(node.args) == 2:
        one = ast.Constant(1)
        return ast.Call(ast.Attribute(node.func.value, "repeat", ast.Load()), [one, node.args[0], one, one], [])
    return None


def _kept_not(node: ast.AST) -> ast.AST | None:
    """x = x.masked_fill(…) whose result is thrown away."""
    if isinstance(node, ast.Assign) and called(node.value) == "masked_fill":
        return ast.Expr(node.value)
    return None


MUTATIONS: dict[str, tuple[Change, set[str]]] = {
    "split by reshape": (lambda n: _flipped(n, True), {"split_without_transpose", "merge_without_transpose"}),
    "merge by reshape": (lambda n: _flipped(n, False), {"merge_without_transpose", "split_without_transpose", "k_reshaped"}),
    "softmax over queries": (lambda n: _axis(n, -2), {"softmax_axis"}),
    "softmax over heads": (lambda n: _axis(n, 1), {"softmax_axis"}),
    "softmax gone": (_no_softmax, {"softmax_missing"}),
    "softmax twice": (_twice, {"softmax_twice"}),
    "root gone": (_no_root, {"scale_d_k", "scale_twice"}),
    "scale gone": (_no_scale, {"no_scale"}),
    "scale inverted": (_inverted, {"scale_inverted"}),
    "v by k": (lambda n: _other_projection(n, "v", "k"), {"k_as_v"}),
    "k by q": (lambda n: _other_projection(n, "k", "q"), {"shared_projection"}),
    "output projection gone": (_no_out, {"out_missing"}),
    "drops always": (_always_drops, {"dropout_in_eval"}),
    "mask backwards": (_mask_equals, {"mask_backwards"}),
    "mask tiny": (_tiny, {"mask_too_small", "mask_zero"}),
    "diagonal up": (lambda n: _diagonal(n, 1), {"causal_off_by_one"}),
    "diagonal down": (lambda n: _diagonal(n, -1), {"causal_off_by_one"}),
    "heads tiled": (_tiled, {"gqa_order", "lens_tiled"}),
    "masked_fill lost": (_kept_not, {"mask_ignored", "causal_missing", "result_discarded", "padding_on_queries"}),
}


class _One(ast.NodeTransformer):
    """Changes the nth place."""

    def __init__(self, change: Change, nth: int) -> None:
        self.change, self.left, self.line = change, nth, 0

    def visit(self, node: ast.AST) -> ast.AST:
        changed = self.change(node)
        if changed is not None:
            if self.left == 0:
                self.left, self.line = -1, getattr(node, "lineno", 0)
                return ast.copy_location(changed, node)
            self.left -= 1
        return self.generic_visit(node)


def mutants(code: str, names: set[str]) -> Iterator[Mutant]:
    """Every mutation in every place of the classes and functions with these names."""
    for mutation, (change, expected) in MUTATIONS.items():
        for nth in range(20):
            tree, line = ast.parse(code), 0
            left = nth
            for i, node in enumerate(tree.body):
                if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name in names and left >= 0:
                    one = _One(change, left)
                    tree.body[i] = one.visit(node)
                    left, line = one.left, one.line or line
            if left >= 0:
                break
            header = next((i for i, n in enumerate(tree.body) if not (isinstance(n, ast.ImportFrom) and n.module == "__future__") and not
                           (isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant))), 0)  # fmt: skip
            tree.body[header:header] = ast.parse(FLIP).body
            yield Mutant(mutation, frozenset(expected), line, ast.unparse(ast.fix_missing_locations(tree)))
