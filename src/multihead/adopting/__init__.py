"""Other projects' attention layers, read, proven and put to use. Its rooms are entered on the first call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from torch import nn

if TYPE_CHECKING:
    from ..layer import MultiHeadAttention
    from .huggingface import Registration

Model = TypeVar("Model", bound=nn.Module)


class AdoptionError(ValueError):
    """Why a module cannot become ours, in one sentence."""


def from_module(module: nn.Module) -> MultiHeadAttention:
    """A layer of ours that computes what another project's attention module computes, with its weights.

        layer = from_module(their_attention)
        print(layer.origin)   # what was found, which mask convention it has, and the proof

    The projections are found by numbers, not by class names, and the result is compared with the module on random inputs of
    several shapes, with and without masks; AdoptionError says what was tried where nothing agrees. Submodules and parameters
    that can be taken over whole are shared with the module (so that tied weights stay tied); parts of fused ones are copied.
    """
    from .reading import read

    return read(module).layer


def adopt(model: Model, example: Any = None) -> Model:
    """Replace every attention layer in a model by ours, each proven equal first; returns the model, changed in place.

        model = adopt(model, example={"input_ids": ids})
        print(model.adoption)     # what was replaced, what was not, and why

    example  inputs of the model – a tensor, a tuple of arguments or a dict of keywords; its results before and after are
             compared, and the model is left as it was if they differ beyond rounding
    Call signatures, dtype, device, tying, hooks and requires_grad stay; restore(model) takes it all back.
    """
    from .models import replace_all

    return replace_all(model, example)


def restore(model: Model) -> Model:
    """Undo adopt(): the modules that stood there come back, with whatever the weights have become since."""
    from .models import put_back

    return put_back(model)


def register_with_transformers(name: str = "multihead") -> Registration:
    """Make our attention known to transformers, so that its models run on it as they are.

        registration = multihead.register_with_transformers()
        model = registration.use(model)          # or from_pretrained(…, attn_implementation="multihead")
        print(registration.calls)                # models that bypass the registry never call: use() warns of them

    Masks come as transformers' own boolean ones (True may attend), since static caches take no other. Registering again
    gives the same counter.
    """
    from .huggingface import register

    return register(name)
