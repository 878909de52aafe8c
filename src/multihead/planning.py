"""`multihead plan`: the plan of a call that is described, not made."""

from __future__ import annotations

import argparse
from typing import Any

import torch

from .kernels.spec import Spec
from .masks import parse
from .plan import KERNELS, explain

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}


def add_to(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    sizes = "batch,heads,q_len,head_dim"
    parser.add_argument("--q", required=True, metavar=sizes, help="shape of the queries, as in 2,16,8192,128")
    parser.add_argument(
        "--kv", metavar="kv_heads,kv_len[,v_dim]", help="of keys and values, where they differ from the queries"
    )
    parser.add_argument("--device", default="cpu", help="cpu or cuda; the device need not be there (default: cpu)")
    parser.add_argument("--dtype", choices=DTYPES, default="fp32", help="(default: fp32)")
    parser.add_argument("--mask", help='such as "causal & window(1024)", "lengths([90, 7])", "causal | prefix(16)"')
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--softcap", type=float)
    parser.add_argument("--lse", action="store_true", help="the log-sum-exp is wanted, too")
    parser.add_argument("--kernel", default="auto", choices=("auto", *KERNELS), help="ask for one, and learn why not")


def show(asked: argparse.Namespace) -> str:
    """The plan of what the options say, printed."""
    B, H, T, D = _sizes("--q", asked.q, "batch,heads,q_len,head_dim", 4)
    G, S, E = H, T, D
    if asked.kv is not None:
        G, S, E = (*_sizes("--kv", asked.kv, "kv_heads,kv_len[,v_dim]", 2, 3), D)[:3]
    made: dict[str, Any] = {"dtype": DTYPES[asked.dtype], "device": "meta"}
    q, k, v = (torch.empty(shape, **made) for shape in ((B, H, T, D), (B, G, S, D), (B, G, S, E)))
    mask = None if asked.mask is None else parse(asked.mask)
    spec = Spec(q, k, v, mask, dropout=asked.dropout, softcap=asked.softcap, want_lse=asked.lse)
    spec.device = _device(asked.device)
    return str(explain(spec, asked.kernel))


def _sizes(option: str, text: str, form: str, *counts: int) -> tuple[int, ...]:
    try:
        found = tuple(int(n) for n in text.split(","))
    except ValueError:
        found = ()
    if len(found) not in counts or min(found) < 1:
        raise ValueError(f"{option} must be whole numbers ≥ 1, {form}; it is {text!r}")
    return found


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise ValueError(f"--device must be cpu or cuda; it is {name!r}")
    return device
