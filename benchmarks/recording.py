"""What it costs to see: `python benchmarks/recording.py [--device cuda]` writes benchmarks/results/recording[-cuda].{json,md,png}.

One run of a fused attention, and the same recorded and asked for entropy, received, distance, strongest and map together; eager
attention, which is what people fall back to, with the same statistics; what record() costs where it looks on and keeps nothing; a
training step. Contenders run A, B, A, B, … in one process; figures are ratios of medians over the unrecorded run = 1.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
os.environ["HF_HUB_OFFLINE"] = "1"
import multihead as mh
from layer import DTYPES, RESULTS, interleave, processor, table

ALL = ("entropy", "received", "distance", "strongest", "map")
MOST = {"cpu": 4096, "cuda": 16_384}  # the longest text for which eager attention is run


def eager(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> dict[str, Tensor]:
    """The same answers from a matrix of weights, as people compute them."""
    T = q.shape[2]
    scores = (q @ k.mT * q.shape[3] ** -0.5).float()
    if causal:
        scores = scores.masked_fill(torch.ones(T, T, dtype=torch.bool, device=q.device).triu(1), float("-inf"))
    w = scores.softmax(-1)
    at = torch.arange(T, device=q.device)
    size = -(-T // 256)
    pooled = F.pad(w, (0, -T % size, 0, -T % size)).unflatten(3, (-1, size)).unflatten(2, (-1, size))
    strongest = w.max(-1)
    return {
        "out": w.to(v.dtype) @ v, "entropy": -torch.xlogy(w, w).sum(-1), "received": w.sum(2),
        "distance": (w * (at[:, None] - at).abs()).sum(-1), "strongest": strongest.values, "map": pooled.amax((3, 5)),
    }  # fmt: skip


def calls(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> dict[str, Callable[[], object]]:
    def plain() -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    def ask(*wanted: str) -> None:
        with mh.record() as seen:
            plain()
        seen[0].compute(*wanted, progress=False)

    made: dict[str, Callable[[], object]] = {
        "forward": plain,
        "kept": lambda: recorded(plain),
        "rows": lambda: ask("entropy", "distance", "strongest"),
        "all five": lambda: ask(*ALL),
    }
    if q.shape[2] <= MOST[q.device.type]:
        made["eager"] = lambda: eager(q, k, v, causal)
    return {name: synchronised(call) if q.is_cuda else call for name, call in made.items()}


def recorded(call: Callable[[], object]) -> None:
    with mh.record():
        call()


def synchronised(call: Callable[[], object]) -> Callable[[], object]:
    def run() -> None:
        call()
        torch.cuda.synchronize()

    return run


def statistics(device: str, seconds: float) -> list[dict[str, object]]:
    """The model's own forward and all statistics, over the forward alone."""
    cpu = device == "cpu"
    lengths = (1024, 2048, 4096, 8192) if cpu else (8192, 16_384, 32_768, 65_536, 131_072)
    rows: list[dict[str, object]] = []
    for name in ("fp32", "bf16") if cpu else ("bf16",):
        for length in lengths:
            for head_dim in (64,) if cpu else (64, 128):
                for causal in (False, True):
                    heads = 8 if cpu else 16
                    q, k, v = torch.randn(3, 1, heads, length, head_dim, device=device, dtype=DTYPES[name])
                    with torch.no_grad():
                        times = interleave(calls(q, k, v, causal), seconds, 11 if length <= 2048 or not cpu else 5)
                    row: dict[str, object] = {"dtype": name, "S": length, "H": heads, "D": head_dim, "causal": causal}
                    row["forward_ms"] = times["forward"] * 1e3
                    rows.append(row | {n: t / times["forward"] for n, t in times.items() if n != "forward"})
                    print(rows[-1], flush=True)
    return rows


def nothing(seconds: float) -> dict[str, float]:
    """record() that keeps nothing: around a BERT of 6 layers, 384 wide, B 8 S 256; and microseconds a torch call."""
    import transformers as tr

    tr.logging.set_verbosity_error()
    config = tr.BertConfig(num_hidden_layers=6, hidden_size=384, num_attention_heads=12, intermediate_size=1536)
    model, ids = tr.BertModel._from_config(config, attn_implementation="sdpa").eval(), torch.randint(0, 1000, (8, 256))
    watch = mh.record(where="no such place")

    def watched() -> None:
        with watch:
            model(ids)

    with torch.no_grad():
        times = interleave({"plain": lambda: model(ids), "watched": watched}, 4 * seconds, 25)
    x = torch.zeros(2)
    alone = min(_loop(lambda: torch.neg(x)) for _ in range(5))
    with mh.record():
        seen = min(_loop(lambda: torch.neg(x)) for _ in range(5))
    return {"bert": times["watched"] / times["plain"], "us_a_call": (seen - alone) * 1e6}


def _loop(call: Callable[[], object], n: int = 20_000) -> float:
    begun = time.perf_counter()
    for _ in range(n):
        call()
    return (time.perf_counter() - begun) / n


