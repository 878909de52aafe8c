"""The layer against plain modules: `python benchmarks/layer.py` writes benchmarks/results/layer.{json,md,png}.

Contenders run A, B, A, B, … in one process; figures are ratios of medians over the plain module = 1: four nn.Linear and
F.scaled_dot_product_attention, nothing else. Memory and imports are measured in fresh processes.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import multihead as mh

RESULTS = Path(__file__).parent / "results"
DIM, HEADS, BATCH = 512, 8, 4
LENGTHS = (128, 256, 512, 1024, 2048, 4096)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Plain(nn.Module):
    """The measure: four Linears around SDPA."""

    def __init__(self, dim: int = DIM, heads: int = HEADS, kv_heads: int | None = None) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads or heads, dim // heads
        self.q, self.o = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.k, self.v = (nn.Linear(dim, self.kv_heads * self.head_dim) for _ in range(2))

    def split(self, x: Tensor, heads: int) -> Tensor:
        return x.view(x.shape[0], x.shape[1], heads, self.head_dim).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            self.split(self.q(x), self.heads),
            self.split(self.k(x), self.kv_heads),
            self.split(self.v(x), self.kv_heads),
        )
        return self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape))


class PlainDecoding(Plain):
    def forward(self, x: Tensor, k_all: Tensor, v_all: Tensor, at: int) -> Tensor:
        """One token over a preallocated cache, the query heads of a group folded into the query axis."""
        B, D = x.shape[0], self.head_dim
        q = self.q(x).view(B, self.kv_heads, self.heads // self.kv_heads, D)
        k_all[:, :, at : at + 1] = self.split(self.k(x), self.kv_heads)
        v_all[:, :, at : at + 1] = self.split(self.v(x), self.kv_heads)
        out = F.scaled_dot_product_attention(q, k_all[:, :, : at + 1], v_all[:, :, : at + 1])
        return self.o(out.reshape(B, 1, -1))


class ByHand(Plain):
    """As in the notes: matmul, scale, softmax, matmul."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.split(linear(x), self.heads) for linear in (self.q, self.k, self.v))
        weights = F.softmax(q @ k.transpose(-2, -1) / math.sqrt(self.head_dim), dim=-1)
        return self.o((weights @ v).transpose(1, 2).contiguous().view(x.shape))


class Torchs(nn.Module):
    """nn.MultiheadAttention, with or without weights."""

    def __init__(self, dim: int, heads: int, weights: bool) -> None:
        super().__init__()
        self.inner, self.weights = nn.MultiheadAttention(dim, heads, batch_first=True), weights

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, x, x, need_weights=self.weights)[0]


def same_weights(layer: mh.MultiHeadAttention, kind: type[Plain] = Plain) -> Plain:
    plain = kind(layer.embed_dim, layer.num_heads, layer.kv_heads)
    pairs = ((plain.q, layer.query), (plain.k, layer.key), (plain.v, layer.value), (plain.o, layer.out))
    for mine, theirs in pairs:
        mine.load_state_dict(theirs.state_dict())
    return plain.to(layer.query.weight.dtype)


def interleave(calls: Mapping[str, Callable[[], object]], seconds: float, least: int = 9, most: int = 400) -> dict[str, float]:
    """Median seconds of each, measured in turn; every round begins with another one."""
    for call in calls.values():
        call()
        call()
    times: dict[str, list[float]] = {name: [] for name in calls}
    names, begin, turn = list(calls), time.perf_counter(), 0
    while turn < least or (turn < most and time.perf_counter() - begin < seconds):
        for i in range(len(names)):
            name = names[(turn + i) % len(names)]
            start = time.perf_counter()
            calls[name]()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            times[name].append(time.perf_counter() - start)
        turn += 1
    return {name: statistics.median(t) for name, t in times.items()}


