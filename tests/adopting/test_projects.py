"""from_module(): layers of well-known projects and of torch, found by numbers; what cannot be adopted says why."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import multihead as mh
from multihead.adopting.turning import FORMS, angles

from .zoo import PROJECTS, D, H, MetaLlama, NanoGPT, Note000, Note001, Note004, Tied, TimeFirst, Timm, Windowed

B, T, S = 3, 5, 7
COMPLEX = next(form for form in FORMS if form.name == "complex numbers")


def call(module, x):
    if isinstance(module, MetaLlama):
        return module(x, COMPLEX.make(*(c.float() for c in angles(module.head_dim, torch.arange(x.shape[1])))))
    if isinstance(module, TimeFirst):
        return module(*(x.transpose(0, 1),) * 3).transpose(0, 1)
    return module(x)


@pytest.mark.parametrize("project", PROJECTS)
def test_layers_of_projects(project):
    module = PROJECTS[project]().eval()
    for p in module.parameters():  # so that norms, sinks and biases matter
        nn.init.normal_(p, std=0.3)
    layer = mh.from_module(module)
    x = torch.randn(B, S, layer.embed_dim)
    torch.testing.assert_close(layer(x), call(module, x), rtol=1e-5, atol=2e-6)
    assert layer.origin.error < 1e-6
    assert not layer.training


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize(
    "options",
    [{}, {"bias": False}, {"kdim": 10, "vdim": 14}, {"add_bias_kv": True}, {"add_zero_attn": True},
     {"add_bias_kv": True, "add_zero_attn": True, "kdim": 10}],
    ids=str,
)  # fmt: skip
def test_torchs_layer(options, batch_first):
    module = nn.MultiheadAttention(D, H, batch_first=batch_first, **options).eval()
    for p in module.parameters():
        nn.init.normal_(p, std=0.3)
    layer = mh.from_module(module)
    q, k, v = torch.randn(B, T, D), torch.randn(B, S, module.kdim), torch.randn(B, S, module.vdim)
    blocked = torch.rand(T, S) < 0.4
    blocked[:, 0] = False
    given = (q, k, v) if batch_first else tuple(x.transpose(0, 1) for x in (q, k, v))
    for mask in (None, blocked):
        want, weights = module(*given, attn_mask=mask, average_attn_weights=False)
        out, got = layer(q, k, v, mask=None if mask is None else mh.Blocked(mask), return_weights=True)
        torch.testing.assert_close(out if batch_first else out.transpose(0, 1), want, rtol=1e-5, atol=2e-6)
        if "add_zero_attn" not in options:
            torch.testing.assert_close(got, weights, rtol=1e-5, atol=2e-6)
    padding, attn = layer.origin.masks
    assert (
        padding
        == "key_padding_mask: True is blocked (masks.from_torch), float added to the scores (masks.from_additive) as [batch, k]"
    )
    assert attn == "attn_mask: True is blocked (masks.from_torch), float added to the scores (masks.from_additive) as [q, k]"


def test_names_only_order_the_search():
    """The same layer with names that say nothing, and with names that lie."""

    class Nameless(Note001):
        def __init__(self, names):
            super().__init__()
            for name in ("q_linear", "k_linear", "v_linear", "o_linear"):
                delattr(self, name)
            self.names = names
            for name in names:
                setattr(self, name, nn.Linear(D, D))
            self.n = self.num_heads
            del self.num_heads, self.head_dim

        def forward(self, stuff):
            q, k, v, o = (getattr(self, name) for name in self.names)
            q, k, v = (w(stuff).unflatten(2, (H, -1)).transpose(1, 2) for w in (q, k, v))
            return o((F.softmax(q @ k.mT / math.sqrt(D // H), -1) @ v).transpose(1, 2).flatten(2))

    for names in ("abcd", ("out", "value", "key", "query")):
        module = Nameless(names)
        layer = mh.from_module(module)
        x = torch.randn(B, T, D)
        assert [layer.query, layer.key, layer.value, layer.out] == [getattr(module, n) for n in names]
        torch.testing.assert_close(layer(x), module(x), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize("strided", [False, True])
def test_shared_kv_heads_in_both_orders(kv_heads, strided):
    """k and v repeated as k k … (ours), or tiled as k v k v …: query head h served by kv head h % kv_heads."""

    class Shared(Windowed):
        def __init__(self):
            super().__init__(window_size=99)
            self.k_proj, self.v_proj = nn.Linear(D, kv_heads * D // H), nn.Linear(D, kv_heads * D // H)

        def forward(self, x):
            q = self.q_proj(x).unflatten(2, (H, -1)).transpose(1, 2)
            k, v = (p(x).unflatten(2, (kv_heads, -1)).transpose(1, 2) for p in (self.k_proj, self.v_proj))
            k, v = (y.repeat(1, H // kv_heads, 1, 1) if strided else y.repeat_interleave(H // kv_heads, 1) for y in (k, v))
            return self.o_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))

    module = Shared()
    layer = mh.from_module(module)
    x = torch.randn(B, T, D)
    assert layer.kv_heads == kv_heads
    assert ("kv head h % kv_heads" in str(layer.origin)) == (strided and kv_heads == 2)
    torch.testing.assert_close(layer(x), module(x), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("order", ["by head", "by feature"])
def test_fused_weights_in_other_orders(order):
    """GPT-NeoX interleaves q, k and v by head; others by feature."""

    class Fused(NanoGPT):
        def forward(self, x):
            y = self.c_attn(x)
            y = y.unflatten(2, (H, 3, -1)) if order == "by head" else y.unflatten(2, (H, -1, 3)).transpose(3, 4)
            q, k, v = y.transpose(1, 2).unbind(3)
            return self.c_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))

    module = Fused()
    x = torch.randn(B, T, D)
    torch.testing.assert_close(mh.from_module(module)(x), module(x), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("scale", [1.0, D**-0.5, 0.3])
def test_scales(scale):
    class Scaled(Windowed):
        def __init__(self):
            super().__init__(window_size=99)
            self.scaling = scale

        def forward(self, x):
            q, k, v = (p(x).unflatten(2, (H, -1)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
            out = F.scaled_dot_product_attention(q, k, v, scale=self.scaling)
            return self.o_proj(out.transpose(1, 2).flatten(2))

    module = Scaled()
    layer = mh.from_module(module)
    x = torch.randn(B, T, D)
    assert math.isclose(layer.scale, scale)
    torch.testing.assert_close(layer(x), module(x), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("rotary", ["half", "interleaved"])
def test_rotations_of_its_own(rotary):
    """A layer that makes its own rotations, from a theta that only its frequencies tell."""

    class Own(Windowed):
        def __init__(self):
            super().__init__(window_size=99)
            self.register_buffer("inv_freq", 500.0 ** -(torch.arange(0, 6, 2) / 6))

        def forward(self, x):
            q, k, v = (p(x).unflatten(2, (H, -1)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
            turns = torch.arange(x.shape[1])[:, None] * self.inv_freq
            rope = mh.RoPE(500.0, dim=6, layout=rotary)
            q, k = rope.rotate(q, turns.cos(), turns.sin()), rope.rotate(k, turns.cos(), turns.sin())
            return self.o_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))

    module = Own()
    layer = mh.from_module(module)
    x = torch.randn(B, T, D)
    assert layer.positions.layout == rotary
    assert math.isclose(layer.positions.theta, 500.0, rel_tol=1e-5)
    torch.testing.assert_close(layer(x), module(x), rtol=1e-4, atol=1e-5)


def test_alibi():
    class Alibi(Windowed):
        def __init__(self):
            super().__init__(window_size=99)
            self.register_buffer("slopes", torch.tensor(mh.positions.alibi_slopes(H)))

        def forward(self, x):
            q, k, v = (p(x).unflatten(2, (H, -1)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
            at = torch.arange(x.shape[1])
            bias = -self.slopes[:, None, None] * (at[:, None] - at).abs()
            return self.o_proj(F.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2).flatten(2))

    module = Alibi()
    x = torch.randn(B, T, D)
    torch.testing.assert_close(mh.from_module(module)(x), module(x), rtol=1e-5, atol=2e-6)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize(
    "options",
    [{}, {"causal": True, "flash": True}, {"kv_heads": 2}, {"num_mem_kv": 2}, {"gate_values": True}, {"one_kv_head": True}],
    ids=str,
)
def test_x_transformers(options):
    from x_transformers.x_transformers import Attention

    module = Attention(D, heads=H, dim_head=8, **options).eval()
    for p in module.parameters():
        nn.init.normal_(p, std=0.3)
    layer = mh.from_module(module)
    x = torch.randn(B, T, D)
    torch.testing.assert_close(layer(x), module(x), rtol=1e-5, atol=5e-6)
    if "num_mem_kv" not in options:
        mask = torch.rand(T, T) < 0.5
        mask[:, 0] = True
        torch.testing.assert_close(layer(x, mask=mh.Allowed(mask)), module(x, attn_mask=mask), rtol=1e-5, atol=5e-6)


# ---- what is shared and what is copied ------------------------------------------------------------------------------


def test_whole_projections_are_shared_and_parts_are_copied():
    module = Note000()
    layer = mh.from_module(module)
    assert (layer.query, layer.key, layer.value, layer.out) == (module.W_q, module.W_k, module.W_v, module.W_o)
    fused = NanoGPT()
    fused.c_attn.weight.requires_grad_(False)
    layer = mh.from_module(fused)
    assert layer.out is fused.c_proj
    assert torch.equal(torch.cat([layer.query.weight, layer.key.weight, layer.value.weight]), fused.c_attn.weight)
    assert not layer.query.weight.requires_grad
    assert layer.query.bias.requires_grad
    assert layer.query.weight.data_ptr() != fused.c_attn.weight.data_ptr()


def test_tied_weights_stay_tied():
    layer = mh.from_module(Tied())
    assert layer.query is layer.key
    module = Note001()
    module.k_linear.weight = module.q_linear.weight
    layer = mh.from_module(module)
    assert layer.query.weight is layer.key.weight


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_dtype_is_kept(dtype):
    module = Note004().to(dtype).eval()
    layer = mh.from_module(module)
    assert {p.dtype for p in layer.parameters()} == {dtype}
    x = torch.randn(B, T, D, dtype=dtype)
    size = 1e-12 if dtype == torch.float64 else 2e-2
    torch.testing.assert_close(layer(x), module(x, x, x), rtol=size, atol=size)


def test_reading_leaves_the_module_as_it_was():
    module = NanoGPT().train()
    module.register_forward_hook(lambda *_: pytest.fail("the module itself was called"))
    before, state = copy.deepcopy(module.state_dict()), torch.get_rng_state()
    mh.from_module(module)
    assert module.training
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(x, before[n]) for n, x in module.state_dict().items())
    assert all(p.grad is None for p in module.parameters())


def test_on_cuda():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    module = Timm().cuda().eval()
    layer, x = mh.from_module(module), torch.randn(B, T, D, device="cuda")
    assert all(p.is_cuda for p in layer.parameters())
    torch.testing.assert_close(layer(x), module(x), rtol=1e-3, atol=1e-3)


# ---- refused, with the reason ---------------------------------------------------------------------------------------


class Convolving(Windowed):
    def __init__(self):
        super().__init__()
        self.q_proj = nn.Conv1d(D, D, 3, padding=1)

    def forward(self, x):
        q = self.q_proj(x.mT).mT.unflatten(2, (H, -1)).transpose(1, 2)
        k, v = (p(x).unflatten(2, (H, -1)).transpose(1, 2) for p in (self.k_proj, self.v_proj))
        return self.o_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Wrong(Note001):
    """reshape to heads without transpose: attention over something else."""

    def split_head(self, x):
        return x.reshape(x.size(0), self.num_heads, -1, self.head_dim)


class Residual(Note001):
    def forward(self, hidden_state):
        return hidden_state + super().forward(hidden_state)


class Normed(Note001):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(D)

    def forward(self, hidden_state):
        return super().forward(self.norm(hidden_state))


class Uncallable(Note001):
    def forward(self, hidden_state, table):
        return super().forward(hidden_state) + table["x"]


class AcrossBatch(Note001):
    def forward(self, hidden_state):
        return super().forward(hidden_state).cumsum(0)


@pytest.mark.parametrize(
    ("module", "match"),
    [
        (Convolving, r"Convolving cannot be adopted: it convolves \(q_proj \(Conv1d\)\); a projection must be one matrix"),
        (Wrong, r"none of \d+ hypotheses gives its output; the nearest \(.*\) differs by 0\.\d+ of the largest value"),
        (Residual, "it adds its input to its output; take the attention inside it, without the residual"),
        (Normed, "its output does not grow with its input, so a normalisation is inside it"),
        (Uncallable, "no way to call it was found; the last try said: TypeError: "),
        (AcrossBatch, "its output for one batch entry depends on the others"),
        (lambda: nn.Linear(D, D), "cannot be adopted: "),
        (lambda: Note001().to("meta"), "on the meta device and has no numbers to compare; load its weights first"),
        (lambda: mh.MultiHeadAttention(D, H), "it is a multihead.MultiHeadAttention already"),
    ],
)
def test_refusals_say_why(module, match):
    with pytest.raises(mh.AdoptionError, match=match):
        mh.from_module(module())


def test_only_modules_are_read():
    with pytest.raises(TypeError, match=r"from_module: needs an nn\.Module; got a function"):
        mh.from_module(call)


def test_every_other_number_of_heads_is_told_apart():
    """The hypothesis with the wrong number of heads must not pass, whatever the module calls its number."""
    for heads in (1, 2, 3, 4, 6, 12):
        module = Note001(D, heads)
        module.heads_in_another_layer = 8
        assert mh.from_module(module).num_heads == heads


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_forms_of_rotations_are_read_as_they_are_made(form):
    cos, sin = angles(8, torch.arange(5))
    back = form.read(form.make(cos, sin))
    for want, got in zip((cos, sin), back, strict=True):
        torch.testing.assert_close(got.expand_as(want), want)
