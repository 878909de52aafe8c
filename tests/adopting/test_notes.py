"""The layers of the five notes: adopted, their mask conventions named, equal to 2e-6; and where their code is wrong."""

import pytest
import torch

import multihead as mh
from multihead import masks

from .zoo import NOTES, H, Note000, Note001, Note002, Note003, Note004

B, T, S = 3, 5, 7
TOLERANCE = 2e-6


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=0, atol=TOLERANCE)


def make(note):
    module = NOTES[note]().eval()
    return module, mh.from_module(module).eval()


def inputs(layer, q_len=T, kv_len=S, batch=B):
    return (
        torch.randn(batch, q_len, layer.embed_dim),
        torch.randn(batch, kv_len, layer.key_dim),
        torch.randn(batch, kv_len, layer.value_dim),
    )


def seen(*shape):
    allowed = torch.rand(shape) < 0.5
    allowed[..., 0] = True
    return allowed


# ---- adopted, equal, named ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("note", ["000", "004"])
def test_zeros_block(note):
    """masked_fill(mask == 0, −1e9), from three different texts."""
    module, layer = make(note)
    q, k, v = inputs(layer)
    close(layer(q, k, v), module(q, k, v, mask=None) if note == "004" else module(q, k, v))
    assert "0 blocks (masks.from_zeros)" in str(layer.origin)
    for shape in ((T, S), (B, 1, T, S), (B, H, T, S), (B, 1, 1, S)):
        mask = seen(*shape).long()
        close(layer(q, k, v, mask=masks.from_zeros(mask)), module(q, k, v, mask))


def test_note_001_ones_block():
    """scores += mask · −1e9, over one hidden state."""
    module, layer = make("001")
    x, _, _ = inputs(layer)
    close(layer(x), module(x))
    assert "1 blocks (masks.from_ones)" in str(layer.origin)
    for shape in ((T, T), (B, 1, T, T), (B, H, T, T)):
        mask = (~seen(*shape)).float()
        close(layer(x, mask=masks.from_ones(mask)), module(x, mask))


def test_note_002_is_causal_by_a_buffer():
    module, layer = make("002")
    assert layer.mask == mh.Causal()
    assert layer.mask == masks.from_triu(module.mask[0, 0])
    assert "mask=Causal()" in layer.origin.between
    q, k, v = inputs(layer, S, S)
    close(layer(q, k, v), module(q, k, v))
    assert not any(name.startswith("mask") for name, _ in layer.named_buffers())  # no table as long as the text


def test_note_002_without_a_mask():
    module = Note002(is_causal=False).eval()
    layer = mh.from_module(module)
    assert layer.mask is None
    q, k, v = inputs(layer, S, S)
    close(layer.eval()(q, k, v), module(q, k, v))


def test_note_003_valid_lens():
    """Sizes of queries, keys and values that all differ; lengths a text, and a query."""
    module, layer = make("003")
    assert (layer.embed_dim, layer.key_dim, layer.value_dim) == (14, 10, 18)
    assert "the number of valid keys (ValidLens) as [batch], [batch, q]" in str(layer.origin)
    q, k, v = inputs(layer)
    close(layer(q, k, v), module(q, k, v, None))
    for lengths in (torch.tensor([3, 7, 1]), torch.randint(1, S + 1, (B, T))):
        close(layer(q, k, v, mask=mh.ValidLens(lengths)), module(q, k, v, lengths))


