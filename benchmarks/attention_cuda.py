"""Attention on one GPU against torch's own kernels: `python benchmarks/attention_cuda.py` writes results/attention-cuda.md.

Contenders run A, B, A, B, … in one process, some calls at a time between two CUDA events; figures are medians in ms and ratios
over the peer named in each row. Whatever a mask costs (lowering, block lists, packing) is paid anew in every call of ours, for
what is kept of a mask from call to call is forgotten. `both` is forward and backward; `--repro` runs pytorch#196678 instead. Without a GPU the cases are only built.
"""

from __future__ import annotations

import argparse
import functools
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import multihead as mh
from layer import Plain, same_weights
from multihead.kernels import flex as our_flex
from multihead.kernels import packed as our_packed

RESULTS = Path(__file__).parent / "results"
DTYPE = torch.bfloat16
Call = Callable[[], Any]


@dataclass
class Case:
    """calls by name, of which `over` is the measure; goal is the ratio (or, if absolute, the ms) that ours must not exceed."""

    name: str
    kind: str
    calls: dict[str, Call]
    over: str
    goal: str


# ---- cases ------------------------------------------------------------------------------------------------------------


def tensors(device: str, batch: int, heads: int, tokens: int, dim: int, grad: bool) -> list[Tensor]:
    """q, k, v as a layer makes them: [batch, heads, tokens, dim], token by token in memory."""
    made = [torch.randn(batch, tokens, heads, dim, device=device, dtype=DTYPE) for _ in range(3)]
    return [x.requires_grad_(grad).transpose(1, 2) for x in made]


def both_ways(name: str, shape: tuple[int, ...], device: str, attends: dict[str, Any], over: str, goal: str) -> Iterator[Case]:
    """The case forward, and forward and backward; each of `attends` takes q, k, v."""
    q, k, v = tensors(device, *shape, grad=False)
    yield Case(name, "forward", {n: functools.partial(f, q, k, v) for n, f in attends.items()}, over, goal)
    leaves = tensors(device, *shape, grad=True)
    dout = torch.randn_like(leaves[0])

    def step(attend: Any) -> None:
        torch.autograd.grad(attend(*leaves), leaves, dout)

    yield Case(name, "both", {n: functools.partial(step, f) for n, f in attends.items()}, over, goal)


def ours(q: Tensor, k: Tensor, v: Tensor, mask: Callable[[], mh.Mask], kernel: str) -> Tensor:
    """attention(), its mask lowered anew."""
    our_flex._memo.clear()
    our_packed._memo.clear()
    return mh.attention(q, k, v, mask=mask(), kernel=kernel)


