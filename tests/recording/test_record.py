"""record(): what it sees in every kind of model, that it changes nothing, and that nothing of it stays behind."""

import contextlib
import sys
import threading
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules import module as torch_module
from torch.overrides import _get_current_function_mode_stack

import multihead as mh
from multihead.recording.keep import BudgetError

from ..adopting import zoo

B, T, S, D, H = 2, 7, 9, 24, 4


def close(a, b, **more):
    torch.testing.assert_close(a, b, **{"rtol": 1e-4, "atol": 1e-6, **more})


class Toy(nn.Module):
    """Names to find, and one place that is called twice."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(mh.MultiHeadAttention(D, H, kv_heads=2, mask=mh.Causal()) for _ in range(3))
        self.shared = mh.MultiHeadAttention(D, H)

    def forward(self, x, memory=None):
        for layer in self.layers:
            x = x + layer(x)
        x = self.shared(x)
        return self.shared(x, memory) if memory is not None else x


def clean():
    """As torch is when nobody records."""
    assert not _get_current_function_mode_stack()
    assert not torch_module._global_forward_hooks
    assert not torch_module._global_forward_pre_hooks
    assert not torch_module._has_any_global_hook()
    assert not torch._C._is_torch_function_all_disabled()
    assert torch._C._is_torch_function_enabled()


@pytest.fixture(autouse=True)
def _clean():
    clean()
    yield
    clean()


# ---- every kind of model --------------------------------------------------------------------------------------------


def hand(module, *args, **kwargs):
    return module, args, kwargs


ONES = torch.ones(T, T).tril()
KINDS = {
    "sdpa": lambda: hand(Functional(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True)), *x4(3)),
    "sdpa_bool": lambda: hand(Functional(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=ONES > 0, scale=0.3)), *x4(3)),
    "sdpa_float": lambda: hand(Functional(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, ONES.log())), *x4(3)),
    "sdpa_bias": lambda: hand(Functional(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, torch.linspace(0, 3, T * T).view(T, T))), *x4(3)),
    "sdpa_gqa": lambda: hand(Functional(lambda q, k, v: F.scaled_dot_product_attention(q, k[:, :2], v[:, :2], enable_gqa=True)), *x4(3)),
    "sdpa_3d": lambda: hand(Functional(lambda q, k, v: F.scaled_dot_product_attention(q[0], k[0], v[0])), *x4(3)),
    "ours": lambda: hand(mh.MultiHeadAttention(D, H, kv_heads=2, positions=mh.RoPE(), mask=mh.Causal()), x3()),
    "ours_alibi": lambda: hand(mh.MultiHeadAttention(D, H, positions=mh.ALiBi(), mask=mh.Causal() & mh.Window(3)), x3()),
    "ours_sinks": lambda: hand(mh.MultiHeadAttention(D, H, sinks=True, softcap=2.0, qk_norm=True), x3(), x3(S)),
    "ours_function": lambda: hand(Functional(lambda q, k, v: mh.attention(q, k, v, mask=mh.Lengths([3, 7]))), *x4(3)),
    "ours_unbatched": lambda: hand(Functional(lambda q, k, v: mh.attention(q[0], k[0], v[0], mask=mh.Causal())), *x4(3)),
    "compat": lambda: hand(mh.compat.MultiheadAttention(D, H, batch_first=True), *[x3()] * 3),
    "torch_layer": lambda: hand(nn.MultiheadAttention(D, H, batch_first=True), *[x3()] * 3),
    "torch_cross": lambda: hand(nn.MultiheadAttention(D, H, kdim=10, vdim=12), torch.randn(T, B, D), torch.randn(S, B, 10), torch.randn(S, B, 12), need_weights=False),
    "torch_bias_kv": lambda: hand(nn.MultiheadAttention(D, H, add_bias_kv=True, add_zero_attn=True, batch_first=True), *[x3()] * 3, attn_mask=ONES == 0),
    "torch_unbatched": lambda: hand(nn.MultiheadAttention(D, H), *[torch.randn(T, D)] * 3, key_padding_mask=torch.arange(T) > 4),
    "torch_encoder": lambda: hand(nn.TransformerEncoder(nn.TransformerEncoderLayer(D, H, 32, batch_first=True), 2), x3()),
    "torch_decoder": lambda: hand(nn.TransformerDecoder(nn.TransformerDecoderLayer(D, H, 32, batch_first=True), 2), x3(), x3(S), tgt_mask=ONES.log(), tgt_is_causal=True),
    "note_000": lambda: hand(zoo.Note000(), *[x3()] * 3, mask=ONES),
    "note_001": lambda: hand(zoo.Note001(), x3(), (1 - ONES)),
    "note_002": lambda: hand(zoo.Note002(), *[x3()] * 3),
    "note_003": lambda: hand(zoo.Note003(), torch.randn(B, T, 14), torch.randn(B, S, 10), torch.randn(B, S, 18), torch.tensor([3, 9])),
    "note_004": lambda: hand(zoo.Note004(), *[x3()] * 3, mask=ONES),
}  # fmt: skip


def x3(tokens=T):
    return torch.randn(B, tokens, D)


def x4(n):
    return [torch.randn(B, H, T, 6) for _ in range(n)]


class Functional(nn.Module):
    def __init__(self, call):
        super().__init__()
        self.call, self.num_heads = call, H

    def forward(self, *args):
        return self.call(*args)


def first(result):
    return result[0] if isinstance(result, tuple) else result


@pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested", "ignore:enable_nested_tensor")
def test_nothing_changes(kind, train):
    """Outputs, gradients and random state, bit for bit, with gradients and without."""
    model, args, kwargs = KINDS[kind]()
    model.train(train)
    args = [x.requires_grad_(train) if x.is_floating_point() else x for x in args]
    found = []
    for watched in (False, True):
        torch.manual_seed(3)
        with torch.set_grad_enabled(train):
            if watched:
                with mh.record() as seen:
                    out = first(model(*args, **kwargs))
            else:
                out = first(model(*args, **kwargs))
            grads = (
                torch.autograd.grad(
                    (out * torch.arange(out.numel()).view(out.shape)).sum(),
                    [x for x in args if x.dtype.is_floating_point and x.requires_grad],
                    allow_unused=True,
                )
                if train
                else ()
            )
        found.append([out, torch.get_rng_state(), *(g for g in grads if g is not None)])
    assert len(found[0]) == len(found[1])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert len(seen) == {"torch_encoder": 2, "torch_decoder": 4}.get(kind, 1)
    assert not seen.missed


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_seen_makes_the_output(kind):
    """weights @ values is what the model computed: against the model's own output where no projection hides it, and against
    the weights that torch's layers return."""
    model, args, kwargs = KINDS[kind]()
    model.eval()
    if kind.startswith("torch") and not isinstance(model, nn.MultiheadAttention):
        pytest.skip("layers return no weights")
    with torch.no_grad(), mh.record(keep="values") as seen:
        out = model(*args, **kwargs)
        if isinstance(model, nn.MultiheadAttention):
            want = model(*args, **{**kwargs, "need_weights": True, "average_attn_weights": False})[1]
    w = seen[0].pictures[0].weights()
    if isinstance(model, nn.MultiheadAttention):
        close(w, want.view_as(w))
        return
    call = seen[0].pictures[0]
    values = w @ call.v.repeat_interleave(w.shape[1] // call.v.shape[1], 1)
    if isinstance(model, Functional):
        close(values.reshape(out.shape), out)
        return
    project = next(
        getattr(model, n)
        for n in ("out", "W_o", "o_linear", "wo", "out_proj", "w_o", "w_concat", "fc_out", "combine")
        if hasattr(model, n)
    )
    close(project(values.transpose(1, 2).flatten(2)), first(out), atol=1e-5)


# ---- torch's own encoder, padded ------------------------------------------------------------------------------------


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested", "ignore:enable_nested_tensor")
def test_a_padded_encoder(norm_first, grad):
    """Its native path returns zeros for padding; the recording agrees with the weights of the layers by themselves."""
    layer = nn.TransformerEncoderLayer(D, H, 32, batch_first=True, norm_first=norm_first)
    model, x = nn.TransformerEncoder(layer, 2, enable_nested_tensor=not norm_first).eval(), x3()
    pad = torch.arange(T) >= torch.tensor([[T], [4]])
    with torch.set_grad_enabled(grad):
        want = model(x, src_key_padding_mask=pad)
        with mh.record() as seen:
            got = model(x, src_key_padding_mask=pad)
        assert torch.equal(want, got)
    assert seen.names == ["layers.0.self_attn", "layers.1.self_attn"]
    h = x
    for i, one in enumerate(model.layers):
        inside = one.norm1(h) if norm_first else h
        w = one.self_attn(inside, inside, inside, key_padding_mask=pad, average_attn_weights=False)[1]
        close(seen[i].weights()[0], w[0])
        close(seen[i].weights()[1, :, :4], w[1, :, :4])
        assert not seen[i].weights()[1, :, :, 4:].any()
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            h = one(h, src_key_padding_mask=pad)
        finally:
            torch.backends.mha.set_fastpath_enabled(True)


# ---- places ---------------------------------------------------------------------------------------------------------


def test_places_have_names_and_order():
    model, x, memory = Toy(), x3(), x3(S)
    with mh.record() as seen:
        model(x, memory)
    assert seen.names == ["layers.0", "layers.1", "layers.2", "shared", "shared#2"]
    assert [p.kind for p in seen] == ["self"] * 4 + ["cross"]
    assert seen[3] is seen["shared"]
    assert seen[-1] is seen["shared#2"]
    assert seen[4].calls[0].sizes == (B, H, H, T, S)
    assert [len(p.calls) for p in seen] == [1] * 5
    assert "5 places" in repr(seen)
    assert "Seen(4, 'shared#2', cross: batch 2, heads 4, 7 queries × 9 keys, 1 calls)" in repr(seen)


def test_names_from_a_model():
    model = nn.Sequential(Toy(), nn.Linear(D, D))
    with mh.record(model) as seen:
        model[0](x3())
    assert seen.names == ["0.layers.0", "0.layers.1", "0.layers.2", "0.shared"]
    with mh.record() as seen:
        mh.attention(*x4(3))
        mh.attention(*x4(3))
    assert seen.names == ["attention", "attention#2"]


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"layers": [0, 2]}, ["layers.0", "layers.2"]),
        ({"where": "layers.1"}, ["layers.1"]),
        ({"where": "layers.*"}, ["layers.0", "layers.1", "layers.2"]),
        ({"where": lambda name: name.endswith("d")}, ["shared"]),
        ({"layers": [0, 3], "where": "shared"}, ["shared"]),
    ],
)
def test_selection(options, names):
    model, x = Toy(), x3()
    with mh.record(**options) as seen:
        model(x)
        model(x)
    assert seen.names == names
    assert seen[names[0]].number == int(names[0][-1]) if "." in names[0] else 3
    with (
        pytest.raises(IndexError, match=r"seen\[1\]: was not selected")
        if "layers.1" not in names
        else pytest.raises(IndexError, match=r"seen\[9\]: there is no such")
    ):
        seen[1 if "layers.1" not in names else 9]


