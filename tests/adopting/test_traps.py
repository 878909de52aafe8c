"""Layers that look like something they are not: told apart, left with a reason, or refused at the call – never wrong in silence."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import multihead as mh
from multihead.adopting.adapter import RefusedError

from .zoo import NanoGPT, Note001, Timm

B, T, D, H = 2, 7, 32, 4


class Base(nn.Module):
    """q_proj … o_proj and what follows from them."""

    def __init__(self):
        super().__init__()
        self.num_heads = H
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(D, D) for _ in range(4))

    def heads(self, x):
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

    def scores(self, x):
        return self.heads(self.q_proj(x)) @ self.heads(self.k_proj(x)).mT / math.sqrt(D // H)

    def done(self, scores, x):
        return self.o_proj((scores.softmax(-1) @ self.heads(self.v_proj(x))).transpose(1, 2).flatten(2))


def adopted(module):
    return mh.adopt(nn.ModuleList([module.eval()]))


def agrees(model, module, *args, **kwargs):
    torch.testing.assert_close(model[0](*args, **kwargs), module(*args, **kwargs), rtol=1e-4, atol=1e-5)


def said(model):
    return model.adoption.rows[0].said


# ---- masks that pass for others ---------------------------------------------------------------------------------------


class OldBert(Base):
    """A float mask of ones and zeros that becomes an additive one inside: an additive −inf passes through it as well."""

    def forward(self, x, mask=None):
        scores = self.scores(x)
        return self.done(scores if mask is None else scores + (1.0 - mask[:, None, None]) * -10000.0, x)


class BeforeScale(Base):
    """A float mask that is divided by the scale: only 0 and −inf mean what they say."""

    def forward(self, x, mask=None):
        q, k = self.heads(self.q_proj(x)), self.heads(self.k_proj(x))
        scores = q @ k.mT
        return self.done((scores if mask is None else scores + mask) / math.sqrt(D // H), x)


class Either(Base):
    def forward(self, x, attn_mask=None, key_padding_mask=None):
        scores = self.scores(x)
        if attn_mask is not None:
            scores = scores.masked_fill(attn_mask, -1e9)
        elif key_padding_mask is not None:
            scores = scores.masked_fill(key_padding_mask[:, None, None], -1e9)
        return self.done(scores, x)


class CausalUnlessMasked(Base):
    """A mask of pairs takes the place of its causal one, a padding mask does not."""

    def forward(self, x, attn_mask=None, key_padding_mask=None):
        scores = self.scores(x)
        if attn_mask is None:
            attn_mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(attn_mask, float("-inf"))
        if key_padding_mask is not None:
            scores = scores.masked_fill(key_padding_mask[:, None, None], float("-inf"))
        return self.done(scores, x)


def test_a_float_mask_of_ones_and_zeros_is_not_additive():
    module, x = OldBert(), torch.randn(B, T, D)
    model, mask = adopted(module), (torch.arange(T) < torch.tensor([[3], [7]])).float()
    agrees(model, module, x, mask)
    with pytest.raises(RefusedError, match="cannot read mask"):
        model[0](x, 0.5 * mask)


def test_a_mask_before_the_scale_is_read_where_it_means_what_it_says():
    module, x = BeforeScale(), torch.randn(B, T, D)
    model, causal = adopted(module), torch.full((T, T), -torch.inf).triu(1)
    agrees(model, module, x, causal)
    with pytest.raises(RefusedError, match="−inf blocks"):
        model[0](x, torch.randn(T, T))


def test_two_masks_of_which_one_is_ignored():
    module, x = Either(), torch.randn(B, T, D)
    model, pairs, padding = adopted(module), torch.ones(T, T).triu(1) > 0, torch.arange(T) >= torch.tensor([[3], [7]])
    agrees(model, module, x, pairs)
    agrees(model, module, x, key_padding_mask=padding)
    with pytest.raises(
        RefusedError, match="attn_mask and key_padding_mask came, and what it does with both was not understood"
    ):
        model[0](x, pairs, padding)


def test_which_mask_takes_the_place_of_its_own():
    module, x = CausalUnlessMasked(), torch.randn(B, T, D)
    model, padding = adopted(module), torch.arange(T) >= torch.tensor([[3], [7]])
    seen = torch.rand(T, T) < 0.4
    seen.fill_diagonal_(False)
    agrees(model, module, x)
    agrees(model, module, x, key_padding_mask=padding)
    agrees(model, module, x, seen)


# ---- arguments --------------------------------------------------------------------------------------------------------


class Positions(Base):
    def forward(self, x, position_ids=None, **kwargs):
        at = torch.arange(x.shape[1])[None] if position_ids is None else position_ids
        turns = at[..., None] * 10_000.0 ** -(torch.arange(0, 8, 2) / 8)
        rope, (q, k) = mh.RoPE(dim=8), (self.heads(w(x)) for w in (self.q_proj, self.k_proj))
        q, k = (rope.rotate(y, turns.cos().unsqueeze(1), turns.sin().unsqueeze(1)) for y in (q, k))
        scores = q @ k.mT / math.sqrt(8)
        return self.done(scores if kwargs.get("mask") is None else scores.masked_fill(~kwargs["mask"], -1e9), x)


def test_arguments_that_matter_are_never_ignored():
    module, x = Positions(), torch.randn(B, T, D)
    model = adopted(module)
    agrees(model, module, x)
    with pytest.raises(RefusedError, match="position_ids was not understood"):
        model[0](x, position_ids=3 * torch.arange(T)[None])
    with pytest.raises(RefusedError, match="mask was not understood"):
        model[0](x, mask=torch.ones(T, T) > 0)
    model[0](x, mask=None)


class OwnTraining(Base):
    def forward(self, x, training=False):
        w = F.dropout(self.scores(x).softmax(-1), 0.5, training)
        return self.o_proj((w @ self.heads(self.v_proj(x))).transpose(1, 2).flatten(2))


def test_a_flag_of_its_own_for_training_is_not_ignored():
    model, x = adopted(OwnTraining()), torch.randn(B, T, D)
    model[0](x, training=False)
    with pytest.raises(RefusedError, match="training was not understood"):
        model[0](x, training=True)


class BiasBeforeScale(Base):
    def forward(self, x, attn_bias=None):
        q, k = self.heads(self.q_proj(x)), self.heads(self.k_proj(x))
        scores = q @ k.mT
        return self.done((scores if attn_bias is None else scores + attn_bias) / math.sqrt(D // H), x)


class PlainBias(Base):
    def forward(self, x, attn_bias=None):
        return self.done(self.scores(x) if attn_bias is None else self.scores(x) + attn_bias, x)


def test_a_bias_is_proven_before_it_is_added():
    x, bias = torch.randn(B, T, D), torch.randn(1, H, T, T)
    module = PlainBias()
    agrees(adopted(module), module, x, bias)
    with pytest.raises(RefusedError, match="attn_bias came, a tensor of shape"):
        adopted(BiasBeforeScale())[0](x, bias)


class AlignedAtTheStart(Base):
    def forward(self, query, key, value):
        q, k, v = (self.heads(w(x)) for w, x in ((self.q_proj, query), (self.k_proj, key), (self.v_proj, value)))
        return self.o_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


def test_other_alignments_are_refused_where_they_differ():
    module, x, y = AlignedAtTheStart(), torch.randn(B, T, D), torch.randn(B, T + 2, D)
    model = adopted(module)
    agrees(model, module, x, x, x)
    assert "it aligns them otherwise than here" in " ".join(model[0].layer.origin.differences)
    with pytest.raises(RefusedError, match="7 queries and 9 keys came, and it was proven for equal numbers"):
        model[0](x, y, y)


class WeightsByDefault(Base):
    def forward(self, x, return_attn=True):
        w = self.scores(x).softmax(-1)
        out = self.o_proj((w @ self.heads(self.v_proj(x))).transpose(1, 2).flatten(2))
        return (out, w) if return_attn else out


def test_what_is_returned_by_default_and_what_where_it_is_asked_for():
    module, x = WeightsByDefault(), torch.randn(B, T, D)
    model = adopted(module)
    for args in ((), (True,), (False,)):
        agrees(model, module, x, *args)


# ---- parameters that change nothing yet -------------------------------------------------------------------------------


class Temperature(Base):
    def __init__(self):
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(H, 1, 1))

    def forward(self, x):
        return self.done(self.scores(x) * self.temperature, x)


class Table(Base):
    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.zeros(39, H))

    def forward(self, x):
        at = torch.arange(x.shape[1])
        return self.done(self.scores(x) + self.table[(at[:, None] - at).clamp(-19, 19) + 19].permute(2, 0, 1), x)


class Adapter(nn.Module):
    """Low-rank, as right after wrapping: B is zero."""

    def __init__(self, base):
        super().__init__()
        self.base, self.A, self.B = base, nn.Parameter(torch.randn(4, D)), nn.Parameter(torch.zeros(D, 4))

    def forward(self, x):
        return self.base(x) + x @ self.A.T @ self.B.T


class Plain(Base):
    def forward(self, x):
        return self.done(self.scores(x), x)


class Swapped(Base):
    """The first norm is the keys'."""

    def __init__(self):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(D // H), nn.LayerNorm(D // H)

    def forward(self, x):
        q, k = self.ln2(self.heads(self.q_proj(x))), self.ln1(self.heads(self.k_proj(x)))
        return self.done(q @ k.mT / math.sqrt(D // H), x)


@pytest.mark.parametrize("kind", [Temperature, Table])
def test_parameters_at_a_neutral_value_are_not_lost(kind):
    module = kind()
    model = adopted(module)
    assert model.adoption.replaced == []
    assert "hypotheses gives its output; the nearest" in said(model)


def test_an_adapter_that_adds_nothing_yet_stays():
    module, x = Plain(), torch.randn(B, T, D)
    module.q_proj = Adapter(module.q_proj)
    model = adopted(module)
    assert model[0].layer.query is module.q_proj
    nn.init.normal_(module.q_proj.B)
    agrees(model, module, x)


def test_norms_that_are_alike_at_first_are_not_swapped():
    module, x = Swapped(), torch.randn(B, T, D)
    model = adopted(module)
    for p in (*module.ln1.parameters(), *module.ln2.parameters()):
        nn.init.normal_(p)
    agrees(model, module, x)


@pytest.mark.parametrize("size", [0.0, 1e-4])
def test_projections_near_zero_hide_no_scale(size):
    class Odd(Base):
        def forward(self, x):
            return self.done(self.scores(x) / math.sqrt(D // H), x)

    module, x = Odd(), torch.randn(B, T, D)
    nn.init.normal_(module.q_proj.weight, std=size)
    model = adopted(module)
    assert math.isclose(model[0].layer.scale, H / D)
    nn.init.normal_(module.q_proj.weight)
    agrees(model, module, x)


def test_parameters_that_change_nothing_at_all_are_named():
    module = Plain()
    module.unused = nn.Parameter(torch.randn(3))
    model = adopted(module)
    assert "left out, since they change nothing: unused" in said(model)
    assert "parameters that change nothing were left out: unused" in str(model[0].layer.origin)


# ---- long texts, training, gradients ----------------------------------------------------------------------------------


class Window600(Base):
    def __init__(self):
        super().__init__()
        self.window_size = 600

    def forward(self, x):
        at = torch.arange(x.shape[1])
        far = (at[:, None] - at >= self.window_size) | (at[:, None] < at)
        return self.done(self.scores(x).masked_fill(far, float("-inf")), x)


class TopK(Base):
    def forward(self, x):
        scores = self.scores(x)
        if x.shape[1] > 32:
            scores = scores.masked_fill(scores < scores.topk(32, -1).values[..., -1:], float("-inf"))
        return self.done(scores, x)


class Detached(Base):
    def forward(self, x):
        q, k = self.heads(self.q_proj(x)), self.heads(self.k_proj(x.detach()))
        return self.done(q @ k.mT / math.sqrt(D // H), x)


class NoisyTraining(Base):
    def forward(self, x):
        scores = self.scores(x)
        return self.done(scores + 0.5 * torch.randn_like(scores) if self.training else scores, x)


class LiteralDropout(Base):
    def forward(self, x):
        w = F.dropout(self.scores(x).softmax(-1), 0.5, self.training)
        return self.o_proj((w @ self.heads(self.v_proj(x))).transpose(1, 2).flatten(2))


def test_what_shows_in_long_texts_only():
    model = adopted(TopK())
    assert model.adoption.replaced == []
    assert "for 1 texts of 109 tokens" in said(model)


def test_a_window_that_shows_in_long_texts_only():
    module, x = Window600(), torch.randn(1, 700, D)
    model = adopted(module)
    assert model[0].layer.mask == mh.Causal() & mh.Window(600)
    agrees(model, module, x)


def test_a_window_beyond_every_proof_is_named():
    module = Window600()
    module.window_size = 5000
    origin = adopted(module)[0].layer.origin
    assert "5000 may be a window, and lies beyond the longest text that was compared" in origin.differences


def test_what_shows_in_gradients_only():
    assert "the gradients into its inputs are others by" in said(adopted(Detached()))


@pytest.mark.parametrize("kind", [NoisyTraining, LiteralDropout])
def test_what_shows_in_train_only_is_refused_there(kind):
    module, x = kind(), torch.randn(B, T, D)
    model = adopted(module)
    agrees(model, module, x)
    assert "not in train(): what changes its output though no dropout of its own drops" in said(model)
    with pytest.raises(RefusedError, match=r"in train\(\) it does what was not understood"):
        model.train()[0](x)


# ---- state ------------------------------------------------------------------------------------------------------------


def test_hooks_on_what_is_not_called_any_more():
    module = Timm()
    module.attn_drop.register_forward_hook(lambda *_: None)
    assert "its attn_drop has hooks and would not be called any more" in said(adopted(module))


def test_one_fused_linear_in_two_layers_is_not_torn_apart():
    model = nn.ModuleList([NanoGPT(), NanoGPT()])
    model[1].c_attn = model[0].c_attn
    mh.adopt(model)
    assert model.adoption.replaced == []
    assert "its c_attn.weight holds several projections and is tied to 1.c_attn" in said(model)


def test_modes_of_every_module_stay():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention, self.norm = Note001(), nn.BatchNorm1d(24)

        def forward(self, x):
            return self.norm(self.attention(x).mT).mT

    model = Model().train()
    model.norm.eval()
    model.attention.q_linear.eval()
    before = {n: m.training for n, m in model.named_modules()}
    mh.adopt(model, torch.randn(B, T, 24))
    assert (model.norm.training, model.attention.training, model.attention.q_linear.training) == (False, True, False)
    mh.restore(model)
    assert {n: m.training for n, m in model.named_modules()} == before


def test_restore_keeps_dtypes_apart_and_takes_assigned_weights():
    module = NanoGPT().to(torch.bfloat16)
    module.register_buffer("table", torch.ones(3))
    model = mh.adopt(nn.ModuleList([module]))
    state = {n: torch.randn_like(x) for n, x in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    mh.restore(model)
    assert module.table.dtype == torch.float32
    assert torch.equal(module.c_attn.weight[24:48], state["0.layer.key.weight"])


def test_restore_of_a_weight_that_is_a_view():
    module, x = NanoGPT(), torch.randn(B, T, 24)
    module.c_attn.weight = nn.Parameter(torch.randn(24, 72).T)
    model = adopted(module)
    with torch.no_grad():
        model[0].layer.key.weight.mul_(2)
    want = model[0](x)
    torch.testing.assert_close(mh.restore(model)[0](x), want, rtol=1e-5, atol=1e-5)


def test_a_part_that_is_frozen_freezes_no_other():
    module = NanoGPT()
    model = adopted(module)
    model[0].layer.value.weight.requires_grad_(False)
    mh.restore(model)
    assert module.c_attn.weight.requires_grad


def test_setting_and_reading_what_is_dead_is_refused():
    class Keeps(Plain):
        def forward(self, x):
            self.last = self.scores(x)
            return self.done(self.last, x)

    module = Keeps()
    module(torch.randn(B, T, D))
    model = adopted(module)
    with pytest.raises(AttributeError, match=r"q_proj is the original's, which is not called any more; set it on \.layer"):
        model[0].q_proj = nn.Linear(D, D)
    with pytest.raises(AttributeError, match="last was left there by a call of the original"):
        _ = model[0].last
    with pytest.raises(mh.AdoptionError, match=r"it has been adopted already; its layer is module\.layer"):
        mh.from_module(model[0])


def test_one_odd_layer_leaves_the_others():
    """An old weight_norm computes its weight in a hook, which the float64 copy has not."""
    model = nn.ModuleList([Plain(), Plain()]).eval()
    with pytest.warns(FutureWarning):
        nn.utils.weight_norm(model[0].q_proj)
    mh.adopt(model)
    assert model.adoption.replaced == ["1"]
    assert "reading it failed with" in said(model)


def test_parametrized_projections_are_taken_over():
    module, x = Plain(), torch.randn(B, T, D)
    nn.utils.parametrizations.weight_norm(module.q_proj)
    model = adopted(module)
    assert model[0].layer.query is module.q_proj
    agrees(model, module, x)


def test_a_padded_encoder_compares_equal_where_there_are_tokens():
    layer = nn.TransformerEncoderLayer(D, H, 48, 0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).eval()
    padding = torch.arange(T) >= torch.tensor([[3], [7]])
    mh.adopt(model, {"src": torch.randn(B, T, D), "src_key_padding_mask": padding})
    assert model.adoption.difference < 1e-5
    assert not model.use_nested_tensor
    assert mh.restore(model).use_nested_tensor


def test_reading_advances_no_generator():
    module, state = LiteralDropout(), torch.get_rng_state()
    mh.from_module(module)
    assert torch.equal(torch.get_rng_state(), state)
    assert copy.deepcopy(module).training


def test_an_example_that_the_model_itself_cannot_take_leaves_it_as_it_was():
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(D, H, 48, batch_first=True), 1).eval()
    with pytest.raises((RuntimeError, AssertionError)):
        mh.adopt(model, torch.randn(B, T, D + 1))
    assert model.use_nested_tensor
    assert not hasattr(model, "adoption")
    assert type(model.layers[0].self_attn) is nn.MultiheadAttention
