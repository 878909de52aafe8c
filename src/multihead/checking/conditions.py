"""What a layer does besides its formula: in training, in half precision, on other devices, with memory and lengths."""

from __future__ import annotations

import re
import warnings
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..adopting.affine import exact_copy
from ..adopting.dropouts import ask, find_sites, near
from .calls import leaves
from .case import Case, half
from .devices import Devices
from .diagnose import projections
from .faults import fault
from .mistakes import Text
from .ways import compute, far

PLAIN = (torch.float32, torch.bfloat16, torch.float64)


def check_conditions(case: Case) -> None:
    """All of it; each asks a copy."""
    if case.explanation is not None:
        case.each(_names, _dropouts, _biases)
    case.each(_gradients, _own_tensors, _devices, _dtypes, _strides, _lengths, _kept, _overflow)


def _names(case: Case) -> None:
    """Projections that stand where their names do not belong."""
    e = case.explanation
    if e is None or e.way.by != "qkv":
        return
    for name, said in projections(e.layout, case.affines):
        if name == "qk_swapped":
            text = Text(
                f"{said}: in every call that was tried this is a renaming", f"{said}：在所有试过的调用里，这只是改了名字"
            )
            case.found(name, text, level="note", about=e.layout.q.affine.name)
        elif name in ("out_missing", "no_out"):
            text = Text(
                f"{said} is never applied" if said else "no projection follows the heads",
                f"{said} 从未使用" if said else "合并之后没有投影",
            )
            case.found(name, text)
        else:
            text = Text(
                f"{said.replace('∅', 'is idle')}; so reproduced to {e.error:.1e}",
                f"{said.replace('∅', '闲置')}；据此重现，最大差 {e.error:.1e}",
            )
            case.found(name, text, about=said.split("= ")[1].split("(")[0])


def _gradients(case: Case) -> None:
    """What learns nothing: parameters that no output depends on, and inputs whose gradient is cut."""
    moved = exact_copy(case.moved).requires_grad_(True)
    caller = case.caller.of(moved)
    given = {role: x.requires_grad_() for role, x in case.inputs(2, case.tokens, seed=50).items()}
    own = dict(moved.named_parameters())
    try:
        with torch.enable_grad():
            out = caller(given, grad=True)
            back = torch.randn(out.shape, generator=torch.Generator().manual_seed(5), dtype=out.dtype)
            found = torch.autograd.grad((out * back).sum(), [*own.values(), *given.values()], allow_unused=True)
    except RuntimeError as error:
        said = str(error).splitlines()[0]
        case.found("gradient_cut", Text(f"backward raises: {said}", f"反向传播报错：{said}"))
        return
    idle = [name for name, g in zip(own, found[: len(own)], strict=True) if g is None]  # pyright: ignore[reportUnnecessaryComparison]
    idle = [n for n in idle if not any(f.evidence.en.find(n.rpartition(".")[0] or n) >= 0 for f in case.findings)]
    wanted = _wanted(case, given, found[len(own) :])
    used = _used(case, idle)
    if used:
        names = ", ".join(used)
        case.found("gradient_cut", Text(f"{names} change the output and get no gradient", f"{names} 会影响输出，却没有梯度"))
    elif wanted:
        case.found("gradient_cut", Text(wanted, wanted.replace("the gradient of", "输入的梯度不对：")))
    rest = [n for n in idle if n not in used]
    if rest:
        case.found("parameter_unused", Text(", ".join(rest), "、".join(rest)), about=rest[0].rpartition(".")[0] or rest[0])
    if not idle and not wanted:
        case.check("ok", "every parameter and every input gets its gradient", "每个参数和输入都有梯度")


def _used(case: Case, names: list[str]) -> list[str]:
    """Those parameters whose numbers change the output all the same."""
    found: list[str] = []
    given = case.inputs(2, case.tokens, seed=51)
    before = case.caller(given)
    for name in names:
        p = case.moved.get_parameter(name)
        kept = p.data.clone()
        p.data.add_(1.0 + torch.rand(p.shape, dtype=p.dtype))
        if far(case.caller(given), before) > 1e-9:
            found.append(name)
        p.data.copy_(kept)
    return found


def _wanted(case: Case, given: dict[str, Tensor], grads: tuple[Tensor | None, ...]) -> str:
    """Where gradients into the inputs are not those of the way that gives the output."""
    e = case.explanation
    if e is None:
        return ""
    with torch.enable_grad():
        leaves_ = {role: x.detach().clone().requires_grad_() for role, x in given.items()}
        out = e.predict(leaves_)
        back = torch.randn(out.shape, generator=torch.Generator().manual_seed(5), dtype=out.dtype)
        if bool(out.isnan().any()):
            return ""
        mine = torch.autograd.grad((out * back).sum(), list(leaves_.values()), allow_unused=True, materialize_grads=True)
    for role, a, b in zip(given, mine, grads, strict=True):
        if far(torch.zeros_like(a) if b is None else b, a) > 1e-4:
            return f"the gradient of {case.caller.call.named(role)[0]}"
    return ""