def test_heads_are_selected():
    model, x = mh.MultiHeadAttention(D, H, kv_heads=2, sinks=True), x3()
    nn.init.normal_(model.sinks)
    with mh.record(heads=[3, 0], keep="values") as seen:
        _, w = model(x, return_weights=True)
    close(seen[0].weights(), w[:, [3, 0]])
    assert seen[0].calls[0].heads == [3, 0]
    whole = mh.record(keep="values")
    with whole as every:
        model(x)
    close(seen[0].value_norms(), every[0].value_norms()[:, [3, 0]])
    with (
        pytest.raises(ValueError, match="record: heads must be within 0 … 3, which MultiHeadAttention has; there is 7"),
        mh.record(heads=[7]),
    ):
        model(x)


def test_several_pictures_are_asked_one_by_one():
    model = mh.MultiHeadAttention(D, H)
    with mh.record() as seen:
        model(x3())
        model(x3(S))
    assert len(seen[0].pictures) == 2
    with pytest.raises(
        ValueError, match=r"MultiHeadAttention: attended 2 times, over different keys; ask one of them: seen\[0\].pictures\[i\]"
    ):
        seen[0].entropy()
    assert seen[0].pictures[1].entropy().shape == (B, H, S)
    assert [x.shape[2] for x in seen[0].history("entropy")] == [T, S]


