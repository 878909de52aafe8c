"""Implementations that others wrote, and ours from before the catalogue, each made from a file that can be changed."""

import contextlib
import importlib
import inspect
import itertools
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from multihead.adopting.conventions import patterns
from multihead.checking.calls import callers
from multihead.checking.case import Case
from multihead.checking.entry import check_module
from multihead.checking.source import Source

from .mutate import Mutant, mutants

SAME = 1e-6


@dataclass(frozen=True)
class Held:
    """A module in a file: names are the classes and functions that may be changed, build makes it from the file's namespace."""

    module: str
    names: frozenset[str]
    build: Callable[[types.ModuleType], nn.Module]

    def code(self) -> str:
        module = importlib.import_module(self.module)
        if self.module == "torch.nn.functional":  # the file as a whole cannot be run twice
            return inspect.getsource(getattr(module, *self.names))
        return inspect.getsource(module)

    def load(self, code: str, path: Path) -> types.ModuleType:
        """The file with this code, as a module in the same package."""
        path.write_text(code)
        package = self.module.rpartition(".")[0]
        found = types.ModuleType(f"{package}.{path.stem}" if package else path.stem)
        found.__file__, found.__package__ = str(path), package
        sys.modules[found.__name__] = found
        if self.module == "torch.nn.functional":
            found.__dict__.update({**vars(torch.nn.functional), **vars(found)})
        exec(compile(code, str(path), "exec"), found.__dict__)
        return found


def _transformers(name: str, config: str, build: Callable[..., nn.Module], names: set[str], **sizes: object) -> Held:
    def made(file: types.ModuleType) -> nn.Module:
        import transformers

        c = getattr(transformers, config)(**sizes)
        c._attn_implementation = "eager"
        return build(file, c)

    return Held(f"transformers.models.{name}.modeling_{name}", frozenset(names), made)


def _zoo(name: str, *more: str, build: Callable[[types.ModuleType], nn.Module] | None = None) -> Held:
    return Held("tests.adopting.zoo", frozenset({name, *more}), build or (lambda file: getattr(file, name)()))


def _x_transformers(file: types.ModuleType) -> nn.Module:
    from x_transformers.x_transformers import Attention

    layer = Attention(24, heads=4, dim_head=6)
    layer.attend = file.Attend(heads=4)
    return layer


def _torch(file: types.ModuleType) -> nn.Module:
    """nn.MultiheadAttention on the changed function, which computes in Python where weights are asked for."""

    class MultiheadAttention(nn.MultiheadAttention):
        def forward(self, query, key, value, attn_mask=None):
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
            out, weights = file.multi_head_attention_forward(
                query, key, value, self.embed_dim, self.num_heads, self.in_proj_weight, self.in_proj_bias, None, None, False,
                self.dropout, self.out_proj.weight, self.out_proj.bias, training=self.training, attn_mask=attn_mask,
            )  # fmt: skip
            return out.transpose(0, 1), weights

    return MultiheadAttention(24, 4, batch_first=True)


