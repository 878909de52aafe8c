"""One file a kernel, all alike: refuses(spec) → reason or None; quadratic_bytes(spec); run(q, k, v, spec) → out, lse."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType


def lazily(name: str) -> ModuleType:
    """A kernel's module, which is read when something of it is first asked for: `import multihead` stays cheap."""
    full = f"{__name__}.{name}"
    if full in sys.modules:
        return sys.modules[full]
    spec = importlib.util.find_spec(full)
    if spec is None or spec.loader is None:
        raise ModuleNotFoundError(f"multihead: there is no file for the kernel {name!r}")
    spec.loader = importlib.util.LazyLoader(spec.loader)
    module = importlib.util.module_from_spec(spec)
    sys.modules[full] = module
    spec.loader.exec_module(module)
    setattr(sys.modules[__name__], name, module)
    return module
