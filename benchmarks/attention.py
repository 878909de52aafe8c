"""attention() on a CPU against torch's own kernels, mask by mask: ratios of medians, taken in turns in one process.

    python benchmarks/attention.py [--seconds 4] [--only masks]

Writes results/attention.json, attention.md and attention.png. B 1, H 8, D 64 unless said; every contender has the same threads
and the same precision. Peers: SDPA as its users call it (is_causal, or a dense mask); FlexAttention compiled, where there is a
C++ compiler (forward only, torch has no backward for it on a CPU); for layers a module of four nn.Linear around SDPA.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

import multihead as mh
from layer import DIM, HEADS, processor, same_weights, table
from multihead.kernels import cutting, products
from multihead.kernels.spec import Spec

RESULTS = Path(__file__).parent / "results"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
Row = dict[str, object]


def in_turns(calls: dict[str, Callable[[], object]], seconds: float) -> dict[str, float]:
    """Medians of seconds; every contender runs once a round."""
    for call in calls.values():
        call()
    rounds, begin, times = 0, time.perf_counter(), {name: [] for name in calls}
    while rounds < 3 or (time.perf_counter() - begin < seconds and rounds < 400):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - start)
        rounds += 1
    return {name: statistics.median(x) for name, x in times.items()}


def qkv(B: int, H: int, T: int, dtype: torch.dtype, grad: bool = False, S: int | None = None, G: int | None = None):
    shapes = (B, H, T, 64), (B, G or H, S or T, 64), (B, G or H, S or T, 64)
    return [torch.randn(shape, dtype=dtype).requires_grad_(grad) for shape in shapes]


def both(call: Callable[..., torch.Tensor], tensors: list[torch.Tensor]) -> Callable[[], object]:
    """Forward and backward."""
    dout = torch.randn_like(call(*tensors).detach())
    return lambda: torch.autograd.grad(call(*tensors), tensors, dout)


def row(case: str, dtype: str, kind: str, times: dict[str, float], peer: str, **more: object) -> Row:
    found: Row = {"case": case, "dtype": dtype, "kind": kind, "peer": peer, "peer_ms": times[peer] * 1e3}
    found |= {name: t / times[peer] for name, t in times.items() if name != peer} | more
    print(found, flush=True)
    return found


def unmasked(seconds: float) -> list[Row]:
    """Nothing hidden, and causal: SDPA at its best."""
    rows: list[Row] = []
    for name, dtype in DTYPES.items():
        for tokens in (1024, 2048, 4096, 8192):
            for mask, causal in ((None, False), (mh.Causal(), True)):
                for kind in ("forward", "forward + backward"):
                    ours = lambda q, k, v, m=mask: mh.attention(q, k, v, mask=m)  # noqa: E731
                    sdpa = lambda q, k, v, c=causal: F.scaled_dot_product_attention(q, k, v, is_causal=c)  # noqa: E731
                    tensors = qkv(1, 8, tokens, dtype, kind != "forward")
                    calls = {
                        n: both(f, tensors) if kind != "forward" else lambda f=f: f(*tensors)
                        for n, f in (("sdpa", sdpa), ("ours", ours))
                    }
                    case = f"{'causal' if causal else 'no mask'} {tokens}"
                    rows.append(
                        row(case, name, kind, in_turns(calls, seconds), "sdpa", kernel=mh.plan(*tensors, mask=mask).kernel)
                    )
    return rows


def padded(batch: int, tokens: int) -> mh.Mask:
    return mh.Lengths([max(1, tokens * (i + 1) // batch) for i in range(batch)])


MASKS: dict[str, tuple[int, Callable[[int, int], mh.Mask]]] = {
    "window 128": (1, lambda B, S: mh.Window(128)),
    "window 1024": (1, lambda B, S: mh.Window(1024)),
    "padding 10-100 %": (10, padded),
    "padding, queries too": (10, lambda B, S: mh.Lengths(padded(B, S).keys, padded(B, S).keys)),
    "causal + padding": (10, lambda B, S: mh.Causal() & padded(B, S)),
    "8 documents": (1, lambda B, S: mh.Documents.from_lengths([S // 8] * 8)),
    "8 documents, causal": (1, lambda B, S: mh.Causal() & mh.Documents.from_lengths([S // 8] * 8)),
    "prefix 1024": (1, lambda B, S: mh.Causal() | mh.Prefix(S // 4)),
    "strided table": (1, lambda B, S: mh.Allowed(((torch.arange(S)[:, None] - torch.arange(S)) % 512 < 64).tril())),
}


def masks(seconds: float) -> list[Row]:
    """Time over our own without a mask, beside the share of the pairs that the mask leaves; and over SDPA with a dense mask."""
    rows: list[Row] = []
    for name, dtype in DTYPES.items():
        for case, (batch, make) in MASKS.items():
            tokens = 4096 if batch == 1 else 1024
            mask = make(batch, tokens)
            dense = mask.dense(tokens, tokens, batch=batch, heads=1)
            for kind in ("forward", "forward + backward"):
                tensors = qkv(batch, 8, tokens, dtype, kind != "forward")
                fs = {
                    "unmasked": lambda q, k, v: mh.attention(q, k, v, kernel="blocked"),
                    "ours": lambda q, k, v, m=mask: mh.attention(q, k, v, mask=m),
                    "sdpa": lambda q, k, v, d=dense: F.scaled_dot_product_attention(q, k, v, d),
                }
                calls = {n: both(f, tensors) if kind != "forward" else lambda f=f: f(*tensors) for n, f in fs.items()}
                times = in_turns(calls, seconds)
                left = mask.pairs(tokens, tokens, batch=batch) / (batch * tokens**2)
                computed = cutting.lower(Spec(*tensors, mask)).pairs / (8 * batch * tokens**2)
                over = times["ours"] / times["unmasked"] / left
                rows.append(
                    {
                        "case": case, "dtype": name, "kind": kind, "pairs left": left, "computed": computed,
                        "ours / unmasked": times["ours"] / times["unmasked"], "over the share": over,
                        "ours / sdpa + mask": times["ours"] / times["sdpa"], "ours_ms": times["ours"] * 1e3,
                    }
                )  # fmt: skip
                print(rows[-1], flush=True)
    return rows


def flex(seconds: float) -> list[Row]:
    """A causal window of 128 at 4096 tokens against compiled FlexAttention, whose first call is timed too."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    rows: list[Row] = []
    for name, dtype in DTYPES.items():
        q, k, v = qkv(1, 8, 4096, dtype)
        blocks = create_block_mask(lambda b, h, i, j: (j <= i) & (j > i - 128), 1, 1, 4096, 4096, device="cpu")
        compiled = torch.compile(flex_attention)
        begin = time.perf_counter()
        try:
            want = compiled(q, k, v, block_mask=blocks)
        except Exception as error:  # no C++ compiler, as a rule
            print(f"flex: left out, {type(error).__name__}: {str(error).splitlines()[0]}")
            return rows
        first = time.perf_counter() - begin
        mask = mh.Causal() & mh.Window(128)
        begin = time.perf_counter()
        got = mh.attention(q, k, v, mask=mask)
        ours_first = time.perf_counter() - begin
        torch.testing.assert_close(got, want, rtol=3e-2, atol=3e-2)
        calls = {"flex": lambda: compiled(q, k, v, block_mask=blocks), "ours": lambda: mh.attention(q, k, v, mask=mask)}
        rows.append(
            row(
                "window 128 at 4096",
                name,
                "forward",
                in_turns(calls, seconds),
                "flex",
                flex_first_call_s=first,
                our_first_call_s=ours_first,
            )
        )
    return rows


