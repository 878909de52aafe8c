"""adopt() and restore(): whole models, hand-written and torch's; everything that a place expects stays."""

import copy
import pickle

import pytest
import torch
from torch import nn

import multihead as mh
from multihead.adopting.adapter import Adopted
from multihead.compat import MultiheadAttention

from .zoo import D, H, NanoGPT, Note000, Note001, Note003, Note004, Timm

B, T, S = 2, 5, 7


class Block(nn.Module):
    """A decoder block as the notes' readers write it, with self- and cross-attention."""

    def __init__(self):
        super().__init__()
        self.self_attention, self.cross_attention = Note004(), Note000()
        self.norm1, self.norm2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.feed = nn.Sequential(nn.Linear(D, 4 * D), nn.GELU(), nn.Linear(4 * D, D))

    def forward(self, x, memory, mask=None, memory_mask=None):
        y = self.norm1(x)
        x = x + self.self_attention(y, y, y, mask)
        x = x + self.cross_attention(self.norm2(x), memory, memory, mask=memory_mask)
        return x + self.feed(x)


class Model(nn.Module):
    def __init__(self, depth=2):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.head = nn.Linear(D, 11)

    def forward(self, x, memory, mask=None, memory_mask=None):
        for block in self.blocks:
            x = block(x, memory, mask, memory_mask)
        return self.head(x)


def example():
    causal = torch.ones(T, T).tril()
    padding = torch.ones(B, 1, 1, S)
    padding[0, ..., -2:] = 0
    return torch.randn(B, T, D), torch.randn(B, S, D), causal, padding


# ---- replacing ------------------------------------------------------------------------------------------------------


def test_every_layer_of_a_hand_written_model():
    model, given = Model().eval(), example()
    want = model(*given)
    adopted = mh.adopt(model, given)
    assert adopted is model
    assert model.adoption.replaced == [
        "blocks.0.self_attention", "blocks.0.cross_attention", "blocks.1.self_attention", "blocks.1.cross_attention",
    ]  # fmt: skip
    assert model.adoption.difference < 1e-6
    torch.testing.assert_close(model(*given), want, rtol=1e-5, atol=2e-6)
    layer = model.blocks[0].cross_attention.layer
    assert isinstance(layer, mh.MultiHeadAttention)
    table = str(model.adoption)
    assert "✓ blocks.0.self_attention   Note004  query=W_q, key=W_k, value=W_v, out=W_o, heads=4; proven to " in table
    assert "4 replaced, 0 left\nthe example's results differ by " in table


def test_what_cannot_be_replaced_stays_and_is_listed():
    class Broken(Note001):
        def split_head(self, x):
            return x.reshape(x.size(0), self.num_heads, -1, self.head_dim)

    model = nn.Sequential(Note001(), Broken(), nn.Linear(D, D)).eval()
    x = torch.randn(B, T, D)
    want = model(x)
    mh.adopt(model, x)
    torch.testing.assert_close(model(x), want, rtol=1e-5, atol=2e-6)
    assert [(row.path, row.replaced) for row in model.adoption.rows] == [("0", True), ("1", False)]
    assert "✗ 1  Broken   none of " in str(model.adoption)
    assert "1 replaced, 1 left" in str(model.adoption)


def test_a_model_without_attention():
    model = nn.Sequential(nn.Linear(D, D), nn.GELU(), nn.LayerNorm(D))
    assert str(mh.adopt(model).adoption) == "nothing in the model looks like attention"


def test_a_model_that_is_attention_itself():
    module = Note001().eval()
    x = torch.randn(B, T, D)
    adopted = mh.adopt(module, x)
    assert isinstance(adopted, Adopted)
    assert isinstance(adopted, Note001)
    torch.testing.assert_close(adopted(x), module(x), rtol=1e-5, atol=2e-6)
    assert mh.restore(adopted) is module


def test_adopting_twice_changes_nothing_more():
    model = mh.adopt(Model().eval())
    first = model.blocks[0].self_attention
    mh.adopt(model)
    assert model.blocks[0].self_attention is first
    assert model.adoption.rows == []


def test_one_module_in_two_places_stays_one():
    attention = Note001()
    model = nn.ModuleDict({"a": attention, "b": attention, "c": nn.Linear(D, D)})
    mh.adopt(model)
    assert model["a"] is model["b"]
    assert model.adoption.replaced == ["a", "b"]
    assert mh.restore(model)["a"] is model["b"] is attention