@pytest.mark.parametrize("note", NOTES)
def test_gradients_are_the_notes(note):
    """The layer holds the note's own Linears, so one backward of each must leave the same gradients there."""
    module, layer = make(note)
    given = inputs(layer, T, T)
    given = given[:1] if note == "001" else given
    cotangent, grads = torch.randn(B, T, layer.out_dim), []
    for call in (lambda: module(*given, *([None] if note == "003" else [])), lambda: layer(*given)):
        module.zero_grad()
        (call() * cotangent).sum().backward()
        grads.append({n: p.grad.clone() for n, p in module.named_parameters()})
    for name, want in grads[0].items():
        torch.testing.assert_close(grads[1][name], want, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("note", ["002", "003", "004"])
def test_dropout_is_where_the_note_has_it(note):
    layer = mh.from_module(NOTES[note]())
    assert (layer.dropout, layer.out_dropout) == ((0.1, 0.1) if note == "002" else (0.1, 0.0))


# ---- where a note's own code is wrong -------------------------------------------------------------------------------


def said(layer):
    return " · ".join(layer.origin.differences)


@pytest.mark.parametrize(("note", "call"), [("000", Note000), ("004", Note004)])
def test_a_batch_mask_lands_on_the_heads_there_and_on_the_batch_here(note, call):
    """The docstring of note 004 promises [batch, seq, seq]; its code broadcasts that over the heads."""
    module, layer = make(note)
    assert f"a mask [batch, q, k] lands on its heads where batch is {H}, and fails elsewhere" in said(layer)
    q, k, v = inputs(layer)
    mask = seen(B, T, S)
    with pytest.raises(RuntimeError, match="must match the size"):
        module(q, k, v, mask)
    close(layer(q, k, v, mask=masks.from_zeros(mask)), module(q, k, v, mask[:, None]))
    q, k, v = inputs(layer, batch=H)
    mask = seen(H, T, S)
    silently_wrong = module(q, k, v, mask)
    close(layer(q, k, v, mask=masks.from_zeros(mask[None])), silently_wrong)
    assert (layer(q, k, v, mask=masks.from_zeros(mask)) - silently_wrong).abs().max() > 1e-3


@pytest.mark.parametrize("note", ["000", "004"])
def test_minus_1e9_fails_in_float16_there_and_not_here(note):
    module, layer = make(note)
    assert "with a mask it fails in float16" in said(layer)
    q, k, v = inputs(layer)
    mask, want = seen(T, S), layer(q, k, v, mask=masks.from_zeros(seen(T, S)))
    want = layer(q, k, v, mask=mh.Allowed(mask))
    half = mh.from_module(module).half().eval()
    q, k, v = q.half(), k.half(), v.half()
    with pytest.raises(RuntimeError, match="without overflow"):
        module(q, k, v, mask)  # its Linears are the layer's, and half now too
    torch.testing.assert_close(half(q, k, v, mask=mh.Allowed(mask)).float(), want, rtol=0, atol=5e-3)


@pytest.mark.parametrize("note", ["000", "001", "003", "004"])
def test_a_fully_masked_row_is_uniform_there_and_zero_here(note):
    module, layer = make(note)
    assert "a query that may attend to nothing gets the mean of all values from it; here its weights are zero" in said(layer)
    q, k, v = inputs(layer, T, T)
    x, lengths = (q, q, q) if note == "001" else (q, k, v), torch.tensor([T, 0, T])
    allowed = (torch.arange(T) < lengths[:, None])[:, None, None]  # [batch, 1, 1, k]
    argument = {"001": (~allowed).float(), "003": lengths}.get(note, allowed)
    there = module(*([q] if note == "001" else x), argument)
    here, weights = layer(*x, mask=mh.Lengths(lengths), return_weights=True)
    uniform = layer.out(layer.value(x[2]).mean(1, keepdim=True).expand(-1, T, -1))
    torch.testing.assert_close(there[1], uniform[1], rtol=1e-5, atol=1e-5)
    assert not weights[1].any()
    close(here[1], layer.out(torch.zeros(T, layer.out.in_features)))
    close(here[[0, 2]], there[[0, 2]])


def test_note_002_reshapes_k_and_v_with_the_length_of_q():
    module, layer = make("002")
    assert "it takes as many keys as queries only; here there may be any number" in said(layer)
    q, k, v = inputs(layer)
    with pytest.raises(RuntimeError, match="invalid for input of size"):
        module(q, k, v)
    causal_at_the_end = mh.attention(
        *(w(x).view(B, -1, H, 6).transpose(1, 2) for w, x in ((layer.query, q), (layer.key, k), (layer.value, v))),
        mask=mh.Causal(),
    )
    close(layer(q, k, v), layer.out(causal_at_the_end.transpose(1, 2).flatten(2)))


def test_note_001_in_float16_gives_nan_for_an_empty_row_and_here_zero():
    module = Note001().half().eval()
    layer = mh.from_module(module).eval()
    x = torch.randn(1, T, layer.embed_dim).half()
    mask = torch.zeros(T, T).half()
    mask[2] = 1
    assert module(x, mask)[0, 2].isnan().all()
    out = layer(x, mask=masks.from_ones(mask))
    assert torch.equal(out[0, 2], layer.out.bias)
    torch.testing.assert_close(out[0, :2], module(x, mask)[0, :2], rtol=0, atol=2e-3)


def test_the_origin_reads_as_a_page():
    layer = mh.from_module(Note003())
    assert str(layer.origin).splitlines()[:4] == [
        "from         Note003",
        "projections  query=W_q, key=W_k, value=W_v, out=W_o, heads=4",
        "between      nothing unusual",
        "mask         valid_lens: the number of valid keys (ValidLens) as [batch], [batch, q]",
    ]
    assert (
        str(layer.origin)
        .splitlines()[-1]
        .startswith("proof        7 comparisons in float64, up to 109 tokens, largest difference ")
    )
    assert layer.origin.error < 1e-12