def dropped(seconds: float) -> list[Row]:
    """Training with dropout 0.1 at 4096 tokens: SDPA takes its L×L path."""
    tensors = qkv(1, 8, 4096, torch.float32, True)
    fs = {
        "sdpa": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, dropout_p=0.1),
        "ours": lambda q, k, v: mh.attention(q, k, v, dropout=0.1),
        "ours, no dropout": lambda q, k, v: mh.attention(q, k, v, kernel="blocked"),
    }
    times = in_turns({n: both(f, tensors) for n, f in fs.items()}, seconds)
    kib = {n: int(python(MEMORY.format(call=call))) for n, call in CALLS.items()}
    return [
        row(
            "dropout 0.1 at 4096",
            "fp32",
            "forward + backward",
            times,
            "sdpa",
            memory=kib["ours"] / kib["sdpa"],
            ours_mib=kib["ours"] / 1024,
        )
    ]


CALLS = {
    "sdpa": "torch.nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=0.1)",
    "ours": "mh.attention(q, k, v, dropout=0.1)",
}
MEMORY = """
import torch, multihead as mh
def run(n):
    q, k, v = (torch.randn(1, 8, n, 64, requires_grad=True) for _ in range(3))
    {call}.sum().backward()
run(256)
open("/proc/self/clear_refs", "w").write("5")
read = lambda key: int(next(l for l in open("/proc/self/status") if l.startswith(key)).split()[1])
before = read("VmRSS")
run(4096)
print(read("VmHWM") - before)
"""


def python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip()


def layers(seconds: float) -> list[Row]:
    """The layer, projections and all, B 4 H 8 d 512."""
    rows: list[Row] = []
    for name, dtype in DTYPES.items():
        ours = mh.MultiHeadAttention(DIM, HEADS).to(dtype)
        plain = same_weights(ours)
        for tokens in (128, 256, 512, 1024, 2048, 4096):
            x = torch.randn(4, tokens, DIM, dtype=dtype, requires_grad=True)
            dout = torch.randn_like(x)
            for kind in ("forward", "step"):

                def call(module: Callable[..., torch.Tensor], x=x, dout=dout, kind=kind) -> None:
                    with torch.set_grad_enabled(kind == "step"):
                        y = module(x)
                        if kind == "step":
                            y.backward(dout)

                times = in_turns({"plain": lambda: call(plain), "ours": lambda: call(ours)}, seconds)
                rows.append(row(f"layer {tokens}", name, kind, times, "plain"))
    return rows


