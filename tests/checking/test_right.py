"""Right modules get zero false alarms: torch's, Hugging Face's, x-transformers', ours."""

import pytest
import torch
from torch import nn

import multihead as mh
from multihead.checking.entry import check_module

from ..adopting import zoo


def transformers(name, config, path, impl, **sizes):
    import transformers as tr

    c = getattr(tr, config)(**sizes)
    c._attn_implementation = impl
    model = getattr(tr, name)(c)
    for part in path.split("."):
        model = model[int(part)] if part.isdigit() else getattr(model, part)
    return model


SMALL = {"hidden_size": 24, "num_attention_heads": 4, "num_hidden_layers": 1, "intermediate_size": 16}
ROPE = {**SMALL, "hidden_size": 32, "num_key_value_heads": 2, "vocab_size": 50}
FAMILIES = {
    "BERT": ("BertModel", "BertConfig", "encoder.layer.0.attention.self", {**SMALL, "vocab_size": 50}),
    "GPT-2": ("GPT2Model", "GPT2Config", "h.0.attn", {"n_embd": 24, "n_head": 4, "n_layer": 1, "vocab_size": 50, "n_positions": 64}),
    "Llama": ("LlamaModel", "LlamaConfig", "layers.0.self_attn", ROPE),
    "Mistral": ("MistralModel", "MistralConfig", "layers.0.self_attn", {**ROPE, "head_dim": 8}),
    "Qwen3": ("Qwen3Model", "Qwen3Config", "layers.0.self_attn", {**ROPE, "head_dim": 8}),
    "ViT": ("ViTModel", "ViTConfig", "layers.0.attention", {**SMALL, "image_size": 8, "patch_size": 4}),
    "T5": ("T5EncoderModel", "T5Config", "encoder.block.0.layer.0.SelfAttention", {"d_model": 24, "num_heads": 4, "d_kv": 6, "num_layers": 1, "d_ff": 16, "vocab_size": 50}),
    "DistilBERT": ("DistilBertModel", "DistilBertConfig", "transformer.layer.0.attention", {"dim": 24, "n_heads": 4, "n_layers": 1, "hidden_dim": 16, "vocab_size": 50}),
}  # fmt: skip


@pytest.mark.parametrize("impl", ["eager", "sdpa"])
@pytest.mark.parametrize("family", FAMILIES)
def test_hugging_face(family, impl):
    model, config, path, sizes = FAMILIES[family]
    report = check_module(transformers(model, config, path, impl, **sizes), timed=False)
    assert report.names == []
    assert any("reference give" in c.text.en or "rebuilt as ours" in c.text.en for c in report.checks) or family == "T5"


@pytest.mark.parametrize(
    "options",
    [
        {}, {"batch_first": True}, {"batch_first": True, "kdim": 12, "vdim": 18}, {"batch_first": True, "add_bias_kv": True, "dropout": 0.1},
        {"batch_first": True, "add_zero_attn": True}, {"batch_first": True, "bias": False},
    ],
    ids=str,
)  # fmt: skip
def test_torch(options):
    assert check_module(nn.MultiheadAttention(24, 4, **options), timed=False).names == []


@pytest.mark.parametrize(
    "options",
    [{}, {"causal": True}, {"flash": True}, {"kv_heads": 2}, {"one_kv_head": True}, {"qk_norm": True}, {"pre_talking_heads": True}, {"num_mem_kv": 2}],
    ids=str,
)  # fmt: skip
def test_x_transformers(options):
    from x_transformers.x_transformers import Attention

    report = check_module(Attention(24, heads=4, dim_head=6, **options), timed=False)
    assert report.names == []


OURS = {
    "plain": lambda: mh.MultiHeadAttention(24, 4),
    "dropout": lambda: mh.MultiHeadAttention(24, 4, dropout=0.1, out_dropout=0.2, bias=False),
    "grouped, turned, causal": lambda: mh.MultiHeadAttention(32, 4, kv_heads=2, positions=mh.RoPE(), mask=mh.Causal()),
    "alibi": lambda: mh.MultiHeadAttention(24, 4, positions=mh.ALiBi()),
    "sinks": lambda: mh.MultiHeadAttention(24, 4, sinks=True),
    "compat": lambda: mh.compat.MultiheadAttention(24, 4, batch_first=True),
}


@pytest.mark.parametrize("kind", OURS)
def test_ours(kind):
    assert check_module(OURS[kind](), timed=False).names == []


@pytest.mark.parametrize("kind", [k for k in zoo.PROJECTS if k not in ("window", "softcap", "sinks")])
def test_projects(kind):
    assert check_module(zoo.PROJECTS[kind](), timed=False).names == []


def test_a_mask_that_is_made_on_the_cpu_is_found_in_our_own_tests():
    """The zoo's Windowed makes its mask without a device: a right diagnosis that nobody had planted."""
    assert check_module(zoo.Windowed(), timed=False).names == ["device_fixed"]


@pytest.mark.parametrize(
    "module", [nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.ReLU()), nn.LayerNorm(8), nn.Identity()], ids=str
)
def test_what_is_no_attention_is_not_called_wrong_attention(module):
    report = check_module(module, timed=False)
    assert not any(f.certain and f.name not in ("call_fails", "unexplained") for f in report.findings)


def test_a_whole_model_is_looked_into():
    layer = nn.TransformerEncoderLayer(24, 4, 16, batch_first=True)
    report = mh.check(layer)
    assert report.name == "TransformerEncoderLayer.self_attn"
    assert report.ok


def test_the_module_is_left_as_it_was():
    module = zoo.Note004().train()
    before = {n: p.clone() for n, p in module.state_dict().items()}
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    mh.check(module)
    assert torch.equal(torch.rand(3), expected)
    assert module.training
    assert all(torch.equal(before[n], p) for n, p in module.state_dict().items())
    assert all(p.grad is None and p.requires_grad for p in module.parameters())
