"""The rotary positions that a configuration asks for, where a module is handed its rotations by its model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

from torch import nn

from ..positions import Linear, Llama3, RoPE, Scaling, YaRN
from .hints import CONFIGS

READERS: dict[str, Callable[[dict[str, Any]], Scaling]] = {
    "linear": lambda c: Linear(c["factor"]),
    "llama3": lambda c: Llama3(
        c["factor"], c["original_max_position_embeddings"], c["low_freq_factor"], c["high_freq_factor"]
    ),
    "yarn": lambda c: YaRN(
        c["factor"], c["original_max_position_embeddings"], c.get("beta_fast") or 32.0, c.get("beta_slow") or 1.0,
        c.get("attention_factor"),
    ),
}  # fmt: skip


def configured(found: RoPE, module: nn.Module) -> tuple[RoPE, list[str]]:
    """The layer's positions with theta and scaling from the module's configuration, and what must be said about them."""
    numbers = _numbers(module)
    theta, kind = numbers.get("rope_theta", numbers.get("theta")), str(numbers.get("rope_type", numbers.get("type", "default")))
    said, notes = "it is handed its rotations; here the layer makes them", list[str]()
    if theta is None:
        theta, kind = found.theta, "default"
        notes.append(f"{said}, with theta 10,000, since no configuration says another")
    scaling: Scaling | None = READERS[kind](numbers) if kind in READERS else None
    if scaling is None and kind != "default":
        notes.append(f'{said}, without the scaling "{kind}", which is not known here')
    layout = "half" if found.layout == "half" else "interleaved"
    return RoPE(theta, dim=found.dim, layout=layout, scaling=scaling), notes


def _numbers(module: nn.Module) -> dict[str, Any]:
    """The part of a configuration that is about rotations."""
    for name in CONFIGS:
        config = getattr(module, name, None)
        for inner in ("rope_parameters", "rope_scaling"):
            given = getattr(config, inner, None)
            if isinstance(given, Mapping) and given:
                kind = cast("str | None", getattr(module, "layer_type", None))
                numbers = cast("dict[str, Any]", given)
                numbers = numbers.get(kind) or numbers if kind is not None else numbers
                return {"rope_theta": getattr(config, "rope_theta", None), **numbers}
        theta = getattr(config, "rope_theta", None)
        if theta is not None:
            return {"rope_theta": theta}
    return {}
