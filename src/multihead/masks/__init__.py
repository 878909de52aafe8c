"""What may attend to what: masks as values."""

from .algebra import And as And
from .algebra import Frame as Frame
from .algebra import Mask as Mask
from .algebra import Not as Not
from .algebra import Or as Or
from .algebra import evaluate as evaluate
from .kinds import Causal as Causal
from .kinds import Documents as Documents
from .kinds import Keys as Keys
from .kinds import Lengths as Lengths
from .kinds import Prefix as Prefix
from .kinds import ValidLens as ValidLens
from .kinds import Where as Where
from .kinds import Window as Window
from .readers import from_additive as from_additive
from .readers import from_huggingface as from_huggingface
from .readers import from_ones as from_ones
from .readers import from_sdpa as from_sdpa
from .readers import from_torch as from_torch
from .readers import from_triu as from_triu
from .readers import from_zeros as from_zeros
from .readers import parse as parse
from .tables import Allowed as Allowed
from .tables import Blocked as Blocked

__all__ = [
    "Mask",
    "Frame",
    "And",
    "Or",
    "Not",
    "evaluate",
    "Causal",
    "Window",
    "Lengths",
    "Keys",
    "Documents",
    "Prefix",
    "ValidLens",
    "Allowed",
    "Blocked",
    "Where",
    "from_torch",
    "from_sdpa",
    "from_additive",
    "from_zeros",
    "from_ones",
    "from_triu",
    "from_huggingface",
    "parse",
]