# ---- calls ----------------------------------------------------------------------------------------------------------


def test_call_signatures_stay():
    module = Note004().eval()
    model = mh.adopt(nn.ModuleDict({"attention": module}))
    adopted, (q, k, v) = model["attention"], (torch.randn(B, t, D) for t in (T, S, S))
    mask = torch.rand(T, S) < 0.5
    mask[:, 0] = True
    want = module(q, k, v, mask)
    for out in (
        adopted(q, k, v, mask), adopted(q, k, value=v, mask=mask), adopted(query=q, key=k, value=v, mask=mask.long()),
        adopted(q, k, v, mask=mask[None, None]),
    ):  # fmt: skip
        torch.testing.assert_close(out, want, rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(adopted(q, k, v), module(q, k, v), rtol=1e-5, atol=2e-6)


def test_valid_lens():
    module = Note003(D, D, D).eval()
    adopted = mh.adopt(nn.ModuleList([module]))[0]
    q, k = torch.randn(B, T, D), torch.randn(B, S, D)
    for lengths in (None, torch.tensor([3, 5]), torch.randint(1, S, (B, T))):
        torch.testing.assert_close(adopted(q, k, k, lengths), module(q, k, k, lengths), rtol=1e-5, atol=2e-6)


class Returning(Note001):
    """Weights beside the output, averaged, where they are asked for."""

    def forward(self, x, return_attention=False):
        q, k, v = (self.split_head(w(x)) for w in (self.q_linear, self.k_linear, self.v_linear))
        weights = (q @ k.mT / self.head_dim**0.5).softmax(-1)
        out = self.o_linear((weights @ v).transpose(1, 2).flatten(2))
        return {"out": out, "weights": weights.mean(1)} if return_attention else out


def test_what_is_returned_has_the_form_it_had():
    module = Returning().eval()
    adopted = mh.adopt(nn.ModuleList([module]))[0]
    x = torch.randn(B, T, D)
    torch.testing.assert_close(adopted(x), module(x), rtol=1e-5, atol=2e-6)
    got, want = adopted(x, return_attention=True), module(x, return_attention=True)
    assert list(got) == ["out", "weights"]
    torch.testing.assert_close(got, want, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda m, x: m(), "adopted Note001: hidden_state is missing"),
        (lambda m, x: m(x, None, None), "takes 2 arguments; got 3"),
        (lambda m, x: m(x, hidden_state=x), "got hidden_state twice"),
        (lambda m, x: m(x, mask=None), "takes no mask; it takes hidden_state, attention_mask"),
        (lambda m, x: m(x, torch.zeros(T)), r"cannot read attention_mask, a tensor of shape \[5\], for 5 queries and 5 keys; what was proven is attention_mask: True is blocked"),
        (lambda m, x: m(x, "causal"), r"cannot read attention_mask, 'causal', for .* restore\(\) brings the original back"),
    ],
)  # fmt: skip
def test_calls_that_were_never_proven_are_refused(call, match):
    model = mh.adopt(nn.ModuleList([Note001()]))
    with pytest.raises(TypeError, match=match):
        call(model[0], torch.randn(B, T, D))


class Extra(Note001):
    def forward(self, hidden_state, temperature=1.0):
        return super().forward(hidden_state) * temperature


def test_an_argument_that_was_not_understood_is_refused_unless_it_is_at_its_default():
    adopted, x = mh.adopt(nn.ModuleList([Extra()]))[0], torch.randn(B, T, D)
    adopted(x, temperature=1.0)
    with pytest.raises(
        TypeError, match=r"temperature was not understood when the module was adopted, and temperature=2\.0 came"
    ):
        adopted(x, temperature=2.0)