def training(device: str, seconds: float) -> list[dict[str, object]]:
    """keep="statistics" at every step and at every tenth, over the step itself."""
    dim, length, heads = (512, 512, 8) if device == "cpu" else (2048, 2048, 16)
    layer = mh.MultiHeadAttention(dim, heads, mask=mh.Causal()).to(device, torch.float32 if device == "cpu" else torch.bfloat16)
    x = torch.randn(4, length, dim, device=device, dtype=layer.query.weight.dtype)

    def step() -> None:
        layer(x).square().mean().backward()
        layer.zero_grad()

    def watched(every: int) -> Callable[[], None]:
        def run() -> None:
            recorder = mh.record(keep="statistics", every=every)
            for _ in range(10):
                with recorder:
                    step()

        return run

    def plain() -> None:
        for _ in range(10):
            step()

    made: dict[str, Callable[[], object]] = {"step": plain, "every step": watched(1), "every tenth": watched(10)}
    if device == "cuda":
        made = {name: synchronised(call) for name, call in made.items()}
    times = interleave(made, 3 * seconds, 9)
    return [{"E": dim, "S": length, **{n: t / times["step"] for n, t in times.items() if n != "step"}}]


PEAK = """
import torch, multihead as mh
q, k, v = torch.randn(3, 1, {heads}, 16384, {dim}, device="{device}", dtype=torch.bfloat16 if "{device}" == "cuda" else torch.float32)
def run(n):
    with torch.no_grad(), mh.record() as seen:
        out = torch.nn.functional.scaled_dot_product_attention(q[:, :, :n], k[:, :, :n], v[:, :, :n], is_causal={causal})
    return out, seen, seen[0].compute("entropy", "received", "distance", "strongest", "map", progress=False)
run(256)
if "{device}" == "cuda":
    torch.cuda.reset_peak_memory_stats(); before = torch.cuda.memory_allocated()
    run(16384); peak = torch.cuda.max_memory_allocated() - before
else:
    read = lambda key: int(next(l for l in open("/proc/self/status") if l.startswith(key)).split()[1]) * 1024
    open("/proc/self/clear_refs", "w").write("5"); before = read("VmRSS")
    run(16384); peak = read("VmHWM") - before
print((peak - v.nbytes) / 2**20)
"""


def memory(device: str) -> list[dict[str, object]]:
    """Peak at S 16,384 beyond q, k, v and out, what is kept included, in a fresh process."""
    rows: list[dict[str, object]] = []
    for causal in (False, True):
        code = PEAK.format(heads=8 if device == "cpu" else 16, dim=64 if device == "cpu" else 128, device=device, causal=causal)
        said = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
        rows.append({"S": 16_384, "causal": causal, "MiB": float(said)})
        print(rows[-1], flush=True)
    return rows


def report(found: dict[str, object], command: str) -> str:
    parts = [
        f"# Seeing, measured\n\n`{command}` on {found['machine']}; ratios of medians, the unrecorded run = 1.",
        f"## Forward and statistics\n\n{table(found['statistics'])}",  # type: ignore[arg-type]
        "`kept`: recorded, nothing asked; `rows`: entropy, distance and strongest; `all five`: received and map as well; `eager`: the same "
        "five from a matrix of weights.",
        f"## Peak memory beyond q, k, v and out\n\n{table(found['memory'])}",  # type: ignore[arg-type]
        f'## A training loop with keep="statistics"\n\n{table(found["training"])}',  # type: ignore[arg-type]
    ]
    if "nothing" in found:
        nothing_ = found["nothing"]
        parts.append(
            f"## Nothing matching\n\nBERT, 6 layers, 384 wide, B 8 S 256: {nothing_['bert']:.3f}; "  # type: ignore[index]
            f"a torch call: {nothing_['us_a_call']:.1f} µs more"  # type: ignore[index]
        )
    return "\n\n".join(parts) + "\n"


def plot(rows: list[dict[str, object]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    kinds = list(dict.fromkeys((r["dtype"], r["D"], r["causal"]) for r in rows))
    figure, axes = plt.subplots(1, len(kinds), figsize=(3.6 * len(kinds), 3.4), sharey=True, layout="constrained")
    for ax, kind in zip(axes, kinds, strict=True):
        part = [r for r in rows if (r["dtype"], r["D"], r["causal"]) == kind]
        for name in ("all five", "rows", "eager"):
            points = [(r["S"], r[name]) for r in part if name in r]
            ax.plot(*zip(*points, strict=True), marker="o", ms=4, label=name)
        ax.axhline(1, color="gray", lw=1, ls=":")
        ax.set(title=f"{kind[0]}, D {kind[1]}{', causal' if kind[2] else ''}", xscale="log", xlabel="tokens")
    axes[0].set(ylabel="time / forward", yscale="log")
    axes[0].legend(frameon=False)
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=4.0, help="time for each pair")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    asked = parser.parse_args()
    torch.manual_seed(0)
    RESULTS.mkdir(exist_ok=True)
    cpu = asked.device == "cpu"
    where = f"{processor()}, {torch.get_num_threads()} threads" if cpu else torch.cuda.get_device_name()
    found: dict[str, object] = {
        "machine": f"{where}, torch {torch.__version__}",
        "memory": memory(asked.device),
        "training": training(asked.device, asked.seconds),
        "statistics": statistics(asked.device, asked.seconds),
    }
    if cpu:
        found["nothing"] = nothing(asked.seconds)
    name = "recording" if cpu else "recording-cuda"
    text = report(found, "python benchmarks/recording.py" + ("" if cpu else " --device cuda"))
    (RESULTS / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n")
    (RESULTS / f"{name}.md").write_text(text)
    plot(found["statistics"], RESULTS / f"{name}.png")  # type: ignore[arg-type]
    print(text)


if __name__ == "__main__":
    main()
