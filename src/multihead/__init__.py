"""Multi-head attention you can use, see and check."""

from . import compat as compat
from . import masks as masks
from . import positions as positions
from .adopting import AdoptionError as AdoptionError
from .adopting import adopt as adopt
from .adopting import from_module as from_module
from .adopting import register_with_transformers as register_with_transformers
from .adopting import restore as restore
from .attend import attention as attention
from .cache import KVCache as KVCache
from .checking import check as check
from .layer import MultiHeadAttention as MultiHeadAttention
from .masks import Allowed as Allowed
from .masks import Blocked as Blocked
from .masks import Causal as Causal
from .masks import Documents as Documents
from .masks import Keys as Keys
from .masks import Lengths as Lengths
from .masks import Mask as Mask
from .masks import Prefix as Prefix
from .masks import ValidLens as ValidLens
from .masks import Where as Where
from .masks import Window as Window
from .plan import Plan as Plan
from .plan import QuadraticMemoryWarning as QuadraticMemoryWarning
from .plan import plan as plan
from .plan import plans as plans
from .positions import ALiBi as ALiBi
from .positions import RelativeBias as RelativeBias
from .positions import RoPE as RoPE
from .recording import find_heads as find_heads
from .recording import load as load
from .recording import record as record

__version__ = "0.1.0"

__all__ = [
    "MultiHeadAttention",
    "attention",
    "plan",
    "plans",
    "Plan",
    "QuadraticMemoryWarning",
    "Mask",
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
    "RoPE",
    "ALiBi",
    "RelativeBias",
    "KVCache",
    "from_module",
    "adopt",
    "restore",
    "register_with_transformers",
    "AdoptionError",
    "check",
    "record",
    "load",
    "find_heads",
    "compat",
    "masks",
    "positions",
]
