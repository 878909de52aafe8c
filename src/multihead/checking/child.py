"""The process in which somebody's file is imported and its attention examined; reports go out one by one as lines of JSON."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import re
import sys
import types
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from .entry import check_class, check_function, check_module, looks_like_attention
from .load import File
from .mistakes import CATALOGUE, Text
from .report import Finding, Report
from .wrap import WEIGHT

PARTS = {"query", "queries", "q", "key", "keys", "k", "value", "values", "v", "x"}


def main(spec: dict[str, Any], channel: int) -> None:
    """Check what spec says; write {"at": line}, {"report": …} and {"end": true} to the channel."""

    def tell(**said: Any) -> None:
        os.write(channel, (json.dumps(said) + "\n").encode())

    torch.set_num_threads(1)  # its tensors are small, and threads would wait for each other
    file = None
    if spec["file"]:
        file = File(spec["file"], lambda line: tell(at=line))
        module = file.run(spec["definitions_only"])
    else:
        module = _imported(spec["module"])
    targets = _targets(module, spec["name"])
    findings = file.findings if file else []
    tell(findings=Report("", findings=findings).data()["findings"])
    for name, target in targets:
        tell(on=name)
        report = _checked(name, target, spec["init"])
        tell(report=report.data())
    if spec["name"] and not targets:
        known = ", ".join(n for n, x in vars(module).items() if isinstance(x, type) or inspect.isfunction(x)) or "nothing"
        said = Text(f"there is no {spec['name']} in it; there are: {known}", f"里面没有 {spec['name']}；有的是：{known}")
        tell(report=Report(spec["name"], spec["file"] or "", findings=[Finding("not_built", "wrong", True, said)]).data())
    tell(end=True)


def _imported(name: str) -> types.ModuleType:
    sys.path.insert(0, os.getcwd())
    return importlib.import_module(name)


def _checked(name: str, target: Any, init: dict[str, Any] | None) -> Report:
    try:
        if isinstance(target, nn.Module):
            return check_module(target, name)
        return check_class(cast("type[nn.Module]", target), init) if isinstance(target, type) else check_function(target)
    except Exception as error:  # ours, or theirs in a place where we did not expect it: never a traceback
        said = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        return Report(name, findings=[Finding("check_fails", CATALOGUE["check_fails"].level, True, Text(said, said))])


def _targets(module: types.ModuleType, name: str) -> list[tuple[str, Any]]:
    """What is to be checked: the one that is named, or all classes and functions that look like attention."""
    if name:
        found: Any = module
        for part in name.split("."):
            found = getattr(found, part, None)
        return [(name, found)] if found is not None else []
    own = {n: x for n, x in vars(module).items() if getattr(x, "__module__", None) == module.__name__}
    classes = [(n, x) for n, x in own.items() if isinstance(x, type) and issubclass(x, nn.Module) and _mixes_tokens(x)]
    functions = [(n, x) for n, x in own.items() if inspect.isfunction(x) and _takes_qkv(x)]
    instances = [
        (n, x) for n, x in vars(module).items() if isinstance(x, nn.Module) and not any(isinstance(x, c) for _, c in classes)
    ]
    used = {n for n, _ in functions if any(re.search(rf"(?<![.\w]){n}\(", _code(c)) for _, c in classes)}
    return [*classes, *((n, f) for n, f in functions if n not in used or not classes), *instances[:4]]


def _mixes_tokens(kind: type) -> bool:
    """A layer that attends itself, or by a function of its file; models and blocks around it are not asked."""
    code = _code(kind)
    if not looks_like_attention(kind) or not code:
        return False
    return not any(w in code for w in ("LayerNorm(", "RMSNorm(", "Embedding(")) or "softmax" in code or "scaled_dot" in code


def _takes_qkv(function: Any) -> bool:
    """A function of query, key and value, or of a text and weights, that multiplies."""
    names = [n.lower() for n in inspect.signature(function).parameters]
    known = len([n for n in names if n in PARTS])
    weighed = known >= 1 and any(WEIGHT.search(n) for n in names)
    return (known >= 3 or weighed) and bool(re.search(r"softmax|scaled_dot|exp\(|matmul|bmm|einsum|@", _code(function)))


def _code(x: Any) -> str:
    try:
        return inspect.getsource(x)
    except (OSError, TypeError):
        return ""


if __name__ == "__main__":
    sys.path[:] = [p for p in sys.path if Path(p or ".").resolve() != Path(__file__).parent.resolve()]
    main(json.loads(sys.argv[1]), int(sys.argv[2]))
