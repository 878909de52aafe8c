"""The package from outside: what it exports, what importing it costs, what it refuses by name."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import multihead as mh
from multihead import cli
from multihead.testing import make

ROOT = Path(__file__).parent.parent


def python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip()


def test_all_is_exact():
    assert len(set(mh.__all__)) == len(mh.__all__)
    assert all(hasattr(mh, name) for name in mh.__all__)
    public = {n for n, x in vars(mh).items() if not n.startswith("_") and not isinstance(x, type(sys))}
    assert public | {"masks", "positions", "compat"} == set(mh.__all__)
    assert all(hasattr(mh.masks, name) for name in mh.masks.__all__)


def test_import_needs_torch_alone():
    """With everything else of the environment hidden, and without torch's heavy parts."""
    code = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"triton", "transformers", "matplotlib", "onnx", "hypothesis", "numpy_", "pandas", "rich"}:
            raise ImportError(name)
sys.meta_path.insert(0, Block())
import torch
before = set(sys.modules)
import multihead
new = {n for n in set(sys.modules) - before if not n.startswith("multihead")}
print(sorted(n for n in new if n.split(".")[0] not in sys.stdlib_module_names))
"""
    assert python(code) == "[]"


def test_import_costs_little_over_torch():
    code = "import torch, time; t = time.perf_counter(); import multihead; print(time.perf_counter() - t)"
    assert min(float(python(code)) for _ in range(3)) < 0.06


def test_imports_point_one_way():
    """masks → positions, cache → kernels → plan → attend → layer → compat, adopting → recording → cli: each room knows only those before it."""
    order = [
        "masks",
        "positions",
        "cache",
        "kernels",
        "plan",
        "attend",
        "layer",
        "compat",
        "adopting",
        "checking",
        "recording",
        "testing",
        "demo",
        "planning",
        "cli",
    ]
    for path in (ROOT / "src/multihead").rglob("*.py"):
        room = path.relative_to(ROOT / "src/multihead").parts[0].removesuffix(".py")
        if room == "__init__":
            continue
        dots = "." * len(path.relative_to(ROOT / "src/multihead").parts)
        for imported in re.findall(rf"^\s*from {re.escape(dots)}(\w+)[\w.]* import", path.read_text(), re.M):
            assert order.index(imported) < order.index(room), f"{path.name} imports {imported}"


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"q": 3}, TypeError, r"q must be a tensor \[batch, heads, q_len, head_dim\]; it is a int"),
        ({"q": torch.zeros(2, 2)}, ValueError, r"must all have 4 axes, or all 3 \(no batch\); q .* has shape \[2, 2\]"),
        ({"k": torch.zeros(3, 3, 7, 11)}, ValueError, r"batch is 2 in q but 3 in k; q .*\[2, 6, 5, 11\]"),
        ({"v": torch.zeros(3, 3, 7, 13)}, ValueError, "batch is 2 in q but 3 in v"),
        ({"k": torch.zeros(2, 3, 7, 12)}, ValueError, "head_dim is 11 in q but 12 in k"),
        ({"k": torch.zeros(2, 2, 7, 11)}, ValueError, "kv_heads is 2 in k but 3 in v"),
        ({"v": torch.zeros(2, 3, 8, 13)}, ValueError, "kv_len is 7 in k but 8 in v"),
        ({"k": torch.zeros(2, 4, 7, 11), "v": torch.zeros(2, 4, 7, 13)}, ValueError, r"heads \(6\) must be a multiple of kv_heads \(4\)"),
        ({"q": torch.zeros(2, 6, 5, 0), "k": torch.zeros(2, 3, 7, 0)}, ValueError, "head_dim must be at least 1"),
        ({"v": torch.zeros(2, 3, 7, 13).half()}, TypeError, "must share one of float32, .* they are q torch.float32, k torch.float32, v torch.float16"),
        ({"q": torch.zeros(2, 6, 5, 11).long()}, TypeError, "they are q torch.int64"),
        ({"q": torch.zeros(2, 6, 5, 11, device="meta")}, ValueError, "must be on one device; they are on meta, cpu, cpu"),
        ({"mask": "causal"}, TypeError, r"mask must be a multihead mask such as Causal\(\); it is a str"),
        ({"bias": torch.zeros(6, 5, 7)}, ValueError, r"bias must be \[q_len, kv_len\].*its shape is \[6, 5, 7\], the call is \[2, 6, 5, 7\]"),
        ({"bias": torch.zeros(7)}, ValueError, r"its shape is \[7\]"),
        ({"bias": torch.zeros(5, 7) > 0}, TypeError, r"bias .* its dtype is torch.bool. A bool tensor is a mask: mask=Allowed\(m\)"),
        ({"bias": torch.zeros(5, 7, device="meta")}, ValueError, "bias is on meta but q is on cpu"),
        ({"dropout": 1.5}, ValueError, "dropout is the probability to drop a weight, 0 … 1; it is 1.5"),
        ({"dropout": 0.1, "seed": -1}, ValueError, "seed must be a whole number, 0 … 2⁶³ − 1; it is -1"),
        ({"dropout": 0.1, "seed": 0.5}, ValueError, "it is 0.5"),
        ({"softcap": 0.0}, ValueError, "softcap must be > 0"),
        ({"softcap": float("inf")}, TypeError, "softcap must be a finite number; it is inf"),
        ({"scale": float("nan")}, TypeError, "scale must be a finite number; it is nan"),
        ({"scale": torch.ones(())}, TypeError, "scale must be a finite number; it is tensor"),
        ({"start": 2.5}, TypeError, r"start must be a whole number or an integer tensor \[batch\] = \[2\]; it is 2.5"),
        ({"start": [1, 2]}, TypeError, "start must be a whole number or an integer tensor"),
        ({"key_start": None}, TypeError, "key_start must be a whole number"),
        ({"sinks": [0.0] * 6}, TypeError, r"sinks must be a float tensor \[heads\] = \[6\]; it is a list"),
        ({"sinks": torch.zeros(6).long()}, TypeError, "sinks must be a float tensor .* it is dtype torch.int64"),
        ({"bias": mh.ALiBi()}, TypeError, "bias must be a float tensor that is added to the scores; it is a ALiBi"),
        ({"dropout": None}, ValueError, "dropout is the probability to drop a weight, 0 … 1; it is None"),
        ({"seed": "a"}, ValueError, "seed must be a whole number"),
        ({"mask": mh.Documents([0, 0, 1, 1, 1, 2, 2]), "start": 20}, ValueError, "the mask covers positions 0 … 6 but queries stand at 20 … 24"),
        ({"mask": mh.Allowed(torch.eye(7) > 0, absolute=True), "start": torch.tensor([20, 20])}, ValueError, "its queries stand at 20 … 24"),
        ({"mask": mh.Causal() | mh.Keys(torch.zeros(5, 3) > 0)}, ValueError, "made for batch 5 but the call has batch 2"),
        ({"sinks": torch.zeros(3)}, ValueError, r"sinks must hold one logit a head, \[heads\] = \[6\] on cpu; its shape is \[3\]"),
        ({"start": torch.zeros(3).long()}, ValueError, r"start must be a number or an integer tensor \[batch\] = \[2\]"),
        ({"key_start": torch.zeros(2)}, ValueError, "key_start must be a number or an integer tensor .* it is torch.float32"),
        ({"mask": mh.Lengths([1, 2, 3])}, ValueError, "the mask was made for batch 3 but the call has batch 2"),
        ({"mask": mh.Allowed(torch.ones(5, 8) > 0)}, ValueError, "the mask covers 8 keys but kv_len is 7"),
        ({"kernel": "flash2"}, ValueError, "there is no kernel 'flash2'"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("call", [mh.attention, mh.plan])
def test_bad_arguments_are_named(change, error, match, call):
    q, k, v = make()
    with pytest.raises(error, match=match):
        call(**({"q": q, "k": k, "v": v} | change))


def test_see_prints_what_heads_attend_to(capsys):
    assert cli.main(["see", "to be or not to be", "--lang", "en"]) == 0
    printed = capsys.readouterr().out
    assert "head 1: looks at the token before" in printed
    assert "  not │  █   │ 100% → or" in printed
    assert "  be  │ ▒   ▒│  50% → be" in printed
    assert cli.main(["see", "床前明月光"]) == 0
    assert "注意力头 1: 看前一个词元" in capsys.readouterr().out
    assert cli.main(["see", "--lang", "zh"]) == 0
    printed = capsys.readouterr().out
    assert "注意力头 1: 看前一个词元" in printed
    assert "  月 │  █" in printed


def test_see_says_what_is_wrong(capsys):
    assert cli.main(["see", "   ", "--lang", "en"]) == 2
    assert capsys.readouterr().err == "multihead see: the text is empty: give some words\n"
    assert cli.main(["see", "word " * 50, "--lang", "en"]) == 0
    assert "(the first 40 of 50 tokens)" in capsys.readouterr().out
    assert cli.main(["see", "नमस्ते 👩‍🚀👍🏽 كِتَاب \x1b[31m"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:7]] == [
        "नमस्ते",
        "👩‍🚀",
        "👍🏽",
        "كِتَاب",
        "[",
        "31m",
    ]
    assert cli.main(["see", "東京タワー"]) == 0
    assert "head 1" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        cli.main(["nonsense"])


def blocks(name: str) -> list[tuple[str, str]]:
    """The python blocks of a README, each with the text block that follows it at once."""
    text = (ROOT / name).read_text()
    return re.findall(r"```python\n(.*?)```\n(?:\n```text\n(.*?)```)?", text, re.S)


@pytest.mark.parametrize("name", ["README.md", "README.zh-CN.md"])
def test_readme_examples_run_and_print_what_they_say(name, capsys):
    space: dict[str, object] = {}
    found = blocks(name)
    assert len(found) >= 8
    for code, printed in found:
        exec(compile(code, name, "exec"), space)
        out = capsys.readouterr().out
        wanted = ".*".join(map(re.escape, printed.split("…")))  # … stands for what differs between machines
        assert re.fullmatch(wanted, out), f"{name} says {printed!r}, the code prints {out!r}"


def test_both_readmes_have_the_same_parts():
    one, two = ((ROOT / name).read_text() for name in ("README.md", "README.zh-CN.md"))
    for pattern in (r"^#+ ", r"^\|", r"^```python", r"^!\["):
        assert len(re.findall(pattern, one, re.M)) == len(re.findall(pattern, two, re.M)), pattern


@pytest.mark.parametrize("name", ["README.md", "README.zh-CN.md"])
def test_readme_links_lead_somewhere(name):
    for label, target in re.findall(r"\[([^\]]+)\]\(([^)#]+)\)", (ROOT / name).read_text()):
        assert (ROOT / target).exists(), target
        if label.startswith("test_"):
            assert f"def {label}(" in (ROOT / target).read_text(), label
