"""Files that do harm by accident end in a clear report, within the limits of time and memory, and leave nothing behind."""

import os
import time
from pathlib import Path

import pytest

from multihead.checking.runner import resident, run_file

from .specimens import source

CLASS = source("note004")


def check(tmp_path, code, name="", **limits):
    path = tmp_path / "theirs.py"
    path.write_text(code, encoding="utf-8")
    start = time.monotonic()
    reports = run_file(f"{path}{name}", **{"seconds": 30.0, "gib": 1.5, **limits})
    return reports, time.monotonic() - start


def found(reports):
    return {f.name: f for f in reports.findings}


def said(reports, name="MultiHeadAttention"):
    return next(r for r in reports if r.name == name)


def test_an_infinite_loop_at_import_is_named_by_its_line_and_the_class_is_still_checked(tmp_path, monkeypatch):
    monkeypatch.setattr("multihead.checking.runner.IMPORT", 4.0)
    reports, seconds = check(tmp_path, CLASS + "\nwhile True:\n    pass\n")
    finding = found(reports)["import_runs"]
    assert finding.place.text == "while True:"
    assert "did not go on within 4 s" in finding.evidence.en
    assert said(reports).checks
    assert seconds < 20


def test_sys_exit_at_import(tmp_path):
    reports, _ = check(tmp_path, "import sys\nsys.exit(3)\n" + CLASS)
    assert found(reports)["import_runs"].evidence.en == "SystemExit(3)"
    assert found(reports)["import_runs"].place.line == 2
    assert said(reports).checks


def test_os_exit_at_import(tmp_path):
    reports, _ = check(tmp_path, CLASS + "\nimport os\nos._exit(7)\n")
    assert "exit 7" in found(reports)["import_runs"].evidence.en
    assert said(reports).checks


def test_children_are_not_left_behind(tmp_path):
    pid = tmp_path / "pid"
    code = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
open({str(pid)!r}, "w").write(str(child.pid))
"""
    reports, _ = check(tmp_path, code + CLASS)
    assert said(reports).checks
    child = int(pid.read_text())
    deadline = time.monotonic() + 5
    while (
        Path(f"/proc/{child}").exists() and "Z" not in Path(f"/proc/{child}/stat").read_text() and time.monotonic() < deadline
    ):
        time.sleep(0.05)
    assert not Path(f"/proc/{child}").exists() or ") Z" in Path(f"/proc/{child}/stat").read_text()


def test_memory_that_is_touched_ends_the_check(tmp_path):
    code = "import torch\nx = []\nfor i in range(200):\n    x.append(torch.ones(2**24))\n"
    reports, seconds = check(tmp_path, code + CLASS, gib=1.0)
    finding = found(reports)["limit"]
    assert finding.evidence.en == "more than 1 GiB of memory"
    assert finding.place.line == 3
    assert said(reports).checks  # its definitions were checked all the same
    assert seconds < 30


def test_an_allocation_that_can_never_be_met(tmp_path):
    reports, _ = check(tmp_path, "import torch\nx = torch.empty(2**60)\n" + CLASS)
    assert found(reports)["import_runs"].place.line == 2
    assert said(reports).checks


def test_megabytes_of_output_are_swallowed(tmp_path):
    reports, seconds = check(tmp_path, "for i in range(20000):\n    print('x' * 1000)\n" + CLASS)
    assert said(reports).checks
    assert seconds < 20


def test_a_forward_that_never_ends_is_stopped(tmp_path):
    code = source("note004", ("batch_size = query.size(0)", "batch_size = query.size(0)\n        while True: pass"))
    reports, seconds = check(tmp_path, code, seconds=6.0)
    assert "more than 6 s, while MultiHeadAttention was checked" in found(reports)["limit"].evidence.en
    assert seconds < 12


@pytest.mark.parametrize(
    ("code", "name", "line", "evidence"),
    [
        ("def f(:\n    pass\n", "syntax", 1, "invalid syntax"),
        ("x = (1,\n", "syntax", 1, "never closed"),
        ("\tif True:\n  y = 1\n", "syntax", 1, "unexpected indent"),
        ("x = '\0'\n", "syntax", 1, "null bytes"),
        ("# nothing\n", "not_built", None, "nothing in it looks like attention"),
        ("", "not_built", None, "nothing in it looks like attention"),
        ("x = " + "(" * 5000 + ")" * 5000 + "\n", "syntax", 1, ""),
    ],
)
def test_what_is_not_python_or_holds_nothing(tmp_path, code, name, line, evidence):
    reports, _ = check(tmp_path, code)
    finding = found(reports)[name]
    assert evidence in finding.evidence.en
    assert line is None or finding.place.line == line
    assert not reports.ok


def test_full_width_punctuation_is_mended_and_the_rest_is_checked(tmp_path):
    code = CLASS.replace(
        "def forward(self, query, key, value, mask=None):", "def forward（self，query， key，value，mask=None）："
    )
    reports, _ = check(tmp_path, code)
    finding = found(reports)["punctuation"]
    assert finding.evidence.zh == "1 行中共 7 处；其余部分按改正后的代码检查"
    assert finding.fix.splitlines()[1] == "+ def forward(self,query, key,value,mask=None):"
    assert said(reports).ok


def test_chinese_identifiers(tmp_path):
    code = """
