"""How a module is called: what its parameters are for, by their names and by trying, and where its output lies."""

from __future__ import annotations

import functools
import inspect
import itertools
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from . import AdoptionError
from .affine import Affine
from .hints import Hints
from .turning import FORMS, Form, angles

NAMES = {
    "query": "query queries q x hidden_states hidden_state hidden input inputs input_tensor src tgt h xq emb embeddings "
    "query_states tokens target features feats sequence seq inp tensor data",
    "key": "key keys k xk key_states",
    "value": "value values v xv value_states",
    "memory": "key_value_states encoder_hidden_states encoder_output encoder_outputs enc_output enc_out memory context kv "
    "cond y encoder_states enc",
    "mask": "mask attn_mask attention_mask src_mask tgt_mask causal_mask key_padding_mask padding_mask pad_mask context_mask "
    "encoder_attention_mask memory_mask valid_lens valid_len valid_length valid_lengths lengths lens seq_lens",
    "angles": "position_embeddings rotary_pos_emb freqs_cis rope freqs rotary_emb rotary cos_sin position_embedding",
    "bias": "position_bias attn_bias rel_pos_bias relative_position_bias bias",
    "cache": "past_key_values past_key_value layer_past kv_cache cache past_kv",
    "weights": "output_attentions need_weights return_attention return_weights return_attn return_attention_weights "
    "return_attn_weights need_attn",
    "causal": "is_causal causal",
}
ROLE = {name: role for role, names in NAMES.items() for name in names.split()}
SIDE: dict[str, Callable[[int], Any]] = {  # arguments that often change nothing, and values to see whether that is so
    "position_ids": lambda tokens: 2 * torch.arange(tokens)[None] + 3,
    "cache_position": lambda tokens: torch.arange(tokens) + 1,
    "use_cache": lambda tokens: True,
    "output_attentions": lambda tokens: False,
    "output_hidden_states": lambda tokens: False,
    "return_dict": lambda tokens: True,
    "layer_idx": lambda tokens: 1,
    "start_pos": lambda tokens: 3,
    "num_items_in_batch": lambda tokens: 2,
}


