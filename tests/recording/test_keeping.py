"""save() and load(): nothing lost, nothing run, every damaged file named; and the figures of plot()."""

import contextlib
import json
import os
import sys

import pytest
import torch

import multihead as mh
from multihead.recording import keeping
from multihead.recording.keeping import FileError
from multihead.recording.progress import Progress
from multihead.recording.statistics import STATISTICS

B, T, S, D, H = 2, 7, 9, 24, 4


def recorded(**options):
    torch.manual_seed(0)
    layers = [
        mh.MultiHeadAttention(D, H, kv_heads=2, mask=mh.Causal() & mh.Lengths([7, 4]), sinks=True, softcap=3.0),
        mh.MultiHeadAttention(D, H, positions=mh.ALiBi(), mask=mh.Where(lambda b, h, q, k: (q + k + h) % 3 > 0)),
        mh.MultiHeadAttention(D, H),
    ]
    x, memory = torch.randn(B, T, D), torch.randn(B, S, D)
    with torch.no_grad(), mh.record(**options) as seen:
        for layer in layers:
            layer(x)
        layers[2](x, memory)
        cache = layers[2].new_cache(B, 16)
        layers[2](x, cache=cache)
        layers[2](x[:, :1], cache=cache)
    return seen


def same(a, b):
    assert [(p.number, p.name, len(p.pictures)) for p in a] == [(p.number, p.name, len(p.pictures)) for p in b]
    for one, other in zip(a, b, strict=True):
        for x, y in zip(one.pictures, other.pictures, strict=True):
            assert x._asked().kind == y._asked().kind
            names = x._asked().found or STATISTICS
            for name, value in x.compute(*names).items():
                torch.testing.assert_close(y.compute(*names)[name], value, rtol=1e-5, atol=1e-6)
            if not x._asked().answered:
                torch.testing.assert_close(y.weights(), x.weights(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("keep", ["queries", "values", "statistics"])
def test_nothing_is_lost(keep, tmp_path):
    seen = recorded(keep=keep, tokens=["a", "б", "字", "d", "e", "f", "g"], key_tokens=[["x"] * S] * B)
    seen.text = "aб字"
    seen.save(tmp_path / "run.safetensors")
    back = mh.load(tmp_path / "run.safetensors")
    same(seen, back)
    assert back.tokens == ["a", "б", "字", "d", "e", "f", "g"]
    assert back.key_tokens == [["x"] * S] * B
    assert (back.text, back.steps, back.missed) == ("aб字", 1, [])
    if keep == "values":
        torch.testing.assert_close(back[0].value_norms(), seen[0].value_norms())
    back.save(tmp_path / "again.safetensors")
    same(seen, mh.load(tmp_path / "again.safetensors"))
    assert sorted(os.listdir(tmp_path)) == ["again.safetensors", "run.safetensors"]


def test_size_is_q_and_k(tmp_path):
    layer = mh.MultiHeadAttention(64, 4, kv_heads=2, mask=mh.Causal()).bfloat16()
    with torch.no_grad(), mh.record() as seen:
        layer(torch.randn(1, 2000, 64, dtype=torch.bfloat16))
    seen.save(tmp_path / "x")
    size = 2 * 2000 * (64 + 32)
    assert seen.nbytes == size
    assert (tmp_path / "x").stat().st_size < 1.1 * size
    assert mh.load(tmp_path / "x")[0].calls[0].q.dtype == torch.bfloat16


def test_the_safetensors_library_reads_it(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    seen = recorded()
    seen.save(tmp_path / "x.safetensors")
    found = safetensors.load_file(tmp_path / "x.safetensors")
    assert torch.equal(found["0.0.q"], seen[0].calls[0].q)
    safetensors.save_file({"w": torch.ones(3)}, tmp_path / "other.safetensors")
    with pytest.raises(FileError, match=r"is a safetensors file, but not one that Recording\.save"):
        mh.load(tmp_path / "other.safetensors")


def test_empty(tmp_path):
    with mh.record() as seen:
        pass
    seen.save(tmp_path / "x")
    assert len(mh.load(tmp_path / "x")) == 0


def broken(data, how):
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])

    def again(header):
        text = json.dumps(header).encode()
        return len(text).to_bytes(8, "little") + text + data[8 + length :]

    about = json.loads(header["__metadata__"]["multihead"])
    if how == "newer":
        about["version"] = 99
    if how == "no sizes":
        del about["places"][0]["pictures"][0]["sizes"]
    header["__metadata__"]["multihead"] = json.dumps(about)
    if how == "shape":
        header["0.0.q"]["shape"][0] += 1
    if how == "dtype":
        header["0.0.q"]["dtype"] = "F4"
    if how == "lost":
        header = {n: x for n, x in header.items() if "start" not in n}
        return again(header)
    return {
        "cut": data[:-5],
        "cut header": data[: length // 2],
        "tiny": data[:3],
        "text": b"hello, this is a text" * 3,
        "longer": data + b"0",
    }.get(how) or again(header)


@pytest.mark.parametrize(
    ("how", "match"),
    [
        ("cut", "is cut off or damaged: its numbers should end at byte"),
        ("longer", "is cut off or damaged"),
        ("cut header", "is no recording, or cut off: its header should be"),
        ("tiny", "is no recording, or cut off"),
        ("text", "is no recording, or cut off"),
        ("newer", "is of version 99, this multihead reads up to 1; upgrade it: pip install -U multihead"),
        ("shape", r"is damaged: 0.0.q \[3, 4, 7, 6\] cannot be the bytes"),
        ("dtype", "is no recording, or damaged: its header cannot be read"),
        ("no sizes", "is damaged: what it says of its calls does not fit"),
    ],
)
def test_damaged_files_are_named(how, match, tmp_path):
    recorded().save(tmp_path / "x")
    data = broken((tmp_path / "x").read_bytes(), how)
    (tmp_path / "x").write_bytes(data)
    with pytest.raises(FileError, match=match):
        mh.load(tmp_path / "x")


def test_every_single_byte_of_the_header_may_be_wrong(tmp_path):
    """Whatever is changed, load() gives a recording or a FileError, and nothing else."""
    layer = mh.MultiHeadAttention(8, 1)
    with torch.no_grad(), mh.record() as seen:
        layer(torch.randn(1, 2, 8))
    seen.save(tmp_path / "x")
    data = (tmp_path / "x").read_bytes()
    length = int.from_bytes(data[:8], "little")
    for at in range(0, 8 + length, 7):
        (tmp_path / "y").write_bytes(data[:at] + bytes([data[at] ^ 21]) + data[at + 1 :])
        with contextlib.suppress(FileError):
            mh.load(tmp_path / "y")


def test_what_no_file_can_hold(tmp_path, monkeypatch):
    seen = recorded()
    call = seen[0].pictures[0]._asked()
    call.score = lambda s, b, h, q, k: s
    with pytest.raises(ValueError, match="save: MultiHeadAttention changes its scores by a function"):
        seen.save(tmp_path / "x")
    call.score = None
    monkeypatch.setattr(keeping, "LARGEST", 10)
    with pytest.raises(
        ValueError, match=r"save: the mask of MultiHeadAttention \(2\) has no intervals, and as a table it would take 49 bytes"
    ):
        seen.save(tmp_path / "x")
    assert os.listdir(tmp_path) == []


# ---- plots ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def _pyplot():
    pytest.importorskip("matplotlib")


@pytest.mark.usefixtures("_pyplot")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:Glyph:UserWarning")
def test_plots(tmp_path):
    seen = recorded(tokens=["the", "Ġcat", "▁sat", "$on", "the", "m\nat", "."])
    figure = seen[0].plot(1, path=tmp_path / "x.png")
    axis = figure.axes[0]
    torch.testing.assert_close(torch.tensor(axis.images[0].get_array().data), seen[0].weights(head=1)[0])
    assert [t.get_text() for t in axis.get_xticklabels()] == ["the", "␣cat", "␣sat", r"\$on", "the", "m↵at", "."]
    assert len(axis.get_yticklabels()) == T
    assert axis.get_title() == "MultiHeadAttention, head 1"
    assert (tmp_path / "x.png").read_bytes()[:4] == b"\x89PNG"
    assert len([a for a in seen[0].plot(path=tmp_path / "x.svg").axes if a.images]) == H
    assert "<svg" in (tmp_path / "x.svg").read_text()
    with pytest.raises(IndexError, match="plot: batch must be within 0 … 1 and head within 0 … 3; they are 5 and None"):
        seen[0].plot(batch=5)


@pytest.mark.usefixtures("_pyplot")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_plots_of_long_texts_are_pooled():
    q = torch.randn(1, 1, 1500, 4)
    with mh.record() as seen:
        mh.attention(q, q, q, mask=mh.Causal())
    picture = seen[0].plot(0).axes[0].images[0].get_array()
    assert picture.shape == (500, 500)
    torch.testing.assert_close(torch.tensor(picture.data), seen[0].map(512).max[0, 0])


def test_without_matplotlib(monkeypatch):
    for name in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=r"plot: matplotlib must be installed: pip install 'multihead\[plot\]'"):
        recorded()[0].plot()


# ---- progress -------------------------------------------------------------------------------------------------------


def test_progress_is_said_after_a_second(capsys, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("multihead.recording.progress.time.monotonic", lambda: now[0])
    for wanted, said in ((True, True), (False, False), (None, False)):
        now[0] = 0.0
        with Progress("layer 3", wanted) as bar:
            bar.show(0.1)
            assert capsys.readouterr().err == ""
            now[0] = 2.0
            bar.show(0.5)
            text = capsys.readouterr().err
            assert ("layer 3 ████████████░░░░░░░░░░░░  50%, 2 s left" in text) == said
            bar.show(0.6)
            assert capsys.readouterr().err == ""
        assert (capsys.readouterr().err != "") == said
