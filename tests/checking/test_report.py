"""What a person gets to see: terminal, notebook, JSON, HTML, both languages, exit status; and what they may hand in."""

import dataclasses
import json
import re
import subprocess
import sys

import pytest
import torch
from torch import nn

import multihead as mh
from multihead import cli
from multihead.checking.build import Anything, construct, parse_init
from multihead.checking.devices import Devices
from multihead.checking.load import File, undefined
from multihead.checking.page import _wide
from multihead.checking.report import Report
from multihead.checking.runner import parse
from multihead.checking.source import Place, diff
from multihead.testing import assert_attention

from ..adopting import zoo
from .specimens import source

WRONG = source("note000", ("math.sqrt(self.d_k)", "self.d_k"))


@pytest.fixture
def wrong(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(WRONG, encoding="utf-8")
    return path


def test_a_page_in_english(wrong):
    text = mh.check(str(wrong), lang="en").text("en")
    assert "  ✗ the scores are divided by d_k without the root  scale_d_k\n    mine.py:22\n" in text
    assert "      - attn_scores = torch.matmul(Q, K.transpose(-2, -1)) / self.d_k\n" in text
    assert "      + attn_scores = torch.matmul(Q, K.transpose(-2, -1)) / math.sqrt(self.d_k)\n" in text
    assert "0.1667 ≠ 1/√6 = 0.4082" in text
    assert "  ✗ 1 wrong, 1 at risk" in text


def test_a_page_in_chinese(wrong):
    text = mh.check(str(wrong), lang="zh").text()
    assert "✗ 除以了 d_k，忘了开根号" in text
    assert "证据" in text
    assert "1 处错误，1 处隐患" in text


def test_a_right_module_gets_a_short_page_that_says_what_was_verified():
    report = mh.check(zoo.Timm(), lang="en")
    text = str(report)
    assert report.ok
    assert report.names == []
    assert "✓ its weights in the reference give its output" in text
    assert "put ours in its place  layer = multihead.from_module(timm)" in re.sub(" +", " ", text).replace(
        "place layer", "place  layer"
    )
    assert "compared" in text
    assert "✓ nothing wrong was found" in text
    assert len(text.splitlines()) < 25


def test_colours_only_where_asked():
    report = mh.check(zoo.Timm(), lang="en")
    assert "\x1b[" not in report.text()
    assert "\x1b[32m  ✓ " in report.text(colour=True)


def test_html_is_one_file_and_escapes(wrong):
    page = mh.check(str(wrong), lang="zh").html()
    assert page.startswith('<!doctype html><html lang="zh-CN">')
    assert "http" not in page
    assert '<span class="minus">' in page
    report = Report("<script>alert(1)</script>")
    assert "<script>" not in report.html("en")
    assert "&lt;script&gt;" in report._repr_html_()


def test_json_goes_there_and_back(wrong):
    reports = mh.check(str(wrong))
    data = json.loads(reports.json())
    assert data[0]["findings"][0]["name"] == "scale_d_k"
    assert [json.loads(Report.of(d).json()) for d in data] == data
    one = mh.check(zoo.Note002())
    assert Report.of(json.loads(one.json())).text("zh") == one.text("zh")
    assert repr(one) == "Report('Note002', ok=False, findings=['kv_length_of_q', 'length_limited'])"


def test_reports_are_a_sequence(wrong):
    reports = mh.check(str(wrong))
    assert len(reports) == 1
    assert reports[0].name == "MultiHeadAttention"
    assert "<pre>" in reports._repr_html_()


# ---- targets ------------------------------------------------------------------------------------------------------------


def test_a_class_an_instance_and_a_function_are_checked_in_process():
    assert mh.check(zoo.Note004).name == "Note004"
    assert mh.check(zoo.Note004()).name == "Note004"
    assert mh.check(scaled).ok
    assert mh.check(unscaled).names == ["no_scale"]
    assert mh.check(unscaled).adopt is None


def scaled(q, k, v, mask=None):
    scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
    return scores.softmax(-1) @ v if mask is None else scores.masked_fill(~mask, -1e4).softmax(-1) @ v


def unscaled(q, k, v):
    return (q @ k.transpose(-2, -1)).softmax(-1) @ v


def plain_3d(query, key, value):
    assert query.ndim == 3
    return torch.bmm((torch.bmm(query, key.mT) / query.shape[-1]).softmax(-1), value)


def no_tensors(a, b):
    return a


def test_functions_of_three_axes_and_functions_that_are_none():
    report = mh.check(plain_3d)
    assert "scale_d_k" in {report.names[0], *report.findings[0].instead}
    assert "its parameters are (a, b)" in mh.check(no_tensors).findings[0].evidence.en


@pytest.mark.parametrize(
    ("target", "options", "error", "match"),
    [
        (3, {}, TypeError, "check: needs an nn.Module, a class of one, a function .* got a int"),
        (zoo.Note004, {"lang": "fr"}, ValueError, 'lang must be "en" or "zh"; it is \'fr\''),
        (zoo.Note004, {"init": "64, 4"}, ValueError, '--init must be "name=value, name=value"'),
        ("no_such_file.py", {}, ValueError, "no_such_file.py is not there"),
        ("not a module", {}, ValueError, "needs FILE.py, FILE.py:Name or package.module:Name; it is 'not a module'"),
    ],
)  # fmt: skip
def test_what_it_refuses(target, options, error, match):
    with pytest.raises(error, match=match):
        mh.check(target, **options)


def test_names_of_targets(wrong):
    assert parse(str(wrong)) == (str(wrong), "", "")
    assert parse(f"{wrong}:A") == (str(wrong), "", "A")
    assert parse("a.b:C.d") == ("", "a.b", "C.d")


def test_a_module_by_its_dotted_name():
    reports = mh.check("tests.adopting.zoo:Timm", lang="en")
    assert [r.name for r in reports] == ["Timm"]
    assert reports.ok


def test_a_folder_is_refused(tmp_path):
    with pytest.raises(ValueError, match="is a folder"):
        mh.check(str(tmp_path))


class Strange(nn.Module):
    def __init__(self, flux: str):
        super().__init__()
        self.width = {"blue": 24}[flux]
        self.q, self.k, self.v, self.o = (nn.Linear(self.width, self.width) for _ in range(4))

    def forward(self, x):
        q, k, v = (p(x).unflatten(-1, (4, 6)).transpose(1, 2) for p in (self.q, self.k, self.v))
        return self.o((q @ k.mT / 6**0.5).softmax(-1).matmul(v).transpose(1, 2).flatten(2))


def test_a_constructor_that_cannot_be_guessed_says_what_to_give():
    report = mh.check(Strange)
    assert [f.name for f in report.findings] == ["not_built"]
    assert '--init "d_model=64, num_heads=4"' in report.text("en")
    assert mh.check(Strange, init='flux="blue"').ok
    assert mh.check(Strange, init={"flux": "blue"}).ok


def test_sizes_by_name():
    module, _ = construct(zoo.NanoGPT)
    assert module.c_attn.in_features == 24
    assert parse_init("a=1, b='x', c=None") == {"a": 1, "b": "x", "c": None}
    config = Anything((24, 4, 2))
    assert (config.hidden_size, config.num_attention_heads, config.n_kv_heads, config["head_dim"], config.get("dropout")) == (
        24,
        4,
        2,
        6,
        0.1,
    )
    with pytest.raises(AttributeError):
        _ = config.zzz


# ---- command line ---------------------------------------------------------------------------------------------------------


def test_exit_status_and_outputs(wrong, tmp_path, capsys):
    html = tmp_path / "report.html"
    assert cli.main(["check", str(wrong), "--lang", "en", "--html", str(html)]) == 1
    assert "scale_d_k" in capsys.readouterr().out
    assert "scale_d_k" in html.read_text("utf-8")
    assert cli.main(["check", f"{wrong}:MultiHeadAttention", "--json", "--init", "d_model=32, num_heads=4"]) == 1
    assert json.loads(capsys.readouterr().out)[0]["findings"][0]["name"] == "scale_d_k"
    right = tmp_path / "right.py"
    right.write_text(source("note004"), encoding="utf-8")
    assert cli.main(["check", str(right), "--lang", "zh"]) == 0
    assert "没有发现错误" in capsys.readouterr().out


def test_exit_status_where_nothing_can_be_checked(tmp_path, capsys):
    assert cli.main(["check", "nowhere.py"]) == 2
    assert "multihead check: needs a file" in capsys.readouterr().err
    empty = tmp_path / "empty.py"
    empty.write_text("x = 1\n")
    assert cli.main(["check", str(empty)]) == 1


def test_the_console_script(wrong):
    done = subprocess.run([sys.executable, "-m", "multihead.cli", "check", str(wrong)], capture_output=True, text=True)
    assert done.returncode in (0, 1)


# ---- for tests ------------------------------------------------------------------------------------------------------------


def test_assert_attention():
    assert_attention(zoo.Note001())
    with pytest.raises(AssertionError, match=r"(?s)assert_attention: kv_length_of_q.*k and v are reshaped with q's length"):
        assert_attention(zoo.Note002(), lang="en")


# ---- parts ----------------------------------------------------------------------------------------------------------------


def test_diffs_are_python_or_none():
    assert (
        diff(Place("", 3, 3, "    y = x.view(a, b)"), ((r"\.view\(", ".reshape("),))
        == "- y = x.view(a, b)\n+ y = x.reshape(a, b)"
    )
    assert diff(Place("", 3, 3, "y = x.view(a)"), ((r"view\(", "("), (r"\)", "))"))) is None
    assert (
        diff(Place("", 3, 3, "def farward(self):"), ((r"def \w+\(", "def forward("),))
        == "- def farward(self):\n+ def forward(self):"
    )


def test_undefined_names():
    import ast

    code = "import a.b as c\nfrom d import e\ndef f(x, *y, **z):\n    g = x + h\n    return [i for i in y if i], e, c, __file__\ntry:\n    f()\nexcept E as err:\n    print(err)\n"
    assert undefined(ast.parse(code)) == {"h": 4, "E": 8}
    assert undefined(ast.parse("from m import *\nx")) == {}


def test_devices_are_followed():
    x = torch.randn(3, 3)
    with Devices() as right:
        _ = x + torch.ones(3, device=x.device), x * torch.tensor(2.0), x[torch.arange(2)], torch.ones_like(x) + x
    assert right.mixed is None
    for made in (
        lambda: x + torch.ones(3),
        lambda: x.masked_fill(torch.ones(3, 3).tril() == 0, 0.0),
        lambda: x + torch.arange(3)[:, None],
    ):
        with Devices() as wrong:
            made()
        assert wrong.mixed is not None


def test_wide_characters_count_two():
    assert _wide("类型", 6) == "类型  "
    assert _wide("abcdef", 3) == "abcdef "


def test_windows_line_ends_marks_and_decorators(tmp_path):
    path = tmp_path / "odd.py"
    path.write_bytes(
        b"\xef\xbb\xbf"
        + b"from __future__ import annotations\r\nfrom gone import compiled\r\n@compiled\r\ndef f(x: Unknown):\r\n    return x\r\n"
    )
    file = File(str(path))
    module = file.run()
    assert module.f(3) == 3
    assert [f.name for f in file.findings] == ["undefined", "import_fails"]


# ---- constructors in the wild -----------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Configuration:
    n_embd: int = 7
    n_head: int = 7
    bias: bool = False
    kind: str = "plain"
    dropout: float = 0.0


class Configured(nn.Module):
    def __init__(self, config: Configuration):
        super().__init__()
        self.n_head = config.n_head
        self.qkv, self.out = (
            nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias),
            nn.Linear(config.n_embd, config.n_embd),
        )

    def forward(self, x):
        q, k, v = (y.unflatten(-1, (self.n_head, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        return self.out((q @ k.mT / q.shape[-1] ** 0.5).softmax(-1).matmul(v).transpose(1, 2).flatten(2))


class ByDict(Configured):
    def __init__(self, cfg: dict):
        super().__init__(Configuration(cfg["d_model"], cfg["n_heads"]))


class Nothing(nn.Module):
    """No parameters, no forward."""


class Broken(Configured):
    def forward(self, x):
        return x.no_such_thing() + 1


class Fails(Configured):
    def forward(self, x):
        raise RuntimeError("always")


class CutOff(Configured):
    def forward(self, x):
        return super().forward(x).detach()


class Grows(Configured):
    def forward(self, x):
        self.past = x if not hasattr(self, "past") else torch.cat([self.past, x], 0)
        return super().forward(x) + self.past.mean()


def test_configurations_are_made_from_their_annotations():
    for kind in (Configured, ByDict):
        module, error = construct(kind)
        assert error is None
        assert (module.n_head, module.qkv.in_features, module.qkv.bias) == (4, 24, None)
        assert mh.check(kind).ok


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (Nothing, "forward_misspelt"),
        (Broken, "unknown_name"),
        (Fails, "call_fails"),
        (CutOff, "gradient_cut"),
        (Grows, "state_kept"),
    ],
)
def test_what_cannot_run_or_learn_is_named(kind, name):
    report = mh.check(kind)
    assert name in report.names


def test_a_constructor_of_no_parameters_and_a_name_that_is_missing():
    class Missing(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Linear(undefined_size, 3)  # noqa: F821

    assert [f.name for f in mh.check(Missing).findings] == ["undefined"]


def test_catalogue_texts_by_language():
    from multihead.checking.mistakes import Text

    assert (Text("a", "b")["en"], Text("a", "b")["zh"]) == ("a", "b")
    finding = mh.check(unscaled).findings[0]
    assert finding.mistake.title["zh"] == "分数没有除以 √d_k"
    assert mh.check(unscaled).wrong == [finding] or finding.level == "wrong"
