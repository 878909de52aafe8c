"""Every mistake of the catalogue in somebody's handwriting is named, proven, placed – and no other one is called certain."""

import ast
import collections
import re

import pytest
import torch

from multihead.checking.child import _checked, _targets
from multihead.checking.load import File
from multihead.checking.mistakes import CATALOGUE, SEARCHED
from multihead.checking.source import diff

from .specimens import CLEAN, SPECIMENS, source

# what no specimen can have: they are about the file, the checker, or what nobody can name
ELSEWHERE = {
    "call_fails",
    "check_fails",
    "not_built",
    "limit",
    "import_runs",
    "unexplained",
    "permutation",
    "no_out",
    "cache_differs",
}


def findings(tmp_path, code, name):
    path = tmp_path / f"{name}.py"
    path.write_text(code, encoding="utf-8")
    file = File(str(path))
    module = file.run()
    reports = [_checked(n, target, None) for n, target in _targets(module, "")]
    return reports, [*file.findings, *(f for r in reports for f in r.findings)]


@pytest.mark.parametrize(("i", "style", "mistake"), [(i, s[0], s[1]) for i, s in enumerate(SPECIMENS)])
def test_exactly_the_mistake_is_named(tmp_path, i, style, mistake):
    _, found = findings(tmp_path, source(style, *SPECIMENS[i][2:]), f"specimen{i}")
    assert mistake in {f.name for f in found}
    assert {f.name for f in found if f.level == "wrong" and f.certain} - {mistake} == set()
    finding = next(f for f in found if f.name == mistake)
    assert finding.instead == ()
    assert finding.place is not None
    assert finding.evidence.en
    assert finding.evidence.zh
    if finding.fix:
        assert re.fullmatch(r"([+-] .*\n?)+", finding.fix)


@pytest.mark.parametrize("style", CLEAN)
def test_clean_styles_have_nothing_wrong(tmp_path, style):
    reports, found = findings(tmp_path, source(style), f"clean_{style}")
    assert [f for f in found if f.level == "wrong"] == []
    assert len(reports) == 1
    assert "its weights in the reference give its output" in reports[0].checks[0].text.en


def test_there_are_enough_of_them():
    assert len(SPECIMENS) >= 60
    assert len({s[0] for s in SPECIMENS}) >= 8
    assert {s[1] for s in SPECIMENS} | ELSEWHERE == set(CATALOGUE)


PLACES = [
    ("note000", "split_without_transpose", "return x.view(batch_size, self.num_heads, seq_length, self.d_k)"),
    ("fused", "scale_d_model", "math.sqrt(C)"),
    ("note001", "softmax_axis", "dim=1"),
    ("llama", "cache_axis", "past_key_value[0], k], dim=1"),
    ("fused", "mask_backwards", "== 1"),
    ("note002", "causal_off_by_one", "diagonal=2"),
    ("einops_style", "mask_after_softmax", "attn * mask"),
    ("bert", "dropout_on_scores", "self.dropout(attention_scores)"),
    ("fused", "buffer_not_moved", "self.tril ="),
    ("note001", "gradient_cut", ".detach()"),
    ("weights", "merge_without_transpose", "mixed.reshape"),
    ("sdpa", "split_without_transpose", "v = v.reshape"),
    ("note003", "lens_tiled", ".repeat("),
    ("bert", "inplace_input", "hidden_states *= 0.5"),
]


@pytest.mark.parametrize(("style", "mistake", "line"), PLACES)
def test_the_line_is_the_one(tmp_path, style, mistake, line):
    changes = next(s[2:] for s in SPECIMENS if s[:2] == (style, mistake))
    _, found = findings(tmp_path, source(style, *changes), f"placed_{style}_{mistake}")
    assert line in next(f for f in found if f.name == mistake).place.text


FIXES = [
    ("note000", "split_without_transpose", "+ return x.view(batch_size, seq_length, self.num_heads, self.d_k).transpose(1, 2)"),
    ("note002", "causal_off_by_one", "+ mask = torch.triu(mask, diagonal=1)"),
    ("sdpa", "dropout_in_eval", "dropout_p=p if self.training else 0.0"),
    ("note001", "gradient_cut", "+ key = self.split_head(self.k_linear(hidden_state))"),
    ("llama", "cache_axis", "+ k = torch.cat([past_key_value[0], k], dim=2)"),
    ("note000", "forward_misspelt", "+ def forward(self, Q, K, V, mask=None):"),
    ("fused", "mask_backwards", "self.tril[:, :, :T, :T] == 0"),
]