class Warm(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = Extra(), Note001()

    def forward(self, x):
        return self.second(self.first(x, temperature=2.0))


def test_a_module_that_the_example_calls_in_another_way_goes_back_to_its_place():
    model, x = Warm().eval(), torch.randn(B, T, D)
    want = model(x)
    mh.adopt(model, x)
    assert model.adoption.replaced == ["second"]
    assert "✗ first   Extra    in the example temperature was not understood" in str(model.adoption)
    torch.testing.assert_close(model(x), want, rtol=1e-5, atol=2e-6)


def test_an_example_that_comes_out_differently_undoes_everything(monkeypatch):
    model, given = Model().eval(), example()
    before = dict(model.named_modules())
    monkeypatch.setattr(mh.MultiHeadAttention, "merge", lambda self, out, query: self.out(0.5 * out.transpose(1, 2).flatten(2)))
    monkeypatch.setattr("multihead.adopting.reading.CLOSE", 1e9)
    monkeypatch.setattr("multihead.adopting.adapter.CLOSE", 1e9)
    monkeypatch.setattr("multihead.adopting.probe.CLOSE", 1e9)
    monkeypatch.setattr("multihead.adopting.reading._prove_gradients", lambda *_: None)
    with pytest.raises(mh.AdoptionError, match=r"adopt: the example's results differ by .* so the model is as it was"):
        mh.adopt(model, given)
    assert dict(model.named_modules()) == before
    assert not hasattr(model, "adoption")


# ---- what stays -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_dtype(dtype):
    model, given = Model().to(dtype).eval(), [x.to(dtype) for x in example()]
    want = model(*given)
    mh.adopt(model, tuple(given))
    assert {p.dtype for p in model.parameters()} == {dtype}
    size = 1e-10 if dtype == torch.float64 else 0.05
    torch.testing.assert_close(model(*given), want, rtol=size, atol=size)


def test_parameters_stay_the_same_objects():
    """Optimizers, tying and requires_grad hang on them."""
    model = Model()
    model.blocks[0].self_attention.W_q.weight.requires_grad_(False)
    model.blocks[1].self_attention.W_k = model.blocks[0].self_attention.W_k
    before = {id(p): p.requires_grad for p in model.parameters()}
    mh.adopt(model)
    assert {id(p): p.requires_grad for p in model.parameters()} == before
    assert model.blocks[1].self_attention.layer.key is model.blocks[0].self_attention.layer.key


def test_hooks_go_on_working():
    model, seen = Model().eval(), []
    attention = model.blocks[0].self_attention
    handles = [
        attention.register_forward_hook(lambda *_: seen.append("after")),
        attention.register_forward_pre_hook(lambda *_: seen.append("before")),
        attention.W_q.register_forward_hook(lambda *_: seen.append("query")),
    ]
    mh.adopt(model)
    assert seen == []
    model(*example())
    assert sorted(seen) == ["after", "before", "query"]
    for handle in handles:
        handle.remove()
    model(*example())
    assert len(seen) == 3


def test_train_and_eval_reach_the_layer():
    model = mh.adopt(nn.Sequential(Timm()).train())
    assert model[0].layer.training
    assert (model[0].layer.dropout, model[0].layer.out_dropout) == (0.1, 0.2)
    x = torch.randn(B, T, D)
    assert not torch.equal(model(x), model(x))
    assert torch.equal(model.eval()(x), model(x))


def test_attributes_of_the_original_can_be_read():
    adopted = mh.adopt(nn.ModuleList([Note004()]))[0]
    assert (adopted.d_model, adopted.num_heads, adopted.W_q.weight.shape) == (D, H, (D, D))
    assert not hasattr(adopted, "nonsense")


def test_deepcopy_and_pickle():
    model, given = mh.adopt(Model().eval()), example()
    want = model(*given)
    other = copy.deepcopy(model)
    assert torch.equal(other(*given), want)
    other.blocks[0].self_attention.layer.query.weight.data.zero_()
    assert torch.equal(model(*given), want)
    assert torch.equal(pickle.loads(pickle.dumps(model))(*given), want)
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(*given), want)


def test_compile():
    model, given = mh.adopt(Model(1).eval()), example()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*given), model(*given))
    torch._dynamo.reset()