# ---- growing --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("ragged", [False, True])
def test_decoding_reads_as_one_picture(window, ragged):
    model = mh.MultiHeadAttention(
        D, H, kv_heads=2, positions=mh.RoPE(), mask=mh.Causal() & mh.Window(window) if window else mh.Causal()
    )
    x, steps = x3(6), 8
    more = [x3(1) for _ in range(steps)]
    with torch.no_grad():
        with mh.record(keep="values") as seen:
            cache = model.new_cache(B, 32)
            model(x, cache=cache)
            for y in more:
                model(y, cache=cache)
        with mh.record(keep="values") as whole:
            model(torch.cat([x, *more], 1))
    assert len(seen[0].calls) == 1 + steps
    assert len(seen[0].pictures) == 1
    close(seen[0].weights(), whole[0].weights())
    close(seen[0].entropy(), whole[0].entropy())
    close(seen[0].distance(), whole[0].distance(), atol=1e-5)
    close(seen[0].calls[-1].weights()[:, :, -1], whole[0].weights()[:, :, -1, -seen[0].calls[-1].sizes[4] :])
    assert seen.nbytes < 3 * whole.nbytes  # each key once, in a buffer that doubles
    if ragged:
        with torch.no_grad(), mh.record() as seen:
            cache = model.new_cache(B, 32)
            model(x, cache=cache)
            cache.crop([2, 6]) if window is None else None
            out = [model(y, cache=cache, return_weights=True)[1] for y in more]
        close(
            seen[0].pictures[-1].weights()[:, :, -1:],
            torch.nn.functional.pad(out[-1], (seen[0].pictures[-1].sizes[4] - out[-1].shape[3], 0)),
        )


