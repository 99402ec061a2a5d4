"""Where samples come from: files that are mapped or read in pieces, and torch datasets.

A source has a length and gives any samples by their numbers, as arrays with the samples in the first
dimension. `runs` are ranges of numbers that are cheap to read together.
"""

from __future__ import annotations

import json
import math
import os
import struct
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import default_collate

from shoal.train.group.devices import has_lease
from shoal.train.group.errors import DataError

Indices = np.ndarray[Any, np.dtype[np.int64]]
READ_BYTES_MIN = 2**14  # of a sample that is read by itself, not taken from a map
HEADER_BYTES_MAX = 100 * 2**20  # of a safetensors file


class Source(Protocol):
    """Samples by number."""

    @property
    def runs(self) -> Sequence[range] | None:
        """Ranges that are cheap to read together; None if all samples are equally near."""

    def __len__(self) -> int: ...

    def read(self, indices: Indices) -> Any:
        """The samples of these numbers, in this order: a tree of tensors."""

    def warm(self, indices: Indices) -> None:
        """Does a piece of the work for samples that will be read soon, if there is any."""


class Ready:
    """A source that can do nothing ahead of reading."""

    def warm(self, indices: Indices) -> None:
        """Nothing."""


class ArraySource(Ready):
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


class _Placing(threading.local):
    """Where a thread wants what it reads to lie; a reader's threads want it in shared memory."""

    place: Callable[[Sequence[int], torch.dtype], torch.Tensor | None] | None = None


placing = _Placing()


def pinned(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Host memory that devices read without a copy, where there is such a device."""
    placed = placing.place(shape, dtype) if placing.place is not None else None
    if placed is not None:
        return placed
    return torch.empty(tuple(shape), dtype=dtype, pin_memory=has_lease())


class FileSource(Ready):
    """Samples that lie one after another in a file, each large enough to be read by itself.

    Reading takes from the disk what a batch needs and no more, where a map brings in what lies around
    it, too. A file that was cut meanwhile is an error; touching the map of one would end the program.
    """

    runs: Sequence[range] | None = None

    def __init__(self, path: Path, shape: Sequence[int], like: torch.dtype, offset: int) -> None:
        self._path = path
        self._shape = tuple(shape)
        self._dtype = like
        self._offset = offset
        self._sample_bytes = math.prod(self._shape[1:]) * like.itemsize
        self._file = path.open("rb", buffering=0)
        os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)

    def __len__(self) -> int:
        return self._shape[0]

    def read(self, indices: Indices) -> torch.Tensor:
        out = pinned((len(indices), *self._shape[1:]), self._dtype)
        target = memoryview(out.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
        size, fd = self._sample_bytes, self._file.fileno()
        for place, number in enumerate(indices.tolist()):
            piece = target[place * size : (place + 1) * size]
            read_exactly(fd, piece, self._offset + number * size, str(self._path))
        return out


def read_exactly(fd: int, target: memoryview, offset: int, name: str) -> None:
    """Fills `target` from the file; raises where it ends before."""
    while target:
        try:
            count = os.preadv(fd, [target], offset)
        except OSError as error:
            raise DataError(f"{name} cannot be read: {error}") from None
        if count == 0:
            raise DataError(f"{name} ends before {offset + len(target)} bytes: it was cut")
        target, offset = target[count:], offset + count


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

    def warm(self, indices: Indices) -> None:
        for part in self._parts.values():
            part.warm(indices)


class DatasetSource(Ready):
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


def npy(path: Path) -> Source:
    """A `.npy` file, which is not loaded."""
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read as .npy: {error}") from None
    return _from_map(array, path, str(path))


def _from_map(array: Any, path: Path, name: str, dtype: torch.dtype | None = None) -> Source:
    """Large samples are read, small ones taken from the map: there, a call for each would cost more."""
    in_order = array.ndim > 1 and array.flags.c_contiguous and array.dtype.isnative
    if in_order and array[:1].nbytes >= READ_BYTES_MIN:
        like = dtype or torch.from_numpy(np.empty(0, array.dtype)).dtype
        return FileSource(path, array.shape, like, array.offset)
    return ArraySource(array, name, dtype)


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
        parts[name] = _from_map(array, path, f"{name} in {path}", view)
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
