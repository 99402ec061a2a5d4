"""Where samples come from: files that are read by memory map, and torch datasets.

A source has a length and gives any samples by their numbers, as arrays with the samples in the first
dimension. `runs` are ranges of numbers that are cheap to read together.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import default_collate

from shoal.train.devices import has_lease
from shoal.train.errors import DataError

Indices = np.ndarray[Any, np.dtype[np.int64]]
HEADER_BYTES_MAX = 100 * 2**20  # of a safetensors file


class Source(Protocol):
    """Samples by number."""

    @property
    def runs(self) -> Sequence[range] | None:
        """Ranges that are cheap to read together; None if all samples are equally near."""

    def __len__(self) -> int: ...

    def read(self, indices: Indices) -> Any:
        """The samples of these numbers, in this order: a tree of tensors."""


class ArraySource:
    """Samples along the first dimension of an array in memory or in a mapped file."""

    runs: Sequence[range] | None = None

    def __init__(self, array: Any, name: str = "array", dtype: torch.dtype | None = None) -> None:
        if array.ndim < 1:
            raise DataError(f"{name} holds a single number; samples lie along its first dimension")
        self._array = array
        self._view = dtype  # numpy has no bfloat16: such bytes are read as another type

    def __len__(self) -> int:
        return int(self._array.shape[0])

    def read(self, indices: Indices) -> torch.Tensor:
        shape = (len(indices), *self._array.shape[1:])
        if isinstance(self._array, torch.Tensor):
            return self._array[torch.from_numpy(indices)]
        like = torch.from_numpy(np.empty(0, self._array.dtype.newbyteorder("=")))
        out = pinned(shape, like.dtype)
        np.take(self._array, indices, axis=0, out=out.numpy(), mode="clip")
        return out if self._view is None else out.view(self._view)


def pinned(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Host memory that devices read without a copy, where there is such a device."""
    return torch.empty(tuple(shape), dtype=dtype, pin_memory=has_lease())


class TreeSource:
    """Several sources of the same length side by side: `(inputs, target)` or a dict."""

    def __init__(self, parts: dict[Any, Source], build: Callable[[dict[Any, Any]], Any]) -> None:
        lengths = {name: len(part) for name, part in parts.items()}
        if len(set(lengths.values())) != 1:
            raise DataError(f"the parts have different numbers of samples: {lengths}")
        self._parts = parts
        self._build = build
        self.runs = next((p.runs for p in parts.values() if p.runs is not None), None)

    def __len__(self) -> int:
        return len(next(iter(self._parts.values())))

    def read(self, indices: Indices) -> Any:
        return self._build({name: part.read(indices) for name, part in self._parts.items()})


class DatasetSource:
    """A torch dataset with a length."""

    runs: Sequence[range] | None = None

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any] | None = None) -> None:
        self._dataset = dataset
        self._collate = collate or default_collate

    def __len__(self) -> int:
        return len(self._dataset)

    def read(self, indices: Indices) -> Any:
        numbers = [int(i) for i in indices]
        if hasattr(self._dataset, "__getitems__"):
            return self._collate(self._dataset.__getitems__(numbers))
        return self._collate([self._dataset[i] for i in numbers])


def npy(path: Path) -> ArraySource:
    """A `.npy` file, mapped."""
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read as .npy: {error}") from None
    return ArraySource(array, str(path))


_SAFETENSORS = {
    "F64": ("<f8", None), "F32": ("<f4", None), "F16": ("<f2", None),
    "BF16": ("<i2", torch.bfloat16), "I64": ("<i8", None), "I32": ("<i4", None),
    "I16": ("<i2", None), "I8": ("<i1", None), "U8": ("<u1", None), "BOOL": ("?", None),
}  # fmt: skip


def safetensors(path: Path) -> TreeSource:
    """A `.safetensors` file, mapped: a dict of its tensors, which all have the same first size."""
    parts: dict[Any, Source] = {}
    for name, (kind, shape, offset) in sorted(_safetensors_header(path).items()):
        dtype, view = _SAFETENSORS[kind]
        array = np.memmap(path, dtype=dtype, mode="r", offset=offset, shape=tuple(shape))
        parts[name] = ArraySource(array, f"{name} in {path}", view)
    if not parts:
        raise DataError(f"{path} holds no tensors")
    return TreeSource(parts, dict)


def _safetensors_header(path: Path) -> dict[str, tuple[str, list[int], int]]:
    """Dtype, shape and place of each tensor; everything is checked against the file's size."""
    size = path.stat().st_size
    with path.open("rb") as file:
        first = file.read(8)
        length = struct.unpack("<Q", first)[0] if len(first) == 8 else HEADER_BYTES_MAX + 1
        if length > min(HEADER_BYTES_MAX, size - 8):
            raise DataError(f"{path} is no safetensors file: its header does not fit")
        try:
            header = json.loads(file.read(length))
        except ValueError as error:
            raise DataError(f"{path} is no safetensors file: {error}") from None
    found = {}
    for name, entry in header.items() if isinstance(header, dict) else ():
        if name == "__metadata__":
            continue
        try:
            kind, shape = str(entry["dtype"]), [int(n) for n in entry["shape"]]
            start, stop = (int(n) for n in entry["data_offsets"])
        except (KeyError, TypeError, ValueError):
            raise DataError(f"{path}: the entry of {name!r} is malformed") from None
        if kind not in _SAFETENSORS:
            raise DataError(f"{path}: {name!r} has the dtype {kind}, which is not supported")
        itemsize = np.dtype(_SAFETENSORS[kind][0]).itemsize
        fits = 0 <= start <= stop <= size - 8 - length and min(shape, default=0) >= 0
        if not fits or math.prod(shape) * itemsize != stop - start:
            raise DataError(f"{path}: {name!r} does not lie inside the file")
        found[name] = kind, shape, 8 + length + start
    return found
