"""Mistakes of a layer that are not in its formula: dropout, state, memory, dtypes, devices, layouts of memory."""

from __future__ import annotations

from .mistake import Mistake, Text

LAYERS = (
    Mistake(
        "dropout_in_eval",
        Text("dropout also falls in eval()", "eval() 时仍然在做 dropout"),
        Text(
            "F.dropout and scaled_dot_product_attention do not know the module's mode: without training=self.training they drop "
            "at inference, and results change from call to call.",
            "F.dropout 和 scaled_dot_product_attention 不知道模块处于哪种模式：不传 training=self.training，推理时也会丢弃，每次结果都不同。",
        ),
        "weights = F.dropout(weights, self.p)",
        "weights = F.dropout(weights, self.p, training=self.training)",
        at="dropout",
        swaps=(
            (r"dropout_p\s*=\s*([^,)]+)", r"dropout_p=\1 if self.training else 0.0"),
            (r"dropout\((\w+),\s*(p\s*=\s*)?([\w.]+)(,\s*(?:training\s*=\s*)?True)?\)", r"dropout(\1, \2\3, training=self.training)"),
        ),
    ),
    Mistake(
        "dropout_on_scores",
        Text("dropout falls on the scores instead of the weights", "dropout 加在了分数上，而不是权重上"),
        Text(
            "A dropped score becomes 0, which is an ordinary score: the key is not dropped but gets an arbitrary weight.",
            "被丢弃的分数变成 0，而 0 只是一个普通分数：这个键没有被丢掉，只是得到了一个任意的权重。",
        ),
        "scores = self.dropout(scores)\nweights = scores.softmax(-1)",
        "weights = self.dropout(scores.softmax(-1))",
        at="dropout",
    ),
    Mistake(
        "dropout_forgotten",
        Text("it has a dropout that is never used", "定义了 dropout，却从未使用"),
        Text("Training has no dropout although the constructor asks for it.", "构造时给了 dropout，训练时却没有生效。"),
        "self.dropout = nn.Dropout(p)  # and never again",
        "weights = self.dropout(scores.softmax(-1))",
        level="risk",
        at="init",
    ),
    Mistake(
        "buffer_not_moved",
        Text("a tensor that .to() does not move", ".to() 不会移动的张量"),
        Text(
            "A plain attribute is neither parameter nor buffer: model.to('cuda') leaves it behind, and state_dict does not hold it.",
            "普通属性既不是参数也不是缓冲区：model.to('cuda') 不会带上它，state_dict 里也没有它。",
        ),
        "self.mask = torch.tril(torch.ones(T, T))",
        "self.register_buffer('mask', torch.tril(torch.ones(T, T)), persistent=False)",
        at="init",
        swaps=((r"self\.(\w+)\s*=\s*(.+)$", r"self.register_buffer('\1', \2, persistent=False)"),),
    ),
    Mistake(
        "length_limited",
        Text("its mask buffer limits the length of the text", "掩码缓冲区限制了序列长度"),
        Text(
            "Longer texts fail. A mask made from the length of the call costs less and knows no limit.",
            "更长的文本会报错。按调用时的长度现造掩码更省，也没有上限。",
        ),
        "self.register_buffer('mask', torch.tril(torch.ones(max_len, max_len)))",
        "mask = torch.ones(T, T, dtype=torch.bool, device=x.device).tril()",
        level="note",
        at="init",
    ),
    Mistake(
        "view_noncontiguous",
        Text("view of a tensor whose numbers do not lie in that order", "对不连续的张量用了 view"),
        Text(
            "transpose changes strides, not memory, and view cannot read across them; reshape copies where it must.",
            "transpose 只改变步长，不移动内存，view 无法跨步读取；reshape 会在需要时复制。",
        ),
        "out = out.transpose(1, 2).view(B, T, -1)",
        "out = out.transpose(1, 2).reshape(B, T, -1)",
        at="view",
        swaps=((r"\.view\(", ".reshape("),),
    ),
    Mistake(
        "nan_output",
        Text("its output is not a number", "输出是 NaN"),
        Text(
            "Ordinary inputs give NaN or infinity, most often a softmax over nothing but −inf.",
            "普通的输入得到 NaN 或无穷大，多半是 softmax 的一整行（或一整列）都是 −inf。",
        ),
        "weights = scores.masked_fill(mask, float('-inf')).softmax(dim=1)",
        "weights = scores.masked_fill(mask, float('-inf')).softmax(dim=-1)",
        at="softmax",
    ),
    Mistake(
        "batch_mixed",
        Text("one text of a batch changes another's result", "同一批里的一条文本会影响另一条的结果"),
        Text(
            "Batch entries share nothing in attention; here something is computed across them.",
            "注意力里批次中的各条互不相干，这里却有跨批次的计算。",
        ),
        "weights = scores.softmax(dim=0)",
        "weights = scores.softmax(dim=-1)",
        at="softmax",
    ),
    Mistake(
        "state_kept",
        Text("a call changes what the next one gives", "一次调用会改变下一次的结果"),
        Text(
            "Something of the first call is kept in the module – a cache, a mask, a running value – and meets the next text.",
            "模块里留下了上一次调用的东西（缓存、掩码、累积值），混进了下一条文本。",
        ),
        "self.k = torch.cat([self.k, k], dim=1)",
        "k = torch.cat([past_k, k], dim=1)  # handed in and handed back",
        at="state",
    ),
    Mistake(
        "inplace_input",
        Text("the caller's tensor is changed in place", "原地修改了调用者的张量"),
        Text(
            "What was handed over has other values afterwards: the residual, the next layer or the next step reads them.",
            "传进来的张量调用之后变了：残差、下一层或下一步读到的都是改过的值。",
        ),
        "x *= self.scale",
        "x = x * self.scale",
        at="inplace",
        swaps=((r"^(\s*)(\w+)\s*([*+\-/])=\s*", r"\1\2 = \2 \3 "), (r"\.(masked_fill|mul|add|div|sub|copy|zero)_\(", r".\1(")),
    ),
    Mistake(
        "device_fixed",
        Text("a tensor is made on a fixed device", "张量被固定建在某个设备上"),
        Text(
            "What is made in the forward must lie where the input lies, or the layer fails on another device.",
            "forward 里新建的张量必须和输入在同一设备上，否则换个设备就报错。",
        ),
        "mask = torch.ones(T, T).tril()",
        "mask = torch.ones(T, T, device=x.device).tril()",
        at="made",
        swaps=(
            (r"\.cuda\(\)", ".to(x.device)"),
            (r"device\s*=\s*['\"][\w:]+['\"]", "device=x.device"),
            (r"\.to\(['\"](?:cpu|cuda(?::\d+)?)['\"]\)", ".to(x.device)"),
            (r"(torch\.(?:ones|zeros|full|arange|eye|tensor)\((?:[^()]|\([^()]*\))*)\)", r"\1, device=x.device)"),
        ),
    ),
    Mistake(
        "dtype_fixed",
        Text("a tensor is made in a fixed dtype", "张量被固定成某种 dtype"),
        Text(
            "In bfloat16 or float64 the layer fails, or computes partly in float32.",
            "换成 bfloat16 或 float64 时会报错，或者有一部分仍按 float32 计算。",
        ),
        "weights = scores.float().softmax(-1)",
        "weights = scores.float().softmax(-1).to(v.dtype)",
        at="made",
        swaps=((r"\.float\(\)(.*)$", r".float()\1.to(v.dtype)"), (r"dtype\s*=\s*torch\.float32", "dtype=x.dtype")),
    ),
    Mistake(
        "weights_kept",
        Text("the L×L weights stay alive after the forward", "forward 结束后 L×L 的权重仍被模块保留"),
        Text(
            "An attribute keeps batch · heads · L² numbers, and in training the graph behind them, until the next call.",
            "模块的属性里一直留着 batch·heads·L² 个数，训练时还有它背后的计算图，直到下一次调用。",
        ),
        "self.attention_weights = weights",
        "return out, weights  # or self.attention_weights = weights.detach() where somebody asked for it",
        level="risk",
        at="kept",
    ),
    Mistake(
        "kv_length_of_q",
        Text("k and v are reshaped with q's length", "K、V 用了 Q 的长度来 view"),
        Text(
            "The call takes key and value of their own, but any other length than the query's fails: no cross-attention, no cache.",
            "接口允许另外传入 key、value，但只要长度与 query 不同就报错：做不了交叉注意力，也用不了缓存。",
        ),
        "B, T, _ = q.shape\nk = self.wk(k).view(B, T, H, D)",
        "B, S, _ = k.shape\nk = self.wk(k).view(B, S, H, D)",
        at="view",
        swaps=((r"\.view\((\w+),\s*\w+,", r".view(\1, -1,"), (r"\.reshape\((\w+),\s*\w+,", r".reshape(\1, -1,")),
    ),
    Mistake(
        "gradient_cut",
        Text("gradients do not pass", "梯度传不回去"),
        Text(
            "detach(), .data or no_grad() inside the forward: a projection never learns although the output is right.",
            "forward 里有 detach()、.data 或 no_grad()：输出是对的，但有的投影永远学不到东西。",
        ),
        "k = self.w_k(x.detach())",
        "k = self.w_k(x)",
        at="detach",
        swaps=((r"\.detach\(\)|\.data\b", ""),),
    ),
    Mistake(
        "permutation",
        Text("the result depends on the order of the tokens", "结果依赖词元的顺序"),
        Text(
            "Without mask and positions attention knows no order: tokens in another order give the same outputs in that order.",
            "没有掩码和位置信息时注意力不分先后：打乱词元，输出只应以同样的方式被打乱。",
        ),
        "q = q.view(B, H, T, D)",
        "q = q.view(B, T, H, D).transpose(1, 2)",
        level="risk",
        at="split",
    ),
    Mistake(
        "unexplained",
        Text("no known way of computing attention gives its output", "没有找到能重现其输出的注意力计算方式"),
        Text(
            "Neither the right way nor any single mistake or pair of mistakes of the catalogue reproduces it.",
            "无论是正确的算法，还是目录里的任何一个（或一对）错误，都不能重现它的输出。",
        ),
        "",
        "",
        level="risk",
    ),
)  # fmt: skip
