"""From what a function was given to what a Call holds: SDPA's masks, FlexAttention's functions, what was followed by hand."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from ..masks import Causal, Mask, Where
from .by_hand import Scores, Weights
from .call import Call, Score
from .sight import Sight
from .stream_cpu import rows
from .tensors import Intervals, Memory, additive, compact, four, four_mask, hide


def unreadable(*tensors: Tensor) -> str:
    if any(x.is_nested for x in tensors):
        return "q, k and v are nested tensors; pad them to be recorded"
    if any(torch._C._functorch.is_functorch_wrapped_tensor(x) for x in tensors):  # pyright: ignore[reportPrivateUsage, reportUnknownMemberType, reportAttributeAccessIssue, reportUnknownArgumentType]
        return "it runs inside a transform such as vmap; record outside of it"
    return "its tensors hold no numbers (device meta)" if any(x.is_meta for x in tensors) else ""


def sdpa_masks(
    given: Tensor | None, causal: bool, lead: tuple[int, ...], heads: int, memory: Memory
) -> tuple[Mask | None, Tensor | None, Tensor | None]:
    """SDPA's attn_mask (True may attend, floats are added) and is_causal, which hold together."""
    mask: Mask | None = Causal(align="start") if causal else None
    variant = getattr(given, "variant", None)
    if variant is not None:  # torch.nn.attention.bias
        return Causal(align="start" if "UPPER" in variant.name else "end"), None, None
    if given is None:
        return mask, None, None

    def read(x: Tensor) -> tuple[Mask | None, Tensor | None, Tensor | None]:
        x = four_mask(x, lead, heads)
        return (compact(x), None, None) if x.dtype == torch.bool else additive(x)

    more, bias, flat = memory.of(given, read, f"sdpa {lead} {heads}")
    return both(mask, more), bias, flat


def both(a: Mask | None, b: Mask | None) -> Mask | None:
    return b if a is None else a if b is None else a & b


def each_row(flat: Tensor | None, q: Tensor) -> Tensor | None:
    return None if flat is None else flat.expand(-1, -1, q.shape[2])


def stands(mask: Mask | None, q_len: int, kv_len: int) -> int | None:
    """Where the first query stands, if a mask that came as a tensor tells: each row's last key is one further.

    Rows that see nothing, or everything because a finite "−inf" has levelled them, say nothing.
    """
    if not isinstance(mask, Intervals) or mask.start.shape[2] != 1 or mask.end.shape[1] != q_len or q_len == kv_len:
        return None
    ends = mask.end[..., 0]
    last = int(ends[:, -1].max())
    straight = torch.arange(last - q_len + 1, last + 1, device=ends.device)
    silent = (ends <= mask.start[..., 0]) | (ends == kv_len)
    return last - q_len if last >= q_len and bool(((ends == straight) | silent).all()) else None


def conditions(scores: Scores, heads: int, memory: Memory) -> tuple[Mask | None, Tensor | None, Tensor | None]:
    """The masks and biases that were read, as a call has them."""
    lead, mask, bias, flat = scores.lead, None, None, None
    for hidden, value in scores.hidden:
        key = f"fill {value} {lead} {heads}"
        more, level = memory.of(hidden, lambda x, value=value: hide(four_mask(x, lead, heads), value, True), key)
        mask = both(mask, more)
        flat = level if flat is None else flat if level is None else flat | level
    for added, factor in scores.biases:
        key = f"add {factor} {lead} {heads}"
        more, rest, level = memory.of(added, lambda x, f=factor: additive(four_mask(x, lead, heads) * f), key)
        mask = both(mask, more)
        bias = rest if bias is None else bias if rest is None else bias + rest
        flat = level if flat is None else flat if level is None else flat | level
    return mask, bias, flat


def difference(call: Call, weights: Weights, heads: int) -> str:
    """What is wrong with a call, compared with some rows of the model's own softmax; "" where nothing is."""
    sample = weights.sample
    if sample is None or not sample.numel():
        return ""
    own = four(sample, heads).float().nan_to_num(0.0)
    sight, worst = Sight(call), 0.0
    with torch.no_grad(), torch.autocast(call.q.device.type, enabled=False):
        for b in range(own.shape[0]):
            for h in range(own.shape[1]):
                for i, t in enumerate(weights.rows):
                    worst = max(worst, float((rows(call, sight, b, h, slice(t, t + 1))[0].float() - own[b, h, i]).abs().max()))
        longest = [float(x.float().square().sum(-1).amax()) ** 0.5 for x in (call.q[:, :, weights.rows], call.k)]
        size = longest[0] * longest[1] * abs(call.scale)
    eps = max(torch.finfo(x.dtype).eps for x in (call.q, sample))
    if worst <= min(0.2, 16 * eps * (1 + size)):
        return ""
    return f"its product, mask and softmax were read, but the weights they give differ by {worst:.2g} from the model's own"


def broadcasting(modify: Any) -> Any:
    """A FlexAttention function of single numbers as one of whole index tensors, each varying along its own axis."""

    def broadcast(*given: Tensor) -> Tensor:
        *score, b, h, q, k = given
        shape = cast(torch.Size, torch.broadcast_shapes(*(x.shape for x in (b, h, q, k))))
        run = modify
        outs = [0] * len(score)
        for axis in (3, 2, 1, 0):
            run = torch.vmap(run, in_dims=(*outs, *(0 if i == axis else None for i in range(4))))
        flat = [x.flatten() for x in (b, h, q, k)]
        return run(*(x.expand(shape) if x.ndim == 4 else x.unsqueeze(0).expand(shape) for x in score), *flat)

    return broadcast


def flex_mask(mask_mod: Any) -> Mask | None:
    if getattr(mask_mod, "__name__", "") == "noop_mask":
        return None
    frame_q = broadcasting(mask_mod)
    return Where(lambda b, h, q, k: frame_q(b, h, q, k))


def flex_score(score_mod: Any) -> Score | None:
    if score_mod is None or getattr(score_mod, "__name__", "") == "_identity":
        return None
    modify = broadcasting(score_mod)
    return lambda s, b, h, q, k: modify(s, b, h, q, k)[0]
