"""What an exception says about the author's code: the mistake, the line, and what to try."""

from __future__ import annotations

import difflib
import re
import traceback

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .mistakes import Text
from .source import Place, Source, lines_apart

Fault = tuple[str, Text, Place | None, str | None]


def fault(error: BaseException, source: Source) -> Fault:
    """(name of the mistake, evidence, the line, the line put right)."""
    place = line_of(error, source)
    said = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
    name = "call_fails"
    fix: str | None = None
    evidence = Text(said, said)
    unknown = re.search(r"has no attribute '(\w+)'", str(error))
    if isinstance(error, AttributeError) and unknown:
        name = "unknown_name"
        near = _near(unknown.group(1), error)
        if near:
            evidence = Text(f"{said}; {near} was meant?", f"{said}；是不是想写 {near}？")
            if place is not None:
                fix = lines_apart(place.text, re.sub(rf"\b{unknown.group(1)}\b", near, place.text))
    elif isinstance(error, NameError):
        name = "undefined"
    elif "view size is not compatible" in str(error):
        name = "view_noncontiguous"
    elif re.search(r"CUDA enabled|No CUDA|NVIDIA|same device|different devices|Cannot access accelerator", str(error)):
        name = "device_fixed"
    elif re.search(r"same dtype|expected scalar type|dtype.*to be equal|must have the same", str(error)):
        name = "dtype_fixed"
    return name, evidence, place, fix


def line_of(error: BaseException, source: Source) -> Place | None:
    """The author's line that is nearest to where it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    mine = [f for f in frames if f.filename in source.files]
    return source.place(mine[-1].filename, mine[-1].lineno or 1) if mine else None


def _near(name: str, error: AttributeError) -> str | None:
    owner = getattr(error, "obj", None)
    known = set(dir(owner)) if owner is not None else set(dir(Tensor)) | set(dir(F)) | set(dir(torch)) | set(dir(nn))
    found = difflib.get_close_matches(name, known - {name}, 1, 0.7)
    return found[0] if found else None