HELD = {
    "torch": Held("torch.nn.functional", frozenset({"multi_head_attention_forward"}), _torch),
    "BERT": _transformers(
        "bert", "BertConfig", lambda f, c: f.BertSelfAttention(c), {"eager_attention_forward", "BertSelfAttention"}, hidden_size=24,
        num_attention_heads=4,
    ),
    "GPT-2": _transformers(
        "gpt2", "GPT2Config", lambda f, c: f.GPT2Attention(c), {"eager_attention_forward", "GPT2Attention"}, n_embd=24, n_head=4,
    ),
    "Llama": _transformers(
        "llama", "LlamaConfig", lambda f, c: f.LlamaAttention(c, 0), {"eager_attention_forward", "LlamaAttention"}, hidden_size=24,
        num_attention_heads=4, num_key_value_heads=2, attention_dropout=0.1,
    ),
    "ViT": _transformers(
        "vit", "ViTConfig", lambda f, c: f.ViTAttention(c), {"eager_attention_forward", "ViTAttention"}, hidden_size=24,
        num_attention_heads=4,
    ),
    "OPT": _transformers(
        "opt", "OPTConfig", lambda f, c: f.OPTAttention(c, 0), {"eager_attention_forward", "OPTAttention"}, hidden_size=24,
        num_attention_heads=4,
    ),
    "x-transformers": Held("x_transformers.attend", frozenset({"Attend"}), _x_transformers),
    "note 000": _zoo("Note000"),
    "note 001": _zoo("Note001"),
    "note 002": _zoo("Note002", "note002_args"),
    "note 003": _zoo("Note003", "masked_softmax", "DotProductAttention"),
    "note 004": _zoo("Note004"),
    "minGPT": _zoo("NanoGPT", build=lambda file: file.NanoGPT(flash=False)),
    "timm": _zoo("Timm"),
    "lucidrains": _zoo("LucidViT"),
    "Meta's Llama": _zoo("MetaLlama"),
    "TransformerLens": _zoo("Bare"),
}  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """What became of a mutant: "named", "missed", "other" (another mistake was called certain), "raises",
    "same" (the output does not change), or "convention" (another reading of a mask argument, no less right)."""

    of: str
    mutant: Mutant
    kind: str
    found: tuple[str, ...]


def _outputs(module: nn.Module, state: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """What it gives for a call, and with masks of the usual kinds."""
    module.load_state_dict(state)
    with torch.no_grad():
        case = Case(module, Source(module))
        found = callers(case.moved, case.affines, case.hints, case.errors)
        if not found:
            return []
        given = found[0].inputs(2, 5, seed=1)
        made = [found[0](given)]
        for name in found[0].call.named("mask"):
            for _, allowed in patterns(2, 4, 5, 5):
                for argument in (allowed, allowed.long(), allowed.double(), torch.tensor([2, 4])):
                    with contextlib.suppress(Exception):
                        made.append(found[0](given, {name: argument}))
    return made


def _same(before: list[torch.Tensor], after: list[torch.Tensor]) -> bool:
    return len(before) == len(after) and all(
        a.shape == b.shape and torch.allclose(a, b, atol=SAME, equal_nan=True) for a, b in zip(before, after, strict=True)
    )


def outcomes(name: str, folder: Path, every: int = 1, first: int = 0) -> Iterator[Outcome]:
    """The mutants of one implementation, each checked; every nth from the first on."""
    held = HELD[name]
    code = held.code()
    plain = held.build(held.load(code, folder / f"held_{abs(hash(name)) % 10**6}.py"))
    state = plain.state_dict()
    before, known = _outputs(plain, state), {f.name for f in check_module(plain, timed=False).findings}
    for i, mutant in enumerate(itertools.islice(mutants(code, set(held.names)), first, None, every)):
        try:
            module = held.build(held.load(mutant.code, folder / f"held_{abs(hash(name)) % 10**6}_{first + every * i}.py"))
            after = _outputs(module, state)
        except Exception:
            yield Outcome(name, mutant, "raises", ())
            continue
        if _same(before, after):
            yield Outcome(name, mutant, "same", ())
            continue
        if mutant.mutation == "mask backwards" and _same(before[:1], after[:1]):
            yield Outcome(name, mutant, "convention", ())  # of a mask argument: nobody says which way is right
            continue
        findings = check_module(module, timed=False).findings
        found = tuple(f.name for f in findings if f.name not in known or f.name in mutant.expected)
        certain = {f.name for f in findings if f.certain and f.level == "wrong"} - known - mutant.expected
        kind = "named" if set(found) & mutant.expected else "other" if certain else "missed"
        if kind == "named" and certain - {"parameter_unused", "view_noncontiguous"}:
            kind = "other"
        if not after and kind != "named":
            kind = "raises"
        yield Outcome(name, mutant, kind, found)