@pytest.mark.parametrize(("style", "mistake", "fix"), FIXES)
def test_the_fix_is_the_line_put_right(tmp_path, style, mistake, fix):
    changes = next(s[2:] for s in SPECIMENS if s[:2] == (style, mistake))
    _, found = findings(tmp_path, source(style, *changes), f"mended_{style}_{mistake}")
    assert fix in next(f for f in found if f.name == mistake).fix


def test_a_pair_of_mistakes_is_named_as_a_pair(tmp_path):
    split = (
        "x.view(batch_size, seq_length, self.num_heads, self.d_k).transpose(1, 2)",
        "x.view(batch_size, self.num_heads, seq_length, self.d_k)",
    )
    code = source("note000", split, ("math.sqrt(self.d_k)", "math.sqrt(self.d_model)"))
    _, found = findings(tmp_path, code, "pair")
    assert [f.name for f in found if f.level == "wrong"] == ["split_without_transpose", "scale_d_model"]
    assert "with these mistakes together the reference gives its output" in found[0].evidence.en


def test_what_cannot_be_told_apart_is_said(tmp_path):
    """d_k = 4 and 4 heads: 1/√d_k = 1/√heads is right; 1/d_k = 1/heads = 1/√16 = 1/√d_model is one number with three meanings."""
    import multihead as mh

    code = source("note000", ("math.sqrt(self.d_k)", "self.d_k"))
    path = tmp_path / "alike.py"
    path.write_text(code)
    kind = File(str(path)).run().MultiHeadAttention
    finding = mh.check(kind(16, 4)).findings[0]
    assert {finding.name, *finding.instead} >= {"scale_d_model", "scale_d_k", "scale_heads"}
    assert mh.check(kind).names == ["scale_d_k"]  # with sizes of ours they are told apart
    assert mh.check(kind).findings[0].instead == ()


@pytest.mark.parametrize("mistake", CATALOGUE.values(), ids=CATALOGUE)
def test_the_catalogue_is_whole(mistake):
    assert mistake.title.en
    assert mistake.title.zh
    assert (
        mistake.why.en.endswith(".")
        or mistake.why.en.endswith('"')
        or mistake.why.en.endswith("=True")
        or mistake.why.en[-1] in ").;"
    )
    assert re.search(r"[\u4e00-\u9fff]", mistake.title.zh + mistake.why.zh)
    for code in (mistake.bad, mistake.good):
        if code and mistake.name != "punctuation":
            ast.parse(code if not code.endswith(":") else f"{code} pass") if not code.startswith("return") else None
    assert mistake.bad != mistake.good or not mistake.bad


def test_swaps_turn_each_minimal_example_into_something_else():
    from multihead.checking.source import Place

    turned = collections.Counter()
    for mistake in CATALOGUE.values():
        for line in mistake.bad.splitlines():
            turned[mistake.name] += diff(Place("", 1, 1, line), mistake.swaps) is not None
    lacking = [m.name for m in CATALOGUE.values() if m.swaps and m.bad and not turned[m.name]]
    assert (
        set(lacking) <= {"mask_half", "gqa_order", "out_missing", "no_scale", "causal_off_by_one", "unknown_name"}
        or lacking == []
    )


def test_every_searched_mistake_changes_the_numbers():
    """Switched on alone, none of them is the right way: what could not be found is not in the catalogue."""
    from types import SimpleNamespace

    from multihead.checking.ways import RIGHT

    layout = SimpleNamespace(
        heads=4, kv_heads=2, head_dim=6, v_dim=6, q=SimpleNamespace(affine=SimpleNamespace(in_features=24))
    )
    for mistake in SEARCHED:
        changed = list(mistake.change(RIGHT, layout))
        assert changed
        assert RIGHT not in changed
    assert torch.get_default_dtype() == torch.float32


def test_a_search_that_runs_out_of_time_calls_nothing_right(tmp_path, monkeypatch):
    """What the reference cannot give in time, but adoption reads with an odd scale, is said to be odd."""
    monkeypatch.setattr("multihead.checking.diagnose.SINGLES", -1.0)
    monkeypatch.setattr("multihead.checking.diagnose.PAIRS", -1.0)
    _, found = findings(tmp_path, source("note000", ("math.sqrt(self.d_k)", "self.d_k")), "late")
    assert "scale_odd" in {f.name for f in found}