# ---- back -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [Note001, NanoGPT, Timm])
def test_restore_brings_the_modules_back_with_the_weights_of_today(make):
    model, x = nn.Sequential(make(), make()), torch.randn(B, T, D)
    originals, keys = list(model), list(model.state_dict())
    mh.adopt(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    model.eval()(x).square().sum().backward()
    optimizer.step()
    want = model(x)
    assert mh.restore(model) is model
    assert list(model) == originals
    assert list(model.state_dict()) == keys
    assert not hasattr(model, "adoption")
    torch.testing.assert_close(model(x), want, rtol=1e-5, atol=2e-6)


def test_restore_follows_dtype_and_training():
    model = mh.adopt(nn.Sequential(NanoGPT()).train())
    model.to(torch.float64).eval()
    x = torch.randn(B, T, D, dtype=torch.float64)
    want = model(x)
    mh.restore(model)
    assert not model[0].training
    torch.testing.assert_close(model(x), want)


def test_restoring_what_was_never_adopted_changes_nothing():
    model = Model()
    assert mh.restore(model) is model


# ---- what would come apart ------------------------------------------------------------------------------------------


def test_a_fused_weight_that_is_tied_elsewhere_is_left():
    model = nn.ModuleDict({"attention": NanoGPT(), "other": nn.Linear(D, 3 * D)})
    model["other"].weight = model["attention"].c_attn.weight
    mh.adopt(model)
    assert "its c_attn.weight holds several projections and is tied to other, so it cannot be split up" in str(model.adoption)


def test_a_fused_submodule_with_hooks_is_left():
    model = nn.ModuleDict({"attention": NanoGPT()})
    model["attention"].c_attn.register_forward_hook(lambda *_: None)
    mh.adopt(model)
    assert "its c_attn has hooks and would not be called any more; remove them first" in str(model.adoption)


def test_only_models_are_adopted():
    with pytest.raises(TypeError, match=r"adopt: needs an nn\.Module; got a str"):
        mh.adopt("bert")


# ---- torch's own layers ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
def test_torchs_transformer(norm_first, batch_first):
    encoder_layer = nn.TransformerEncoderLayer(D, H, 48, 0.0, norm_first=norm_first, batch_first=batch_first)
    nested = batch_first and not norm_first
    encoder = nn.TransformerEncoder(encoder_layer, 2, enable_nested_tensor=nested)
    model = nn.Transformer(D, H, 2, 2, 48, 0.0, norm_first=norm_first, batch_first=batch_first, custom_encoder=encoder).eval()
    source, target = torch.randn(B, S, D), torch.randn(B, T, D)
    padding = torch.tensor([[False] * S, [False] * 4 + [True] * 3])
    given = [source, target] if batch_first else [source.transpose(0, 1), target.transpose(0, 1)]
    keywords = {
        "src_key_padding_mask": padding, "memory_key_padding_mask": padding,
        "tgt_mask": nn.Transformer.generate_square_subsequent_mask(T), "tgt_is_causal": True,
    }  # fmt: skip
    state, want = list(model.state_dict()), model(*given, **keywords)
    mh.adopt(model)
    assert len(model.adoption.replaced) == 6
    assert list(model.state_dict()) == state
    assert all(isinstance(m, MultiheadAttention) for m in model.modules() if isinstance(m, nn.MultiheadAttention))
    calls = []
    for module in model.modules():
        if isinstance(module, MultiheadAttention):
            module.register_forward_hook(lambda *_: calls.append(1))
    for context in (torch.enable_grad, torch.no_grad):  # without gradients torch's native fast path would take over
        with context():
            torch.testing.assert_close(model(*given, **keywords), want, rtol=1e-5, atol=5e-6)
    assert len(calls) == 12
    assert not encoder.use_nested_tensor
    mh.restore(model)
    assert encoder.use_nested_tensor == nested
    assert not any(isinstance(m, MultiheadAttention) for m in model.modules())
    torch.testing.assert_close(model(*given, **keywords), want, rtol=1e-5, atol=5e-6)


def test_torchs_native_fast_path_does_not_bypass_ours():
    """In eval() and no_grad() an encoder with an empty text is NaN in torch; adopted it is not."""
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(D, H, 48, batch_first=True), 2, enable_nested_tensor=False).eval()
    x, padding = torch.randn(B, T, D), torch.tensor([[False] * T, [True] * T])
    with torch.no_grad():
        want = model(x, src_key_padding_mask=padding)
        got = mh.adopt(model)(x, src_key_padding_mask=padding)
    assert want[1].isnan().all()
    assert not got.isnan().any()
    torch.testing.assert_close(got[0], want[0], rtol=1e-5, atol=5e-6)


def test_parameters_of_torchs_layer_stay_the_same_objects_through_to():
    model = nn.TransformerEncoderLayer(D, H, 48, batch_first=True)
    before = [id(p) for p in model.parameters()]
    mh.adopt(model)
    assert [id(p) for p in model.parameters()] == before
    model.to(torch.bfloat16)
    mh.restore(model)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def test_a_training_step_is_the_originals():
    model, given = Model().eval(), example()
    other = mh.adopt(copy.deepcopy(model))
    grads = []
    for m in (model, other):
        m.zero_grad()
        m(*given).square().sum().backward()
        grads.append(sorted(float(p.grad.norm()) for p in m.parameters()))
    torch.testing.assert_close(torch.tensor(grads[1]), torch.tensor(grads[0]), rtol=1e-4, atol=1e-5)
