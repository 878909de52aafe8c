"""Where a call happens: the modules that are running, by hooks that are there only while something is recorded."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import Any, cast

from torch import nn
from torch.nn.modules.module import _global_forward_hooks_with_kwargs as with_kwargs  # pyright: ignore[reportPrivateUsage]
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

Leave = Callable[[nn.Module, tuple[Any, ...], dict[str, Any], Any], None]


class Places:
    """The stack of running modules and the names they go by, the longest path from any module that was called outright.

    `entered` and `left` hear of every module, in the thread that records.
    """

    def __init__(self, model: nn.Module | None, entered: Callable[[nn.Module], None], left: Leave) -> None:
        self.stack: list[nn.Module] = []
        self.names: dict[int, str] = {}
        self.modules: dict[int, nn.Module] = {}  # held, so that no id is used twice
        self.counts: dict[int, int] = {}
        self.model, self.entered, self.left = model, entered, left
        self.thread = 0
        self.hooks: list[Any] = []
        if model is not None:
            self._learn(model)

    def __enter__(self) -> Places:
        self.thread = threading.get_ident()
        self.hooks = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, with_kwargs=True, always_call=True),  # pyright: ignore[reportArgumentType]
        ]
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self.hooks:
            hook.remove()
            with_kwargs.pop(hook.id, None)  # torch forgets to: every module call would go the slow way from then on
        self.hooks, self.stack = [], []
        self.modules.clear()
        self.names.clear()

    @contextmanager
    def muted(self) -> Generator[None]:
        """Nothing that runs inside is a part of the model's run."""
        thread, self.thread = self.thread, 0
        try:
            yield
        finally:
            self.thread = thread

    def here(self, module: nn.Module | None = None) -> tuple[int, str, int]:
        """The innermost running module's id and name, and how often it has attended in this run of the model, from 0."""
        module = module or (self.stack[-1] if self.stack else None)
        key = 0 if module is None else id(module)
        count = self.counts.get(key, 0)
        self.counts[key] = count + 1
        return key, self.names.get(key, "attention") or type(module).__name__, count

    def _learn(self, root: nn.Module) -> None:
        for path, module in cast("Iterable[tuple[str, nn.Module]]", root.named_modules()):
            name, known = path.replace("_orig_mod.", "").removesuffix("_orig_mod"), self.names.get(id(module))
            if known is None or len(name) > len(known):
                self.names[id(module)] = name
                self.modules[id(module)] = module

    def _enter(self, module: nn.Module, _args: object) -> None:
        if threading.get_ident() != self.thread:
            return
        if not self.stack:
            self.counts.clear()
            if self.modules.get(id(module)) is not module:
                self._learn(module)
        elif id(module) not in self.names:  # made while the model ran
            self._learn(module)
        self.stack.append(module)
        self.entered(module)

    def _leave(self, module: nn.Module, args: tuple[Any, ...], *more: Any) -> None:
        kwargs: dict[str, Any] = more[0] if len(more) == 2 else {}  # after an exception torch forgets the keywords
        result = more[1] if len(more) == 2 else None
        if threading.get_ident() != self.thread or module not in self.stack:
            return
        while self.stack.pop() is not module:  # what an exception left behind
            pass
        self.left(module, args, kwargs, result)
