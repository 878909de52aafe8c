"""A recording in one file, in the safetensors format: eight bytes, the length of a header; the header, in JSON; numbers.

The format is a page long and nothing in it can run, so it is written and read here with torch alone; the `safetensors` library
reads these files as well. https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from ..masks import Frame, Mask, evaluate
from ..masks.blocks import split
from .call import Call
from .recording import One, Recording, Seen
from .statistics import Map, Profile, Strongest, Top
from .tensors import Intervals, compact

VERSION = 1
DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.bool: "BOOL",
}  # fmt: skip
NAMES = {name: dtype for dtype, name in DTYPES.items()}
TUPLES = {"strongest": Strongest, "top": Top, "map": Map, "offsets": Profile}
LARGEST = 2**31  # bytes of a mask that has no intervals, at most


class FileError(ValueError):
    """A file that is no recording, or not a whole one."""


# ---- saving ---------------------------------------------------------------------------------------------------------


def save(recording: Recording, path: Any) -> None:
    """Recording.save()."""
    tensors: dict[str, Tensor] = {}
    places = [_place(place, f"{n}", tensors) for n, place in enumerate(recording)]
    about = {
        "version": VERSION, "places": places, "tokens": _listed(recording.tokens), "key_tokens": _listed(recording.key_tokens),
        "text": recording.text, "steps": recording.steps, "missed": recording.missed,
    }  # fmt: skip
    write(Path(path), tensors, {"multihead": json.dumps(about)})


def write(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """One safetensors file, put in place only when it is whole; equal tensors that share their memory are written once each."""
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name, x in tensors.items():
        header[name] = {"dtype": DTYPES[x.dtype], "shape": list(x.shape), "data_offsets": [end, end + x.numel() * x.itemsize]}
        end += x.numel() * x.itemsize
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    part = path.with_name(f"{path.name}.part{os.getpid()}")
    try:
        with part.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for x in tensors.values():
                flat = x.detach().contiguous().view(-1).view(torch.uint8)
                for first in range(0, flat.numel(), 2**24):  # no copy as large as the recording
                    file.write(flat[first : first + 2**24].cpu().numpy().tobytes())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _place(place: Seen, key: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    pictures = [_call(one._asked(), f"{key}.{i}", tensors) for i, one in enumerate(place.pictures)]  # pyright: ignore[reportPrivateUsage]
    return {"number": place.number, "name": place.name, "pictures": pictures}


def _call(call: Call, key: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """A call's numbers into tensors, and what is said of it into the header."""
    if call.score is not None:
        raise ValueError(
            f"save: {call.name} changes its scores by a function (FlexAttention's score_mod), which no file can hold"
        )
    said: dict[str, Any] = {
        "kind": call.kind, "scale": call.scale, "softcap": call.softcap, "order": call.order, "step": call.step,
        "heads": call.heads, "sizes": [list(call.q.shape), list(call.k.shape)], "found": sorted(call.found),
    }  # fmt: skip
    if not call.answered:
        for name in ("q", "k", "v", "bias", "sinks", "flat", "out_proj"):
            _put(tensors, f"{key}.{name}", getattr(call, name))
        for name, at in (("start", call.frame.q_start), ("key_start", call.frame.k_start)):
            said[name] = at if isinstance(at, int) else None
            _put(tensors, f"{key}.{name}", None if isinstance(at, int) else at)
        _mask(call, key, tensors)
    for name, found in call.found.items():
        parts = cast("tuple[Any, ...]", found) if isinstance(found, tuple) else (found,)
        for i, part in enumerate(parts):
            if isinstance(part, Tensor):
                _put(tensors, f"{key}.found.{name}.{i}", part)
            else:
                said[f"found.{name}.{i}"] = part
    return said


def _put(tensors: dict[str, Tensor], name: str, x: Tensor | None) -> None:
    if x is not None:
        tensors[name] = x


def _mask(call: Call, key: str, tensors: dict[str, Tensor]) -> None:
    """Intervals where they say it, else a table."""
    if call.mask is None:
        return
    said, rest = split(call.mask, call.frame)
    if said is not None:
        tensors[f"{key}.mask.start"], tensors[f"{key}.mask.end"] = said.start.to(torch.int32), said.end.to(torch.int32)
    if rest is not None:
        B, H, _, T, S = call.sizes
        frame = Frame(B, H, T, S, q_start=call.start, k_start=call.key_start, device=call.q.device)
        if T * S * max(rest.batch, 1) > LARGEST:
            raise ValueError(
                f"save: the mask of {call.name} has no intervals, and as a table it would take {T * S:,} bytes: {rest!r}"
            )
        tensors[f"{key}.mask.table"] = evaluate(rest, frame)


