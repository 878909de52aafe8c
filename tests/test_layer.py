"""The layer against its formula written out with einsum, its options one by one and together."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import multihead as mh

B, T, S, D = 2, 5, 7, 24


def by_einsum(layer, query, key=None, value=None, allowed=None):
    """The formula in axis letters, from the layer's own parameters."""
    key = query if key is None else key
    value = key if value is None else value

    def heads(linear, x, n):
        return torch.einsum("btd,hed->bhte", x, linear.weight.unflatten(0, (n, -1))) + (
            0 if linear.bias is None else linear.bias.view(n, 1, -1)
        )

    q, k, v = (
        heads(layer.query, query, layer.num_heads),
        heads(layer.key, key, layer.kv_heads),
        heads(layer.value, value, layer.kv_heads),
    )
    if layer.query_norm is not None:
        q, k = (
            x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * n.weight
            for x, n in ((q, layer.query_norm), (k, layer.key_norm))
        )
    group = torch.arange(layer.num_heads) // (layer.num_heads // layer.kv_heads)
    s = torch.einsum("bhte,bhse->bhts", q, k[:, group]) * (layer.scale or 1 / math.sqrt(layer.head_dim))
    s = layer.softcap * torch.tanh(s / layer.softcap) if layer.softcap else s
    s = s if allowed is None else s.masked_fill(~allowed, -math.inf)
    w = s.exp() / (s.exp().sum(-1, keepdim=True) + (0 if layer.sinks is None else layer.sinks.exp().view(-1, 1, 1)))
    out = torch.einsum("bhts,bhse->bthe", w, v[:, group]).flatten(2)
    if layer.gate is not None:
        out = out * torch.sigmoid(layer.gate(query))
    return layer.out(out), w


