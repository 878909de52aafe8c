"""Laws of attention that need no knowledge of the weights."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from ..adopting.affine import exact_copy, perturbed
from .case import Case
from .mistakes import Text
from .source import Place

SAME = 1e-9


def check_laws(case: Case) -> None:
    """What holds for every attention layer, asked of the module itself."""
    case.each(_finite, _quiet, _state, _batch, _inputs)
    if case.explanation is None:
        case.each(_order, _influence)


def _differ(a: Tensor, b: Tensor) -> float:
    if a.shape != b.shape:
        return float("inf")
    both = a.isfinite() & b.isfinite()
    if not bool(both.any()):
        return 0.0
    return float((a - b)[both].abs().max() / b[both].abs().max().clamp(min=1e-30))


def _finite(case: Case) -> None:
    """Ordinary inputs give numbers; a row that its own mask leaves empty is told elsewhere."""
    out = case.caller(case.inputs(2, case.tokens))
    share = float((~out.isfinite()).double().mean())
    if share > 0.5 and not (case.explanation and case.explanation.mistakes):
        case.found("nan_output", Text(f"{share:.0%} of its output is not finite", f"输出中有 {share:.0%} 不是有限数"))


def _quiet(case: Case) -> None:
    """In eval() the same input gives the same output."""
    given, loud = case.inputs(2, case.tokens), case.caller.loudly()
    case.caller(given)
    heard = case.caller.heard
    with torch.random.fork_rng(devices=[]):
        far = _differ(loud(given), loud(given))
    if far > SAME and heard:
        kind = heard[0]
        case.found(
            "dropout_in_eval",
            Text(
                f"in eval() two calls differ by {far:.2g} of the largest value; without {kind} they agree to the last digit",
                f"eval() 下两次调用相差最大值的 {far:.2g}；去掉 {kind} 后完全一致",
            ),
        )
    elif far > SAME:
        case.found(
            "state_kept",
            Text(
                f"the same call twice in eval() differs by {far:.2g} of the largest value",
                f"eval() 下同样的调用两次相差最大值的 {far:.2g}",
            ),
            place=_state_place(case),
        )
    else:
        case.check("ok", "eval() gives the same output twice", "eval() 下结果可重复")


def _state(case: Case) -> None:
    """What another text was, before, changes nothing."""
    if case.has("state_kept", "dropout_in_eval"):
        return
    given, other = case.inputs(2, case.tokens, seed=31), case.inputs(1, case.tokens + 2, seed=32)
    fresh, another = (case.caller.of(perturbed(exact_copy(case.module))) for _ in range(2))
    before = fresh(given)
    another(other)  # on its own it can do that
    try:
        fresh(other)
        after = fresh(given)
    except Exception as error:
        said = str(error).splitlines()[0] if str(error) else type(error).__name__
        case.found(
            "state_kept",
            Text(f"after a call with another shape it raises: {said}", f"换一种形状调用之后再调用就报错：{said}"),
            place=_state_place(case),
        )
        return
    far = _differ(before, after)
    if far > SAME:
        case.found(
            "state_kept",
            Text(
                f"after another text the same call gives something else, by {far:.2g} of the largest value",
                f"处理过另一条文本之后，同样的调用结果相差最大值的 {far:.2g}",
            ),
            place=_state_place(case),
        )
    else:
        case.check("ok", "calls leave no trace in later calls", "前一次调用不影响后一次")


def _state_place(case: Case) -> Place | None:
    found = case.source.grep(r"^\s*self\.\w+(\[.*\])?\s*(=|\+=)(?!=)", "(?!__init__).*")
    return found[0] if found else None


def _batch(case: Case) -> None:
    """One text does not change another's result."""
    if case.has("state_kept"):
        return
    given = case.inputs(2, case.tokens, seed=33)
    changed = {role: torch.cat([-1.5 * x[:1], x[1:]]) for role, x in given.items()}
    far = _differ(case.caller(changed)[1], case.caller(given)[1])
    if far > SAME and not (case.explanation and case.explanation.mistakes):
        case.found(
            "batch_mixed",
            Text(
                f"another first text changes the second text's result by {far:.2g} of the largest value",
                f"换掉第一条文本，第二条的结果变化了最大值的 {far:.2g}",
            ),
        )
    elif far <= SAME:
        case.check("ok", "texts of a batch do not influence each other", "批次中的各条互不影响")


def _inputs(case: Case) -> None:
    """What was handed over is afterwards what it was."""
    given = case.inputs(2, case.tokens, seed=34)
    kept = {role: x.clone() for role, x in given.items()}
    case.caller.raw(given)
    changed = [role for role, x in given.items() if not torch.equal(x, kept[role])]
    names = ", ".join(case.caller.call.named(role)[0] for role in changed)
    if changed:
        case.found("inplace_input", Text(f"after the call {names} holds other numbers", f"调用之后 {names} 的数值变了"))
    else:
        case.check("ok", "inputs are left as they were", "不修改传入的张量")


def _order(case: Case) -> None:
    """Without positions and masks, tokens in another order give the same outputs in that order."""
    if case.has("state_kept", "batch_mixed"):
        return
    given = case.inputs(2, case.tokens, seed=35)
    order = torch.randperm(case.tokens, generator=torch.Generator().manual_seed(2))
    moved = {role: x[:, order] for role, x in given.items()}
    far = _differ(case.caller(moved), case.caller(given)[:, order])
    if far > SAME and not bool(_pattern(case).triu(1).eq(0).all()):
        case.found(
            "permutation",
            Text(
                f"tokens in another order change the result by {far:.2g} of the largest value",
                f"打乱词元顺序后结果相差最大值的 {far:.2g}",
            ),
            certain=False,
        )


def _pattern(case: Case) -> Tensor:
    """[q, k]: how much key k moves the output of query q, by gradients."""
    given = {role: x.requires_grad_() for role, x in case.inputs(1, case.tokens, seed=36).items()}
    source = list(given.values())[-1]
    with torch.enable_grad():
        out = case.caller(given, grad=True)[0]
        if not out.requires_grad:
            return torch.ones(case.tokens, case.tokens)
        sums = [row.square().sum() for row in out]
    rows = [torch.autograd.grad(x, source, retain_graph=True, allow_unused=True, materialize_grads=True)[0] for x in sums]
    return torch.stack([row[0].abs().sum(-1) for row in rows])


def _influence(case: Case) -> None:
    seen = _pattern(case) > 1e-12
    drawn = " / ".join("".join("■" if x else "·" for x in row) for row in cast("list[list[bool]]", seen.tolist()))
    case.check(
        "open",
        f"which tokens move which outputs, by gradients: {drawn}",
        f"用梯度看到的影响关系（行：输出，列：词元）：{drawn}",
    )