def _listed(tokens: Any) -> Any:
    return None if tokens is None else [t if isinstance(t, str) else [str(x) for x in t] for t in tokens]


# ---- loading --------------------------------------------------------------------------------------------------------


def load(path: Any) -> Recording:
    """multihead.load(): the numbers stay in the file until they are asked for."""
    tensors, metadata = read(Path(path))
    about = _about(path, metadata)
    try:
        recording = Recording(about["tokens"], about["key_tokens"])
        recording.text, recording.steps, recording.missed = about["text"], about["steps"], about["missed"]
        for n, said in enumerate(about["places"]):
            place = Seen(recording, said["number"], said["name"])
            place.pictures = [
                One(place, _called(one, said["name"], f"{n}.{i}", tensors)) for i, one in enumerate(said["pictures"])
            ]
            recording.places[n, 0] = place
    except (KeyError, TypeError, IndexError) as error:
        raise FileError(f"load: {path} is damaged: what it says of its calls does not fit ({error})") from error
    return recording


def read(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a safetensors file, mapped and not read, and its metadata."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > size - 8:
            raise FileError(
                f"load: {path} is no recording, or cut off: its header should be {length:,} bytes long, it has {size:,}"
            )
        try:
            header: dict[str, Any] = json.loads(file.read(length))
            metadata: dict[str, str] = header.pop("__metadata__", {})
            entries = {name: (NAMES[x["dtype"]], tuple(x["shape"]), tuple(x["data_offsets"])) for name, x in header.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise FileError(f"load: {path} is no recording, or damaged: its header cannot be read ({error})") from error
    data = 8 + length
    end = max((last for _, _, (_, last) in entries.values()), default=0)
    if data + end != size:
        raise FileError(f"load: {path} is cut off or damaged: its numbers should end at byte {data + end:,}, it has {size:,}")
    for name, (dtype, shape, (first, last)) in entries.items():
        if first < 0 or last - first != math.prod(shape) * dtype.itemsize:
            raise FileError(f"load: {path} is damaged: {name} {list(shape)} cannot be the bytes {first} … {last}")
    if not end:
        return {n: torch.empty(shape, dtype=dtype) for n, (dtype, shape, _) in entries.items()}, metadata
    mapped = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
    return {n: _tensor(mapped[data + a : data + z], dtype, shape) for n, (dtype, shape, (a, z)) in entries.items()}, metadata


def _tensor(raw: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    if raw.storage_offset() % dtype.itemsize:
        raw = raw.clone()
    return raw.view(dtype).view(shape)


def _about(path: Any, metadata: dict[str, str]) -> dict[str, Any]:
    if "multihead" not in metadata:
        raise FileError(f"load: {path} is a safetensors file, but not one that Recording.save() wrote")
    try:
        about: dict[str, Any] = json.loads(metadata["multihead"])
    except ValueError as error:
        raise FileError(f"load: {path} is damaged: its header cannot be read ({error})") from error
    if about.get("version", 0) > VERSION:
        raise FileError(
            f"load: {path} is of version {about['version']}, this multihead reads up to {VERSION}; "
            "upgrade it: pip install -U multihead"
        )
    return about


def _called(said: dict[str, Any], name: str, key: str, tensors: dict[str, Tensor]) -> Call:
    def get(part: str) -> Tensor | None:
        return tensors.get(f"{key}.{part}")

    q, k = (tensors.get(f"{key}.{n}", torch.empty(shape, device="meta")) for n, shape in zip("qk", said["sizes"], strict=True))
    call = Call(
        q, k, get("v"), scale=said["scale"], softcap=said["softcap"], bias=get("bias"), sinks=get("sinks"), flat=get("flat"),
        name=name, kind=said["kind"], order=said["order"], step=said["step"], heads=said["heads"], out_proj=get("out_proj"),
    )  # fmt: skip
    if not call.answered:
        starts = (said[n] if said[n] is not None else tensors[f"{key}.{n}"] for n in ("start", "key_start"))
        call.start, call.key_start = starts
        call.mask = _masked(get("mask.start"), get("mask.end"), get("mask.table"))
    for found in said["found"]:
        parts: list[Any] = []
        while (part := get(f"found.{found}.{len(parts)}")) is not None or f"found.{found}.{len(parts)}" in said:
            parts.append(part if part is not None else said[f"found.{found}.{len(parts)}"])
        call.found[found] = TUPLES[found](*parts) if found in TUPLES else parts[0]
    return call


def _masked(start: Tensor | None, end: Tensor | None, table: Tensor | None) -> Mask | None:
    spans = None if start is None or end is None else Intervals(start.long(), end.long())
    rest = None if table is None else compact(table)
    if spans is None or rest is None:
        return rest if spans is None else spans
    return spans & rest
