"""The five notes' layers as they stand get what a careful reviewer would write about them."""

import re
from pathlib import Path

import pytest

import multihead as mh
from multihead.checking.load import File

from .specimens import source

NOTE_000 = source(
    "note000",
    ("def forward(", "def farward("),
    (".masked_fill(", ".mask_fill("),
)
NOTE_001 = source("note001", ("import torch\nfrom torch import nn\n", "")).replace("torch.nn.Module", "torch.nn.Module")
NOTE_002 = source(
    "note002",
    ("class ModelArgs:\n    dim = 24\n    n_heads = 4\n    dropout = 0.1\n    max_seq_len = 64\n", ""),
    ("import math\n", ""),
    ("is_causal=True", "is_causal=False"),
    ("def forward(self, x: torch.Tensor):", "def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor):"),
    ("bsz, seqlen, _ = x.shape", "bsz, seqlen, _ = q.shape"),
    ("self.wq(x), self.wk(x), self.wv(x)", "self.wq(q), self.wk(k), self.wv(v)"),
)
NOTE_002_FUNCTION = """
def attention(query, key, value, dropout=None):
    d_k = query.size(-1)
    scores = torch.matmul(query, key.transpose(-2, -1)) / math.sqrt(d_k)
    p_attn = scores.softmax(dim=-1)
    if dropout is not None:
        p_attn = dropout(p_attn)
    return torch.matmul(p_attn, value), p_attn
"""
NOTE_003 = re.sub(r"def sequence_mask.*?(?=class MultiHead)", "", source("note003"), flags=re.S).replace(
    "import math\n\nimport torch\nfrom torch import nn\n", ""
)
NOTE_003 = NOTE_003.replace("self.dropout = nn.Dropout(dropout)", "self.attention = d2l.DotProductAttention(dropout)")
NOTE_003 = re.sub(r"    def attention\(self.*?(?=    def forward)", "", NOTE_003, flags=re.S)
NOTE_004 = "from tkinter import NO\n" + source(
    "note004",
    ("            mask = mask.unsqueeze(1)\n", ""),
    ('float("-inf")', "-1e9"),
    ("    def forward(self, query, key, value, mask=None):\n",
     '    def forward(self, query, key, value, mask=None):\n        """\n        Args:\n            mask(Tensor, optional):注意力掩码，形状[batch_size, seq_len, seq_len]\n        """\n'),
)  # fmt: skip


def findings(tmp_path: Path, code: str):
    path = tmp_path / "note.py"
    path.write_text(code, encoding="utf-8")
    reports = mh.check(str(path), lang="zh")
    return {f.name: f for f in reports.findings}, reports


def test_note_000(tmp_path):
    """The note itself says so: farward, mask_fill. Once mended, −1e9 in float16 and the batch mask remain."""
    found, reports = findings(tmp_path, NOTE_000)
    assert {n for n, f in found.items() if f.level == "wrong"} == {"forward_misspelt", "unknown_name"}
    assert found["unknown_name"].fix.splitlines()[1] == "+ attn_scores = attn_scores.masked_fill(mask == 0, -1e9)"
    assert "是不是想写 masked_fill" in reports.text("zh")


def test_note_001(tmp_path):
    """Right; torch and nn are never imported, and its mask is the reverse of Hugging Face's: 1 blocks."""
    found, reports = findings(tmp_path, NOTE_001)
    assert reports.ok
    assert found["undefined"].fix.splitlines() == ["+ import torch", "+ from torch import nn"]
    assert "1 表示遮住" in reports.text("zh")


def test_note_002(tmp_path):
    """k and v are viewed with q's length: cross-attention breaks. ModelArgs and math are not there."""
    found, reports = findings(tmp_path, NOTE_002)
    assert {n for n, f in found.items() if f.level == "wrong"} == {"kv_length_of_q"}
    assert "xk" in found["kv_length_of_q"].place.text
    assert "ModelArgs" in "".join(f.evidence.en for f in reports.findings if f.name == "undefined")


def test_note_002s_function(tmp_path):
    _, reports = findings(tmp_path, NOTE_002_FUNCTION)
    assert reports.ok
    assert [r.name for r in reports if r.checks] == ["attention"]


def test_note_003(tmp_path):
    """A fragment of d2l: right, with the package's parts supplied; valid_lens are recognised."""
    found, reports = findings(tmp_path, NOTE_003)
    assert reports.ok
    assert "d2l" in "".join(f.evidence.en for f in reports.findings if f.name == "undefined")
    assert "valid_lens：有效键的个数" in reports.text("zh")
    assert "mean_row" in found


def test_note_004(tmp_path):
    """It promises a mask [batch, seq, seq], which lands on the heads; −1e9 fails in float16; tkinter's NO is not needed."""
    found, _ = findings(tmp_path, NOTE_004)
    assert {n for n, f in found.items() if f.level == "wrong"} == {"mask_on_heads"}
    assert "mask_half" in found
    assert found["mask_on_heads"].fix.splitlines()[1] == "+ scores = scores.masked_fill(mask.unsqueeze(1) == 0, -1e9)"


@pytest.mark.parametrize("code", [NOTE_000, NOTE_001, NOTE_002, NOTE_003, NOTE_004])
def test_they_are_python(tmp_path, code):
    path = tmp_path / "note.py"
    path.write_text(code)
    assert File(str(path))._parsed() is not None
