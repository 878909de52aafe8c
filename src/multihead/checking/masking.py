"""Which convention each mask argument follows, or which mistake is made with it: the module's weights, the mask, one change."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..adopting.affine import exact_copy
from ..adopting.conventions import CONVENTIONS, Convention, Reader, Shape, patterns, soft
from .case import Case
from .diagnose import CLOSE, Explanation
from .mistakes import Text
from .ways import OWN, Way, compute, far

LARGE = 30.0  # times the inputs: scores grow by 900
HOWS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("mask_after_softmax", {"how": "after"}),
    ("mask_zero", {"how": 0.0}),
    *(("mask_too_small", {"how": v, "adds": a}) for v in (-1e-9, 1e-9, -1.0, 1.0, -10.0, -100.0) for a in (False, True)),
    ("mask_sign", {"how": 1e9, "adds": True}),
    ("mask_sign", {"how": 1e9}),
    *(("softmax_axis", {"axis": a, "how": h}) for a in ("q", "heads") for h in ("fill", -1e9)),
    ("softmax_twice", {"act": "twice"}),
)
CAUSAL = re.compile(r"(?i)causal|masked(?!_)|因果")


class Masks:
    """One module's masks, asked after what it computes without them is explained."""

    def __init__(self, case: Case, explanation: Explanation) -> None:
        self.case, self.e = case, explanation
        self.T = case.tokens
        self.S = self.T + 2 if case.free else self.T
        self.given = case.inputs(2, self.T, self.S, seed=40)
        self.bare = case.caller(self.given)
        self.errors: list[Exception] = []
        self.accepted = 0

    def run(self) -> None:
        self._own()
        for name in self.case.caller.call.named("mask"):
            reader = Reader(name)
            heard = self._conventions(name, reader) | self._lengths(name, reader)
            if reader:
                self.case.readers.append(reader)
                self.case.check("ok", f"{name}: {_said(str(reader), 'en')}", f"{name}：{_said(str(reader), 'zh')}")
                self._large(name, reader)
                self._empty(name, reader)
                self._half(name, reader)
                self._single(name, reader)
                self._batch_mask(name, reader)
            elif not self._mistake(name) and not self._raised(name, heard):
                self._unread(name, heard)

    # ---- what an argument means -------------------------------------------------------------------------------------

    def _ask(self, extra: dict[str, Any], given: dict[str, Tensor] | None = None) -> Tensor | None:
        try:
            return self.case.caller(given or self.given, extra)
        except Exception as error:
            self.errors.append(error)
            return None

    def _guess(self, blocked: Tensor | None, bias: Tensor | None = None, way: Way | None = None) -> Tensor:
        try:
            return compute(self.e.parts(self.given, blocked, bias), way or self.e.way)
        except (RuntimeError, ValueError):
            return torch.full((1,), torch.nan)

    def _written(self) -> Iterator[tuple[Convention, Shape, Tensor, Tensor]]:
        """Every convention and shape: the argument, and what it hides as [batch | 1, heads | 1, q, k]."""
        for shape, allowed in patterns(2, self.e.layout.heads, self.T, self.S):
            for convention in CONVENTIONS:
                yield convention, shape, convention.write(allowed), _four(~allowed, shape)

    def _conventions(self, name: str, reader: Reader) -> bool:
        """Learn the conventions that hold; returns whether any argument changed anything."""
        heard = False
        for convention, shape, argument, blocked in self._written():
            truth = self._ask({name: argument})
            if truth is None or truth.shape != self.bare.shape:
                continue
            self.accepted += 1
            heard |= not torch.equal(truth, self.bare)
            added = convention.read is None
            guess = self._guess(None, _four(soft(argument.shape), shape)) if added else self._guess(blocked)
            if far(guess, truth) <= CLOSE or (self._own_mask() and far(self._without_own(blocked), truth) <= CLOSE):
                reader.learn(convention, shape, argument.ndim)
        return heard

    def _own_mask(self) -> bool:
        return self.e.core.mask is not None

    def _without_own(self, blocked: Tensor) -> Tensor:
        """Where a mask that is given takes the place of the layer's own."""
        parts = self.e.parts(self.given, blocked)
        parts.core = replace(parts.core, mask=None)
        return compute(parts, self.e.way)

    def _lengths(self, name: str, reader: Reader) -> bool:
        """d2l's valid_lens: [batch], or [batch, q]."""
        heard = False
        if not re.search(r"(?i)len|valid", name):
            return heard
        for lens in self._lens():
            truth = self._ask({name: lens})
            if truth is None:
                continue
            self.accepted += 1
            heard |= not torch.equal(truth, self.bare)
            if far(self._guess(self._beyond(lens)), truth) <= CLOSE:
                reader.lengths.add(lens.ndim)
        return heard

    def _lens(self) -> tuple[Tensor, Tensor]:
        random = torch.Generator().manual_seed(5)
        return torch.tensor([3, self.S - 1]), torch.randint(1, self.S, (2, self.T), generator=random)

    def _beyond(self, lens: Tensor) -> Tensor:
        at = torch.arange(self.S)
        return at >= lens[:, None, None, None] if lens.ndim == 1 else (at >= lens[:, :, None])[:, None]

    # ---- which mistake ----------------------------------------------------------------------------------------------

    def _mistake(self, name: str) -> bool:
        """The change that makes the reference do with the mask what the module does: the nearest of all."""
        fitting: list[tuple[float, str, str, Tensor]] = []
        given: Tensor | None = None
        truth: Tensor | None = None
        for mistake, said, argument, guess in self._wrong_ways(name):
            if argument is not given:  # many ways of one argument follow each other
                given, truth = argument, self._ask({name: argument})
            if truth is not None and not torch.equal(truth, self.bare) and (error := far(guess, truth)) <= CLOSE:
                fitting.append((max(error, 1e-13), mistake, said, argument))
        for error, mistake, said, argument in sorted(fitting, key=lambda f: math.log10(f[0]) // 2)[:1]:
            if error <= CLOSE:
                steps = self.case.trace(self.case.caller, self.given, {name: argument})
                self.case.found(
                    mistake,
                    Text(
                        f"{name} ({said}): with this mistake the reference gives its output, largest difference {error:.1e}",
                        f"{name}（{_said(said, 'zh')}）：带上这个错误，参考实现与模块输出一致，最大差 {error:.1e}",
                    ),
                    steps=steps,
                )
                return True
        return False

    def _wrong_ways(self, name: str) -> Iterator[tuple[str, str, Tensor, Tensor]]:
        if re.search(r"(?i)len|valid", name):
            yield from self._wrong_lens()
        for convention, shape, argument, blocked in self._written():
            if convention.read is None:
                continue
            said = f"{convention.name}, {shape.name}"
            for mistake, changes in HOWS if (self.e.way.axis, self.e.way.act) == ("k", "softmax") else ():
                yield mistake, said, argument, self._guess(blocked, way=replace(self.e.way, **changes))
            if self.T == self.S and shape.name in ("[batch, k]", "[batch, 1, 1, k]"):
                yield "padding_on_queries", said, argument, self._guess(blocked.mT)

    def _wrong_lens(self) -> Iterator[tuple[str, str, Tensor, Tensor]]:
        H, B = self.e.layout.heads, 2
        for lens in self._lens():
            beyond = self._beyond(lens)
            tiled = lens[torch.arange(B * H) % B]
            yield "lens_tiled", "[batch]", lens, self._guess(self._beyond(tiled).view(B, H, -1, self.S))
            if lens.ndim == 1:  # in the order of rows
                rows = lens.repeat_interleave(H).repeat(self.T).view(B, H, self.T, 1)
                yield "lens_tiled", "[batch]", lens, self._guess(torch.arange(self.S) >= rows)
            yield "mask_backwards", "[batch]", lens, self._guess(~beyond)
            for mistake, changes in HOWS:
                yield mistake, "[batch]", lens, self._guess(beyond, way=replace(self.e.way, **changes))
            if self.T == self.S and lens.ndim == 1:
                yield "padding_on_queries", "[batch]", lens, self._guess(beyond.mT)

    def _raised(self, name: str, heard: bool) -> bool:
        """A mask that always raises, and why: a misspelt method, most often."""
        from .faults import fault

        several = {str(e): e for e in self.errors if isinstance(e, AttributeError | NameError)}
        own = [e for e in several.values() if fault(e, self.case.source)[0] in ("unknown_name", "undefined")]
        if heard or not own:
            return False
        what, evidence, place, fix = fault(own[0], self.case.source)
        if not self.case.has(what):
            self.case.found(what, Text(f"with {name}: {evidence.en}", f"传入 {name} 时：{evidence.zh}"), place=place)
            if fix is not None:
                self.case.findings[-1] = replace(self.case.findings[-1], fix=fix)
        return True

    def _unread(self, name: str, heard: bool) -> None:
        if any(f.name == "result_discarded" and "mask" in f.evidence.en for f in self.case.findings):
            return  # which is why
        if not heard and self.accepted and not re.search(r"context|memory|encoder", name):
            self.case.found(
                "mask_ignored",
                Text(
                    f"{self.accepted} masks of several conventions and shapes were given as {name}; none changed the output",
                    f"以多种约定和形状传入 {name} 共 {self.accepted} 次，输出都没有变化",
                ),
                level="risk" if self._own_mask() else None,
                place=next(iter(self.case.source.grep(rf"\b{name}\b.*", "(?!__init__).*")), None),
            )
        else:
            self.case.check("open", f"{name}: no convention was recognised", f"{name}：没有识别出它的约定")

    # ---- the layer's own mask ---------------------------------------------------------------------------------------

    def _own(self) -> None:
        e, case = self.e, self.case
        if e.core.mask is not None or e.way.own in OWN:
            if e.way.own is None:
                case.check("ok", f"its own mask: {e.core.mask!r}", f"自带掩码：{e.core.mask!r}")
            self._too_small({}, None)
            if case.free and e.way.own is None:
                self._corner()
        elif not case.caller.call.takes("mask") and not case.caller.call.takes("causal") and (why := self._claims()):
            case.found(
                "causal_missing",
                Text(f"{why}, and every token sees every other", f"{why}，但每个词元都能看到所有词元"),
            )

    def _claims(self) -> str:
        """Why one would think that it is causal."""
        name = type(self.case.module).__name__
        for sub in self.case.module.modules():
            flags = [n for n, x in vars(sub).items() if x is True and CAUSAL.search(n)]
            if flags:
                return f"{flags[0]} = True"
            for n, x in sub.named_buffers(recurse=False):
                square = x.ndim >= 2 and x.shape[-1] == x.shape[-2] > 1
                if square and (bool((x.triu(1) == 0).all()) or bool((x.tril(-1) == 0).all())):
                    return f"{n} is a triangle"
        return name if re.search(r"(?i)causal|maskedself|masked_self|因果", name) else ""

    def _corner(self) -> None:
        """With more keys than queries: does the last query see the last key?"""
        at_q, at_k = torch.arange(self.T)[:, None], torch.arange(self.S)
        parts = self.e.parts(self.given, at_k > at_q)
        parts.core = replace(parts.core, mask=None)
        error = far(compute(parts, self.e.way), self.bare)
        if error <= CLOSE:
            self.case.found(
                "causal_corner",
                Text(
                    f"for {self.T} queries and {self.S} keys query i sees keys 0 … i, largest difference {error:.1e}",
                    f"{self.T} 个查询、{self.S} 个键时，第 i 个查询看到的是键 0 … i，最大差 {error:.1e}",
                ),
            )

    # ---- numbers ----------------------------------------------------------------------------------------------------

    def _first(self, reader: Reader) -> tuple[Convention, Shape, Tensor, Tensor] | None:
        """The first argument in a known convention that hides something."""
        known = {
            (c, s.name) for several in reader.known.values() for c, s in several if c.read is not None and c.kind != "float"
        }
        known = known or {(c, s.name) for several in reader.known.values() for c, s in several if c.read is not None}
        known -= {(c, n) for c, n in known if "−inf" in c.name}
        return next((w for w in self._written() if (w[0], w[1].name) in known), None)

    def _large(self, name: str, reader: Reader) -> None:
        if reader.lengths:
            self._too_small({name: self._lens()[0]}, self._beyond(self._lens()[0]))
        written = self._first(reader)
        if written is not None and "−1e9" not in written[0].name:
            self._too_small({name: written[2]}, written[3])

    def _too_small(self, extra: dict[str, Any], blocked: Tensor | None) -> None:
        """Large activations meet the mask: a number that is not large enough shows itself."""
        given = {role: LARGE * x for role, x in self.given.items()}
        truth = self._ask(extra, given)
        if truth is None or self.case.has("mask_too_small", "mask_zero", "mask_after_softmax"):
            return
        guess = compute(self.e.parts(given, blocked), self.e.way)
        error = far(guess, truth)
        if error <= 1e-4:
            return
        steps = self.case.trace(self.case.caller, self.given, extra)
        numbers = sorted({n for s in steps.steps for n in s.numbers if -20000 < n < 0 and n not in (-1.0, -2.0)})
        if any(
            far(compute(self.e.parts(given, blocked), replace(self.e.way, how=n, adds=a)), truth) <= 1e-4
            for n in numbers
            for a in (False, True)
        ):
            number = numbers[0]
            self.case.found(
                "mask_too_small",
                Text(
                    f"with activations {LARGE:g} times larger, {number:g} hides no longer: the output is off by {error:.2g}",
                    f"激活值放大 {LARGE:g} 倍后，{number:g} 就遮不住了：输出相差 {error:.2g}",
                ),
                steps=steps,
            )

    def _empty(self, name: str, reader: Reader) -> None:
        """A text of which nothing may be seen."""
        if reader.lengths:
            argument: Tensor = torch.tensor([0, self.S])
        else:
            written = self._first(reader)
            if written is None:
                return
            convention, shape = written[0], written[1]
            allowed = torch.ones(shape.sizes(2, self.e.layout.heads, self.T, self.S), dtype=torch.bool)
            allowed[0] = False
            argument = convention.write(allowed)
        truth = self._ask({name: argument})
        if truth is None:
            return
        rows = truth[:, 0] if argument.ndim == 2 and argument.shape == (self.T, self.S) else truth[0]
        if bool(rows.isnan().any()):
            said = "a text of which nothing may be seen gives NaN", "一条完全被遮住的文本得到 NaN"
            self.case.found("nan_row", Text(*said), steps=self.case.trace(self.case.caller, self.given, {name: argument}))
            return
        mean = compute(self.e.parts(self.given), replace(self.e.way, dropped="scores")) if self.e.core.mask is None else None
        if mean is not None and far(mean[:, 0] if rows.shape == truth[:, 0].shape else mean[0], rows) <= 1e-4:
            said = (
                "a text of which nothing may be seen gives the mean of its values",
                "一条完全被遮住的文本得到的是所有 V 的平均",
            )
            self.case.found("mean_row", Text(*said), steps=self.case.trace(self.case.caller, self.given, {name: argument}))

    def _half(self, name: str, reader: Reader) -> None:
        """The same mask in float16."""
        from .case import half

        written = self._first(reader)
        argument = self._lens()[0] if reader.lengths else None if written is None else written[2]
        if argument is None:
            return
        caller = self.case.caller.of(half(self.case.module, torch.float16))
        given = {role: x.half() for role, x in self.given.items()}
        argument = argument.half() if argument.is_floating_point() else argument
        try:
            caller(given)
        except Exception:  # it does not run in float16 at all
            return
        try:
            failed = "NaN" if bool(caller(given, {name: argument}).isnan().any()) else ""
        except RuntimeError as error:
            failed = str(error).splitlines()[0]
        if failed:
            steps = self.case.trace(
                self.case.caller, self.given, {name: argument.double() if argument.is_floating_point() else argument}
            )
            self.case.found(
                "mask_half", Text(f"with {name} in float16: {failed}", f"float16 下传入 {name}：{failed}"), steps=steps
            )

    def _single(self, name: str, reader: Reader) -> None:
        """The same mask in float32, where a large positive number swallows the scores it is added to."""
        from .case import half

        written = self._first(reader)
        if written is None:
            return
        caller = self.case.caller.of(half(self.case.module, torch.float32))
        given = {role: x.float() for role, x in self.given.items()}
        argument = written[2].float() if written[2].is_floating_point() else written[2]
        steps = self.case.trace(self.case.caller, self.given, {name: written[2]})
        large = [n for s in steps.steps for n in s.numbers if n >= 1e4]
        try:
            bare, out = caller(given), caller(given, {name: argument})
        except Exception:  # it does not run in float32
            return
        exact = self.case.caller.of(exact_copy(self.case.module))
        off = far(out.double(), exact(self.given, {name: written[2]}))
        if large and off > 1e-2 and off > 100 * far(bare.double(), exact(self.given)):
            self.case.found(
                "mask_sign",
                Text(
                    f"{large[0]:g} is added to what may be seen; in float32 it swallows the scores: off by {off:.2g}",
                    f"给可以看的位置加上了 {large[0]:g}；float32 下分数被它淹没，输出相差 {off:.2g}",
                ),
                steps=steps,
            )

    def _batch_mask(self, name: str, reader: Reader) -> None:
        """[batch, q, k] where only [q, k] or four axes are understood: it lands on the heads."""
        if any(axes == 3 for _, axes in reader.known) or not reader.known or self.e.layout.heads < 2:
            return
        H = self.e.layout.heads
        convention = next(c for several in reader.known.values() for c, _ in several)
        if convention.read is None:
            convention = CONVENTIONS[-1]
        given = self.case.inputs(H, self.T, self.S, seed=41)
        allowed = torch.rand(H, self.T, self.S, generator=torch.Generator().manual_seed(8)) < 0.5
        allowed[..., 0] = True
        truth = self._ask({name: convention.write(allowed)}, given)
        if truth is None:
            return
        error = far(compute(self.e.parts(given, ~allowed[None]), self.e.way), truth)
        if error <= CLOSE:
            claimed = re.search(
                rf"{name}.*?[\[(]\s*(b|B|batch|batch_size|N)\w*\s*,\s*\w+\s*,\s*\w+\s*[\])]", self.case.source.words()
            )
            said = f"; its own text says {name} is {claimed.group(0)[-30:]}" if claimed else ""
            self.case.found(
                "mask_on_heads",
                Text(
                    f"{name} [batch, q, k] fails unless batch is {H}; there it hides per head, largest difference {error:.1e}"
                    + said,
                    f"{name} [batch, q, k] 只有 batch = {H} 时不报错，而且遮住的是各个头，最大差 {error:.1e}"
                    + ("；而注释里写的正是这种形状" if said else ""),
                ),
                level="wrong" if claimed else "note",
                steps=self.case.trace(self.case.caller, given, {name: convention.write(allowed)}),
            )  # fmt: skip


def _four(x: Tensor, shape: Shape) -> Tensor:
    if shape.name == "[batch, k]":
        return x[:, None, None]
    return x[None, None] if x.ndim == 2 else x[:, None] if x.ndim == 3 else x


ZH = (
    ("True may attend", "True 表示可以看"), ("True is blocked", "True 表示遮住"),
    ("0 blocks", "0 表示遮住"), ("1 blocks", "1 表示遮住"),
    ("added to the scores", "加到分数上"), ("−inf blocks", "−inf 表示遮住"), ("−1e9 blocks", "−1e9 表示遮住"),
    ("the number of valid keys", "有效键的个数"), (" or ", " 或 "), (" as ", "，形状 "), ("; ", "；"),
)  # fmt: skip


def _said(text: str, lang: str) -> str:
    text = re.sub(r"^\w+: ", "", text)
    text = re.sub(r" \(masks\.\w+\)", "", text)
    if lang == "zh":
        for en, zh in ZH:
            text = text.replace(en, zh)
    return text