def _biases(case: Case) -> None:
    e = case.explanation
    if e is None:
        return
    rows = (e.layout.q, e.layout.k, e.layout.v)
    have = {name: r.affine.bias is not None for name, r in zip("qkv", rows, strict=True)}
    if len(set(have.values())) > 1:
        said = ", ".join(f"{n}: {'bias' if b else 'no bias'}" for n, b in have.items())
        case.found(
            "odd_bias", Text(said, said.replace("no bias", "无偏置").replace("bias", "有偏置")), about=e.layout.q.affine.name
        )


# ---- training -------------------------------------------------------------------------------------------------------


def _dropouts(case: Case) -> None:
    """Each dropout set to drop everything, alone: what falls then tells where it stands."""
    module, given, e = case.moved, case.inputs(2, case.tokens, seed=52), case.explanation
    sites = list(find_sites(module))
    if e is None or not sites or case.has("dropout_in_eval") or e.way.act == "none":
        return
    caller = case.caller.loudly()
    kept = e.predict(given)
    scores = compute(e.parts(given), replace(e.way, dropped="scores"))
    idle: list[tuple[str, float]] = []
    falls = False
    nothing = e.layout.merge(torch.zeros(2, e.layout.heads, case.tokens, e.layout.v_dim, dtype=torch.float64))
    module.train()
    try:
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for name, owner, key, p in sites:
                half_, none = (ask(caller, given, sites, owner, key, q) for q in (0.5, 1.0))
                if half_ is None:
                    continue
                falls |= none is not None and near(none, nothing)
                if near(half_, kept):
                    idle.append((name, p))
                elif none is not None and far(scores, none) <= 1e-6 and not near(none, kept):
                    error = far(scores, none)
                    said = Text(
                        f"{name} = 1 makes all weights alike, as scores of 0 do: largest difference {error:.1e}",
                        f"{name} = 1 时所有权重相同，与分数全为 0 的结果一致：最大差 {error:.1e}",
                    )
                    case.found("dropout_on_scores", said, steps=case.trace(caller, given))
    finally:
        module.eval()
    for name, p in idle:  # where another one falls on the weights, this one may be for a path that is not taken
        said = Text(f"{name} = {p:g} changes nothing in train()", f"{name} = {p:g} 在 train() 下没有任何作用")
        place = name.rpartition(".")[0] if name.endswith(".p") else name
        case.found("dropout_forgotten", said, about=place, level="note" if falls else None)


# ---- what is not a parameter ------------------------------------------------------------------------------------------


def _own_tensors(case: Case) -> None:
    """Plain attributes that hold tensors the forward needs."""
    given = case.inputs(2, case.tokens, seed=53)
    for sub in case.moved.modules():
        for name, x in list(vars(sub).items()):
            if not isinstance(x, Tensor) or isinstance(x, nn.Parameter) or not x.numel() or x.ndim == 0:
                continue
            before = case.caller(given)
            try:
                setattr(sub, name, ~x if x.dtype == torch.bool else 1 - x if x.numel() else x)
                after = case.caller(given)
            except Exception:
                after = None
            finally:
                setattr(sub, name, x)
            if after is None or far(after, before) > 1e-9:
                said = Text(
                    f"self.{name} {list(x.shape)} changes the output, stays behind in .to(), and is not in state_dict()",
                    f"self.{name} {list(x.shape)} 会影响输出，但 .to() 不会移动它，state_dict() 里也没有它",
                )
                if not _cached(case, name):
                    case.found("buffer_not_moved", said, about=name)


def _cached(case: Case, name: str) -> bool:
    """Whether the forward makes it itself."""
    return bool(case.source.grep(rf"\bself\.{re.escape(name)}\s*=(?!=)", "(?!__init__).*"))


def _devices(case: Case) -> None:
    """Tensors that the forward makes on a device of its own choosing, and mixes with its input."""
    given = case.inputs(2, case.tokens)
    with Devices() as devices:
        try:
            case.caller.loudly().run(given)
        except Exception:  # it was called before: what it says now is about the mode
            return
    if not devices.mixed:
        case.check("ok", "makes its tensors where its input lies", "新建的张量都和输入在同一设备上")
        return
    made, step = devices.mixed
    steps = case.steps
    place = next((case.source.place(file, line) for file, line in made if file in case.source.files), None)
    if steps is not None and place is not None:
        said = Text(
            f"what it makes meets the input in {step}; on another device that raises",
            f"它在 {step} 中与输入相遇；换个设备就会报错",
        )
        case.found("device_fixed", said, place=place)


