"""kernels/flex.py: its blocks, its function inside them, its results and gradients, and how often it compiles.

On a CPU torch refuses FlexAttention's gradients at the door only; behind it lies a dense implementation of forward and backward,
which the backend "aot_eager" runs. It reads the same block mask and the same mask_mod as the kernels on CUDA do.
"""

import math

import pytest
import torch
import torch._dynamo.testing
from torch.nn.attention import flex_attention as torch_flex

import multihead as mh
from multihead.kernels import flex
from multihead.kernels.flex import SIZE, refuses
from multihead.kernels.spec import Spec
from multihead.plan import KERNELS
from multihead.testing import Sizes, check, cotangent, make, naive, oracle
from tests.common import MASKS, B, H, S, T, moved

GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch hides it, but not from "error"
Q, K = 300, 333
RANDOM = torch.Generator().manual_seed(5)


def some(*shape, share=0.3):
    return torch.rand(shape, generator=RANDOM) < share


def torn(n):
    return torch.arange(n) // 3 % 5


def squares(n, size=64):
    """Whole blocks allowed and blocked by turns: the case of block-sparse tables."""
    i = torch.arange(n) // size
    return (i[:, None] + i) % 2 == 0


BIG = {
    "causal": mh.Causal(),
    "causal_start": mh.Causal(align="start"),
    "window": mh.Window(50),
    "window_ahead": mh.Window(140, ahead=20),
    "lengths": mh.Lengths([200, 333]),
    "lengths_empty": mh.Lengths([0, 130], [140, 300]),
    "keys_left": mh.Keys(torch.arange(K) >= torch.tensor([[0], [170]])),
    "documents": mh.Documents.from_lengths([[100, 33, 200], [1, 300, 32]]),
    "documents_cross": mh.Documents.from_lengths([133, 200], queries=[150, 150]),
    "prefix": mh.Prefix([3, 290]),
    "prefix_lm": mh.Causal() | mh.Prefix([100, 290]),
    "valid_lens_2d": mh.ValidLens(torch.stack([torch.arange(Q), torch.arange(Q).flip(0)])),
    "sinks_and_window": mh.Causal() & (mh.Window(60) | mh.Prefix(4)),
    "not_window": ~mh.Window(50),
    "causal_padded": mh.Causal() & mh.Lengths([170, 333]),
    "all_of_them": mh.Causal() & mh.Window(90) & mh.Documents.from_lengths([[100, 33, 200], [1, 300, 32]]),
    "nothing": mh.Causal() & ~mh.Causal(),
}
LOOKED_AT = {
    "table": mh.Allowed(squares(K)[:Q]),
    "table_of_heads": mh.Blocked(some(B, H, Q, K)),
    "table_of_keys": mh.Allowed(some(1, 1, 1, K)),
    "table_absolute": mh.Allowed(squares(K + 9, 128), absolute=True),
    "where": mh.Where(lambda b, h, q, k: (q - k) % 3 == b),
    "where_and_causal": mh.Causal() & mh.Where(lambda b, h, q, k: (q + h) % 3 != k % 3),
    "where_or_prefix": mh.Prefix([30, 290]) | ~mh.Where(lambda b, h, q, k: q - k < 200),
    "documents_torn": mh.Documents(torn(K)),
    "documents_torn_cross": mh.Documents(torch.stack([torn(K), torn(K) - 1]), queries=torn(Q)),
    "keys_in_many_runs": mh.Keys(torch.arange(K) % 3 != torch.tensor([[0], [1]])) & mh.Causal(),
    "nothing_looked_at": mh.Where(lambda b, h, q, k: k < -1),
}
ALL = BIG | LOOKED_AT


@pytest.fixture(autouse=True)
def _on_cpu(request, monkeypatch):
    """flex.py on a CPU, through torch's dense implementation."""
    if request.node.get_closest_marker("gpu"):
        yield
        return
    monkeypatch.setattr(flex, "DEVICES", ("cuda", "cpu"))
    monkeypatch.setattr(flex, "BACKEND", "aot_eager")
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *_: None)
    yield
    flex._memo.clear()


@pytest.fixture(scope="module", autouse=True)
def _clean():
    yield
    forget()


def forget():
    flex._compiled.cache_clear()
    flex._met.clear()
    torch._dynamo.reset()


def attend(q, k, v, **options):
    spec = Spec(q, k, v, **options)
    assert refuses(spec) is None
    return flex.run(q, k, v, spec)


