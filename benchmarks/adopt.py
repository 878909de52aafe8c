"""What adoption costs and saves: `python benchmarks/adopt.py` writes benchmarks/results/adopt.{json,md}.

Hugging Face's BERT and Llama on their own `sdpa` attention against the same models adopted, and through the registry; the notes'
layers against themselves adopted. Contenders run A, B, A, B, … in one process; figures are ratios of medians.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import sys
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]
os.environ["HF_HUB_OFFLINE"] = "1"
from tests.adopting import zoo  # noqa: E402

import multihead as mh  # noqa: E402
from layer import RESULTS, interleave, processor, table  # noqa: E402


def families() -> dict[str, torch.nn.Module]:
    import transformers as tr

    tr.logging.set_verbosity_error()
    bert = tr.BertConfig(num_hidden_layers=4)  # its own sizes: 768 wide, 12 heads
    llama = tr.LlamaConfig(  # SmolLM2-135M's sizes
        num_hidden_layers=6, hidden_size=576, num_attention_heads=9, num_key_value_heads=3, intermediate_size=1536, vocab_size=4096
    )  # fmt: skip
    made = {"BERT": (tr.BertModel, bert), "Llama": (tr.LlamaModel, llama)}
    return {name: kind._from_config(config, attn_implementation="sdpa").eval() for name, (kind, config) in made.items()}


def models(seconds: float) -> list[dict[str, object]]:
    """Forward of two texts, the second padded at its end, and a training step."""
    rows: list[dict[str, object]] = []
    registration = mh.register_with_transformers()
    for name, theirs in families().items():
        adopted = mh.adopt(copy.deepcopy(theirs))
        registered = registration.use(copy.deepcopy(theirs))
        for tokens, padded, kind in (
            (128, True, "forward"),
            (512, True, "forward"),
            (512, False, "forward"),
            (256, True, "step"),
        ):
            ids, mask = torch.randint(0, 4096, (2, tokens)), torch.ones(2, tokens, dtype=torch.long)
            if padded:
                mask[1, tokens * 3 // 4 :] = 0

            def run(model: torch.nn.Module, ids=ids, mask=mask, step=kind == "step") -> None:
                with torch.set_grad_enabled(step):
                    out = model(input_ids=ids, attention_mask=mask).last_hidden_state
                    if step:
                        out.square().mean().backward()
                        model.zero_grad()

            calls = {"sdpa": lambda: run(theirs), "adopted": lambda: run(adopted), "registry": lambda: run(registered)}
            times = interleave(calls, seconds, 15)
            row: dict[str, object] = {
                "model": name,
                "tokens": tokens,
                "padded": str(padded),
                "kind": kind,
                "sdpa_ms": times["sdpa"] * 1e3,
            }
            rows.append(row | {other: times[other] / times["sdpa"] for other in ("adopted", "registry")})
            print(rows[-1], flush=True)
    return rows


def writing(seconds: float, tokens: int = 32) -> list[dict[str, object]]:
    """Tokens written one by one, through transformers' dynamic cache."""
    import transformers as tr

    config = tr.LlamaConfig(
        num_hidden_layers=6, hidden_size=576, num_attention_heads=9, num_key_value_heads=3, intermediate_size=1536, vocab_size=4096
    )  # fmt: skip
    theirs = tr.LlamaForCausalLM._from_config(config, attn_implementation="sdpa").eval()
    theirs.generation_config.eos_token_id = None
    adopted, registered = mh.adopt(copy.deepcopy(theirs)), mh.register_with_transformers().use(copy.deepcopy(theirs))
    ids = torch.randint(0, 4096, (1, 512))

    def run(model: torch.nn.Module) -> None:
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False, pad_token_id=0)

    times = interleave(
        {"sdpa": lambda: run(theirs), "adopted": lambda: run(adopted), "registry": lambda: run(registered)}, seconds, 9
    )
    row: dict[str, object] = {"model": "Llama", "prompt": 512, "written": tokens, "sdpa_ms": times["sdpa"] * 1e3}
    row |= {other: times[other] / times["sdpa"] for other in ("adopted", "registry")}
    print(row, flush=True)
    return [row]


def notes(seconds: float, dim: int = 512, heads: int = 8) -> list[dict[str, object]]:
    """Each note's layer at S 2048, without a mask, and with the causal mask in its own convention."""
    rows: list[dict[str, object]] = []
    for name in zoo.NOTES:
        options = {"000": (dim, heads), "001": (dim, heads), "003": (dim, dim, dim, dim, heads, 0.0), "004": (dim, heads, 0.0)}
        args = zoo.note002_args(dim=dim, n_heads=heads, max_seq_len=2048, dropout=0.0)
        module = (zoo.Note002(args) if name == "002" else zoo.NOTES[name](*options[name])).eval()
        layer = mh.from_module(module).eval()
        for tokens in (512, 2048):
            x = torch.randn(4, tokens, dim)
            given = [x] if name == "001" else [x, x, x] + ([None] if name == "003" else [])
            for step in (False, True):

                def theirs(module=module, given=given, step=step) -> None:
                    with torch.set_grad_enabled(step):
                        out = module(*given)
                        if step:
                            out.sum().backward()

                def ours(layer=layer, x=x, step=step) -> None:
                    with torch.set_grad_enabled(step):
                        out = layer(x)
                        if step:
                            out.sum().backward()

                times = interleave({"note": theirs, "adopted": ours}, seconds, 7)
                row: dict[str, object] = {"note": name, "tokens": tokens, "kind": "step" if step else "forward"}
                rows.append(row | {"note_ms": times["note"] * 1e3, "adopted": times["adopted"] / times["note"]})
                print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=6.0, help="time for each comparison")
    seconds = parser.parse_args().seconds
    torch.manual_seed(0)
    import transformers

    machine = (
        f"{processor()}, {torch.get_num_threads()} threads, torch {torch.__version__}, transformers {transformers.__version__}"
    )
    found = {"machine": machine, "models": models(seconds), "writing": writing(4 * seconds), "notes": notes(seconds)}
    (RESULTS / "adopt.json").write_text(json.dumps(found, indent=1) + "\n")
    text = f"""# Adoption, measured

`python benchmarks/adopt.py` on {machine}; ratios of medians, fp32.

## Hugging Face's models over their own `sdpa` attention = 1 (BERT: 4 layers, 768 wide; Llama: 6 layers, 576 wide, 9 heads over 3)

{table(found["models"])}

## Writing through a dynamic cache

{table(found["writing"])}

## The notes' layers adopted, over themselves = 1, B 4 H 8 d 512

{table(found["notes"])}
"""
    (RESULTS / "adopt.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