def test_a_buffer_that_is_overwritten_is_copied():
    model, buffer = mh.MultiHeadAttention(D, H), torch.randn(B, H, T, 6)
    with mh.record() as seen:
        mh.attention(buffer, buffer, buffer)
        want = torch.softmax(buffer @ buffer.mT / 6**0.5, -1)
        buffer.zero_()
    close(seen[0].weights(), want)
    del model


# ---- keeping --------------------------------------------------------------------------------------------------------


def test_statistics_at_once():
    model, x = Toy(), x3()
    watch = mh.record(keep="statistics", every=2, statistics=("entropy", "top"))
    for _ in range(5):
        with watch as seen:
            model(x)
    assert seen.steps == 3
    assert len(seen) == 4
    assert [c.step for c in seen[0].calls] == [0, 2, 4]
    assert all(call.q.is_meta for call in seen[1].calls)
    with mh.record() as whole:
        model(x)
    history = seen[1].history("entropy")
    assert len(history) == 3
    close(history[0], whole[1].entropy())
    close(seen[1].calls[0].top().weights, whole[1].top(5).weights)
    with pytest.raises(
        ValueError,
        match='was recorded with keep="statistics", so that only what was asked then is there: entropy, top; not received',
    ):
        seen[1].calls[0].received()
    with pytest.raises(ValueError, match="is there: entropy, top; not with other numbers"):
        seen[1].calls[0].top(3)
    with pytest.raises(ValueError, match=r'weights: layers.1 was recorded with keep="statistics", which drops q and k'):
        seen[1].calls[0].weights()


def test_budget():
    model, x = Toy(), x3()
    with mh.record() as seen:
        model(x)
    with mh.record(budget=seen.nbytes) as enough:
        model(x)
    assert enough.nbytes == seen.nbytes == sum(4 * B * T * 6 * (H + g) for g in (2, 2, 2, H))
    with (
        pytest.raises(
            BudgetError, match=r"record: shared would take the recording from .* over its budget of .*; record fewer places"
        ),
        mh.record(budget=seen.nbytes - 1),
    ):
        model(x)


def test_repeated_kv_heads_are_kept_once():
    q, k, v = torch.randn(B, 6, T, 8), torch.randn(B, 2, T, 8), torch.randn(B, 2, T, 8)
    k, v = (x.repeat_interleave(3, 1) for x in (k, v))
    with mh.record() as seen:
        F.scaled_dot_product_attention(q, k, v)
        F.scaled_dot_product_attention(q, q, q)
    assert seen[0].calls[0].sizes == (B, 6, 2, T, T)
    assert seen[1].calls[0].sizes == (B, 6, 6, T, T)


def test_dense_masks_are_kept_as_intervals():
    """A mask of 2,048² bools in 32 KB."""
    q = torch.randn(1, 1, 2048, 4)
    at = torch.arange(2048)
    mask = (at[None] <= at[:, None]) & (at[None] > at[:, None] - 100) | (at < 4)[None]
    with mh.record() as seen:
        for _ in range(3):
            F.scaled_dot_product_attention(q, q, q, mask)
    kept = [place.calls[0].mask for place in seen]
    assert kept[0] is kept[1] is kept[2]
    assert sum(x.nbytes for x in kept[0].leaves()) < 2**17
    assert torch.equal(kept[0].dense(2048, 2048), mask)


def test_differentiable_weights():
    model, x = mh.MultiHeadAttention(D, H, mask=mh.Causal()), x3().requires_grad_()
    with mh.record(differentiable=True) as seen:
        model(x)
    w = seen[0].weights(head=1, queries=slice(2, 5), differentiable=True)
    want = model(x, return_weights=True)[1][:, 1, 2:5]
    close(w, want)
    chosen = torch.randn_like(w)
    close(torch.autograd.grad((w * chosen).sum(), x, retain_graph=True)[0], torch.autograd.grad((want * chosen).sum(), x)[0])
    with mh.record() as seen:
        model(x)
    with pytest.raises(
        ValueError, match=r"weights: MultiHeadAttention has no graph to differentiate; record\(differentiable=True\) keeps it"
    ):
        seen[0].weights(differentiable=True)


@pytest.mark.parametrize(
    "index", [None, 2, -1, slice(1, 5), slice(None, None, 3), [4, 1, 1], torch.tensor([0, 3]), slice(3, 3)]
)
def test_slices_of_weights(index):
    model, x = mh.MultiHeadAttention(D, H, mask=mh.Causal(), softcap=3.0), x3()
    with torch.no_grad(), mh.record() as seen:
        w = model(x, return_weights=True)[1]
    close(seen[0].weights(queries=index), w if index is None else w[:, :, index])
    close(seen[0].weights(keys=index, head=2), w[:, 2] if index is None else w[:, 2][..., index])
    with pytest.raises(IndexError, match=r"queries: must be within 0 … 6; it is 7"):
        seen[0].weights(queries=7)
    with pytest.raises(TypeError, match="head: must be a number, a slice or a list of numbers; it is 'a'"):
        seen[0].weights(head="a")