def agrees(sizes, mask, **options):
    """Output, log-sum-exp and gradients of both against the oracle."""
    q, k, v = make(sizes, requires_grad=True)
    out, lse = attend(q, k, v, mask=mask, want_lse=True, **options)
    dout, dlse = cotangent(out), cotangent(lse, seed=2)
    exact = oracle(q, k, v, mask=mask, dout=dout, dlse=dlse, **options)
    torch.testing.assert_close(out.detach(), exact.out.float(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.detach(), exact.lse.float(), rtol=1e-5, atol=1e-5)
    total = (out * dout).sum() + torch.where(lse.isfinite(), lse * dlse, 0.0).sum()
    for got, n in zip(torch.autograd.grad(total, (q, k, v)), "qkv", strict=True):
        torch.testing.assert_close(got, exact.grads[n].float(), rtol=1e-4, atol=1e-4, msg=lambda m, n=n: f"d{n}: {m}")


def lowered(mask, q_len=Q, kv_len=K, **options):
    q, k, v = make(Sizes(q_len=q_len, kv_len=kv_len))
    spec = Spec(q, k, v, mask, **options)
    return flex._lower(spec, flex._lengths(spec))


def grid(allowed, how):
    """[·, ·, blocks, blocks] by looking, what is not there being hidden."""
    allowed = torch.nn.functional.pad(allowed, (0, -allowed.shape[3] % SIZE, 0, -allowed.shape[2] % SIZE))
    b, h, t, s = allowed.shape
    return getattr(allowed.view(b, h, t // SIZE, SIZE, s // SIZE, SIZE).transpose(3, 4).flatten(4), how)(4)


def blocks(number, order):
    """Which blocks are listed."""
    listed = torch.arange(order.shape[-1]) < number.unsqueeze(-1)
    return torch.zeros_like(listed).scatter(-1, order.long(), listed)


@pytest.mark.parametrize("name", ALL)
def test_blocks_are_those_of_the_predicate(name):
    allowed = ALL[name].dense(Q, K, batch=B, heads=H)
    made = lowered(ALL[name]).block_mask
    partial, full = blocks(made.kv_num_blocks, made.kv_indices), blocks(made.full_kv_num_blocks, made.full_kv_indices)
    assert not (partial & full).any()
    some, every = grid(allowed, "any"), grid(allowed, "all")
    assert bool((~some | partial | full).all())
    assert bool((every | ~full).all())
    if name not in ("sinks_and_window", "not_window", "prefix_lm"):  # several intervals a row: what lies between may be listed
        assert torch.equal((partial | full).expand_as(some), some)
        assert torch.equal(full.expand_as(every), every)
    other = blocks(made.q_num_blocks, made.q_indices)
    assert torch.equal(other, partial.mT)


@pytest.mark.parametrize("name", ALL)
def test_the_function_inside_is_the_predicate(name):
    made = lowered(ALL[name])
    mod = torch_flex.create_mask(made.block_mask.mask_mod, B, H, 384, 384, device="cpu")
    assert torch.equal(mod[:, :, :Q, :K], ALL[name].dense(Q, K, batch=B, heads=H))
    assert not mod[:, :, Q:].any()
    assert not mod[:, :, :, K:].any()


@pytest.mark.parametrize("name", ALL)
def test_rows_and_columns_that_see_and_are_seen(name):
    made, allowed = lowered(ALL[name]), ALL[name].dense(Q, K, batch=B, heads=H)
    rows, columns = allowed.any(3), allowed.any(2).any(1)
    assert torch.equal(torch.ones_like(rows) if made.rows is None else made.rows.expand_as(rows), rows)
    assert torch.equal(torch.ones_like(columns) if made.columns is None else made.columns.expand_as(columns), columns)


@pytest.mark.parametrize("mask", [None, mh.Causal(), mh.Window(20), LOOKED_AT["where"], LOOKED_AT["table_absolute"]], ids=repr)
@pytest.mark.parametrize(
    "at",
    [
        {"start": 7},
        {"start": torch.tensor([0, 30])},
        {"key_start": 3},
        {"start": 5, "key_start": torch.tensor([-40, 0])},
        {"start": 5, "key_start": -140},
    ],
    ids=str,
)
def test_positions(mask, at):
    q, k, v = make(Sizes(q_len=Q, kv_len=K))
    spec = Spec(q, k, v, mask, **at)
    allowed = torch.ones(B, 1, Q, K, dtype=torch.bool) if mask is None else mask.evaluate(spec.frame)
    there = spec.frame.there()
    allowed = allowed.expand(B, -1, Q, K) & (there if there is not None else True)
    made = flex._lower(spec, flex._lengths(spec))
    if made.block_mask is None:
        assert bool(allowed.all())
        return
    mod = torch_flex.create_mask(made.block_mask.mask_mod, B, 1, Q, K, device="cpu")
    assert torch.equal(mod, allowed)


@pytest.mark.parametrize("name", MASKS)
def test_every_mask(name):
    agrees(Sizes(), MASKS[name])


@pytest.mark.parametrize("name", [None, *ALL])
def test_several_blocks(name):
    agrees(Sizes(q_len=Q, kv_len=K), None if name is None else ALL[name])


@pytest.mark.parametrize("name", ["causal", "all_of_them", "where"])
@pytest.mark.parametrize(
    "sizes", [Sizes(q_len=Q, kv_len=K, kv_heads=6, v_dim=11), Sizes(q_len=Q, kv_len=K, kv_heads=1, head_dim=32, v_dim=8)]
)
@pytest.mark.parametrize("options", [{"softcap": 0.8}, {"scale": -0.4}, {"scale": 0.0}], ids=str)
def test_heads_softcap_and_scales(name, sizes, options):
    agrees(sizes, ALL[name], **options)


def test_softcap_pads_to_whole_blocks():
    """pytorch#153799: gradients are NaN where a score_mod meets a length that 128 does not divide."""
    for mask in (None, BIG["documents"], LOOKED_AT["table"], LOOKED_AT["documents_torn_cross"]):
        made = lowered(mask, softcap=2.0)
        assert made.lens == (384, 384) == made.block_mask.seq_lengths
        agrees(Sizes(q_len=Q, kv_len=K), mask, softcap=2.0)
    with torch.no_grad():
        assert lowered(BIG["causal"], softcap=2.0).lens == (Q, K)


def test_a_graph_kept_for_one_length_does_not_serve_another():
    """The same mask with and without gradients is lowered to different lengths."""
    q, k, v = make(Sizes(q_len=Q, kv_len=K))
    spec = Spec(q, k, v, mh.Causal(), softcap=2.0)
    out = flex.run(q, k, v, spec)[0]
    with torch.no_grad():
        again = flex.run(q, k, v, spec)[0]
    torch.testing.assert_close(out, again)


@pytest.mark.parametrize(
    "name", ["lengths_empty", "keys_left", "causal_padded", "where_or_prefix", "nothing", "nothing_looked_at"]
)
def test_what_nobody_sees_has_no_influence(name):
    """NaN in keys no query may see, and in queries that see nothing, reaches neither the output nor a gradient."""
    allowed = ALL[name].dense(Q, K, batch=B, heads=H)
    hidden, empty = ~allowed.any(2).any(1)[:, None, :, None], ~allowed.any(3)[..., None]
    q, k, v = make(Sizes(q_len=Q, kv_len=K))
    leaves = [x.masked_fill(m, math.nan).requires_grad_() for x, m in ((q, empty), (k, hidden), (v, hidden))]
    out, lse = attend(*leaves, mask=ALL[name], want_lse=True)
    want, want_lse = attend(q, k, v, mask=ALL[name], want_lse=True)
    assert torch.equal(out, want)
    assert torch.equal(lse, want_lse)
    assert torch.equal(lse == -math.inf, empty.squeeze(-1).expand_as(lse))
    assert all(bool(g.isfinite().all()) for g in torch.autograd.grad((out * cotangent(out)).sum(), leaves))


def test_a_new_length_or_mask_costs_no_compile(monkeypatch):
    """Windows, documents, prefixes and paddings of any length are one kernel, or one a number of intervals."""
    forget()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    monkeypatch.setattr(flex, "BACKEND", counter)

    def call(q_len, kv_len, mask, **options):
        q, k, v = make(Sizes(q_len=q_len, kv_len=kv_len), requires_grad=True)
        attend(q, k, v, mask=mask, **options)[0].sum().backward()
        return counter.frame_count

    lens = [384, 300, 1000, 129, 257, 768]  # three blocks, as there are three kv heads: equal by chance
    assert [call(n, n, mask) for n in lens for mask in (mh.Causal(), mh.Window(n // 3))] == [1] * 12
    assert [call(n, n + 50, mh.Causal() | mh.Prefix(n // 2)) for n in lens] == [1] * 6
    assert [call(n, n, mh.Documents.from_lengths([100, n - 100])) for n in lens] == [1] * 6
    assert [call(n, n, mh.Causal(), start=5) for n in lens] == [1] * 6
    assert [call(n, n, mh.Causal() & mh.Lengths([n, n // 2])) for n in lens] == [2] * 6  # differs from text to text
    assert [call(n, n, mh.Lengths([n, 0])) for n in lens] == [2] * 6
    forget()


def test_the_unfused_path_is_an_error(monkeypatch):
    q, k, v = make(Sizes(q_len=Q, kv_len=K))
    way_out = r'torch.compile is switched off or gave up, and FlexAttention would run unfused.*write kernel="fused"'
    with torch.compiler.set_stance("force_eager"), pytest.raises(RuntimeError, match=way_out):
        attend(q, k, v, mask=mh.Window(5))
    forget()
    compare = [torch.eq, torch.ne, torch.lt]
    masks = [mh.Where(lambda b, h, q, k, f=f: f(q % 7, k % 5)) for f in compare]  # one code, another constant each time
    assert len({mask.allows.__code__ for mask in masks}) == 1
    with torch._dynamo.config.patch(recompile_limit=1):
        attend(q, k, v, mask=masks[0])
        too_many = r'compiled for more shapes than .*recompile_limit allows.*write kernel="fused"'
        with pytest.raises(RuntimeError, match=too_many):
            [attend(q, k, v, mask=mask) for mask in masks[1:]]
    forget()


def test_other_errors_are_not_hidden(monkeypatch):
    q, k, v = make(Sizes(q_len=Q, kv_len=K))
    with pytest.raises(ValueError, match="the mask was made for batch 3 but the call has batch 2"):
        attend(q, k, v, mask=mh.Lengths([1, 2, 3]))

    def fails(*_):
        raise KeyError("other")

    monkeypatch.setattr(flex, "_compiled", lambda _: fails)
    with pytest.raises(KeyError, match="other"):
        attend(q, k, v)

    class Own(mh.Mask):
        def predicate(self, b, h, q, k, frame):
            return k >= 0

    with pytest.raises(NotImplementedError, match='kernel="flex" does not know Own; write kernel="fused"'):
        attend(q, k, v, mask=Own())


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"dtype": torch.float64}, "FlexAttention has no fused float64 kernel"),
        ({"bias": torch.zeros(T, S)}, "a bias is L×L numbers that FlexAttention would fetch one by one"),
        ({"sinks": torch.zeros(H)}, "FlexAttention has no sinks"),
        ({"dropout": 0.5}, "FlexAttention has no dropout"),
        ({"sizes": Sizes(kv_len=0)}, "there is an axis of size 0"),
    ],
    ids=str,
)
def test_reasons(change, why):
    options = {n: x for n, x in change.items() if n not in ("sizes", "dtype")}
    q, k, v = make(change.get("sizes"), dtype=change.get("dtype", torch.float32))
    assert refuses(Spec(q, k, v, **options)) == why


def test_more_reasons(monkeypatch):
    q, k, v = make()
    with torch.autograd.forward_ad.dual_level():
        assert refuses(Spec(q, k, v)) == "FlexAttention has no forward-mode derivative"
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert refuses(Spec(q, k, v)) == "its block mask is made outside of a compiled graph"
    monkeypatch.undo()
    assert refuses(Spec(q, k, v)) == "FlexAttention is fused on CUDA only"
    with pytest.raises(
        ValueError, match=r'kernel="flex" cannot do this: FlexAttention is fused on CUDA only; kernels that can'
    ):
        mh.attention(q, k, v, kernel="flex")


def test_backend_on_versions_that_ignore_blocks(monkeypatch):
    """pytorch#188322: where it holds, Triton is asked for by name."""
    seen = []
    monkeypatch.setattr(torch_flex, "flex_attention", lambda q, k, v, **options: seen.append(options) or q)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    kind = flex.Kind(0.5, None, False, (2, 2, 16, 16), torch.float32, (), None, ())
    for held in ([True], []):
        flex._compiled.cache_clear()
        monkeypatch.setattr(flex, "holding", lambda call, kernels: held)  # noqa: B023
        flex._compiled(kind)(torch.ones(1), None, None, None)
    assert [options.get("kernel_options") for options in seen] == [{"BACKEND": "TRITON"}, None]
    assert seen[0]["scale"] == 0.5
    flex._compiled.cache_clear()


def test_a_mask_is_lowered_once_unless_a_function_decides(monkeypatch):
    made = []
    original = flex._lower
    monkeypatch.setattr(flex, "_lower", lambda *a: made.append(a) or original(*a))
    q, k, v = make(Sizes(q_len=Q, kv_len=K))
    for _ in range(3):
        attend(q, k, v, mask=mh.Window(50))
    assert len(made) == 1
    for _ in range(2):
        attend(q, k, v, mask=LOOKED_AT["where"])
    assert len(made) == 3


def test_second_derivatives_are_refused():
    q, k, v = make(Sizes(q_len=Q, kv_len=K), requires_grad=True)
    out, _ = attend(q, k, v, mask=mh.Causal())
    with pytest.raises(NotImplementedError, match='kernel="flex" can be differentiated once; for second derivatives write'):
        torch.autograd.grad(out.sum(), q, create_graph=True)
    torch.autograd.grad(attend(q, k, v, mask=mh.Causal())[0].sum(), q)


@pytest.mark.slow
def test_long_sequences_are_lowered_without_their_square():
    """131,072 tokens: a square would be 16 GiB of bool, the blocks are 1,024² and the bounds 1 MiB."""
    q = torch.empty(1, 1, 131_072, 16, device="meta")
    spec = Spec(q, q, q, mh.Causal() & mh.Window(4096) & mh.Documents.from_lengths([31_072, 100_000]))
    spec.device = torch.device("cpu")
    made = flex._lower(spec, flex._lengths(spec))
    tensors = [x for x in made.block_mask.as_tuple() if isinstance(x, torch.Tensor)]
    assert sum(x.numel() * x.element_size() for x in tensors) < 20 * 2**20
    assert int(made.block_mask.kv_num_blocks.sum() + made.block_mask.full_kv_num_blocks.sum()) < 1024 * 34
    assert made.rows is None
    assert made.columns is None


# ---- on a device ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=GPU)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("place", ["host", "device"])
@pytest.mark.parametrize("name", [None, *ALL])
def test_on_cuda(name, place, softcap, dtype, device):
    dense = moved(None if name is None else ALL[name], device)
    mask = dense if place == "device" or name in LOOKED_AT or name == "keys_left" else ALL.get(name)
    q, k, v = make(Sizes(q_len=Q, kv_len=K, head_dim=64, v_dim=64), dtype=dtype, device=device, requires_grad=True)
    out, lse = mh.attention(q, k, v, mask=mask, softcap=softcap, kernel="flex", return_lse=True)
    dout, dlse = cotangent(out), cotangent(lse, seed=2)
    total = (out * dout).sum() + torch.where(lse.isfinite(), lse * dlse, 0.0).sum()
    grads = torch.autograd.grad(total, (q, k, v))
    exact = oracle(q, k, v, mask=dense, dout=dout, dlse=dlse, softcap=softcap)
    size = 2e-2 if dtype == torch.bfloat16 else 2e-3
    if softcap is None:
        check(out.detach(), exact.out, naive(q, k, v, mask=dense).detach())
    torch.testing.assert_close(out.double(), exact.out, rtol=size, atol=size)
    torch.testing.assert_close(lse.double(), exact.lse, rtol=size, atol=size)
    for got, n in zip(grads, "qkv", strict=True):
        torch.testing.assert_close(got.double(), exact.grads[n], rtol=size, atol=4 * size, msg=lambda m, n=n: f"d{n}: {m}")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_masks_that_differ_between_texts_stay_finite_over_many_lengths():
    """pytorch#186775: NaN was seen under dynamic shapes with masks that change from batch to batch; nobody could say why."""
    for step in range(40):
        n = 500 + 37 * step
        ids = torch.sort(torch.randint(0, 9, (2, n)), 1).values
        q, k, v = make(Sizes(2, 4, 2, n, n, 64, 64), seed=step, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        mask = mh.Causal() & mh.Documents(ids)
        out = mh.attention(q, k, v, mask=mask, kernel="flex")
        check(out.detach(), oracle(q, k, v, mask=moved(mask, "cuda")).out, naive(q, k, v, mask=moved(mask, "cuda")).detach())
        assert all(bool(g.isfinite().all()) for g in torch.autograd.grad((out * cotangent(out)).sum(), (q, k, v)))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_nothing_square_and_nothing_waited_for_on_cuda():
    assert KERNELS["flex"] is flex
    q, k, v = make(Sizes(1, 4, 4, 32_768, 32_768, 64, 64), dtype=torch.bfloat16, device="cuda", requires_grad=True)
    mh.attention(q, k, v, mask=mh.Causal() & mh.Window(512), kernel="flex").sum().backward()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.cuda.set_sync_debug_mode("error")
    try:
        mh.attention(q, k, v, mask=mh.Causal() & mh.Window(1024), kernel="flex").sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.max_memory_allocated() - before < 300 * 2**20