@dataclass(frozen=True)
class Call:
    """How a module is called.

    parameters   the parameters of its forward, in order, with their defaults
    roles        what each is for: query, key, value, memory, mask, angles, bias, cache, weights, causal
    open         whether it takes any keyword (**kwargs)
    fed          the roles that the proof feeds with tensors
    dims         features of each of these
    batch_first  [batch, tokens, dim] instead of [tokens, batch, dim]
    form         how rotations are handed over, if they are
    out          which leaf of the result is the output
    """

    parameters: dict[str, Any]
    roles: dict[str, str]
    open: bool
    fed: tuple[str, ...] = ()
    dims: tuple[int, ...] = ()
    batch_first: bool = True
    form: Form | None = None
    turned: int = 0
    out: int = 0

    @functools.cached_property
    def by_role(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for name, role in self.roles.items():
            found.setdefault(role, []).append(name)
        return found

    def named(self, role: str) -> list[str]:
        return self.by_role.get(role, [])

    def takes(self, role: str) -> bool:
        return bool(self.named(role))


def sources(given: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value of tensors by role: a memory is both, and what is not there is what stands before it."""
    query = given["query"]
    key = given.get("key", given.get("memory", query))
    return query, key, given.get("value", given.get("memory", key))


class Driver:
    """Runs an exact copy of a module as `call` says; tensors are [batch, tokens, dim] whatever the module wants."""

    def __init__(self, module: nn.Module, call: Call) -> None:
        self.module, self.call = module, call

    def run(self, given: dict[str, Tensor], extra: dict[str, Any] | None = None, grad: bool = False) -> Any:
        """The raw result, for tensors by role and further arguments by parameter name."""
        call, arguments = self.call, dict[str, Any]()
        for role, x in given.items():
            arguments[call.named(role)[0]] = x if call.batch_first else x.transpose(0, 1)
        tokens = given["query"].shape[1]
        if call.form is not None:
            arguments[call.named("angles")[0]] = call.form.make(*angles(call.turned, torch.arange(tokens)))
        for name, default in call.parameters.items():
            if default is inspect.Parameter.empty and name not in arguments:
                arguments[name] = None
        with torch.set_grad_enabled(grad), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return self.module(**{**arguments, **(extra or {})})

    def __call__(self, given: dict[str, Tensor], extra: dict[str, Any] | None = None, grad: bool = False) -> Tensor:
        """The output, [batch, tokens, dim]."""
        out = pytree.tree_leaves(self.run(given, extra, grad))[self.call.out]
        return out if self.call.batch_first else out.transpose(0, 1)

    def inputs(self, batch: int, q_len: int, kv_len: int | None = None, seed: int = 0, size: float = 1.0) -> dict[str, Tensor]:
        """Random tensors by role; of one length unless kv_len is given, and one and the same where the module allows it."""
        random = torch.Generator().manual_seed(seed)
        found: dict[str, Tensor] = {}
        for role, dim in zip(self.call.fed, self.call.dims, strict=True):
            tokens = q_len if role == "query" or kv_len is None else kv_len
            found[role] = torch.randn(batch, tokens, dim, generator=random, dtype=torch.float64) * size
        return found


def drivers(module: nn.Module, affines: Sequence[Affine], hints: Hints) -> list[Driver]:
    """The ways in which the copy can be called, likeliest first. Raises where there is none."""
    base, errors = signature(module), list[str]()
    found = [driver for call in forms(base, affines, hints) if (driver := tried(module, call, affines, errors))]
    if not found:
        raise AdoptionError(
            "no way to call it was found; "
            + (f"the last try said: {errors[-1]}" if errors else f"its forward takes ({', '.join(base.parameters)})")
        )
    for i, driver in enumerate(found):
        across, along = mixes(driver, 0), mixes(driver, 1)
        if across and along:
            raise AdoptionError("its output for one batch entry depends on the others")
        if across:
            found[i] = Driver(module, replace(driver.call, batch_first=False))
    return [d for d in found if mixes(d, 1)]


def signature(module: nn.Module) -> Call:
    """The parameters of its forward, and what their names say they are for."""
    try:
        parameters = inspect.signature(module.forward).parameters
    except (ValueError, TypeError) as error:
        raise AdoptionError(f"its forward has no signature to read: {error}") from error
    if not parameters or next(iter(parameters.values())).kind is inspect.Parameter.VAR_POSITIONAL:
        raise AdoptionError("its forward does not name what it takes")
    plain = {n: p.default for n, p in parameters.items() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    roles = {n: ROLE[n.lower()] for n in plain if n.lower() in ROLE}
    order = iter(("query", "key", "value"))
    for name, default in plain.items():  # what has no known name is taken by its place
        if default is inspect.Parameter.empty and name not in roles:
            roles[name] = next((role for role in order if role not in roles.values()), "unknown")
    if "query" not in roles.values():
        roles[next(iter(plain))] = "query"
    return Call(plain, roles, any(p.kind is p.VAR_KEYWORD for p in parameters.values()))


def forms(base: Call, affines: Sequence[Affine], hints: Hints) -> Iterator[Call]:
    """What to feed, of which sizes, with which rotations."""
    sizes = [n for n, _ in Counter(a.in_features for a in affines).most_common(3)]
    fed = [("query", "key", "value")] if base.takes("value") else [("query",)]
    fed += [("query", "memory")] if base.takes("memory") else []
    fed += [("query", "key")] if base.takes("key") and not base.takes("value") else []
    turned: list[tuple[Form | None, int]] = [(None, 0)]
    if base.takes("angles"):
        widths = [*hints.head_dims, *(a.out_features // h for a in affines for h in hints.heads)]
        found = [(form, d) for form in FORMS for d in dict.fromkeys(widths) if d and d % 2 == 0]
        optional = base.parameters[base.named("angles")[0]] is None
        turned = [*(turned if optional else []), *found]
    for roles, (form, width) in itertools.product(fed, turned):
        for dims in sorted(itertools.product(sizes, repeat=len(roles)), key=lambda dims: len(set(dims))):
            yield replace(base, fed=roles, dims=dims, form=form, turned=width)


def tried(
    module: nn.Module,
    call: Call,
    affines: Sequence[Affine],
    errors: list[str],
    kind: Callable[[nn.Module, Call], Driver] = Driver,
    finite: bool = True,
) -> Driver | None:
    """The call with its output found in the result; None, and why in errors, where it cannot be made."""
    driver = kind(module, call)
    try:
        leaves = pytree.tree_leaves(driver.run(driver.inputs(2, 3)))
    except Exception as error:
        errors.append(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
        return None
    widths = {a.out_features for a in affines}
    fitting = [i for i, x in enumerate(leaves) if isinstance(x, Tensor) and x.ndim == 3 and x.shape[:2] == (2, 3)]
    if not fitting:
        errors.append(
            f"it returns {[tuple(x.shape) if isinstance(x, Tensor) else x for x in leaves]} for {call.fed} of [2, 3, …]"
        )
        return None
    out = next((i for i in fitting if leaves[i].shape[2] in widths), fitting[0])
    if finite and not bool(leaves[out].isfinite().all()):
        errors.append("its output is not finite")
        return None
    return kind(module, replace(call, out=out))


def mixes(driver: Driver, axis: int) -> bool:
    """Whether what stands first along the axis has influence on what stands second."""
    given = driver.inputs(2, 3)
    changed = {role: x.clone() for role, x in given.items()}
    for x in changed.values():
        x.select(axis, 0).mul_(-1.5)
    before, after = driver(given).select(axis, 1), driver(changed).select(axis, 1)
    return not torch.allclose(before, after, rtol=1e-6, atol=1e-9, equal_nan=True)
