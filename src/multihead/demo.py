"""A layer whose three heads are made by hand, so that what it attends to can be understood: `multihead see`.

Half of each head's features turn with the position (RoPE), the other half hold the word. A head that asks with its own
constant turned back by one step finds the token before it; a head that asks with the word finds the same word; a head
that asks for nothing attends to everything alike.
"""

from __future__ import annotations

import math
import re
import unicodedata

import torch
from torch import Tensor

from .layer import MultiHeadAttention
from .masks import Causal
from .masks.algebra import Lang
from .positions import RoPE

HALF = 32
SHADES = " ·░▒▓█"
HEADS = {
    "en": ("looks at the token before", "looks for the same token", "looks at everything alike"),
    "zh": ("看前一个词元", "找相同的词元", "平均地看所有词元"),
}
TEXTS = {
    "en": "the cat sat on the mat and the dog sat on the cat",
    "zh": "床前明月光，疑是地上霜。举头望明月，低头思故乡。",
}


def see(text: str, lang: Lang = "en", most: int = 40) -> str:
    """What each head of the layer attends to in the text, as a picture in text."""
    tokens = tokenize(text)
    if not tokens:
        raise ValueError("the text is empty: give some words" if lang == "en" else "文本是空的：请给出一些文字")
    shown = tokens[:most]
    with torch.no_grad():
        weights = layer()(embed(shown), return_weights=True)[1][0]
    head = "head" if lang == "en" else "注意力头"
    parts = [
        f"{head} {i + 1}: {name}\n{picture(w, shown)}" for i, (name, w) in enumerate(zip(HEADS[lang], weights, strict=True))
    ]
    if len(tokens) > most:
        parts.append(
            f"(the first {most} of {len(tokens)} tokens)"
            if lang == "en"
            else f"（共 {len(tokens)} 个词元，只显示前 {most} 个）"
        )
    return "\n\n".join(parts)


def tokenize(text: str) -> list[str]:
    """Words, single Chinese characters, single signs; a mark or joiner stays with the character it belongs to."""
    tokens: list[str] = []
    glued = word = False
    for c in text.lower():
        joins = unicodedata.category(c) in ("Mn", "Mc", "Me") or c in "\u200d\ufe0f" or "\U0001f3fb" <= c <= "\U0001f3ff"
        letter = (c.isalnum() or c == "_") and not re.match(r"[\u2e80-\u9fff\uf900-\ufaff]", c)
        if c.isspace() or (not joins and not c.isprintable()):  # a control character could paint the terminal
            glued = word = False
        elif tokens and (joins or glued or (letter and word)):
            tokens[-1] += c
            word = word or letter
        else:
            tokens.append(c)
            word = letter
        glued = c == "\u200d"
    return tokens


def embed(tokens: list[str]) -> Tensor:
    """[1, tokens, HALF + 1]: a vector a word, of length one, and a constant 1."""
    random = torch.Generator().manual_seed(0)
    words = {word: torch.randn(HALF, generator=random) for word in dict.fromkeys(tokens)}
    return torch.stack([torch.cat([words[t] / words[t].norm(), torch.ones(1)]) for t in tokens])[None]


def layer() -> MultiHeadAttention:
    """Previous token, same token, everything: three heads, causal, weights set by hand."""
    rope = RoPE(theta=20.0, dim=HALF)
    made = MultiHeadAttention(HALF + 1, 3, head_dim=2 * HALF, bias=False, positions=rope, mask=Causal(), scale=1.0).eval()
    constant = torch.full((1, 1, 1, HALF), 1.5)
    back = rope.rotate(constant, *rope.angles(torch.tensor([-1]), constant)).flatten()
    query, key = (torch.zeros(3, 2 * HALF, HALF + 1) for _ in range(2))
    query[0, :HALF, HALF], key[0, :HALF, HALF] = back, constant.flatten()
    query[1, HALF:, :HALF], key[1, HALF:, :HALF] = 8 * torch.eye(HALF), torch.eye(HALF)
    with torch.no_grad():
        made.query.weight.copy_(query.flatten(0, 1))
        made.key.weight.copy_(key.flatten(0, 1))
    return made


def picture(weights: Tensor, tokens: list[str]) -> str:
    """A line a token: its row of weights as shades, and the token it attends to most."""
    wide = max(_width(t) for t in tokens)
    lines: list[str] = []
    for i, (token, row) in enumerate(zip(tokens, weights, strict=True)):
        shares = [float(w) for w in row]
        shades = "".join(SHADES[math.ceil(w * 5 - 0.05)] if j <= i else " " for j, w in enumerate(shares))
        best = int(row[: i + 1].argmax())
        lines.append(f"  {token}{' ' * (wide - _width(token))} │{shades}│ {row[best].item():4.0%} → {tokens[best]}")
    return "\n".join(lines)


def _width(text: str) -> int:
    """Columns in a terminal: Chinese characters and emoji take two, marks none, what is joined no more than the first."""
    joined = re.split("\u200d", text)[0]
    marks = ("Mn", "Me", "Cf")
    skin = re.compile("[\U0001f3fb-\U0001f3ff]")
    return sum(
        0 if unicodedata.category(c) in marks or skin.match(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1
        for c in joined
    )
