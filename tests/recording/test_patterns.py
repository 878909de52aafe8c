"""Patterns on heads that are made by hand to follow them, tables, the probe, comparisons."""

import math
import sys

import pytest
import torch
from torch import nn

import multihead as mh
from multihead.recording.patterns import PATTERNS, delimits, monotone
from multihead.recording.tables import Heads

T = 24
TEXT = ["the", "cat", ",", "the", "dog", ".", "a", "cat", "and", "a", "dog", ",", "and", "the", "end", ".", "of", "the", "cat", "!", "end", "of", "the", "text"]  # fmt: skip


def shaped(logits, causal=True):
    """A recording of one head whose scores are `logits` [T, S]: q is the logits, k the identity."""
    q, k = logits[None, None].float(), torch.eye(logits.shape[1])[None, None]
    with mh.record() as seen:
        mh.attention(q, k, k, scale=1.0, mask=mh.Causal() if causal else None)
    seen.tokens = TEXT
    return seen


def target(choose, causal=True):
    """Logits of a head in which query t looks at choose(t), where that is a key."""
    logits = torch.zeros(T, T)
    for t in range(T):
        s = choose(t)
        if s is not None and 0 <= s < T:
            logits[t, s] = 20.0
    return shaped(logits, causal)


def earlier(t, shift):
    found = [s + shift for s in range(t) if TEXT[s] == TEXT[t] and s + shift < t]
    return found[-1] if found else None


HEADS = {
    "previous": lambda: target(lambda t: t - 1),
    "next": lambda: target(lambda t: t + 1, causal=False),
    "same": lambda: target(lambda t: t),
    "duplicate": lambda: target(lambda t: earlier(t, 0)),
    "induction": lambda: target(lambda t: earlier(t, 1)),
    "sink": lambda: target(lambda t: 0),
    "delimiter": lambda: target(lambda t: max((s for s in range(t + 1) if TEXT[s] in ",.!"), default=None)),
    "local": lambda: shaped(torch.where((torch.arange(T)[:, None] - torch.arange(T)).abs() <= 8, 12.0, 0.0), causal=False),
    "positional": lambda: target(lambda t: t - 12),
    "uniform": lambda: shaped(torch.zeros(T, T)),
}


@pytest.mark.parametrize("pattern", HEADS)
def test_a_head_that_follows_a_pattern(pattern):
    row = HEADS[pattern]().heads()[0]
    assert row[pattern] > {"positional": 0.45, "delimiter": 0.9}.get(pattern, 0.95), row
    assert row["pattern"] == ("sink" if pattern == "positional" and row["sink"] > 0.4 else pattern), row
    assert all(0 <= row[name] <= 1 for name in PATTERNS if name in row)
    others = [p for p in ("previous", "next", "same", "duplicate", "induction", "sink") if p != pattern and p in row]
    if pattern in ("previous", "next", "same"):
        assert all(row[p] < 0.3 for p in others), row


def test_alignment():
    """Cross-attention that moves on with the queries; one that stays or moves back scores nothing."""
    layer, memory, x = mh.MultiHeadAttention(8, 1), torch.randn(1, 40, 8), torch.randn(1, 20, 8)

    def row(key):
        logits = torch.zeros(20, 40)
        logits[torch.arange(20), key] = 20.0
        with mh.record() as seen:
            layer(x, memory)
        call = seen[0].pictures[0]._asked()
        call.q, call.k, call.scale = logits[None, None], torch.eye(40)[None, None], 1.0
        return seen.heads()[0]

    assert row(torch.arange(0, 40, 2))["alignment"] > 0.95
    assert row(torch.arange(0, 40, 2))["pattern"] == "alignment"
    assert row(torch.arange(39, 0, -2))["alignment"] == 0
    assert row(torch.full((20,), 7))["alignment"] == 0


