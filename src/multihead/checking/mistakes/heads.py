"""Mistakes in cutting into heads and putting together, and in who is projected by what."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ...adopting.layouts import Layout
from ..ways import Way
from .mistake import Mistake, Text, ways


def _tiled(way: Way, layout: Layout) -> Iterable[Way]:
    return (replace(way, tiled=t) for t in ("kv", "k", "v")) if 1 < layout.kv_heads < layout.heads else ()


def _split(way: Way, layout: Layout) -> Iterable[Way]:
    del layout
    for which in ("qkv", "q", "k", "v", "kv", "qk", "qv"):
        if not way.split:
            yield replace(way, split=which)
            yield replace(way, split=which, late=True)


def _by(way: Way, *projections: str) -> Iterable[Way]:
    """One projection made by another's matrix, of its own source or of the other's."""
    if way.by != "qkv":
        return
    for by in projections:
        yield replace(way, by=by)
        yield replace(way, by=by, source=by)


HEADS = (
    Mistake(
        "split_without_transpose",
        Text("heads are cut by reshape without transpose", "用 reshape/view 直接切出多头，没有 transpose"),
        Text(
            "reshape keeps the order of the numbers in memory, token after token. [batch, heads, tokens, dim] read from that order "
            "gives head 0 all features of the first tokens and the last head those of the last: a head no longer sees every token.",
            "reshape 不改变内存里数字的顺序（一个词元接一个词元）。按这个顺序直接读成 [batch, heads, tokens, dim]，第 0 个头拿到的是"
            "前几个词元的全部特征，最后一个头拿到的是最后几个词元的：每个头都看不到完整的序列了。",
        ),
        "q = q.view(B, H, T, D)",
        "q = q.view(B, T, H, D).transpose(1, 2)",
        at="split",
        swaps=(
            (r"\.(view|reshape)\(\s*([^,()]+(?:\([^()]*\)|\[[^\]]*\])?)\s*,\s*([\w.]+)\s*,\s*([^,()]+(?:\([^()]*\)|\[[^\]]*\])?)\s*,\s*([^()]+?)\s*\)",
             r".\1(\2, \4, \3, \5).transpose(1, 2)"),
            (r"(['\"])b \(h? ?t h? ?\) ", r"\1b t (h d) "),
        ),
        change=_split,
    ),
    Mistake(
        "heads_never_moved",
        Text("the heads of one token attend to each other", "头的维度没有移到前面：注意力算在同一个词元的各个头之间"),
        Text(
            "After view the axes are [batch, tokens, heads, dim]. A matrix product works on the last two, so that scores are "
            "[batch, tokens, heads, heads] and no token ever sees another.",
            "view 之后各维是 [batch, tokens, heads, dim]。矩阵乘法只作用在最后两维，得到的分数是 [batch, tokens, heads, heads]，"
            "任何词元都看不到别的词元。",
        ),
        "q = q.view(B, T, H, D)\nscores = q @ k.transpose(-2, -1)",
        "q = q.view(B, T, H, D).transpose(1, 2)\nscores = q @ k.transpose(-2, -1)",
        at="split",
        swaps=((r"(\.(?:view|reshape)\([^()]*(?:\([^()]*\)[^()]*)*\))\s*$", r"\1.transpose(1, 2)"),),
        change=lambda way, layout: [replace(way, over="heads")] if layout.heads > 1 and way.over != "heads" else [],
    ),
    Mistake(
        "merge_without_transpose",
        Text("heads are put together without transpose", "合并多头时没有先 transpose 回来"),
        Text(
            "The result is [batch, heads, tokens, dim]; reshape to [batch, tokens, heads · dim] reads it in that order, so that a "
            "token gets pieces of other tokens' results.",
            "注意力的结果是 [batch, heads, tokens, dim]；直接 reshape 成 [batch, tokens, heads·dim] 会按这个顺序读，"
            "一个词元会拿到其他词元的结果。",
        ),
        "out = out.reshape(B, T, H * D)",
        "out = out.transpose(1, 2).reshape(B, T, H * D)",
        at="merge",
        swaps=((r"(?:\.contiguous\(\))?\.(?:view|reshape)\(", r".transpose(1, 2).reshape("), (r"(['\"])b h t d ->", r"\1b h t d ->")),
        change=ways(merge=("reshape",)),
    ),
    Mistake(
        "heads_averaged",
        Text("heads are averaged or summed instead of put side by side", "多头结果被求平均（或求和），而不是拼接"),
        Text(
            "The mean of the heads throws away which head found what; the output projection can no longer weigh heads differently.",
            "取平均会丢掉“哪个头看到了什么”，输出投影也无法再给不同的头不同的权重。",
        ),
        "out = out.mean(dim=1)",
        "out = out.transpose(1, 2).flatten(2)",
        at="average",
        swaps=((r"\.(?:mean|sum)\([^()]*\)", r".transpose(1, 2).flatten(2)"),),
        change=ways(merge=("mean", "sum")),
    ),
    Mistake(
        "gqa_order",
        Text("shared key/value heads are repeated in the wrong order", "GQA：K、V 头重复的顺序不对（repeat 与 repeat_interleave 混淆）"),
        Text(
            "Query head h belongs to kv head h // (heads / kv_heads): 0 0 1 1. repeat gives 0 1 0 1, so that weights trained by "
            "anybody else meet the wrong keys.",
            "第 h 个查询头应当使用第 h // (heads / kv_heads) 个 K/V 头：0 0 1 1。repeat 得到的是 0 1 0 1，别处训练的权重会配错键。",
        ),
        "k = k.repeat(1, H // G, 1, 1)",
        "k = k.repeat_interleave(H // G, dim=1)",
        at="repeat",
        swaps=(
            (r"\.(repeat|tile)\(\s*1\s*,\s*([^,]+),\s*1\s*,\s*1\s*\)", r".repeat_interleave(\2, dim=1)"),
            (r"\(r g\)|\(r h\)", "(g r)"),
        ),
        change=_tiled,
    ),
    Mistake(
        "qk_swapped",
        Text("queries and keys have changed places", "Q 和 K 的位置互换了"),
        Text(
            "The scores are keys by queries: with keys from another text every output row belongs to a key, and a causal mask "
            "hides the past. In self-attention without a mask it is a renaming and no harm.",
            "分数成了“键 × 查询”：做交叉注意力时，每行输出对应的是键；有因果掩码时被遮住的是过去。没有掩码的自注意力里它只是改名，没有害处。",
        ),
        "scores = k @ q.transpose(-2, -1)",
        "scores = q @ k.transpose(-2, -1)",
        at="scores",
        swaps=((r"\b(\w*[kK]\w*)\s*@\s*(\w*[qQ]\w*)\.", r"\2 @ \1."), (r"\(\s*(\w*[kK]\w*)\s*,\s*(\w*[qQ]\w*)\.", r"(\2, \1.")),
        change=ways(crossed=(True,)),
    ),
    Mistake(
        "k_as_v",
        Text("the values are made by another projection", "V 用错了投影（例如把 K 当成了 V）"),
        Text(
            "What is summed are not the values: their own projection is never used and never learns.",
            "加权求和的不是 V：属于 V 的投影层从未被使用，也学不到任何东西。",
        ),
        "v = self.w_k(x)",
        "v = self.w_v(x)",
        at="project",
        change=lambda way, layout: _by(way, "qkk", "qkq") if layout.head_dim == layout.v_dim else (),
    ),
    Mistake(
        "shared_projection",
        Text("one projection is used twice while its own is idle", "一个投影层被用了两次，而应该用的那个闲置"),
        Text(
            "Queries and keys made by one matrix are alike: every token finds itself most similar. The idle one gets no gradient.",
            "Q 和 K 用同一个矩阵时二者相同，每个词元总是最像自己；闲置的那个投影层没有梯度。",
        ),
        "k = self.w_q(x)",
        "k = self.w_k(x)",
        at="project",
        change=lambda way, layout: _by(way, "qqv", "kkv", "vkv", "qvv"),
    ),
    Mistake(
        "parameter_unused",
        Text("parameters that change nothing", "有参数从未参与计算"),
        Text("They take memory, get no gradient and mislead the reader.", "它们占用内存、没有梯度，还会误导读代码的人。"),
        "self.w_x = nn.Linear(D, D)  # and never again",
        "",
        level="risk",
        at="project",
    ),
    Mistake(
        "out_missing",
        Text("the output projection is never applied", "输出投影（W_o）没有被调用"),
        Text(
            "Heads stay side by side and never mix; the layer has a projection for that and does not use it.",
            "各个头只是并排放着，没有混合；层里定义了输出投影，却没有用。",
        ),
        "return out",
        "return self.w_o(out)",
        at="return",
        swaps=((r"return (\w+)", r"return self.OUT(\1)"),),
    ),
    Mistake(
        "no_out",
        Text("there is no output projection", "没有输出投影"),
        Text(
            "Heads stay side by side. Some architectures mean it; a Transformer's layer has one.",
            "各个头只是并排放着。有些结构是故意的；标准 Transformer 有输出投影。",
        ),
        "return out",
        "return self.w_o(out)",
        level="note",
        at="return",
    ),
    Mistake(
        "odd_bias",
        Text("some of the projections of q, k, v have a bias and others have none", "Q、K、V 的投影有的带偏置，有的不带"),
        Text(
            "Usually all three have one or none has. (A bias of the keys changes no weight; Whisper leaves out just that one.)",
            "通常三个都有或都没有。（键的偏置不影响权重；Whisper 正是只去掉了它。）",
        ),
        "self.w_q = nn.Linear(D, D)\nself.w_k = nn.Linear(D, D, bias=False)\nself.w_v = nn.Linear(D, D, bias=False)",
        "self.w_q, self.w_k, self.w_v = (nn.Linear(D, D, bias=False) for _ in range(3))",
        level="note",
        at="init",
    ),
)  # fmt: skip
