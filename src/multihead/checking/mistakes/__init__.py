"""The catalogue of mistakes."""

from .code import CODE
from .heads import HEADS
from .layers import LAYERS
from .masks import MASKS
from .mistake import Level, Mistake, Text
from .scores import SCORES

CATALOGUE = {m.name: m for m in (*HEADS, *SCORES, *MASKS, *LAYERS, *CODE)}
SEARCHED = tuple(m for m in CATALOGUE.values() if m.change is not None)

__all__ = ["CATALOGUE", "SEARCHED", "Level", "Mistake", "Text"]
