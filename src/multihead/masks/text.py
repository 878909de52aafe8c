"""A mask written as text, as one types it in a shell: "causal & window(1024)"."""

from __future__ import annotations

import ast
import difflib
from collections.abc import Callable
from typing import Any

from .algebra import Mask
from .kinds import Causal, Documents, Lengths, Prefix, ValidLens, Window

KINDS: dict[str, Callable[..., Mask]] = {
    "causal": Causal,
    "window": Window,
    "lengths": Lengths,
    "documents": Documents.from_lengths,
    "prefix": Prefix,
    "valid_lens": ValidLens,
}


def parse(text: str) -> Mask:
    """The mask that a text names: causal, window(w, ahead=n), lengths([…]), documents([…]), prefix(n), valid_lens([…]), & | ~.

    Only names, numbers, lists and these signs are read; nothing is executed.
    """
    try:
        return _mask(ast.parse(text.strip(), mode="eval").body, text)
    except SyntaxError:
        raise ValueError(f'mask "{text}" cannot be read; {_advice()}') from None


def _mask(node: ast.expr, text: str) -> Mask:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitAnd | ast.BitOr):
        left, right = _mask(node.left, text), _mask(node.right, text)
        return left & right if isinstance(node.op, ast.BitAnd) else left | right
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Invert):
        return ~_mask(node.operand, text)
    if isinstance(node, ast.Name):
        return _made(node.id, [], {}, text)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and all(k.arg for k in node.keywords):
        given = [_value(x, text) for x in node.args]
        named = {k.arg: _value(k.value, text) for k in node.keywords if k.arg}
        return _made(node.func.id, given, named, text)
    raise ValueError(f'mask "{text}": "{ast.unparse(node)}" is no mask; {_advice()}')


def _value(node: ast.expr, text: str) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError:
        raise ValueError(f'mask "{text}": "{ast.unparse(node)}" must be a number, a list of numbers or a quoted word') from None


def _made(name: str, given: list[Any], named: dict[str, Any], text: str) -> Mask:
    kind = KINDS.get(name.lower())
    if kind is None:
        near = difflib.get_close_matches(name.lower(), KINDS, 1)
        raise ValueError(
            f'mask "{text}": there is no mask "{name}"{f"; did you mean {near[0]}?" if near else f"; {_advice()}"}'
        )
    try:
        return kind(*given, **named)
    except (TypeError, ValueError) as error:
        raise ValueError(f'mask "{text}": {error}') from None


def _advice() -> str:
    return f"write {', '.join(KINDS)}, joined by & | ~, as in causal & window(1024)"
