"""multihead.compat.MultiheadAttention against nn.MultiheadAttention: same calls, same numbers, without its traps."""

import copy
import itertools

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

import multihead as mh
from multihead.compat import MultiheadAttention

N, L, S, E, H = 3, 5, 7, 24, 4
OPTIONS = {
    "plain": {},
    "no bias": {"bias": False},
    "sizes": {"kdim": 10, "vdim": 14},
    "bias_kv": {"add_bias_kv": True},
    "zero_attn": {"add_zero_attn": True},
    "both": {"add_bias_kv": True, "add_zero_attn": True, "kdim": 10},
}
MASKS = {
    "none": dict,
    "bool": lambda: {"attn_mask": blocked(L, S)},
    "float": lambda: {"attn_mask": torch.randn(L, S)},
    "inf": lambda: {"attn_mask": torch.zeros(L, S).masked_fill(blocked(L, S), -torch.inf)},
    "per head": lambda: {"attn_mask": blocked(N * H, L, S)},
    "padding": lambda: {"key_padding_mask": blocked(N, S)},
    "float padding": lambda: {"key_padding_mask": torch.zeros(N, S).masked_fill(blocked(N, S), -torch.inf)},
    "bool and padding": lambda: {"attn_mask": blocked(L, S), "key_padding_mask": blocked(N, S)},
    "float and padding": lambda: {
        "attn_mask": torch.randn(N * H, L, S),
        "key_padding_mask": torch.zeros(N, S).masked_fill(blocked(N, S), -torch.inf),
    },
}


def blocked(*shape):
    """Every row keeps its first key."""
    mask = torch.rand(shape) < 0.4
    mask[..., 0] = False
    return mask


def pair(batch_first=True, dtype=torch.float32, **options):
    theirs = nn.MultiheadAttention(E, H, batch_first=batch_first, dtype=dtype, **options)
    for p in theirs.parameters():
        nn.init.normal_(p, std=0.3)
    ours = MultiheadAttention(E, H, batch_first=batch_first, dtype=dtype, **options)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def inputs(module, batch_first=True, dtype=torch.float32):
    shapes = (L, module.embed_dim), (S, module.kdim), (S, module.vdim)
    return [torch.randn((N, t, d) if batch_first else (t, N, d), dtype=dtype, requires_grad=True) for t, d in shapes]


