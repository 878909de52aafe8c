"""Mistakes in the scores and their softmax, and in positions."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from ...adopting.layouts import Layout
from ..ways import Way
from .mistake import Mistake, Text, ways


def _scales(*values: Callable[[int, int, int], float]) -> Callable[[Way, Layout], Iterable[Way]]:
    """Scales made from (d_model, heads, head_dim)."""

    def change(way: Way, layout: Layout) -> Iterable[Way]:
        if way.scale is None:
            sizes = layout.q.affine.in_features, layout.heads, layout.head_dim
            yield from (replace(way, scale=value(*sizes)) for value in values)

    return change


BY_ROOT = (r"/\s*[\w.]+(?:\([^()]*\))?(\s*\*\*\s*0?\.5)?", "/ math.sqrt(q.size(-1))")
TABLE = "cos = torch.cat([c, c], -1)          # two halves\n"

SCORES = (
    Mistake(
        "no_scale",
        Text("the scores are not scaled", "分数没有除以 √d_k"),
        Text(
            "q·k of d_k independent numbers has variance d_k. Unscaled, the softmax saturates and its gradient vanishes.",
            "d_k 个独立分量的点积方差是 d_k。不缩放的话 softmax 会饱和，梯度几乎为零。",
        ),
        "scores = q @ k.transpose(-2, -1)",
        "scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))",
        at="scores",
        swaps=((r"^(\s*)(.*@.*|.*matmul\(.*\)|.*einsum\(.*\)|.*bmm\(.*\))$", r"\1\2 / math.sqrt(q.size(-1))"),),
        change=_scales(lambda d, h, k: 1.0),
    ),
    Mistake(
        "scale_d_model",
        Text("the scores are scaled by d_model instead of d_k", "缩放用了 d_model，而不是每个头的 d_k"),
        Text(
            "A head's dot product runs over head_dim numbers, so √head_dim is its size. By d_model attention becomes too flat.",
            "每个头的点积只有 head_dim 项，应除以 √head_dim。用 d_model 会让注意力过于平均。",
        ),
        "scores = scores / math.sqrt(d_model)",
        "scores = scores / math.sqrt(d_model // num_heads)",
        at="scale",
        swaps=(BY_ROOT,),
        change=_scales(lambda d, h, k: d**-0.5, lambda d, h, k: 1 / d),
    ),
    Mistake(
        "scale_d_k",
        Text("the scores are divided by d_k without the root", "除以了 d_k，忘了开根号"),
        Text(
            "The spread of q·k grows with √d_k, not d_k: divided by d_k, all keys get almost the same weight.",
            "点积的标准差随 √d_k 增长，而不是 d_k：除以 d_k 之后所有键的权重几乎一样。",
        ),
        "scores = scores / d_k",
        "scores = scores / math.sqrt(d_k)",
        at="scale",
        swaps=((r"/\s*([\w.]+)\s*$", r"/ math.sqrt(\1)"), (r"/\s*([\w.]+)", r"/ math.sqrt(\1)")),
        change=_scales(lambda d, h, k: 1 / k),
    ),
    Mistake(
        "scale_twice",
        Text("the scale is applied twice", "缩放做了两次"),
        Text(
            "Once on q (or k) and once on the scores, or by hand and again in scaled_dot_product_attention: the scores are "
            "divided by d_k in all.",
            "一次乘在 q（或 k）上，一次除在分数上；或自己缩放后又交给 scaled_dot_product_attention：总共除以了 d_k。",
        ),
        "q = q / math.sqrt(d_k)\nscores = q @ k.transpose(-2, -1) / math.sqrt(d_k)",
        "scores = q @ k.transpose(-2, -1) / math.sqrt(d_k)",
        at="scale",
        change=_scales(lambda d, h, k: 1 / k),
    ),
    Mistake(
        "scale_heads",
        Text("the scores are scaled by the number of heads", "缩放用成了头数"),
        Text(
            "What counts is how many numbers a dot product adds up, head_dim, not how many heads there are.",
            "应当看一个点积加了多少项（head_dim），与头的个数无关。",
        ),
        "scores = scores / math.sqrt(num_heads)",
        "scores = scores / math.sqrt(head_dim)",
        at="scale",
        swaps=(BY_ROOT,),
        change=_scales(lambda d, h, k: h**-0.5, lambda d, h, k: 1 / h),
    ),
    Mistake(
        "scale_inverted",
        Text("the scores are multiplied by √d_k instead of divided", "乘以了 √d_k，而不是除以"),
        Text("The softmax saturates at once: nearly all weight falls on one key.", "softmax 立刻饱和：几乎全部权重落在一个键上。"),
        "scores = scores * math.sqrt(d_k)",
        "scores = scores / math.sqrt(d_k)",
        at="scale",
        swaps=((r"\*\s*((?:math|torch|np)\.sqrt)", r"/ \1"), (r"\*\s*self\.scale", "/ self.scale")),
        change=_scales(lambda d, h, k: k**0.5, lambda d, h, k: float(k)),
    ),
    Mistake(
        "scale_odd",
        Text("an unusual scale of the scores", "分数的缩放不寻常"),
        Text(
            "Some architectures mean it (a temperature, 1/d_k in µP); by default it is 1/√d_k.",
            "有些结构是故意的（温度、µP 里的 1/d_k）；通常是 1/√d_k。",
        ),
        "scores = scores * 0.3",
        "scores = scores / math.sqrt(q.size(-1))",
        level="risk",
        at="scale",
    ),
    Mistake(
        "k_reshaped",
        Text("k is reshaped instead of transposed", "K 用 reshape/view 代替了转置"),
        Text(
            "reshape to [.., dim, keys] does not turn rows into columns: each score adds up features of different keys.",
            "reshape 成 [.., dim, keys] 并不会把行变成列：每个分数加的是不同键的特征。",
        ),
        "scores = q @ k.reshape(B, H, D, T)",
        "scores = q @ k.transpose(-2, -1)",
        at="scores",
        swaps=((r"\.(?:view|reshape)\([^()]*\)", ".transpose(-2, -1)"),),
        change=ways(reshaped=(True,)),
    ),
    Mistake(
        "softmax_axis",
        Text("the softmax runs over the wrong axis", "softmax 的维度不对"),
        Text(
            "The weights of one query over its keys must sum to 1, so the softmax runs over the last axis of [.., q, k].",
            "一个查询对所有键的权重之和应为 1，所以 softmax 要在 [.., q, k] 的最后一维上做。",
        ),
        "weights = scores.softmax(dim=-2)",
        "weights = scores.softmax(dim=-1)",
        at="softmax",
        swaps=((r"dim\s*=\s*-?\d+", "dim=-1"), (r"softmax\((\w+),\s*-?\d+\)", r"softmax(\1, -1)"), (r"\.softmax\(\s*-?\d+\s*\)", ".softmax(-1)")),
        change=lambda way, layout: (
            [replace(way, axis=a, how=h) for a in ("q", "heads", "batch") for h in ("fill", -1e9)]
            if (way.axis, way.how) == ("k", "fill")
            else []
        ),
    ),
    Mistake(
        "softmax_missing",
        Text("there is no softmax", "没有 softmax"),
        Text("Scores are used as weights: they are negative, do not sum to 1 and grow with the text.",
             "直接把分数当权重用：有正有负，和不为 1，还会随序列变长而变大。"),
        "out = scores @ v",
        "out = scores.softmax(dim=-1) @ v",
        at="context",
        swaps=((r"(\w+)\s*@\s*", r"\1.softmax(dim=-1) @ "), (r"matmul\((\w+),", r"matmul(\1.softmax(dim=-1),")),
        change=ways(act=("none",)),
    ),
    Mistake(
        "softmax_twice",
        Text("the softmax is applied twice", "softmax 做了两次"),
        Text("Weights lie between 0 and 1, so a second softmax makes them nearly equal.", "权重都在 0 和 1 之间，再做一次 softmax 就几乎全都相等了。"),
        "weights = scores.softmax(-1).softmax(-1)",
        "weights = scores.softmax(-1)",
        at="softmax",
        change=ways(act=("twice",)),
    ),
    Mistake(
        "softmax_overflows",
        Text("exp of the scores overflows", "手写的 exp 会溢出"),
        Text(
            "exp(89) is infinite in float32, exp(12) in float16. A softmax subtracts the largest score first.",
            "float32 里 exp(89) 就是无穷大，float16 里 exp(12) 就是。softmax 要先减去最大的分数。",
        ),
        "w = scores.exp()\nw = w / w.sum(-1, keepdim=True)",
        "w = scores.softmax(dim=-1)",
        at="exp",
        swaps=((r"(\w+)\.exp\(\)", r"\1.softmax(dim=-1)"), (r"torch\.exp\((\w+)\)", r"\1.softmax(dim=-1)")),
    ),
    Mistake(
        "softmax_in_half",
        Text("in half precision the softmax stays in half precision", "半精度下 softmax 没有转成 float32"),
        Text(
            "Its weights are rounded to 8 or 11 bits before they sum the values. Llama and BERT's fused kernels keep float32.",
            "权重在与 V 相乘之前就被舍入到 8 或 11 位。Llama 的写法和各种融合算子都用 float32。",
        ),
        "weights = scores.softmax(dim=-1)",
        "weights = scores.softmax(dim=-1, dtype=torch.float32).to(q.dtype)",
        level="note",
        at="softmax",
    ),
    Mistake(
        "rope_on_v",
        Text("RoPE also turns the values", "RoPE 也作用到了 V 上"),
        Text("Only q and k are turned, so that q·k knows the distance; a turned value mixes its features by position.",
             "只应旋转 Q 和 K，使 q·k 反映相对距离；旋转 V 会让它的特征按位置混在一起。"),
        "q, k, v = rope(q), rope(k), rope(v)",
        "q, k = rope(q), rope(k)",
        at="turn",
        change=ways(turned=("qkv",)),
    ),
    Mistake(
        "rope_one_side",
        Text("RoPE turns only one of q and k", "RoPE 只作用在 Q、K 之一上"),
        Text("q·k then depends on where the token stands, not on the distance.", "这样 q·k 取决于绝对位置，而不是相对距离。"),
        "q = rope(q)",
        "q, k = rope(q), rope(k)",
        at="turn",
        change=ways(turned=("q", "k")),
    ),
    Mistake(
        "rope_layout",
        Text("RoPE's table and its rotation pair features differently", "RoPE 的 cos/sin 表与旋转的配对方式不一致"),
        Text(
            "A table [c, c] belongs to pairs (i, i + d/2), a table c0 c0 c1 c1 to neighbours. Mixed, it is no rotation: the scores "
            "depend on absolute positions.",
            "表 [c, c] 对应的是 (i, i + d/2) 配对，表 c0 c0 c1 c1 对应相邻配对。混用就不再是旋转，分数会依赖绝对位置。",
        ),
        TABLE + "turned = torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)",
        TABLE + "turned = torch.cat([-x[..., d // 2 :], x[..., : d // 2]], -1)",
        at="turn",
        change=ways(pairs=("half", "neighbours")),
    ),
    Mistake(
        "rope_position",
        Text("with a cache, RoPE counts positions from 0 again", "使用 KV 缓存时，RoPE 的位置又从 0 开始"),
        Text("The new token stands behind all cached ones: its position is the cache's length, not 0.",
             "新词元排在缓存的所有词元之后：它的位置是缓存的长度，而不是 0。"),
        "q, k = rope(q, start=0), rope(k, start=0)",
        "q, k = rope(q, start=past), rope(k, start=past)",
        at="turn",
    ),
    Mistake(
        "cache_axis",
        Text("the cache is joined along the wrong axis", "KV 缓存拼接的维度不对"),
        Text("Keys of new tokens belong behind the old ones on the axis of tokens; anywhere else heads or features grow instead.",
             "新词元的键应当接在“词元”这一维上；接在别的维上，增加的是头数或特征数。"),
        "k = torch.cat([past_k, k], dim=1)",
        "k = torch.cat([past_k, k], dim=2)  # [batch, heads, tokens, dim]",
        at="cat",
        swaps=((r"dim\s*=\s*-?\d+", "dim=2"), (r"\],\s*-?\d+\)", "], dim=2)")),
    ),
    Mistake(
        "cache_differs",
        Text("decoding with the cache gives other numbers than the whole text", "用缓存逐个解码与整段计算的结果不同"),
        Text("The same tokens must give the same output, however they are fed.", "同样的词元，无论怎样分批输入，结果都应该一样。"),
        "k = torch.cat([k, past_k], dim=2)",
        "k = torch.cat([past_k, k], dim=2)",
        at="cat",
    ),
)  # fmt: skip