def _dtypes(case: Case) -> None:
    """The other dtypes: what fails or comes out in another one."""
    ran: list[str] = []
    for dtype in PLAIN:
        caller = case.caller.of(half(case.module, dtype))
        given = {role: x.to(dtype) for role, x in case.inputs(2, case.tokens).items()}
        name = str(dtype).removeprefix("torch.")
        try:
            out = caller(given)
        except Exception as error:
            kind, evidence, place, _ = fault(error, case.source)
            if kind == "dtype_fixed":
                case.found("dtype_fixed", Text(f"in {name}: {evidence.en}", f"{name} 下：{evidence.zh}"), place=place)
            return
        if out.dtype != dtype:
            here = str(out.dtype).removeprefix("torch.")
            said = Text(f"{name} comes in and {here} comes out", f"输入 {name}，输出却是 {here}")
            case.found("dtype_fixed", said)
            return
        ran.append(name)
        if dtype == torch.bfloat16:
            _softmax_in_half(case, caller, given)
    case.check("ok", f"runs in {', '.join(ran)}", f"可在 {'、'.join(ran)} 下运行")


def _softmax_in_half(case: Case, caller: Any, given: dict[str, Tensor]) -> None:
    steps = case.trace(caller, given)
    soft = [s for s in steps.all("softmax") if s.name == "softmax"]
    if soft and all(s.dtype == torch.bfloat16 for s in soft):
        case.found(
            "softmax_in_half",
            Text("its softmax gives bfloat16 in bfloat16", "bfloat16 下 softmax 的结果也是 bfloat16"),
            steps=steps,
        )


def _strides(case: Case) -> None:
    """Inputs that do not lie in memory in their order."""
    given = {role: x.mT.contiguous().mT for role, x in case.inputs(2, case.tokens, seed=54).items()}
    try:
        case.caller(given)
    except RuntimeError as error:
        name, evidence, place, _ = fault(error, case.source)
        if name == "view_noncontiguous":
            said = Text(f"for an input that is itself transposed: {evidence.en}", f"输入本身是转置过的张量时：{evidence.zh}")
            case.found(name, said, place=place, level="risk")


def _lengths(case: Case) -> None:
    """Keys of another number than queries, and texts longer than its tables."""
    call = case.caller.call
    if call.fed != ("query",) and not case.free and case.errors:
        name, evidence, place, _ = fault(case.errors[-1], case.source)
        if name == "call_fails" and re.search(r"invalid for input of size", evidence.en):
            T = case.tokens
            said = Text(f"{T} queries and {T + 2} keys: {evidence.en}", f"{T} 个查询、{T + 2} 个键：{evidence.zh}")
            case.found("kv_length_of_q", said, place=place)
    elif case.free:
        case.check("ok", "keys may be more or fewer than queries", "键的个数可以与查询不同")
    limits = [
        (n, x.shape[-1])
        for n, x in case.module.named_buffers()
        if x.ndim >= 2 and x.shape[-1] == x.shape[-2] > case.tokens and x.shape[-1] <= 4096
    ]
    for name, size in limits:
        try:
            case.caller(case.inputs(1, size + 1))
        except Exception as error:
            said = str(error).splitlines()[0] if str(error) else type(error).__name__
            text = Text(f"{size + 1} tokens: {said}", f"{size + 1} 个词元：{said}")
            case.found("length_limited", text, about=name)
            return


def _kept(case: Case) -> None:
    """L×L tensors that are attributes after the forward."""
    T = 37
    caller, known = case.caller, {id(x) for x in case.moved.buffers()}
    try:
        caller(case.inputs(1, T))
    except Exception:
        return
    for sub in case.moved.modules():
        for name, x in vars(sub).items():
            tensors = [t for t in leaves(x) if t.ndim >= 2 and t.shape[-2:] == (T, T)]
            if tensors and id(x) not in known:
                shape = list(tensors[0].shape)
                said = Text(
                    f"self.{name} holds {shape} after a call of {T} tokens", f"处理 {T} 个词元后 self.{name} 仍保留 {shape}"
                )
                case.found("weights_kept", said, about=name)
                return


def _overflow(case: Case) -> None:
    """Scores of a few hundred: a softmax that subtracts the largest knows no overflow."""
    single = case.caller.of(half(case.module, torch.float32))
    given = {role: (30 * x).float() for role, x in case.inputs(2, case.tokens, seed=55).items()}
    try:
        out = single(given)
        small = single({role: x / 300 for role, x in given.items()})
    except Exception:
        return
    if not bool(out.isfinite().all()) and bool(small.isfinite().all()) and case.steps is not None and case.steps.all("exp"):
        case.found(
            "softmax_overflows",
            Text(
                "with scores of a few hundred its output is not finite in float32", "分数达到几百时，float32 下输出不再是有限数"
            ),
        )