def layers(seconds: float, device: str = "cpu") -> list[dict[str, object]]:
    """Forward and training step: B4 H8 d512 on a CPU, H16 d2048 with 16,384 tokens on a GPU."""
    rows: list[dict[str, object]] = []
    dim, heads = (DIM, HEADS) if device == "cpu" else (2048, 16)
    shapes = [(BATCH, tokens) for tokens in LENGTHS] if device == "cpu" else [(32, 512), (8, 2048), (2, 8192)]
    for name, dtype in DTYPES.items() if device == "cpu" else [("bf16", torch.bfloat16)]:
        for batch, tokens in shapes:
            made = {"device": device, "dtype": dtype}
            ours = mh.MultiHeadAttention(dim, heads, **made)
            pair: dict[str, nn.Module] = {"plain": same_weights(ours).to(device), "ours": ours}
            others: dict[str, nn.Module] = {}
            if tokens <= 2048:
                others = {
                    "by hand": ByHand(dim, heads),
                    "nn.MHA": Torchs(dim, heads, False),
                    "nn.MHA weights": Torchs(dim, heads, True),
                }
            x = torch.randn(batch, tokens, dim, **made)

            def forward(m: nn.Module, x: Tensor = x) -> None:
                with torch.no_grad():
                    m.eval()(x)

            def step(m: nn.Module, x: Tensor = x) -> None:
                m.train()(x).sum().backward()
                m.zero_grad()

            for kind, run in (("forward", forward), ("step", step)):
                times = interleave({n: lambda m=m, run=run: run(m) for n, m in pair.items()}, seconds, 21)
                ratios = {n: t / times["plain"] for n, t in times.items()}
                for n, m in others.items():
                    m.to(**made)
                    two = {"plain": pair["plain"], n: m}
                    two = interleave({n: lambda m=m, run=run: run(m) for n, m in two.items()}, seconds / 4, 5)
                    ratios[n] = two[n] / two["plain"]
                rows.append(
                    {"dtype": name, "batch": batch, "tokens": tokens, "kind": kind, "plain_ms": times["plain"] * 1e3, **ratios}
                )
                print(rows[-1], flush=True)
    return rows


def decoding(steps: int = 200, builds: int = 5) -> list[dict[str, object]]:
    """One token at a time over a long cache, 8 query heads; the median of several builds, since where weights lie in memory
    changes a step by as much as 5 %."""
    rows: list[dict[str, object]] = []
    for name, dtype in DTYPES.items():
        for length in (4096, 16384):
            for kv_heads in (8, 2, 1):
                found = [decode(dtype, length, kv_heads, steps) for _ in range(builds)]
                plain = statistics.median(times["plain"] for times in found)
                ratio = statistics.median(times["ours"] / times["plain"] for times in found)
                rows.append({"dtype": name, "length": length, "kv_heads": kv_heads, "plain_ms": plain * 1e3, "ours": ratio})
                print(rows[-1], flush=True)
    return rows


def decode(dtype: torch.dtype, length: int, kv_heads: int, steps: int) -> dict[str, float]:
    """Median seconds of a step, of one build."""
    ours = mh.MultiHeadAttention(DIM, HEADS, kv_heads=kv_heads, mask=mh.Causal()).to(dtype).eval()
    plain = same_weights(ours, PlainDecoding)
    size = length + 2 * steps + 10
    k_all, v_all = torch.randn(2, 1, kv_heads, size, DIM // HEADS, dtype=dtype)
    cache = ours.new_cache(1, size)
    with torch.no_grad():
        cache.append(k_all[:, :, :length], v_all[:, :, :length])
        x, at = torch.randn(1, 1, DIM, dtype=dtype), iter(range(length, size))
        return interleave(
            {"plain": lambda: plain(x, k_all, v_all, next(at)), "ours": lambda: ours(x, cache=cache)}, 1e9, steps, steps
        )


def overhead() -> dict[str, float]:
    """Microseconds that a call of the layer costs over the plain module, on tensors too small to matter."""
    found: dict[str, float] = {}
    cases = {"layer(x)": {}, "mask=Causal()": {"mask": mh.Causal()}}
    for name, options in cases.items():
        ours, x = mh.MultiHeadAttention(16, 2, **options), torch.randn(1, 4, 16)
        plain = same_weights(ours)
        for grad in (False, True):
            with torch.set_grad_enabled(grad):
                times = interleave({"plain": lambda: plain(x), "ours": lambda: ours(x)}, 60, 4000, 4000)
            found[f"{name}{', grad' if grad else ''}"] = (times["ours"] - times["plain"]) * 1e6
    return found


def python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip()


def imports(runs: int = 15) -> float:
    """Milliseconds of `import multihead` after `import torch`, in fresh processes."""
    code = "import torch, time; t = time.perf_counter(); import multihead; print(time.perf_counter() - t)"
    return statistics.median(float(python(code)) for _ in range(runs)) * 1e3


MEMORY = """
import sys; sys.path.insert(0, {here!r})
import torch
from layer import Plain, mh, DIM, HEADS, BATCH
m = Plain() if {name!r} == "plain" else mh.MultiHeadAttention(DIM, HEADS)
def run(tokens):
    y = m(torch.randn(BATCH, tokens, DIM))
    if {grad}: y.sum().backward()
with torch.set_grad_enabled({grad}):
    run(8)
    open("/proc/self/clear_refs", "w").write("5")
    read = lambda key: int(next(l for l in open("/proc/self/status") if l.startswith(key)).split()[1])
    before = read("VmRSS")
    run(4096)
    print(read("VmHWM") - before)
"""


def memory(runs: int = 5) -> list[dict[str, object]]:
    """Peak resident memory of a forward and of a step at S 4096, over the plain module's."""
    rows: list[dict[str, object]] = []
    for grad in (False, True):
        kib = {
            name: statistics.median(
                int(python(MEMORY.format(here=str(Path(__file__).parent), name=name, grad=grad))) for _ in range(runs)
            )
            for name in ("plain", "ours")
        }
        rows.append(
            {
                "kind": "step" if grad else "forward",
                "plain_mib": kib["plain"] / 1024,
                "ours": kib["ours"] / kib["plain"],
            }
        )
        print(rows[-1], flush=True)
    return rows


def summary(rows: list[dict[str, object]]) -> str:
    """The README's table."""
    lines = ["| | forward fp32 | step fp32 | forward bf16 | step bf16 |", "|---|---|---|---|---|"]
    for name in ("ours", "nn.MHA", "nn.MHA weights", "by hand"):
        cells = []
        for dtype in DTYPES:
            for kind in ("forward", "step"):
                found = {r["tokens"]: r[name] for r in rows if r["dtype"] == dtype and r["kind"] == kind and name in r}
                cells.append(" · ".join(f"{found[t]:.2f}" for t in (128, 512, 2048)))
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def table(rows: list[dict[str, object]]) -> str:
    columns = list(dict.fromkeys(c for row in rows for c in row))
    cell = lambda v: "" if v is None else f"{v:.3f}" if isinstance(v, float) else str(v)  # noqa: E731
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return "\n".join(lines + ["| " + " | ".join(cell(row.get(c)) for c in columns) + " |" for row in rows])


def processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    name = next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.processor())
    flags = next((line for line in lines if line.startswith("flags")), "")
    extras = [f for f in ("avx512f", "avx512_bf16", "amx_bf16") if f" {f}" in flags]
    return f"{name} ({', '.join(extras) or 'no AVX-512'})"