def test_monotone_by_its_definition():
    generator = torch.Generator().manual_seed(0)
    keys = torch.randint(0, 9, (2, 3, 30), generator=generator)
    live = torch.rand(2, 1, 30, generator=generator).expand(2, 3, 30) < 0.8
    found = monotone(keys, live)
    for h in range(3):
        each = []
        for b in range(2):
            x = keys[b, h][live[b, h]].tolist()
            rank = [sum(y < v for y in x) + (sum(y == v for y in x) + 1) / 2 for v in x]
            n = len(x)
            mean = (n + 1) / 2
            top = sum((r - mean) * (i + 1 - mean) for i, r in enumerate(rank))
            each.append(
                max(0, top / math.sqrt(sum((r - mean) ** 2 for r in rank) * sum((i + 1 - mean) ** 2 for i in range(n))))
            )
        assert found[h].item() == pytest.approx(sum(each) / 2, abs=1e-5)


def test_delimiters():
    assert all(delimits(t) for t in (",", ".", "[SEP]", "<s>", "<|endoftext|>", "Ġ,", "▁。", "##!", "「"))
    assert not any(delimits(t) for t in ("a", "Ġthe", "##ing", "3", "猫", "", "Ġ", "[x"))


def test_without_tokens_their_patterns_are_left_out():
    with mh.record() as seen:
        mh.MultiHeadAttention(8, 2)(torch.randn(2, 5, 8))
    columns = seen.heads().columns
    assert not {"duplicate", "induction", "delimiter", "alignment"} & set(columns)
    assert {"previous", "uniform", "entropy", "positional"} <= set(columns)


def test_means_over_several_texts():
    layer = mh.MultiHeadAttention(8, 2, mask=mh.Causal())
    x, y = torch.randn(1, 5, 8), torch.randn(1, 15, 8)
    with torch.no_grad(), mh.record() as both:
        layer(x), layer(y)
    entropy = [p.entropy()[0].sum(-1) for p in both[0].pictures]
    want = (entropy[0] + entropy[1]) / 20
    torch.testing.assert_close(torch.tensor(both.heads()["entropy"]), want)


# ---- tables ---------------------------------------------------------------------------------------------------------


def test_tables():
    rows = [
        {"layer": 0, "head": i, "name": "a", "pattern": "sink", "score": s, "entropy": 1.0}
        for i, s in enumerate((0.5, math.nan, 0.75))
    ]
    table = Heads(rows)
    assert [r["head"] for r in table.sort("score")] == [2, 0, 1]
    assert [r["head"] for r in table.sort("score", descending=False)] == [0, 2, 1]
    assert table["head"] == [0, 1, 2]
    assert table[1:]["head"] == [1, 2]
    assert table.where(lambda row: row["score"] > 0.6)[0]["head"] == 2
    assert str(table[:1]) == "layer  head  name  pattern  score  entropy\n    0     0  a     sink      0.50     1.00"
    assert str(Heads(rows * 20)).endswith("… 20 more")
    with pytest.raises(KeyError, match="there is no column 'scores'; there are layer, head, name, pattern, score, entropy"):
        table.sort("scores")


def test_to_pandas(monkeypatch):
    table = Heads([{"layer": 0, "head": 1}])
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match="to_pandas: pandas must be installed: pip install pandas"):
        table.to_pandas()
    fake = type(sys)("pandas")
    fake.DataFrame = list
    monkeypatch.setitem(sys.modules, "pandas", fake)
    assert table.to_pandas() == [{"layer": 0, "head": 1}]


# ---- the probe ------------------------------------------------------------------------------------------------------


class Induction(nn.Module):
    """Two layers made by hand: the first tells each token what stood before it, the second looks for the token it is after."""

    def __init__(self, vocabulary=60, most=128):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, 64)
        self.place = nn.Embedding(most, 128)
        nn.init.orthogonal_(self.place.weight)
        self.embed.weight.data = torch.nn.functional.normalize(self.embed.weight.data, dim=-1)
        self.first, self.second = (mh.MultiHeadAttention(256, 1, mask=mh.Causal(), bias=False, scale=1.0) for _ in range(2))
        for layer in (self.first, self.second):
            for part in (layer.query, layer.key, layer.value, layer.out):
                nn.init.zeros_(part.weight)
        with torch.no_grad():
            shift = self.place.weight.T @ torch.cat(
                [torch.zeros(1, 128), self.place.weight[:-1]]
            )  # maps place t to place t − 1
            self.first.query.weight[:128, 64:192] = 30 * shift.T
            self.first.key.weight[:128, 64:192] = torch.eye(128)
            self.first.value.weight[:64, :64] = torch.eye(64)
            self.first.out.weight[192:, :64] = torch.eye(64)
            self.second.query.weight[:64, :64] = 30 * torch.eye(64)
            self.second.key.weight[:64, 192:] = torch.eye(64)

    def forward(self, ids):
        x = torch.cat(
            [self.embed(ids), self.place(torch.arange(ids.shape[1])).expand(len(ids), -1, -1), torch.zeros(*ids.shape, 64)], -1
        )
        x = x + self.first(x)
        return x + self.second(x)