# ---- values ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["ours", "torch_layer", "note_000", "note_003", "torch_cross"])
def test_value_norms(kind):
    """‖w v W_o‖ as its definition has it, the projection found by itself."""
    model, args, kwargs = KINDS[kind]()
    with torch.no_grad(), mh.record(keep="values") as seen:
        model.eval()(*args, **kwargs)
        one = seen[0]
        W = next(getattr(model, n) for n in ("out", "out_proj", "W_o") if hasattr(model, n)).weight
        w, v = one.weights(), one.calls[0].v.repeat_interleave(H // one.calls[0].v.shape[1], 1)
        moved = torch.einsum("bhts,bhse,dhe->bhtsd", w, v, W.unflatten(1, (H, -1)))
    close(one.norms(), moved.norm(dim=-1))
    close(one.norms(head=1, queries=2, keys=slice(0, 3)), moved.norm(dim=-1)[:, 1, 2, :3])
    close(one.received_norms(), moved.norm(dim=-1).sum(2))
    close(one.value_norms(W), one.value_norms())


def test_value_norms_need_values_and_a_projection():
    with mh.record() as seen:
        mh.attention(*x4(3))
    with pytest.raises(
        ValueError, match=r'value_norms: the values of attention were not kept; record\(keep="values"\) keeps them'
    ):
        seen[0].value_norms()
    with mh.record(keep="values") as seen:
        mh.attention(*x4(3))
    with pytest.raises(ValueError, match=r"value_norms: needs the output projection of attention, .* v_dim 6; none was found"):
        seen[0].value_norms()
    with mh.record(keep="values", out_proj=torch.eye(D)) as seen:
        mh.attention(*x4(3))
    close(seen[0].value_norms(), seen[0].calls[0].v.norm(dim=-1))


def test_rollout():
    """Against the product of the layers' mean weights."""
    model, x = Toy(), x3()
    with torch.no_grad(), mh.record() as seen:
        model(x)
    product = torch.eye(T).expand(B, T, T)
    for place in seen:
        product = (0.5 * place.weights().mean(1) + 0.5 * torch.eye(T)) @ product
    for token in (0, 3, -1):
        close(seen.rollout(token), product[:, token])
    close(seen.rollout(2, residual=0.0, layers=[1]), seen[1].weights().mean(1)[:, 2])
    assert torch.equal(seen.rollout(2, residual=1.0), torch.eye(T)[2].expand(B, T))
    with pytest.raises(IndexError, match="rollout: token must be within 0 … 6; it is 7"):
        seen.rollout(7)
    with torch.no_grad(), mh.record() as seen:
        model(x, x3(S))
    with pytest.raises(
        ValueError,
        match=r"rollout: goes through self-attention over the same tokens in every layer; there are layers.0 7 × 7, shared#2 7 × 9",
    ):
        seen.rollout(0, layers=[0, 4])


# ---- what cannot be read --------------------------------------------------------------------------------------------


def softmax_over_queries(x):
    return torch.softmax(x @ x.mT, 1) @ x


def scaled_late(x):
    return torch.softmax((x @ x.mT).tanh() * 2 * 3, -1) @ x


def overwritten(x):
    s = x @ x.mT
    s[..., 0] = 5.0
    return s.softmax(-1) @ x


def filled_with_zero(x):
    return (x @ x.mT).masked_fill(torch.eye(T) > 0, 0.0).softmax(-1) @ x


def hidden_from_us(x):
    s = x @ x.mT
    s.data.mul_(2)
    torch._foreach_mul_([s], 3.0)
    return s.softmax(-1) @ x


@pytest.mark.parametrize(
    ("call", "why"),
    [
        (softmax_over_queries, "softmax runs over axis 1 instead of the keys"),
        (scaled_late, "scores are scaled after the softcap"),
        (overwritten, "a part of the scores is overwritten by its place"),
        (filled_with_zero, "a mask writes 0.0 into the scores, which hides nothing"),
        (hidden_from_us, "its product, mask and softmax were read, but the weights they give differ by"),
    ],
)
def test_what_cannot_be_read_is_named(call, why):
    x = torch.randn(B, T, T)
    with pytest.warns(UserWarning, match=f"record: attention that could not be read: .*: {why}"), mh.record() as seen:
        got = call(x)
    assert torch.equal(got, call(x))
    assert why in seen.missed[0]
    with pytest.raises(IndexError, match=r"seen\[0\]: nothing was recorded; what attended could not be read"):
        seen[0]


def einsum(q, k, v):
    w = torch.softmax(torch.einsum("bqhd,bkhd->bhqk", q, k) * 0.5, dim=-1)
    return torch.einsum("bhqk,bkhd->bqhd", w, v)


def softcapped(q, k, v):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    s = torch.matmul(q, k.transpose(2, 3)) / 3
    s = torch.tanh(s / 1.5) * 1.5
    s = torch.where(ONES.bool(), s, torch.finfo(s.dtype).min)
    return torch.matmul(F.dropout(F.softmax(s, dim=-1, dtype=torch.float32).type_as(q), 0.0), v).transpose(1, 2)


def by_blocks_of_heads(q, k, v):
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    s = torch.baddbmm(torch.linspace(0, 1, T).expand(len(q), T, T), q, k.transpose(1, 2), alpha=0.25)
    s.masked_fill_(ONES == 0, float("-inf"))
    return torch.bmm(torch.softmax(s, -1), v).unflatten(0, (B, H)).transpose(1, 2)


def temperature(q, k, v):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    s = (F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT) * torch.tensor([1.0, 5.0, 9.0, 13.0]).view(H, 1, 1)
    s = s + torch.linspace(-1, 1, T * T).view(T, T)
    s -= s.max(-1, keepdim=True).values
    return (s.softmax(-1) @ v).transpose(1, 2)


def with_sinks(q, k, v):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    s = q @ k.mT * 0.4 + ONES.log()
    s = torch.cat([s, torch.tensor([0.0, 1.0, 2.0, 3.0]).reshape(1, -1, 1, 1).expand(B, -1, T, -1)], dim=-1)
    s = s - s.max(dim=-1, keepdim=True).values
    return (F.softmax(s, dim=-1)[..., :-1] @ v).transpose(1, 2)


@pytest.mark.parametrize("style", [einsum, softcapped, by_blocks_of_heads, temperature, with_sinks])
def test_styles_of_writing(style):
    q, k, v = (torch.randn(B, T, H, 6) for _ in range(3))
    model = Functional(style)
    with mh.record(keep="values") as seen:
        out = model(q, k, v)
    assert torch.equal(out, model(q, k, v))
    close((seen[0].weights() @ seen[0].calls[0].v).transpose(1, 2), out, atol=1e-5)


def test_products_that_are_no_attention():
    x = torch.randn(B, T, D)
    with mh.record() as seen:
        (x @ x.mT) @ x  # no softmax
        torch.softmax(x @ x.mT, -1)  # no values
        F.linear(x, torch.randn(D, D)).softmax(-1) @ torch.randn(B, D, 3)
        (x @ torch.randn(D, D)).softmax(-1)
    assert len(seen) == 0
    assert not seen.missed
    assert repr(seen).startswith("Recording(nothing: no attention call that torch's functions make was seen inside the block")


def test_products_are_not_held():
    """What is followed is not kept alive."""
    watch = mh.record()
    with watch:
        scores = torch.randn(B, T, D) @ torch.randn(B, D, T)
        assert len(watch.watch.follower.known) == 1
        del scores
        assert len(watch.watch.follower.known) == 0


# ---- nothing stays behind -------------------------------------------------------------------------------------------


def fail(model, args, kwargs):
    model(*args, **kwargs)
    raise ZeroDivisionError


@pytest.mark.parametrize("kind", ["torch_encoder", "torch_layer", "ours", "note_000"])
@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
def test_an_exception_inside(kind):
    model, args, kwargs = KINDS[kind]()
    with pytest.raises((RuntimeError, AssertionError, ValueError)), mh.record():
        model.eval()(*(x[..., :5] for x in args), **kwargs)
    clean()
    recorder = mh.record()
    with pytest.raises(ZeroDivisionError), recorder as seen:
        fail(model, args, kwargs)
    clean()
    assert len(seen) > 0


def test_an_exception_in_a_torch_layer_that_is_caught():
    model, (x, *_), _ = KINDS["torch_layer"]()
    with mh.record() as seen:
        with pytest.raises((RuntimeError, AssertionError)):
            model(x[..., :5], x[..., :5], x[..., :5])
        mh.attention(*x4(3))
        model(x, x, x)
    assert seen.names == ["attention", "MultiheadAttention"]


def test_nesting():
    model, x = Toy(), x3()
    with mh.record() as outer, mh.record(where="shared") as inner:
        model(x)
    assert len(outer) == 4
    assert len(inner) == 1
    close(outer["shared"].weights(), inner["shared"].weights())
    recorder = mh.record()
    with recorder:
        with pytest.raises(RuntimeError, match="record: this recorder is recording already"), recorder:
            pass
        clean_now = len(_get_current_function_mode_stack())
        assert clean_now == 1
    a, b = mh.record(), mh.record()
    a.__enter__()
    b.__enter__()
    with pytest.raises(RuntimeError, match="record: the block was left while Watch, entered inside of it, was still on"):
        a.__exit__(None, None, None)
    assert len(_get_current_function_mode_stack()) == 1
    b.__exit__(None, None, None)


@pytest.mark.slow
def test_blocks_left_in_any_order_leave_the_compiler_on():
    compiled = torch.compile(lambda x: x + 1, backend="eager")
    compiled(torch.ones(1))
    frames = sys.modules["torch._dynamo.eval_frame"]
    for leave in ((0, 1), (1, 0)):
        blocks = mh.record(), mh.record()
        for block in blocks:
            block.__enter__()
            assert frames._stance.stance == "force_eager"
        for i in leave:
            assert frames._stance.stance == "force_eager"
            with contextlib.suppress(RuntimeError):
                blocks[i].__exit__(None, None, None)
        assert frames._stance.stance == "default"


def test_other_threads_are_not_seen():
    model, x = Toy(), x3()
    with mh.record() as seen:
        thread = threading.Thread(target=lambda: model(x))
        thread.start()
        thread.join()
    assert len(seen) == 0


def test_a_default_device_does_not_matter():
    model, x = Toy(), x3()
    with torch.device("cpu"), mh.record() as seen:
        model(x)
        nn.MultiheadAttention(D, H)(x, x, x)
    assert len(seen) == 5


def test_autocast_is_seen_as_it_computes():
    q, k, v = x4(3)
    with torch.autocast("cpu", torch.bfloat16), mh.record() as seen:
        F.scaled_dot_product_attention(q, k, v)
        mh.attention(q, k, v, mask=mh.Causal())
        torch.softmax(q @ k.mT, -1) @ v
    assert [place.calls[0].q.dtype for place in seen] == [torch.bfloat16, torch.bfloat16, torch.float32]


def test_transforms_are_refused_by_name():
    q, k, v = x4(3)
    with pytest.warns(UserWarning, match="attention: it runs inside a transform such as vmap"), mh.record():
        torch.vmap(lambda a, b, c: F.scaled_dot_product_attention(a, b, c))(q, k, v)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"keep": "all"}, 'record: keep must be one of "queries", "values", "statistics"; it is \'all\''),
        ({"statistics": ["entrophy"]}, "record: there is no statistic 'entrophy'; there are lse"),
        ({"budget": -1}, "record: budget must be a number of bytes; it is -1"),
        ({"every": 0}, "record: every must be a whole number ≥ 1; it is 0"),
        ({"differentiable": True, "keep": "statistics"}, "record: differentiable=True keeps q and k with their graph"),
    ],
)
def test_errors(options, match):
    with pytest.raises(ValueError, match=match):
        mh.record(**options)