@pytest.mark.parametrize("batch_first", [True, False], ids=["batch first", "tokens first"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("option", OPTIONS)
def test_equals_torch_over_the_grid_of_options(option, mask, batch_first):
    theirs, ours = pair(batch_first, **OPTIONS[option])
    given = inputs(theirs, batch_first)
    for average, training in itertools.product((True, False), repeat=2):
        keywords = MASKS[mask]()
        want, weights = theirs.train(training)(*given, **keywords, average_attn_weights=average)
        out, got = ours.train(training)(*given, **keywords, average_attn_weights=average)
        torch.testing.assert_close(out, want, rtol=1e-5, atol=2e-6)
        torch.testing.assert_close(got, weights, rtol=1e-5, atol=2e-6)
        out, none = ours(*given, **keywords, need_weights=False)
        assert none is None
        torch.testing.assert_close(out, want, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("option", OPTIONS)
def test_gradients_equal_torchs(option, mask):
    theirs, ours = pair(dtype=torch.float64, **OPTIONS[option])
    given, keywords = inputs(theirs, dtype=torch.float64), MASKS[mask]()
    keywords = {name: x if x.dtype == torch.bool else x.double() for name, x in keywords.items()}
    grads = []
    for module in (theirs, ours):
        out, weights = module(*given, **keywords)
        torch.manual_seed(3)
        loss = (out * torch.randn(out.shape)).sum() + (weights * torch.randn(weights.shape)).sum()
        grads.append(torch.autograd.grad(loss, [*given, *module.parameters()]))
    for want, got in zip(*grads, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-7, atol=1e-8)


def test_self_attention_and_unbatched():
    theirs, ours = pair()
    x = torch.randn(N, L, E)
    for given in ((x, x, x), (x[0], x[0], x[0]), (x, x.clone(), x.clone())):
        torch.testing.assert_close(ours(*given), theirs(*given), rtol=1e-5, atol=2e-6)
    mask, padding = blocked(H, L, L), blocked(L)
    torch.testing.assert_close(
        ours(x[0], x[0], x[0], attn_mask=mask, key_padding_mask=padding),
        theirs(x[0], x[0], x[0], attn_mask=mask, key_padding_mask=padding),
        rtol=1e-5, atol=2e-6,
    )  # fmt: skip


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("option", ["plain", "zero_attn"])
def test_is_causal_is_a_promise_about_the_mask(option, need_weights):
    theirs, ours = pair(**OPTIONS[option])
    x = torch.randn(N, L, E)
    mask = torch.ones(L, L, dtype=torch.bool).triu(1)
    padding = torch.tensor([[False] * L, [False] * 3 + [True] * 2, [False] * 4 + [True]])
    for keywords in ({}, {"key_padding_mask": padding}):
        keywords = {"attn_mask": mask, "is_causal": True, **keywords}
        want, _ = theirs(x, x, x, **keywords)  # without weights torch forgets its zero key, or hides it
        torch.testing.assert_close(ours(x, x, x, **keywords, need_weights=need_weights)[0], want, rtol=1e-5, atol=2e-6)


def test_state_dict_and_signature_are_torchs():
    import inspect

    theirs, ours = pair(add_bias_kv=True, kdim=10)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    for name in ("__init__", "forward"):
        a, b = (inspect.signature(getattr(kind, name)).parameters for kind in (MultiheadAttention, nn.MultiheadAttention))
        assert [(p.name, p.default, p.kind) for p in a.values()] == [(p.name, p.default, p.kind) for p in b.values()]


# ---- without its traps ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["attn_mask", "key_padding_mask", "float", "per head"])
def test_an_empty_row_gives_zeros_in_all_three_paths(how):
    """torch: NaN with weights, zeros or NaN without, NaN in its native fast path."""
    theirs, ours = pair(bias=False)
    x = torch.randn(N, L, E)
    mask, padding = torch.zeros(L, L, dtype=torch.bool), torch.zeros(N, L, dtype=torch.bool)
    mask[2], padding[1] = True, True
    keywords = {
        "attn_mask": {"attn_mask": mask},
        "float": {"attn_mask": torch.zeros(L, L).masked_fill(mask, -torch.inf)},
        "per head": {"attn_mask": mask.expand(N * H, L, L)},
        "key_padding_mask": {"key_padding_mask": padding},
    }[how]
    row = (1, slice(None)) if how == "key_padding_mask" else (slice(None), 2)
    assert theirs(x, x, x, **keywords)[0][row].isnan().any()
    for need_weights in (True, False):
        out, weights = ours.train()(x, x, x, **keywords, need_weights=need_weights)
        assert not out[row].any()
        assert weights is None or not weights[row].any()
        out.sum().backward()
        assert all(bool(p.grad.isfinite().all()) for p in ours.parameters())
        ours.eval()
        with torch.no_grad():
            assert not ours(x, x, x, **keywords, need_weights=need_weights)[0][row].any()


@pytest.mark.parametrize("need_weights", [True, False])
def test_train_eval_and_no_grad_agree(need_weights):
    _, ours = pair()
    x, padding = torch.randn(N, L, E), blocked(N, L)
    outs = [ours.train()(x, x, x, padding, need_weights)[0], ours.eval()(x, x, x, padding, need_weights)[0]]
    with torch.no_grad():
        outs.append(ours(x, x, x, padding, need_weights)[0])
    with torch.inference_mode():
        outs.append(ours(x, x, x, padding, need_weights)[0])
    for out in outs[1:]:
        torch.testing.assert_close(out, outs[0], rtol=1e-6, atol=1e-6)


def test_weights_do_not_cost_the_fused_kernel():
    """The output is computed by SDPA's flash kernel whether or not weights are asked for."""
    _, ours = pair()
    x = torch.randn(N, L, E)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        assert torch.equal(ours(x, x, x, need_weights=True)[0], ours(x, x, x, need_weights=False)[0])
    calls = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            calls.append(str(function))
            return function(*args, **(kwargs or {}))

    with Watch():
        ours(x, x, x, need_weights=True)
    assert sum("scaled_dot_product_flash_attention" in call for call in calls) == 1


def test_dropout_falls_in_train_only_and_weights_come_before_it():
    _, ours = pair(dropout=0.5)
    x = torch.randn(N, L, E)
    want, weights = ours.eval()(x, x, x)
    out, kept = ours.train()(x, x, x)
    assert not torch.allclose(out, want)
    torch.testing.assert_close(kept, weights)


def test_torchs_encoder_layers_do_not_bypass_it():
    layer = nn.TransformerEncoderLayer(E, H, 32, dropout=0.0, batch_first=True).eval()
    x, padding = torch.randn(N, L, E), torch.tensor([[False] * L, [True] * L, [False] * 3 + [True] * 2])
    with torch.no_grad():
        before = layer(x, src_key_padding_mask=padding)
        ours = MultiheadAttention(E, H, batch_first=True)
        ours.load_state_dict(layer.self_attn.state_dict())
        calls = []
        ours.register_forward_hook(lambda *_: calls.append(1))
        layer.self_attn = ours
        after = layer(x, src_key_padding_mask=padding)
        assert calls
        nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)(x)
    torch.testing.assert_close(after[0], before[0], rtol=1e-5, atol=1e-5)
    assert not after.isnan().any()
    assert before[1].isnan().any()


def test_adapters_on_the_output_projection_are_called():
    """torch never calls out_proj.forward, so that an adapter there is without effect (peft#761)."""

    class Doubled(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return 2 * self.inner(x)

    _, ours = pair(bias=False)
    x = torch.randn(N, L, E)
    once = ours(x, x, x)[0]
    ours.out_proj = Doubled(ours.out_proj)
    torch.testing.assert_close(ours(x, x, x)[0], 2 * once)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_and_autocast(dtype):
    theirs, ours = pair()
    x = torch.randn(N, L, E)
    want, _ = theirs(x, x, x)
    torch.testing.assert_close(copy.deepcopy(ours).to(dtype)(*(x.to(dtype),) * 3)[0].float(), want, rtol=0.05, atol=0.1)
    with torch.autocast("cpu", dtype):
        torch.testing.assert_close(ours(x, x, x)[0].float(), want, rtol=0.05, atol=0.1)


def test_compile():
    _, ours = pair(add_bias_kv=True)
    x, mask = torch.randn(N, L, E), blocked(L, L)
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, x, x, attn_mask=mask), ours(x, x, x, attn_mask=mask))
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda m, x: m(x, x, x, attn_mask=torch.zeros(L, S) > 0), ValueError, r"attn_mask must be \[L, S\] = \[5, 5\] or \[N · num_heads, L, S\] = \[12, 5, 5\]; its shape is \[5, 7\]"),
        (lambda m, x: m(x, x, x, key_padding_mask=torch.zeros(N, S) > 0), ValueError, r"key_padding_mask must be \[N, S\] = \[3, 5\]; its shape is \[3, 7\]"),
        (lambda m, x: m(x, x, x, attn_mask=torch.zeros(L, L).long()), TypeError, "attn_mask must be bool .* or float .*; it is torch.int64"),
        (lambda m, x: m(x, x, x, is_causal=True), ValueError, "is_causal promises that attn_mask is the causal mask, but there is no attn_mask"),
        (lambda m, x: m(x, x[:2], x[:2]), ValueError, r"one batch N, and key and value one length; query \[N, L, 24\] has shape \[3, 5, 24\]"),
        (lambda m, x: m(x, x, x[:, :2]), ValueError, "key and value one length"),
        (lambda m, x: m(x[..., :3], x, x), ValueError, r"query \[N, L, 24\] has shape \[3, 5, 3\]"),
        (lambda m, x: m(*(torch.nested.nested_tensor([x[0], x[1, :2]], layout=torch.jagged),) * 3), TypeError, "nested tensors are not taken; pad them"),
    ],
)  # fmt: skip
def test_errors(call, error, match):
    _, ours = pair()
    with pytest.raises(error, match=match):
        call(ours, torch.randn(N, L, E))


def test_is_a_submodule_of_the_package():
    assert mh.compat.MultiheadAttention is MultiheadAttention
    assert mh.compat.__all__ == ["MultiheadAttention"]
