"""Where samples come from: files that are mapped or read in chunks, and torch datasets.

A source has a length and reads any samples by their indices, as tensors with the samples in the first
dimension. `runs` are ranges of indices that are cheap to read together.
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
READ_BYTES_MIN = 2**14  # of a sample that is read with a call of its own, not from a map
HEADER_BYTES_MAX = 100 * 2**20  # of a safetensors file


class Source(Protocol):
    """Samples by index."""

    @property
    def runs(self) -> Sequence[range] | None:
        """Ranges that are cheap to read together; None if all samples cost the same."""

    def __len__(self) -> int: ...

    def read(self, indices: Indices) -> Any:
        """Read the samples with these indices, in this order: a tree of tensors."""

    def warm(self, indices: Indices) -> None:
        """Do work ahead for samples that will be read soon, if there is any."""


class Ready:
    """A source without work to do ahead."""

    def warm(self, indices: Indices) -> None:
        """Do nothing."""


class ArraySource(Ready):
    """Samples along the first dimension of an array in memory or in a mapped file."""

    runs: Sequence[range] | None = None

    def __init__(self, array: Any, name: str = "array", dtype: torch.dtype | None = None) -> None:
        if array.ndim < 1:
            raise DataError(
                f"{name} holds a single number; samples must lie along its first dimension"
            )
        self._array = array
        self._view = dtype  # numpy has no bfloat16: its bytes are read as another type

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


class _Destination(threading.local):
    """Allocates the tensors that a thread reads into; a reader's threads use shared memory."""

    allocate: Callable[[Sequence[int], torch.dtype], torch.Tensor | None] | None = None


destination = _Destination()


def pinned(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Allocate host memory that devices read without a copy, if the program has devices."""
    given = destination.allocate(shape, dtype) if destination.allocate is not None else None
    if given is not None:
        return given
    return torch.empty(tuple(shape), dtype=dtype, pin_memory=has_lease())


class FileSource(Ready):
    """Samples one after another in a file, each large enough for a read of its own.

    Reading takes only what a batch needs from the disk; a map also brings in the bytes around it. A
    file that was truncated meanwhile raises an error; touching its map would end the program.
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
        for i, index in enumerate(indices.tolist()):
            chunk = target[i * size : (i + 1) * size]
            read_exactly(fd, chunk, self._offset + index * size, str(self._path))
        return out


def read_exactly(fd: int, target: memoryview, offset: int, name: str) -> None:
    """Fill `target` from the file. Raise if the file ends before."""
    while target:
        try:
            count = os.preadv(fd, [target], offset)
        except OSError as error:
            raise DataError(f"{name} cannot be read: {error}") from None
        if count == 0:
            raise DataError(f"{name} ends before byte {offset + len(target)}: it was truncated")
        target, offset = target[count:], offset + count


class TreeSource:
    """Several sources of the same length side by side: `(inputs, target)` or a dict."""

    def __init__(self, sources: dict[Any, Source], build: Callable[[dict[Any, Any]], Any]) -> None:
        lengths = {name: len(source) for name, source in sources.items()}
        if len(set(lengths.values())) != 1:
            raise DataError(f"the sources have different numbers of samples: {lengths}")
        self._sources = sources
        self._build = build
        self.runs = next((s.runs for s in sources.values() if s.runs is not None), None)

    def __len__(self) -> int:
        return len(next(iter(self._sources.values())))

    def read(self, indices: Indices) -> Any:
        return self._build({name: source.read(indices) for name, source in self._sources.items()})

    def warm(self, indices: Indices) -> None:
        for source in self._sources.values():
            source.warm(indices)


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
    """Open a `.npy` file without loading it."""
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read as .npy: {error}") from None
    return _from_map(array, path, str(path))


def _from_map(array: Any, path: Path, name: str, dtype: torch.dtype | None = None) -> Source:
    """Read large samples, and take small ones from the map: a call for each would cost more."""
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
    """Map a `.safetensors` file: a dict of its tensors, which all have the same first size."""
    tensors: dict[Any, Source] = {}
    for name, (kind, shape, offset) in sorted(_safetensors_header(path).items()):
        dtype, view = _SAFETENSORS[kind]
        array = np.memmap(path, dtype=dtype, mode="r", offset=offset, shape=tuple(shape))
        tensors[name] = _from_map(array, path, f"{name} in {path}", view)
    if not tensors:
        raise DataError(f"{path} holds no tensors")
    return TreeSource(tensors, dict)


def _safetensors_header(path: Path) -> dict[str, tuple[str, list[int], int]]:
    """Read the dtype, shape and offset of each tensor, checked against the file's size."""
    size = path.stat().st_size
    with path.open("rb") as file:
        first = file.read(8)
        length = struct.unpack("<Q", first)[0] if len(first) == 8 else HEADER_BYTES_MAX + 1
        if length > min(HEADER_BYTES_MAX, size - 8):
            raise DataError(f"{path} is not a safetensors file: its header does not fit")
        try:
            header = json.loads(file.read(length))
        except ValueError as error:
            raise DataError(f"{path} is not a safetensors file: {error}") from None
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