def test_absent_places():
    model, x = Toy(), x3()
    with mh.record() as seen:
        model(x)
    with pytest.raises(
        KeyError, match=r"seen\['layers'\]: there is no such place; recorded are \[0, 1, 2, 3\]: layers.0, layers.1, layers.2"
    ):
        seen["layers"]
    with mh.record(where="nowhere") as seen:
        model(x)
    with pytest.raises(
        IndexError, match=r"seen\[0\]: nothing was recorded; 4 places attended, but none was selected: layers.0, layers.1"
    ):
        seen[0]


def named(q, k, v):
    """matmul with its operands by name, where() with the hidden value first, sub, half precision between."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    s = torch.matmul(input=q, other=k.mT).mul(0.3).sub(torch.linspace(0, 1, T))
    s = torch.where(ONES == 0, torch.tensor(float("-inf")), s).to(torch.float64).float()
    return (torch.softmax(s, dim=3).contiguous() @ v).transpose(1, 2)


def keys_first(q, k, v):
    w = torch.softmax(torch.einsum("bqhd,bkhd->bhkq", q, k).mT * 0.5, dim=-1)
    return torch.einsum("bhqk,bkhd->bqhd", w, v)


def one_head(q, k, v):
    q, k, v = (x[0, :, 0] for x in (q, k, v))
    return ((q @ k.T) / 2.0).softmax(-1) @ v


@pytest.mark.parametrize("style", [named, one_head])
def test_more_styles_of_writing(style):
    q, k, v = (torch.randn(B, T, H, 6) for _ in range(3))
    with mh.record(keep="values") as seen:
        out = style(q, k, v)
    made = seen[0].weights() @ seen[0].calls[0].v
    close(made[0, 0] if style is one_head else made.transpose(1, 2), out, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda s: 1.0 / s, "something is divided by the scores"),
        (lambda s: 1.0 - s, "scores are subtracted from something"),
        (lambda s: s * torch.rand(T), "scores are multiplied by a tensor"),
        (lambda s: (s + torch.rand(T, T)).tanh(), "tanh comes after a mask or bias"),
        (lambda s: torch.where(torch.rand(T, T) > 0.5, s, 0.0), "a mask writes 0.0 into the scores"),
        (lambda s: s.masked_fill(mask=torch.eye(T) > 0, value=3.0), "a mask writes 3.0 into the scores"),
    ],
)
def test_more_that_cannot_be_read(change, why):
    x = torch.randn(B, T, T)
    with pytest.warns(UserWarning, match=why), mh.record():
        change(x @ x.mT).softmax(-1) @ x


def test_torchs_function_without_its_layer():
    layer, x = nn.MultiheadAttention(D, H), torch.randn(T, B, D)
    call = F.multi_head_attention_forward
    given = (
        x,
        x,
        x,
        D,
        H,
        layer.in_proj_weight,
        layer.in_proj_bias,
        None,
        None,
        False,
        0.0,
        layer.out_proj.weight,
        layer.out_proj.bias,
    )
    with mh.record() as seen:
        out, w = call(*given, training=False, average_attn_weights=False)
        call(
            *given,
            training=False,
            attn_mask=ONES == 0,
            use_separate_proj_weight=True,
            q_proj_weight=layer.in_proj_weight[:D],
            k_proj_weight=layer.in_proj_weight[D : 2 * D],
            v_proj_weight=layer.in_proj_weight[2 * D :],
        )
    close(seen[0].weights(), w)
    close(out, layer(x, x, x)[0])
    assert not seen[1].weights()[..., 0, 1:].any()


def test_torchs_own_causal_biases():
    from torch.nn.attention.bias import causal_lower_right, causal_upper_left

    q, k = torch.randn(B, H, 3, 8), torch.randn(B, H, 5, 8)
    with mh.record(keep="values") as seen:
        out = [F.scaled_dot_product_attention(q, k, k, bias(3, 5)) for bias in (causal_upper_left, causal_lower_right)]
    for place, want in zip(seen, out, strict=True):
        close(place.weights() @ k, want)


@pytest.mark.parametrize("device", ["cpu"])
def test_what_is_kept_can_be_moved(device):
    model, x = mh.MultiHeadAttention(D, H, mask=mh.Causal() & mh.Lengths([7, 3])), x3()
    with mh.record(device=device, keep="values") as seen, torch.no_grad():
        w = model(x, return_weights=True)[1]
    close(seen[0].weights(), w)
    with mh.record(device=device, keep="statistics") as seen:
        model(x)
    assert seen[0].entropy().device.type == device
    assert seen[0].strongest().key.shape == (B, H, T)
    assert seen.nbytes > 0


def test_generation_with_biases_and_tables_grows():
    """A dense mask and a bias at each step: tables and biases are joined too."""
    k = torch.randn(1, 2, 12, 8)
    seen_by = torch.rand(12, 12) < 0.5
    seen_by |= torch.eye(12) > 0
    seen_by &= torch.ones(12, 12).tril() > 0
    bias = torch.randn(2, 12, 12)
    q = torch.randn(1, 2, 12, 8)
    with mh.record(keep="values") as seen:
        for a, b in ((0, 8), *((i, i + 1) for i in range(8, 12))):
            Step.at(q[:, :, a:b], k[:, :, :b], seen_by[a:b, :b], bias[:, a:b, :b])
    assert len(seen[0].pictures) == 1
    want = mh.attention(q, k, k, mask=mh.Allowed(seen_by), bias=bias[None], return_weights=True)[1]
    close(seen[0].weights(), want)
    close(seen[0].received(), want.sum(2))


class Step(nn.Module):
    def forward(self, q, k, mask, bias):
        return mh.attention(q, k, k, mask=mh.Allowed(mask), bias=bias[None])

    one = None

    @classmethod
    def at(cls, *given):
        cls.one = cls.one or cls()
        return cls.one(*given)


# ---- compiled -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_compiled_model_is_recorded_by_running_it_uncompiled():
    model, x = Toy().eval(), x3()
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        compiled(x)
        with mh.record() as seen:
            got = compiled(x)
        close(got, model(x))
        assert seen.names == ["layers.0", "layers.1", "layers.2", "shared"]
        compiled(x)
    assert "torch._dynamo" in sys.modules


@pytest.mark.slow
def test_flex_attention():
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    q, k, v = x4(3)
    lengths = torch.tensor([3, 7])

    def mask(b, h, q, k):
        return (k <= q) & (k < lengths[b])

    def score(s, b, h, q, k):
        return s * 0.5 + h - 0.1 * (q - k)

    block = create_block_mask(mask, B, None, T, T, device="cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.no_grad(), mh.record(keep="values") as seen:
            out = flex_attention(q, k[:, :2], v[:, :2], score_mod=score, block_mask=block, enable_gqa=True)
            plain = flex_attention(q, k, v)
    close(seen[0].weights() @ seen[0].calls[0].v.repeat_interleave(2, 1), out, atol=1e-5)
    close(seen[1].weights() @ v, plain, atol=1e-5)
    w = seen[0].weights()
    close(seen[0].entropy(), -torch.xlogy(w, w).sum(-1), atol=1e-5)
    assert not w[0, :, :, 3:].any()
