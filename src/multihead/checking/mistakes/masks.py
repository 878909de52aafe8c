"""Mistakes with masks: what they hide, from whom, when, and by which number."""

from __future__ import annotations

from dataclasses import replace

from .mistake import Mistake, Text, ways

FILL = "masked_fill(mask == 0, float('-inf'))"

MASKS = (
    Mistake(
        "mask_backwards",
        Text("the mask is read backwards", "掩码读反了"),
        Text(
            "What should be hidden is seen, and what should be seen is hidden: a causal layer looks into the future only, padding "
            "is all that is attended to.",
            "该遮住的能看见，该看见的被遮住：因果层只能看未来，填充位置反而成了唯一被注意的内容。",
        ),
        "scores = scores.masked_fill(tril == 1, float('-inf'))",
        "scores = scores.masked_fill(tril == 0, float('-inf'))",
        at="mask|causal",
        swaps=(
            (r"==\s*1\b|==\s*True\b", "== 0"),
            (r"masked_fill\(\s*~", "masked_fill("),
            (r"==\s*0\b|==\s*False\b", "== 1"),
            (r"masked_fill\(\s*(?=[\w(])", "masked_fill(~"),
            (r"tril", "triu"),
        ),
        change=ways(own=("future", "future alone")),
    ),
    Mistake(
        "mask_after_softmax",
        Text("the mask is applied after the softmax", "掩码放在了 softmax 之后"),
        Text(
            "The weights were divided by a sum that contains the hidden keys: they no longer sum to 1, and the hidden keys still "
            "change the result.",
            "权重已经除以了包含被遮住的键的总和：剩下的和不为 1，被遮住的键仍会影响结果。",
        ),
        "weights = scores.softmax(-1)\nweights = weights.masked_fill(mask == 0, 0)",
        "scores = scores.masked_fill(mask == 0, float('-inf'))\nweights = scores.softmax(-1)",
        at="mask",
        change=ways(how=("after",)),
    ),
    Mistake(
        "mask_zero",
        Text("hidden scores become 0 instead of −inf", "被遮住的分数变成了 0，而不是 −inf"),
        Text(
            "exp(0) is 1: a score of 0 is an ordinary score, and the key stays visible.",
            "exp(0) = 1：分数 0 只是一个普通的分数，这个键仍然可见。",
        ),
        "scores = scores * mask",
        "scores = scores.masked_fill(mask == 0, float('-inf'))",
        at="mask",
        swaps=(
            (r"(\w+)\s*\*=?\s*(self\.\w+(?:\[[^\]]*\])?|\w+)\s*$", r"\1.masked_fill(\2 == 0, float('-inf'))"),
            (r"masked_fill\(([^,]+),\s*0(?:\.0)?\)", r"masked_fill(\1, float('-inf'))"),
        ),
        change=lambda way, layout: [replace(way, how=0.0)] if not way.adds and way.how == "fill" else [],
    ),
    Mistake(
        "mask_too_small",
        Text("the number that hides a key is too small", "用来遮住键的数不够小"),
        Text(
            "Only a score far below all others vanishes in the softmax. −1e-9 is nearly 0 (−1e9 was meant), 1 or 0 added hides "
            "nothing, and −100 is an ordinary score for large activations.",
            "只有远小于其他分数的值才会在 softmax 中消失。−1e-9 几乎就是 0（本意是 −1e9），加 1 或 0 什么也遮不住，激活值较大时 −100 也只是普通的分数。",
        ),
        "scores = scores.masked_fill(mask == 0, -1e-9)",
        "scores = scores.masked_fill(mask == 0, float('-inf'))",
        at="mask",
        swaps=((r"-\s*1e-\d+|-\s*\d+(?:\.\d+)?(?![\w.])(?=\))|-\s*\d+(?:\.\d*)?(?=\s*$)|-?\b1e-?\d+", "float('-inf')"),),
        change=lambda way, layout: (
            [replace(way, how=v, adds=a) for v in (-1e-9, 1e-9, -1.0, 1.0, -10.0, -100.0, -1000.0) for a in (False, True)]
            if way.how == "fill"
            else []
        ),
    ),
    Mistake(
        "mask_sign",
        Text("the mask adds a large positive number", "掩码加的是很大的正数"),
        Text("+1e9 draws all weight to the very keys that should be hidden.", "加上 +1e9 会让全部权重落到本该遮住的键上。"),
        "scores = scores + mask * 1e9",
        "scores = scores.masked_fill(mask == 1, float('-inf'))",
        at="mask",
        swaps=((r"(?<!-)\b1e(\d)", r"-1e\1"),),
        change=lambda way, layout: (
            [replace(way, how=1e9, adds=a) for a in (False, True)] if way.how == "fill" else []
        ),
    ),
    Mistake(
        "mask_half",
        Text("the mask's number does not fit float16", "掩码用的数超出了 float16 的范围"),
        Text(
            "float16 ends at 65,504: masked_fill with −1e9 raises, adding −1e9 becomes −inf and gives NaN for an empty row.",
            "float16 最大只有 65504：masked_fill(…, -1e9) 会报错，加 −1e9 会变成 −inf，空行得到 NaN。",
        ),
        "scores = scores.masked_fill(mask == 0, -1e9)",
        "scores = scores.masked_fill(mask == 0, torch.finfo(scores.dtype).min)",
        level="risk",
        at="mask",
        swaps=((r"-\s*1e\d+", "torch.finfo(scores.dtype).min"),),
    ),
    Mistake(
        "nan_row",
        Text("a query that may attend to nothing gets NaN", "没有任何键可看的查询得到 NaN"),
        Text(
            "A softmax over nothing but −inf is 0/0. One such row (a text that is all padding) makes the loss NaN.",
            "整行都是 −inf 时 softmax 是 0/0。只要有一行这样（例如整条都是填充），损失就会变成 NaN。",
        ),
        "weights = scores.masked_fill(blocked, float('-inf')).softmax(-1)",
        "weights = scores.masked_fill(blocked, float('-inf')).softmax(-1).nan_to_num(0.0)",
        level="risk",
        at="mask",
    ),
    Mistake(
        "mean_row",
        Text("a query that may attend to nothing gets the mean of all values", "没有任何键可看的查询得到所有 V 的平均"),
        Text(
            "With one large negative number in every place the softmax is uniform: hidden values, padding among them, come through. "
            "Nothing reads such a row, as a rule.",
            "整行都是同一个很大的负数时 softmax 是均匀的：被遮住的内容（包括填充）会漏出来。通常没有人会用到这样的行。",
        ),
        "scores = scores.masked_fill(mask == 0, -1e9)",
        "weights = scores.softmax(-1).masked_fill(~mask.any(-1, keepdim=True), 0.0)",
        level="note",
        at="mask",
    ),
    Mistake(
        "causal_off_by_one",
        Text("the causal mask is off by one", "因果掩码差了一位"),
        Text(
            "A token sees itself and what stands before it. triu(…, diagonal=0) hides the token itself (the first sees nothing), "
            "diagonal=2 shows it the next one: the answer leaks.",
            "一个词元能看到自己和之前的词元。triu(…, diagonal=0) 连自己也遮住了（第一个什么都看不到），diagonal=2 会看到下一个词元：答案泄漏。",
        ),
        "mask = torch.triu(torch.ones(T, T), diagonal=2).bool()",
        "mask = torch.triu(torch.ones(T, T), diagonal=1).bool()",
        at="causal",
        swaps=(
            (r"(triu\(.*?diagonal\s*=\s*)-?\d+", r"\g<1>1"), (r"(tril\(.*?diagonal\s*=\s*)-?\d+", r"\g<1>0"),
            (r"(\.triu\()-?\d*\)", r"\g<1>1)"), (r"(\.tril\()-?\d*\)", r"\g<1>)"),
            (r"(triu\(.*\)),\s*-?\d+\)", r"\1, 1)"), (r"(triu\([^=]*)\)", r"\1, diagonal=1)"),
        ),
        change=ways(own=("without itself", "one ahead")),
    ),
    Mistake(
        "causal_corner",
        Text("the causal mask stands in the wrong corner where keys outnumber queries", "键比查询多时，因果掩码对齐的角不对"),
        Text(
            "New queries are the last tokens of the text, so the last query sees the last key. Aligned at the start (as is_causal "
            "of scaled_dot_product_attention is), a token decoded with a cache sees the first key alone.",
            "新的查询是文本最后的词元，最后一个查询应看到最后一个键。若从开头对齐（scaled_dot_product_attention 的 is_causal 就是），"
            "用缓存解码的词元只能看到第一个键。",
        ),
        "mask = torch.tril(torch.ones(T, S))",
        "mask = torch.tril(torch.ones(T, S), diagonal=S - T)",
        level="risk",
        at="causal",
    ),
    Mistake(
        "causal_missing",
        Text("it says it is causal and is not", "声称是因果（掩码）注意力，但其实没有遮住未来"),
        Text(
            "Every token sees the tokens it is to predict: training looks perfect, and generation fails.",
            "每个词元都能看到要预测的内容：训练时损失漂亮，生成时一塌糊涂。",
        ),
        "self.register_buffer('mask', torch.tril(torch.ones(T, T)))  # and never used",
        "scores = scores.masked_fill(self.mask[:T, :T] == 0, float('-inf'))",
        at="causal",
    ),
    Mistake(
        "padding_on_queries",
        Text("padding is masked on the axis of queries instead of keys", "填充掩码加在了查询维，而不是键维"),
        Text(
            "A mask [batch, keys] must become [batch, 1, 1, keys]. As [batch, 1, tokens, 1] whole rows are hidden and every other "
            "query still sees the padding.",
            "[batch, keys] 的掩码要变成 [batch, 1, 1, keys]。变成 [batch, 1, tokens, 1] 遮住的是整行，其他查询仍然能看到填充。",
        ),
        "scores = scores.masked_fill(padding[:, None, :, None], float('-inf'))",
        "scores = scores.masked_fill(padding[:, None, None, :], float('-inf'))",
        at="mask",
        swaps=((r"\[:, None, :, None\]", "[:, None, None, :]"), (r"unsqueeze\(1\)\.unsqueeze\((?:3|-1)\)", "unsqueeze(1).unsqueeze(2)")),
    ),
    Mistake(
        "mask_on_heads",
        Text("a mask [batch, q, k] lands on the heads", "[batch, q, k] 的掩码被广播到了头上，而不是批次上"),
        Text(
            "Against scores [batch, heads, q, k] torch lines axes up from the right: batch meets heads. It fails unless both are "
            "equal, and is silently wrong where they are.",
            "与 [batch, heads, q, k] 相加时 torch 从右边对齐：batch 对上了 heads。两者不等就报错，相等时悄悄算错。",
        ),
        "scores = scores.masked_fill(mask == 0, -1e9)  # mask [batch, q, k]",
        "scores = scores.masked_fill(mask.unsqueeze(1) == 0, -1e9)",
        level="note",
        at="mask",
        swaps=((r"\bmask\s*==", "mask.unsqueeze(1) =="), (r"\bmask\b(?!ed)", "mask.unsqueeze(1)")),
    ),
    Mistake(
        "lens_tiled",
        Text("valid lengths are repeated in the wrong order", "valid_lens 用 repeat 复制，顺序不对"),
        Text(
            "Where batch and heads share an axis, text 0's heads stand first: lengths must be repeated as 0 0 1 1 "
            "(repeat_interleave). repeat gives 0 1 0 1, and texts get each other's lengths.",
            "batch 和 heads 合成一维时，先是第 0 条文本的所有头：长度应按 0 0 1 1 重复（repeat_interleave）。repeat 得到 0 1 0 1，文本之间的长度互相用错。",
        ),
        "valid_lens = valid_lens.repeat(num_heads)",
        "valid_lens = valid_lens.repeat_interleave(num_heads, dim=0)",
        at="repeat",
        swaps=((r"(\w+)\.repeat\(\s*([\w.]+)[^)]*\)", r"\1.repeat_interleave(\2, dim=0)"), (r"torch\.tile\((\w+),\s*\(?([\w.]+),?\)?\)", r"torch.repeat_interleave(\1, \2, dim=0)")),
    ),
    Mistake(
        "mask_ignored",
        Text("the mask that is given changes nothing", "传入的掩码没有任何作用"),
        Text("The caller believes that padding or the future is hidden, and it is not.", "调用者以为填充或未来被遮住了，其实没有。"),
        "scores.masked_fill(mask == 0, float('-inf'))",
        "scores = scores.masked_fill(mask == 0, float('-inf'))",
        at="mask",
        swaps=((r"^(\s*)(\w+)\.masked_fill\(", r"\1\2 = \2.masked_fill("),),
    ),
)  # fmt: skip