def unmasked(device: str) -> Iterator[Case]:
    """Nothing hidden and causal, H · D = 2048 and B · S = 16,384: what cuDNN does best."""

    def cudnn(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    for dim in (64, 128):
        for tokens in (2048, 4096, 8192, 16_384):
            for mask in (None, mh.Causal()):
                attends = {
                    "cuDNN": functools.partial(cudnn, causal=mask is not None),
                    "ours": functools.partial(mh.attention, mask=mask),
                }
                name = f"{'none' if mask is None else 'causal'}, D {dim} S {tokens}"
                yield from both_ways(name, (16_384 // tokens, 2048 // dim, tokens, dim), device, attends, "cuDNN", "1.02")


def padding(device: str) -> Iterator[Case]:
    """Lengths of 10 … 100 % of 2048, B 16 H 16 D 64; keys and queries behind a length are padding."""
    batch, heads, tokens, dim = 16, 16, 2048, 64
    lens = [round(tokens * (0.1 + 0.9 * i / (batch - 1))) for i in range(batch)]
    there = torch.arange(tokens)[None] < torch.tensor(lens)[:, None]
    keys, on_device = there[:, None, None].to(device), torch.tensor(lens, device=device)
    index = there.flatten().nonzero()[:, 0].to(device)
    cu = F.pad(torch.tensor(lens).cumsum(0), (1, 0)).int().to(device)

    def varlen(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Packing and unpacking by torch's own indexing, everything about the mask prepared."""
        from torch.nn.attention.varlen import varlen_attn

        flat = [x.transpose(1, 2).reshape(-1, heads, dim).index_select(0, index) for x in (q, k, v)]
        out = varlen_attn(*flat, cu, cu, max(lens), max(lens))
        whole = out.new_zeros(batch * tokens, heads, dim).index_copy(0, index, out)
        return whole.view(batch, tokens, heads, dim).transpose(1, 2)

    attends = {
        "no mask": F.scaled_dot_product_attention,
        "key mask": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, keys),
        "varlen": varlen,
        "ours, lengths on the host": functools.partial(ours, mask=lambda: mh.Lengths(lens, lens), kernel="packed"),
        "ours, on the device": functools.partial(ours, mask=lambda: mh.Lengths(on_device, on_device), kernel="packed"),
    }
    yield from both_ways("padding 10–100 %", (batch, heads, tokens, dim), device, attends, "varlen", "0.45 ms forward")


def sparse(device: str) -> Iterator[Case]:
    """A window of 1024, and documents of 1000 tokens; S 8192 B 2 H 16 D 128."""
    batch, heads, tokens, dim, width = 2, 16, 8192, 128, 1024
    lens = [1000] * (tokens // 1000) + [tokens % 1000]
    ids = torch.arange(len(lens)).repeat_interleave(torch.tensor(lens)).to(device)
    whole = (torch.arange(batch + 1) * tokens).int().to(device)
    parts = F.pad(torch.tensor(lens * batch).cumsum(0), (1, 0)).int().to(device)

    def in_window(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:  # noqa: ARG001
        return (k <= q) & (k > q - width)

    def in_document(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:  # noqa: ARG001
        return (k <= q) & (ids[q] == ids[k])

    def flex(q: Tensor, k: Tensor, v: Tensor, mod: Any, keep: dict[Any, Any] | None) -> Tensor:
        from torch.nn.attention.flex_attention import create_block_mask

        made = keep.get(mod) if keep is not None else None
        if made is None:
            made = create_block_mask(mod, None, None, tokens, tokens, device=q.device)
        if keep is not None:
            keep[mod] = made
        return compiled_flex()(q, k, v, block_mask=made)

    def varlen(q: Tensor, k: Tensor, v: Tensor, cu: Tensor, longest: int, window: tuple[int, int]) -> Tensor:
        from torch.nn.attention.varlen import varlen_attn

        flat = [x.transpose(1, 2).reshape(-1, heads, dim) for x in (q, k, v)]
        out = varlen_attn(*flat, cu, cu, longest, longest, window_size=window)
        return out.view(batch, tokens, heads, dim).transpose(1, 2)

    ready: dict[Any, Any] = {}
    for name, mod, mask, cu, longest, window in (
        ("window 1024", in_window, lambda: mh.Window(width), whole, tokens, (width - 1, 0)),
        ("documents of 1000", in_document, lambda: mh.Causal() & mh.Documents.from_lengths(lens), parts, 1000, (-1, 0)),
    ):
        attends = {
            "flex": functools.partial(flex, mod=mod, keep=ready),
            "flex and its mask": functools.partial(flex, mod=mod, keep=None),
            "varlen": functools.partial(varlen, cu=cu, longest=longest, window=window),
            "ours, flex": functools.partial(ours, mask=mask, kernel="flex"),
            "ours, packed": functools.partial(ours, mask=mask, kernel="packed"),
        }
        yield from both_ways(name, (batch, heads, tokens, dim), device, attends, "flex", "0.9 of the better of flex and varlen")


@functools.cache
def compiled_flex() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)


class FusedQKV(nn.Module):
    """One product for q, k and v, SDPA, one product."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape))


def layer(device: str) -> Iterator[Case]:
    """E 2048 H 16 S 2048 B 8, a training step of one layer, eager and compiled."""
    dim, heads = 2048, 16
    ours = mh.MultiHeadAttention(dim, heads, device=device, dtype=DTYPE)
    plain: nn.Module = same_weights(ours, Plain).to(device) if device != "meta" else Plain(dim, heads).to(device, DTYPE)
    modules = {"plain": plain, "ours": ours, "fused qkv": FusedQKV(dim, heads).to(device, DTYPE)}
    x = torch.randn(8, 2048, dim, device=device, dtype=DTYPE)

    def step(module: Any) -> None:
        module(x).sum().backward()
        module.zero_grad()

    yield Case("layer, eager", "step", {n: functools.partial(step, m) for n, m in modules.items()}, "plain", "1.02")
    fast = {n: torch.compile(m) for n, m in modules.items()}
    yield Case("layer, compiled", "step", {n: functools.partial(step, m) for n, m in fast.items()}, "plain", "1.02")


CASES: dict[str, Callable[[str], Iterator[Case]]] = {"unmasked": unmasked, "padding": padding, "sparse": sparse, "layer": layer}


# ---- measuring ----------------------------------------------------------------------------------------------------------


def burst(call: Call, n: int) -> float:
    """ms a call, of n calls between two events: the host may run ahead, as it does in a model."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(n):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / n


def measure(case: Case, seconds: float) -> dict[str, float]:
    """Median ms of each call, in turn; every round begins with another one."""
    for call in case.calls.values():
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    n = max(1, math.ceil(15 / max(burst(call, 3) for call in case.calls.values())))
    names, times, begin, turn = list(case.calls), {name: [] for name in case.calls}, time.perf_counter(), 0
    while turn < 9 or time.perf_counter() - begin < seconds:
        for i in range(len(names)):
            name = names[(turn + i) % len(names)]
            times[name].append(burst(case.calls[name], n))
        turn += 1
    return {name: statistics.median(t) for name, t in times.items()}


def new_lengths() -> list[str]:
    """Wall-clock ms of a call of a length never seen before, over one of a length that was."""
    rows = []
    for kernel, mask in (("flex", mh.Window(1024)), ("packed", mh.Window(1024))):
        times = []
        for tokens in (8192, 8192, 8192, 7000, 6001, 5128, 8192, 9999):
            q, k, v = tensors("cuda", 2, 16, tokens, 128, grad=False)
            torch.cuda.synchronize()
            start = time.perf_counter()
            mh.attention(q, k, v, mask=mask, kernel=kernel)
            torch.cuda.synchronize()
            times.append((tokens, (time.perf_counter() - start) * 1e3))
        rows.append(f"- {kernel}: " + ", ".join(f"{tokens}: {ms:.1f} ms" for tokens, ms in times))
    return rows


def line(case: Case, times: dict[str, float]) -> str:
    cells = "; ".join(f"{name} {ms:.3f} ({ms / times[case.over]:.2f})" for name, ms in times.items())
    return f"| {case.name} | {case.kind} | {cells} | {case.goal} |"


def repro() -> str:
    """pytorch#196678: rows whose log-sum-exp is below −88.7, with a dense mask; NaN in dq where kv_len % 128 == 64."""
    backends = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "efficient": SDPBackend.EFFICIENT_ATTENTION}
    rows = ["| L | L % 128 | cuDNN | efficient | cuDNN, is_causal | ours |", "|---|---|---|---|---|---|"]
    for length in (64, 128, 192, 640, 700, 704, 768, 832, 1088, 2112):
        random = torch.Generator().manual_seed(0)
        q, k, v = (torch.randn(1, 1, length, 64, generator=random) for _ in range(3))
        q, k = q * 0.1, k * 0.1
        q[..., 0], k[..., 0] = 1.0, -120 * math.sqrt(64)  # every score about −120
        q, k, v = (x.to("cuda", DTYPE).requires_grad_() for x in (q, k, v))
        mask = torch.ones(length, length, dtype=torch.bool, device="cuda").tril()
        outs = []
        for backend in backends.values():
            with sdpa_kernel(backend):
                outs.append(F.scaled_dot_product_attention(q, k, v, mask))
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            outs.append(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        outs.append(mh.attention(q, k, v, mask=mh.Allowed(mask), kernel="fused"))
        bad = [int((~torch.autograd.grad(out, q, torch.ones_like(out))[0].isfinite()).sum()) for out in outs]
        rows.append(f"| {length} | {length % 128} | {' | '.join(map(str, bad))} |")
    return "numbers of dq that are not finite\n\n" + "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3.0, help="time for each row")
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES), help="which cases")
    parser.add_argument("--repro", action="store_true", help="run pytorch#196678, and nothing else")
    asked = parser.parse_args()
    if not torch.cuda.is_available():
        built = [f"{case.name} {case.kind}" for name in asked.only for case in CASES[name]("meta")]
        print(f"no CUDA device: {len(built)} rows were built and none was measured ({built[0]} … {built[-1]})", file=sys.stderr)
        raise SystemExit(2)
    where = f"{torch.cuda.get_device_name()}, torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}"
    if asked.repro:
        print(f"{where}\n\n{repro()}")
        return
    rows = ["| case | kind | ms (ratio) | goal |", "|---|---|---|---|"]
    for name in asked.only:
        for case in CASES[name]("cuda"):
            rows.append(line(case, measure(case, asked.seconds)))
            print(rows[-1], flush=True)
    text = (
        "# Attention on a GPU, measured\n\n`python benchmarks/attention_cuda.py` on " + where + ", bf16\n\n" + "\n".join(rows)
    )
    text += "\n\nMasks of 1024 over lengths in this order, ms from call to end:\n\n" + "\n".join(new_lengths()) + "\n"
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "attention-cuda.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