OPTIONS = {
    "plain": {},
    "grouped": {"kv_heads": 2},
    "sizes": {"kv_heads": 3, "head_dim": 11, "value_head_dim": 13, "key_dim": 17, "value_dim": 19, "out_dim": 23},
    "no_bias": {"bias": False, "out_bias": True},
    "norm": {"qk_norm": True},
    "softcap": {"softcap": 1.3},
    "sinks": {"sinks": True},
    "gate": {"gate": True},
    "scale": {"scale": 0.7},
    "all": {
        "kv_heads": 2,
        "value_head_dim": 5,
        "qk_norm": True,
        "softcap": 2.0,
        "sinks": True,
        "gate": True,
        "scale": 0.9,
        "bias": False,
    },
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("masked", [False, True])
def test_the_layer_is_its_formula(options, masked):
    layer = mh.MultiHeadAttention(D, 6, **OPTIONS[options], dtype=torch.float64)
    for p in layer.parameters():
        nn.init.normal_(p, std=0.5)
    query, key, value = (
        torch.randn(B, T, D).double(),
        torch.randn(B, S, layer.key_dim).double(),
        torch.randn(B, S, layer.value_dim).double(),
    )
    mask = mh.Causal() & mh.Lengths([3, 7]) if masked else None
    want, weights = by_einsum(layer, query, key, value, None if mask is None else mask.dense(T, S))
    got, found = layer(query, key, value, mask=mask, return_weights=True)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(found, weights)
    torch.testing.assert_close(layer(query, key, value, mask=mask), want)


def test_self_and_cross_attention_calls():
    layer = mh.MultiHeadAttention(D, 4)
    x, memory, other = torch.randn(B, T, D), torch.randn(B, S, D), torch.randn(B, S, D)
    torch.testing.assert_close(layer(x), layer(x, x, x))
    torch.testing.assert_close(layer(x, memory), layer(x, memory, memory))
    assert not torch.allclose(layer(x, memory, other), layer(x, memory))


def test_unbatched():
    layer = mh.MultiHeadAttention(D, 4, mask=mh.Causal(), positions=mh.RoPE())
    x, memory = torch.randn(T, D), torch.randn(S, D)
    torch.testing.assert_close(layer(x), layer(x[None])[0])
    y, w = layer(x, memory, return_weights=True)
    assert y.shape == (T, D)
    assert w.shape == (4, T, S)


def test_same_numbers_as_torchs_layer():
    theirs = nn.MultiheadAttention(D, 4, batch_first=True).eval()
    ours = mh.MultiHeadAttention(D, 4)
    weights = theirs.in_proj_weight.chunk(3)
    with torch.no_grad():
        for linear, w, b in zip((ours.query, ours.key, ours.value), weights, theirs.in_proj_bias.chunk(3), strict=True):
            linear.weight.copy_(w)
            linear.bias.copy_(b)
        ours.out.load_state_dict(theirs.out_proj.state_dict())
    x = torch.randn(B, T, D)
    torch.testing.assert_close(ours(x), theirs(x, x, x)[0])


def test_submodules_have_the_names_that_tools_look_for():
    layer = mh.MultiHeadAttention(D, 4, gate=True, qk_norm=True, sinks=True)
    assert {n for n, m in layer.named_modules() if isinstance(m, nn.Linear)} == {"query", "key", "value", "out", "gate"}
    assert set(layer.state_dict()) == {f"{n}.{p}" for n in ("query", "key", "value", "out", "gate") for p in ("weight", "bias")} | {
        "query_norm.weight", "key_norm.weight", "sinks"
    }  # fmt: skip


def test_submodules_are_called_so_that_adapters_work():
    """LoRA wraps or replaces a Linear; nn.MultiheadAttention never calls its out_proj (peft#761)."""

    class Doubled(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner, self.calls = inner, 0

        def forward(self, x):
            self.calls += 1
            return self.inner(x) * 2

    layer = mh.MultiHeadAttention(D, 4)
    for name in ("query", "key", "value", "out"):
        setattr(layer, name, Doubled(getattr(layer, name)))
    layer(torch.randn(B, T, D))
    assert [getattr(layer, n).calls for n in ("query", "key", "value", "out")] == [1] * 4


@pytest.mark.parametrize(
    "mask",
    [
        mh.Keys(torch.tensor([[True, False, True]])),
        mh.Causal() & mh.Allowed(torch.ones(3, 3) > 0),
        mh.Lengths([2], [3]),
    ],
    ids=repr,
)
def test_the_layers_own_mask_follows_to_and_state_dict(mask):
    layer = mh.MultiHeadAttention(D, 4, mask=mask)
    assert layer.mask == mask
    names = {n for n, _ in layer.named_buffers()}
    assert names == {f"mask_tensors.tensor{i}" for i in range(len(mask.leaves()))}
    assert names < set(layer.state_dict())
    moved = copy.deepcopy(layer).to("meta")
    assert {t.device.type for t in moved.mask.leaves()} == {"meta"}
    half = copy.deepcopy(layer).to(torch.bfloat16)
    assert half.mask == mask
    other = mh.MultiHeadAttention(D, 4, mask=mask.map(torch.zeros_like))
    assert other.mask != mask
    other.load_state_dict(layer.state_dict())
    assert other.mask == mask
    x = torch.randn(1, 3, D)
    torch.testing.assert_close(other(x), mh.MultiHeadAttention.forward(layer, x))


def test_layers_that_share_a_mask_share_no_storage():
    mask = mh.Lengths([3, 2])
    a, b = (mh.MultiHeadAttention(D, 4, mask=mask) for _ in range(2))
    a.load_state_dict(mh.MultiHeadAttention(D, 4, mask=mh.Lengths([1, 1])).state_dict())
    assert a.mask == mh.Lengths([1, 1])
    assert b.mask == mask == mh.Lengths([3, 2])
    assert "mask=Lengths([1, 1])" in repr(a)


def test_a_mask_comes_back_from_the_meta_device():
    layer = mh.MultiHeadAttention(D, 4, mask=mh.Causal() | mh.Prefix(2), device="meta").to_empty(device="cpu")
    layer.reset_parameters()
    assert layer.mask == mh.Causal() | mh.Prefix(2)
    with torch.device("meta"):
        assert mh.MultiHeadAttention(D, 4, mask=mh.Causal() | mh.Prefix(2)).mask.leaves()[0].is_meta


def test_a_bias_of_three_axes_never_lands_on_the_heads():
    x, bias = torch.randn(2, 3, 16), torch.randn(2, 3, 3)
    for positions in (None, mh.ALiBi(), mh.RelativeBias(2)):
        layer = mh.MultiHeadAttention(16, 2, positions=positions)
        assert torch.equal(layer(x, bias=bias), layer(x, bias=bias[:, None]))


def test_a_part_of_the_heads():
    """What tensor parallelism leaves on a device: columns of q, k and v, rows of the output projection."""
    torch.manual_seed(2)
    for options in ({"mask": mh.Causal(), "kv_heads": 2}, {"softcap": 5.0}, {}):
        layer, x = mh.MultiHeadAttention(24, 4, bias=False, **options), torch.randn(2, 5, 24)
        whole, parts = layer(x), 0
        for half in (0, 1):
            part = copy.deepcopy(layer)
            for name in ("query", "key", "value"):
                linear = getattr(part, name)
                linear.weight = nn.Parameter(linear.weight.chunk(2)[half])
            part.out.weight = nn.Parameter(part.out.weight.chunk(2, 1)[half])
            parts = parts + part(x)
        torch.testing.assert_close(parts, whole)


def test_no_buffer_grows_with_the_text():
    layer = mh.MultiHeadAttention(D, 4, positions=mh.RoPE(), mask=mh.Causal() & mh.Window(3))
    assert sum(b.numel() for b in layer.buffers()) <= D
    layer(torch.randn(1, 100, D))
    assert sum(b.numel() for b in layer.buffers()) <= D


def test_dropout_on_weights_and_on_the_output():
    layer = mh.MultiHeadAttention(D, 4, dropout=1.0, bias=False)
    assert not layer(torch.randn(B, T, D)).any()
    layer = mh.MultiHeadAttention(D, 4, out_dropout=0.5)
    dropped = layer(torch.randn(B, 400, D))
    assert (dropped == 0).float().mean().item() == pytest.approx(0.5, abs=0.02)


def test_it_learns():
    """A layer can learn to copy the first token, which only attention can do."""
    layer = mh.MultiHeadAttention(D, 4, positions=mh.RoPE(), mask=mh.Causal())
    optimizer = torch.optim.Adam(layer.parameters(), 1e-2)
    mark = torch.zeros(1, 6, D)
    mark[:, 0, 0] = 3.0
    for _ in range(150):
        x = torch.randn(16, 6, D) + mark
        loss = F.mse_loss(layer(x)[:, -1], x[:, 0])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.5


def test_repr():
    layer = mh.MultiHeadAttention(D, 4, 0.1, kv_heads=2, softcap=5.0, mask=mh.Causal())
    assert "heads=4, head_dim=6, kv_heads=2, dropout=0.1, softcap=5, mask=Causal()" in repr(layer)


def test_positional_arguments_are_torchs():
    layer = mh.MultiHeadAttention(D, 4, 0.3, False)
    assert layer.dropout == 0.3
    assert layer.query.bias is None
    assert layer.out.bias is None


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda: mh.MultiHeadAttention(10, 3), ValueError, r"embed_dim \(10\) must be a multiple of num_heads \(3\), or give head_dim="),
        (lambda: mh.MultiHeadAttention(12, 4, kv_heads=3), ValueError, r"num_heads \(4\) must be a multiple of kv_heads \(3\)"),
        (lambda: mh.MultiHeadAttention(12, 0), ValueError, "every size must be ≥ 1; embed_dim is 12, num_heads is 0, kv_heads is 0"),
        (lambda: mh.MultiHeadAttention(12, 4, 1.5), ValueError, "must be 0 … 1; they are 1.5 and 0.0"),
        (lambda: mh.MultiHeadAttention(12, 4, out_dim=0), ValueError, "every size must be ≥ 1; .*out_dim is 0"),
        (lambda: mh.MultiHeadAttention(12, 4, softcap=-1.0), ValueError, "softcap must be > 0"),
        (lambda: mh.MultiHeadAttention(12, 4, scale="half"), TypeError, "scale must be a finite number; it is 'half'"),
        (lambda: mh.MultiHeadAttention(12, 4)([[1.0]]), TypeError, r"query must be a tensor \[batch, tokens, dim\]; it is a list"),
        (lambda: mh.MultiHeadAttention(12, 4)(torch.ones(2, 5, 12), cache=True), TypeError, "cache must be a KVCache, .*it is a bool"),
        (lambda: mh.MultiHeadAttention(12, 4, mask="causal"), TypeError, "must be a multihead mask such as Causal.*it is a str"),
        (lambda: mh.MultiHeadAttention(12, 4, positions=nn.Identity()), TypeError, r"positions must be RoPE\(\).*it is a Identity"),
        (lambda: mh.MultiHeadAttention(12, 4, positions=mh.RoPE()), ValueError, "must be a multiple of 2 .* there are 3"),
        (lambda: mh.MultiHeadAttention(12, 4)(torch.ones(2, 5, 13)), ValueError, r"query \[batch, tokens, 12\] has shape \[2, 5, 13\]"),
        (lambda: mh.MultiHeadAttention(12, 4)(torch.ones(2, 5, 12), torch.ones(3, 5, 12)), ValueError, r"must have the layer's dims and one batch.*key .* \[3, 5, 12\]"),
        (lambda: mh.MultiHeadAttention(12, 4)(torch.ones(2, 5, 12), torch.ones(2, 5, 12), torch.ones(2, 6, 12)), ValueError, "as many values as keys"),
        (lambda: mh.MultiHeadAttention(12, 4)(torch.ones(1, 2, 5, 12)), ValueError, r"query \[batch, tokens, 12\] has shape \[1, 2, 5, 12\]"),
        (lambda: mh.MultiHeadAttention(12, 3, positions=mh.RoPE())(torch.ones(2, 5, 12), position_ids=torch.arange(4)), ValueError, r"position_ids must be a tensor \[tokens\].*here \[5\] or \[2, 5\]; its shape is \[4\]"),
    ],
)  # fmt: skip
def test_errors(call, error, match):
    with pytest.raises(error, match=match):
        call()
