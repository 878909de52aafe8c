"""The layer under what people do to layers: compile, export, ONNX, autocast, copies, state_dict, torch.func, meta, threads."""

import copy
import io
import warnings

import numpy as np
import onnxruntime
import pytest
import torch
import torch._dynamo.testing
from torch import nn
from torch.utils.checkpoint import checkpoint

import multihead as mh
from multihead.testing import Sizes, make

D = 24
LAYERS = {
    "plain": {},
    "causal": {"mask": mh.Causal()},
    "grouped": {"kv_heads": 2, "mask": mh.Causal() & mh.Window(3), "positions": mh.RoPE},
    "everything": {
        "kv_heads": 2, "mask": mh.Causal() | mh.Keys(torch.tensor([[True, False, True, False, True]])), "positions": mh.ALiBi,
        "softcap": 5.0, "sinks": True, "gate": True, "qk_norm": True,
    },
}  # fmt: skip


def build(name, **more):
    options = {n: x() if isinstance(x, type) else x for n, x in LAYERS[name].items()}
    layer = mh.MultiHeadAttention(D, 4, **(options | more))
    for p in layer.parameters():
        nn.init.normal_(p, std=0.3)
    return layer


@pytest.fixture
def _clean():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("_clean")
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("grad", [False, True])
def test_compile_fullgraph(name, grad):
    layer, x = build(name).double(), torch.randn(2, 5, D, dtype=torch.float64, requires_grad=grad)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with torch.set_grad_enabled(grad):
        torch.testing.assert_close(compiled(x), layer(x))
        got, want = compiled(x, return_weights=True), layer(x, return_weights=True)
        torch.testing.assert_close(got, want)
    if grad:
        a, b = (torch.autograd.grad(f(x).square().sum(), [x, *layer.parameters()]) for f in (compiled, layer))
        torch.testing.assert_close(a, b)