def test_the_probe_finds_induction():
    model = Induction().train()
    state = torch.get_rng_state()
    table = mh.find_heads(model, "induction", tokens=20)
    assert torch.equal(state, torch.get_rng_state())
    assert model.training
    assert model.first.training
    assert (table[0]["name"], table[0]["pattern"]) == ("second", "induction")
    assert table[0]["induction"] > 0.9
    assert table[1]["induction"] < 0.2
    before = mh.find_heads(model, "previous", tokens=20)[0]
    assert (before["name"], before["pattern"]) == ("first", "previous")
    assert "induction" in str(table).splitlines()[0]


class Words:
    all_special_ids = (0,)
    bos_token_id = 0

    def __call__(self, text):
        return {"input_ids": [1 + sum(map(ord, w)) % 59 for w in text.replace(",", " ,").replace(".", " .").split()]}

    def convert_ids_to_tokens(self, ids):
        return [str(i) for i in ids]


def test_the_probe_on_natural_text():
    model = Induction()
    table = mh.find_heads(model, "induction", tokenizer=Words(), text="one two three . one two four . one two three")
    assert table[0]["name"] == "second"
    assert mh.find_heads(model, "delimiter", tokenizer=Words())["delimiter"] is not None


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (
            lambda: mh.find_heads(Induction(), "inductive"),
            "find_heads: there is no pattern 'inductive'; there are previous, next",
        ),
        (lambda: mh.find_heads(Induction(), text="a"), "find_heads: a text needs tokenizer= to read it"),
        (lambda: mh.find_heads(nn.Linear(2, 2)), "find_heads: the model has neither config.vocab_size nor an nn.Embedding"),
        (lambda: mh.find_heads(nn.Embedding(60, 4)), "find_heads: 'induction' cannot be measured here: Recording"),
    ],
)
def test_probe_errors(call, match):
    with pytest.raises(ValueError, match=match):
        call()


# ---- comparing ------------------------------------------------------------------------------------------------------


def recorded(layer, x):
    with torch.no_grad(), mh.record() as seen:
        layer(x)
    return seen


def test_comparing_two_checkpoints():
    """The head whose query was changed comes first, by the total variation of its weights."""
    layer, x = mh.MultiHeadAttention(24, 4, mask=mh.Causal() & mh.Window(40)), torch.randn(2, 300, 24)
    before = recorded(layer, x)
    layer.query.weight.data[12:18] *= -3
    after = recorded(layer, x)
    table = before.compare(after)
    assert (table[0]["head"], table[0]["by"]) == (2, "weights")
    want = (before[0].weights() - after[0].weights()).abs().sum(-1).mean((0, 2)) / 2
    torch.testing.assert_close(torch.tensor([r["change"] for r in sorted(table, key=lambda r: r["head"])]), want)
    assert want[[0, 1, 3]].max() == 0


def test_comparing_two_prompts():
    layer = mh.MultiHeadAttention(24, 4, mask=mh.Causal())
    table = recorded(layer, torch.randn(1, 30, 24)).compare(recorded(layer, 9 * torch.randn(1, 50, 24)))
    assert table[0]["by"] in PATTERNS
    assert table[0]["change"] > 0.1
    q = torch.randn(1, 2, 3, 4)
    with mh.record() as other:
        mh.attention(q, q, q)
    seen = recorded(layer, torch.randn(1, 5, 24))
    with pytest.raises(
        ValueError, match="compare: the recordings share no place; one has MultiHeadAttention; the other attention"
    ):
        seen.compare(other)