def hashing() -> dict[str, float]:
    """Nanoseconds a weight for deciding what dropout keeps, on one thread."""
    from multihead.kernels import dropping

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    b = h = torch.zeros(1, 1, 1, 1, dtype=torch.int64)
    at = torch.arange(4096)
    rows, columns = dropping.rows(3, b, h, at[:256].view(1, 1, -1, 1)), dropping.columns(at.view(1, 1, 1, -1))
    times = in_turns({"hash": lambda: dropping.keep_(rows ^ columns, 0.1)}, 1.0)
    torch.set_num_threads(threads)
    return {"ns a weight, one thread": times["hash"] / (256 * 4096) * 1e9}


PARTS = {"unmasked": unmasked, "masks": masks, "flex": flex, "dropped": dropped, "layers": layers}
TITLES = {
    "unmasked": "No mask and causal, over SDPA = 1 (goals forward 0.60 fp32, 0.40 bf16; causal 0.65, 0.45; with backward 0.80, 0.60)",
    "masks": "Masks: time over our own without a mask, beside the share of the pairs left (goal: `over the share` ≤ 1.25)",
    "flex": "Against compiled FlexAttention, forward (goal 0.7)",
    "dropped": "Training with dropout 0.1 (goals: 0.35 of the time, 1/8 of the memory)",
    "layers": "The layer over four nn.Linear and SDPA = 1 (goals 0.65 forward; step 0.8 fp32, 0.75 bf16)",
}


def report(found: dict[str, object]) -> str:
    lines = [
        "# Attention on a CPU, measured",
        "",
        f"`python benchmarks/attention.py` on {found['machine']}; ratios of medians. Products: {found['products']}.",
        "",
    ]
    for part, title in TITLES.items():
        if found.get(part):
            lines += [f"## {title}", "", table(found[part]), ""]  # type: ignore[arg-type]
    lines += [f"Dropout's hash: {found['hash']['ns a weight, one thread']:.2f} ns a weight on one thread."]  # type: ignore[index]
    return "\n".join(lines) + "\n"


def plot(rows: list[Row]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(12, 4.2), sharey=True, layout="constrained")
    for ax, kind in zip(axes, ("forward", "forward + backward"), strict=True):
        for dtype, marker in (("fp32", "o"), ("bf16", "s")):
            part = [r for r in rows if r["dtype"] == dtype and r["kind"] == kind]
            ax.scatter(
                [r["pairs left"] for r in part],
                [r["ours / unmasked"] for r in part],
                marker=marker,
                label=f"{dtype}, ours",
                zorder=3,
            )
            dense = [r["ours / unmasked"] / r["ours / sdpa + mask"] for r in part]
            ax.scatter(
                [r["pairs left"] for r in part],
                dense,
                marker=marker,
                facecolors="none",
                edgecolors="gray",
                label=f"{dtype}, SDPA + dense mask",
            )
        ax.plot([0.02, 1], [0.02, 1], color="gray", lw=1, ls=":")
        ax.set(title=kind, xscale="log", yscale="log", xlabel="share of the pairs that the mask leaves")
        named = sorted((r for r in rows if r["dtype"] == "fp32" and r["kind"] == kind), key=lambda r: r["pairs left"])
        for i, r in enumerate(named):  # in turns above and below, since some shares are nearly the same
            at = (-24, 8) if i % 2 else (6, -11)
            ax.annotate(r["case"], (r["pairs left"], r["ours / unmasked"]), fontsize=6.5, xytext=at, textcoords="offset points")
    axes[0].set_ylabel("time / our own without a mask")
    axes[0].legend(frameon=False, fontsize=8)
    figure.savefig(RESULTS / "attention.png", dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=4.0, help="time for each comparison")
    parser.add_argument("--only", choices=PARTS, action="append", help="some parts; the others keep their figures")
    asked = parser.parse_args()
    torch.manual_seed(0)
    warnings.simplefilter("ignore")
    RESULTS.mkdir(exist_ok=True)
    file = RESULTS / "attention.json"
    found: dict[str, object] = json.loads(file.read_text()) if asked.only and file.exists() else {}
    found["machine"] = f"{processor()}, {torch.get_num_threads()} threads, torch {torch.__version__}"
    found["products"] = "; ".join(products.describe(dtype) for dtype in DTYPES.values())
    found["hash"] = hashing()
    for part in asked.only or PARTS:
        found[part] = PARTS[part](asked.seconds)
    file.write_text(json.dumps(found, indent=1) + "\n")
    (RESULTS / "attention.md").write_text(report(found))
    if "masks" in found:
        plot(found["masks"])  # type: ignore[arg-type]
    print(report(found))


if __name__ == "__main__":
    main()