@pytest.mark.usefixtures("_clean")
def test_compile_with_inductor():
    """The default backend, C++ kernels and all."""
    layer, x = build("grouped"), torch.randn(2, 5, D)
    torch.testing.assert_close(torch.compile(layer, fullgraph=True)(x), layer(x), rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("_clean")
def test_compile_takes_masks_as_arguments_and_does_not_recompile_for_their_values():
    layer = build("causal")
    counter = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    for n in ([1, 5], [3, 2], [5, 5]):
        x = torch.randn(2, 5, D)
        mask = mh.Lengths(torch.tensor(n))
        torch.testing.assert_close(compiled(x, mask=mask), layer(x, mask=mask))
    assert counter.frame_count == 1
    made_inside = torch.compile(lambda x, n: layer(x, mask=mh.Lengths(n) & mh.Window(2)), fullgraph=True, backend="eager")
    torch.testing.assert_close(made_inside(x, torch.tensor([3, 4])), layer(x, mask=mh.Lengths([3, 4]) & mh.Window(2)))


@pytest.mark.usefixtures("_clean")
@torch.no_grad()
def test_compile_decoding():
    """A compiled step with a cache: the same tokens, and not a compilation a step."""
    layer, x = build("grouped").eval(), torch.randn(1, 24, D)
    counter = torch._dynamo.testing.CompileCounter()
    step = torch.compile(layer, fullgraph=True, backend=counter)
    layer = copy.deepcopy(layer)
    layer_mask = mh.MultiHeadAttention(D, 4, kv_heads=2, mask=mh.Causal(), positions=mh.RoPE())
    layer_mask.load_state_dict(layer.state_dict())
    step = torch.compile(layer_mask, fullgraph=True, backend=counter)
    cache = layer_mask.new_cache(1, 24)
    out = torch.cat([step(token, cache=cache) for token in x.split(1, 1)], 1)
    torch.testing.assert_close(out, layer_mask(x), rtol=1e-4, atol=1e-5)
    assert counter.frame_count <= 4


@pytest.mark.usefixtures("_clean")
@pytest.mark.parametrize("name", LAYERS)
def test_export(name):
    layer, x = build(name).eval(), torch.randn(2, 5, D)
    program = torch.export.export(layer, (x,))
    torch.testing.assert_close(program.module()(x), layer(x))


@pytest.mark.usefixtures("_clean")
@pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning")  # torch 2.11's own loader
def test_export_with_dynamic_sizes_and_a_mask():
    layer, x = build("causal", kv_heads=2, positions=mh.RoPE()).eval(), torch.randn(2, 5, D)
    batch, tokens = torch.export.Dim("batch", min=2, max=64), torch.export.Dim("tokens", min=2, max=512)
    program = torch.export.export(layer, (x,), dynamic_shapes=({0: batch, 1: tokens},))
    other = torch.randn(3, 11, D)
    torch.testing.assert_close(program.module()(other), layer(other))
    mask = mh.Keys(torch.tensor([[True, True, True, False, False], [True] * 5]))
    program = torch.export.export(layer, (x,), {"mask": mask})
    turned = mh.Keys(mask.allowed.flip(0))
    torch.testing.assert_close(program.module()(x, mask=turned), layer(x, mask=turned))
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    torch.testing.assert_close(torch.export.load(file).module()(x, mask=mask), layer(x, mask=mask))


@pytest.mark.usefixtures("_clean")
@pytest.mark.parametrize("mask", [mh.Window(8), mh.Causal() & mh.Window(8), mh.Causal()], ids=repr)
def test_an_exported_window_holds_for_longer_texts(mask, tmp_path):
    """The example text is shorter than the window, as it nearly always is."""
    layer, x = mh.MultiHeadAttention(D, 4, mask=mask).eval(), torch.randn(2, 5, D)
    program = torch.export.export(layer, (x,), dynamic_shapes=({1: torch.export.Dim("tokens", min=2, max=1000)},))
    longer = torch.randn(2, 20, D)
    torch.testing.assert_close(program.module()(longer), layer(longer))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        shapes = ({1: torch.export.Dim.DYNAMIC},)
        torch.onnx.export(
            layer, (x,), tmp_path / "w.onnx", opset_version=23, dynamo=True, dynamic_shapes=shapes, verbose=False
        )  # fmt: skip
    session = onnxruntime.InferenceSession(tmp_path / "w.onnx", providers=["CPUExecutionProvider"])
    (out,) = session.run(None, {session.get_inputs()[0].name: longer.numpy()})
    np.testing.assert_allclose(out, layer(longer).detach().numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("_clean")
def test_export_of_cross_attention_does_not_take_lengths_for_equal(tmp_path):
    layer = mh.MultiHeadAttention(D, 4, mask=mh.Causal()).eval()
    shapes = ({1: torch.export.Dim.DYNAMIC}, {1: torch.export.Dim.DYNAMIC})
    program = torch.export.export(layer, (torch.randn(2, 5, D), torch.randn(2, 5, D)), dynamic_shapes=shapes)
    x, memory = torch.randn(2, 3, D), torch.randn(2, 9, D)
    torch.testing.assert_close(program.module()(x, memory), layer(x, memory))


@pytest.mark.usefixtures("_clean")
def test_export_of_a_long_text_sees_no_memory_limit():
    layer = mh.MultiHeadAttention(D, 4, mask=mh.Causal(), softcap=3.0).eval()
    torch.export.export(
        layer, (torch.randn(2, 5, D),), dynamic_shapes=({1: torch.export.Dim("tokens", min=2, max=8192)},)
    )  # fmt: skip


@pytest.mark.usefixtures("_clean")
@pytest.mark.parametrize("mask", [None, mh.Causal(), "inside"], ids=repr)
def test_compile_the_function_with_dynamic_heads(mask):
    def call(q, k, v):
        return mh.attention(q, k, v, mask=mh.Lengths([3, 4]) if mask == "inside" else mask)

    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend="aot_eager")
    for heads in (2, 4, 6):
        q, k, v = make(Sizes(heads=heads, kv_heads=2))
        torch.testing.assert_close(compiled(q, k, v), call(q, k, v))


@pytest.mark.usefixtures("_clean")
@pytest.mark.parametrize("name", LAYERS)
def test_onnx(name, tmp_path):
    """Opset 23 has an Attention operator of its own; onnxruntime must give our numbers."""
    layer, x = build(name).eval(), torch.randn(2, 5, D)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(layer, (x,), tmp_path / "layer.onnx", opset_version=23, dynamo=True, verbose=False)
    session = onnxruntime.InferenceSession(tmp_path / "layer.onnx", providers=["CPUExecutionProvider"])
    (out,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    np.testing.assert_allclose(out, layer(x).detach().numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(name, dtype, device):
    layer, x = build(name).to(device), torch.randn(2, 5, D, device=device)
    with torch.autocast(device, dtype):
        out = layer(x)
        loss = out.float().square().sum()
    assert out.dtype == dtype
    torch.testing.assert_close(out.float(), layer(x), rtol=0.05, atol=0.15)
    loss.backward()
    assert all(p.grad.dtype == torch.float32 and bool(p.grad.isfinite().all()) for p in layer.parameters())


@pytest.mark.parametrize("kernel", ["auto", "reference", "fused"])
def test_autocast_casts_the_function_like_sdpa(kernel):
    q, k, v = make()
    with torch.autocast("cpu", torch.bfloat16):
        assert mh.attention(q, k.bfloat16(), v, mask=mh.Causal(), kernel=kernel).dtype == torch.bfloat16
        assert mh.attention(q.double(), k.double(), v.double(), kernel=kernel).dtype == torch.float64


@pytest.mark.parametrize("name", LAYERS)
def test_copies_and_state(name, tmp_path):
    layer, x = build(name), torch.randn(2, 5, D)
    torch.testing.assert_close(copy.deepcopy(layer)(x), layer(x))
    torch.save(layer, tmp_path / "whole.pt")
    torch.testing.assert_close(torch.load(tmp_path / "whole.pt", weights_only=False)(x), layer(x))
    torch.save(layer.state_dict(), tmp_path / "state.pt")
    other = build(name)
    assert not torch.allclose(other(x), layer(x))
    other.load_state_dict(torch.load(tmp_path / "state.pt"))
    torch.testing.assert_close(other(x), layer(x))


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")  # torch has no batching rule for CPU flash
def test_torch_func(name):
    layer, x = build(name), torch.randn(3, 2, 5, D)
    parameters = dict(layer.named_parameters())

    def loss(parameters, x):
        return torch.func.functional_call(layer, parameters, (x,)).square().sum()

    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, x)
    for i in range(3):
        want = torch.autograd.grad(layer(x[i]).square().sum(), list(parameters.values()))
        for got, w in zip(each.values(), want, strict=True):
            torch.testing.assert_close(got[i], w, rtol=1e-3, atol=1e-3)
    stacked = {n: torch.stack([p, p * 2]) for n, p in parameters.items()}
    out = torch.func.vmap(lambda p: torch.func.functional_call(layer, p, (x[0],)))(stacked)
    torch.testing.assert_close(out[0], layer(x[0]), rtol=1e-4, atol=1e-4)


def test_torch_func_hessian_by_the_reference():
    layer, x = build("causal").double(), torch.randn(1, 2, D).double()
    hessian = torch.func.hessian(lambda x: layer(x, kernel="reference").square().sum())(x)
    hessian = hessian.reshape(2 * D, 2 * D)
    torch.testing.assert_close(hessian, hessian.T)
    assert hessian.abs().max() > 0


@pytest.mark.parametrize("name", LAYERS)
def test_meta(name):
    layer = build(name, device="meta")
    assert layer(torch.empty(2, 5, D, device="meta")).shape == (2, 5, D)
    assert layer.to_empty(device="cpu")(torch.randn(2, 5, D)).shape == (2, 5, D)


@pytest.mark.parametrize("seed", [None, 5])
def test_checkpointing_repeats_the_dropout(seed):
    layer, x = build("causal", dropout=0.5), torch.randn(2, 5, D, requires_grad=True)

    def run(call):
        torch.manual_seed(3)
        return torch.autograd.grad(call().square().sum(), [x, *layer.parameters()])

    got = run(lambda: checkpoint(lambda x: layer(x, seed=seed), x, use_reentrant=False))
    torch.testing.assert_close(got, run(lambda: layer(x, seed=seed)))


def test_parametrisation_and_quantised_linears_are_found():
    layer, x = build("causal").eval(), torch.randn(2, 5, D)
    want = layer(x)
    nn.utils.parametrizations.weight_norm(layer.query)
    torch.testing.assert_close(layer(x), want)


def test_a_transformer_block_trains():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.attend = mh.MultiHeadAttention(D, 4, kv_heads=2, positions=mh.RoPE(), mask=mh.Causal(), qk_norm=True)
            self.norm, self.mlp = nn.LayerNorm(D), nn.Sequential(nn.Linear(D, 2 * D), nn.GELU(), nn.Linear(2 * D, D))

        def forward(self, x, mask):
            x = x + self.attend(self.norm(x), mask=mask)
            return x + self.mlp(x)

    torch.manual_seed(1)
    block, embed, read = Block(), nn.Embedding(11, D), nn.Linear(D, 11)
    optimizer = torch.optim.Adam([*block.parameters(), *embed.parameters(), *read.parameters()], 3e-3)
    first = None
    for _ in range(200):  # the token two back
        tokens = torch.randint(11, (32, 9))
        logits = read(block(embed(tokens), mh.Window(4)))
        loss = nn.functional.cross_entropy(logits[:, 2:].flatten(0, 1), tokens[:, :-2].flatten())
        first = first or loss.item()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.2 * first