def report(found: dict[str, object]) -> str:
    over = "\n".join(f"- `{name}`: {us:.1f} µs" for name, us in found["overhead_us"].items())  # type: ignore[attr-defined]
    return f"""# The layer, measured

`python benchmarks/layer.py` on {found["machine"]}; ratios of medians, the plain module (four Linears over SDPA) = 1.

## Forward and training step, B {BATCH} H {HEADS} d {DIM}

{table(found["layers"])}

## Decoding a token through the layer's cache, 8 query heads, over a preallocated cache with groups folded

{table(found["decoding"])}

## Peak memory at S 4096, fp32

{table(found["memory"])}

## Python's own cost of a call, over the plain module

{over}

`import multihead` after `import torch`: {found["import_ms"]:.1f} ms
"""  # type: ignore[arg-type]


def plot(rows: list[dict[str, object]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 4, figsize=(15, 3.6), sharey=True, layout="constrained")
    for ax, (dtype, kind) in zip(axes, ((d, k) for d in DTYPES for k in ("forward", "step")), strict=True):
        part = [r for r in rows if r["dtype"] == dtype and r["kind"] == kind]
        for name in ("ours", "by hand", "nn.MHA", "nn.MHA weights"):
            points = [(r["tokens"], r[name]) for r in part if name in r]
            ax.plot(*zip(*points, strict=True), marker="o", ms=4, lw=2.4 if name == "ours" else 1.3, label=name)
        ax.axhline(1, color="gray", lw=1, ls=":")
        ax.set(title=f"{dtype}, {kind}", xscale="log", xlabel="tokens")
        ax.set_xticks([128, 512, 2048], ["128", "512", "2048"])
        ax.minorticks_off()
    axes[0].set_ylabel("time / plain module")
    axes[0].legend(frameon=False)
    figure.savefig(RESULTS / "layer.png", dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=4.0, help="time for each pair")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    asked = parser.parse_args()
    torch.manual_seed(0)
    RESULTS.mkdir(exist_ok=True)
    if asked.device == "cuda":
        rows = layers(asked.seconds, "cuda")
        where = f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
        text = f"# The layer on a GPU, measured\n\n`python benchmarks/layer.py --device cuda` on {where}; H 16 d 2048\n\n{table(rows)}\n"
        (RESULTS / "layer-cuda.md").write_text(text)
        print(text)
        return
    found: dict[str, object] = {
        "machine": f"{processor()}, {torch.get_num_threads()} threads, torch {torch.__version__}",
        "import_ms": imports(),
        "overhead_us": overhead(),
        "memory": memory(),
        "decoding": decoding(),
        "layers": layers(asked.seconds),
    }
    (RESULTS / "layer.json").write_text(json.dumps(found, indent=1) + "\n")
    (RESULTS / "layer.md").write_text(report(found))
    plot(found["layers"])  # type: ignore[arg-type]
    print(report(found))
    print(summary(found["layers"]))  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