import math
from torch import nn
class 多头注意力(nn.Module):
    def __init__(self, 维度, 头数):
        super().__init__()
        self.头数, self.每头维度 = 头数, 维度 // 头数
        self.qkv, self.out = nn.Linear(维度, 3 * 维度), nn.Linear(维度, 维度)
    def forward(self, x):
        批, 长, 宽 = x.shape
        q, k, v = (y.view(批, 长, self.头数, -1).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        分数 = q @ k.transpose(-2, -1) / math.sqrt(宽)
        return self.out((分数.softmax(-1) @ v).transpose(1, 2).reshape(批, 长, 宽))
"""
    reports, _ = check(tmp_path, code)
    assert said(reports, "多头注意力").names == ["scale_d_model"]


def test_the_channel_survives_noise(tmp_path):
    code = "import os\nfor fd in range(3, 12):\n    try:\n        os.write(fd, b'noise\\n{\"at\": 1}\\n')\n    except OSError:\n        pass\n"
    reports, _ = check(tmp_path, code + CLASS)
    assert said(reports).checks


def test_a_name_that_is_not_there(tmp_path):
    reports, _ = check(tmp_path, CLASS, ":Nothing")
    assert "there is no Nothing in it; there are: " in found(reports)["not_built"].evidence.en


def test_resident_memory_is_that_of_the_group():
    assert 0.05 < resident(os.getpgrp()) < 100
    assert resident(2**22) == 0


# ---- the child itself, in this process ----------------------------------------------------------------------------------


def child(tmp_path, code, **spec):
    """What the child writes to its channel."""
    import json

    from multihead.checking.child import main

    path = tmp_path / "inner.py"
    path.write_text(code, encoding="utf-8")
    read, write = os.pipe()
    threads = __import__("torch").get_num_threads()
    try:
        main({"file": str(path), "module": "", "name": "", "init": None, "definitions_only": False, **spec}, write)
    finally:
        __import__("torch").set_num_threads(threads)
        os.close(write)
    with os.fdopen(read) as stream:
        return [json.loads(line) for line in stream]


def test_the_child_tells_where_it_is_and_what_it_found(tmp_path):
    heard = child(tmp_path, "x = 1\n" + CLASS + "\nlayer = MultiHeadAttention(24, 4)\n")
    assert [h["at"] for h in heard if "at" in h][:2] == [1, 2]
    assert [h["report"]["name"] for h in heard if "report" in h] == ["MultiHeadAttention"]
    assert heard[-1] == {"end": True}


def test_the_child_leaves_out_what_does_something(tmp_path):
    heard = child(tmp_path, "print(1 / 0)\nif __name__ == '__main__':\n    exit()\n" + CLASS, definitions_only=True)
    assert [h["findings"] for h in heard if "findings" in h] == [[]]
    assert any("report" in h for h in heard)


def test_the_child_checks_functions_instances_and_names(tmp_path):
    function = "def attention(q, k, v):\n    return (q @ k.mT).softmax(-1) @ v\n"
    heard = child(tmp_path, function + "import torch\nlayer = torch.nn.MultiheadAttention(24, 4)\n")
    assert [h["report"]["name"] for h in heard if "report" in h] == ["attention", "layer"]
    assert child(tmp_path, function, name="attention")[-2]["report"]["findings"][0]["name"] == "no_scale"
    assert child(tmp_path, function, name="gone")[-2]["report"]["findings"][0]["name"] == "not_built"
    heard = child(tmp_path, "", file="", module="tests.adopting.zoo", name="Timm")
    assert heard[-2]["report"]["ok"]


def test_what_fails_in_the_checker_is_not_blamed_on_the_file(tmp_path, monkeypatch):
    def fails(*_):
        raise RuntimeError("ours")

    monkeypatch.setattr("multihead.checking.child.check_class", fails)
    finding = child(tmp_path, CLASS)[-2]["report"]["findings"][0]
    assert (finding["name"], finding["level"], finding["evidence"]["en"]) == ("check_fails", "risk", "RuntimeError: ours")


FRAGMENT = """
from gone import anything, compiled
import nowhere.at_all as away
class Config(ModelArgs):
    pass
class Net(d2l.Module):
    def __init__(self, num_hiddens, num_heads, dropout):
        super().__init__()
        self.num_heads, self.attention = num_heads, d2l.DotProductAttention(dropout)
        self.W_q, self.W_k, self.W_v, self.W_o = (nn.Linear(num_hiddens, num_hiddens) for _ in range(4))
    def forward(self, queries, keys, values, valid_lens):
        queries, keys, values = (transpose_qkv(w(x), self.num_heads) for w, x in ((self.W_q, queries), (self.W_k, keys), (self.W_v, values)))
        if valid_lens is not None:
            valid_lens = torch.repeat_interleave(valid_lens, self.num_heads, dim=0)
        return self.W_o(transpose_output(self.attention(queries, keys, values, valid_lens), self.num_heads))
assert Config().dim == 24
anything.of.it
away(1)
raise KeyboardInterrupt_
"""


def test_a_fragment_gets_what_it_lacks(tmp_path):
    heard = child(tmp_path, FRAGMENT)
    found = next(h["findings"] for h in heard if "findings" in h)
    names = [(f["name"], f["evidence"]["en"].split(":")[0]) for f in found]
    assert ("undefined", "ModelArgs, d2l, transpose_qkv, transpose_output") in names
    assert ("undefined", "nn, torch") in names
    assert ("import_runs", "NameError") in names
    reports = [h["report"] for h in heard if "report" in h]
    assert [r["ok"] for r in reports] == [True]
    assert "valid_lens: the number of valid keys" in str(reports[0]["checks"])
