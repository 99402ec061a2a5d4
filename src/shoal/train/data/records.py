"""Samples in tables, image folders and tar shards."""

from __future__ import annotations

import io
import itertools
import json
import tarfile
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate

from shoal.train.data.sources import Indices, Ready, pinned
from shoal.train.group.errors import DataError

CACHED_RUNS = 8  # row groups that stay decoded
IMAGES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".gif", ".ppm", ".pgm")
RECORD_BYTES_MAX = 2**30
# numpy parses an array's header as Python, which in Python 3.11 may fail in two threads at once.
_parsing = threading.Lock()


class TableSource:
    """A Parquet or Arrow file: a dict of columns. Decoded row groups stay in a cache."""

    def __init__(self, path: Path, columns: Sequence[str] | None = None) -> None:
        self._path = path
        self._columns = list(columns) if columns is not None else None
        self._read_run, lengths = _open_table(path, self._columns)
        starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        self._starts = starts
        self.runs = [range(int(a), int(b)) for a, b in itertools.pairwise(starts)]
        self._cache: OrderedDict[int, Future[dict[str, Any]]] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return int(self._starts[-1])

    def read(self, indices: Indices) -> dict[str, torch.Tensor]:
        which = np.searchsorted(self._starts, indices, side="right") - 1
        found: dict[str, Any] = {}
        wanted = [int(run) for run in np.unique(which)]
        decoding = {run: self._run(run) for run in wanted}
        for run in wanted:
            mask = which == run
            rows = indices[mask] - self._starts[run]
            for name, column in decoding[run].result().items():
                if name not in found:
                    like = torch.from_numpy(np.empty(0, column.dtype)).dtype
                    found[name] = pinned((len(indices), *column.shape[1:]), like)
                found[name].numpy()[mask] = column[rows]
        return found

    def warm(self, indices: Indices) -> None:
        """Decode one row group that a later batch needs, so that not all are due at once."""
        for run in np.unique(np.searchsorted(self._starts, indices, side="right") - 1):
            with self._lock:
                known = int(run) in self._cache
            if not known:
                self._run(int(run))  # a reader of the row group gets its error
                return

    def _run(self, run: int) -> Future[dict[str, Any]]:
        """Return a row group. Decode it unless another thread has done so or is doing so."""
        with self._lock:
            found = self._cache.get(run)
            if found is not None:
                self._cache.move_to_end(run)
                return found
            decoded = self._cache[run] = Future()
            while len(self._cache) > CACHED_RUNS:
                self._cache.popitem(last=False)
        try:
            decoded.set_result(self._read_run(run))
        except BaseException as error:
            decoded.set_exception(error)
            with self._lock:
                self._cache.pop(run, None)
        return decoded


def _open_table(
    path: Path, columns: list[str] | None
) -> tuple[Callable[[int], dict[str, Any]], list[int]]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise DataError(
            f"{path} needs pyarrow, which is not installed; type: pip install pyarrow"
        ) from None
    try:
        if path.suffix == ".parquet":
            return _open_parquet(path, columns, pq)
        return _open_arrow(path, columns, pa)
    except (OSError, pa.ArrowInvalid) as error:
        raise DataError(f"{path} cannot be read: {error}") from None


def _open_parquet(
    path: Path, columns: list[str] | None, pq: Any
) -> tuple[Callable[[int], dict[str, Any]], list[int]]:
    with pq.ParquetFile(path) as file:
        metadata = file.metadata
    lengths = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
    local = threading.local()  # a ParquetFile is not thread-safe

    def read(run: int) -> dict[str, Any]:
        if not hasattr(local, "file"):
            local.file = pq.ParquetFile(path, metadata=metadata)
        # Loader threads decode several row groups at once; more threads would compete for the cores.
        table = local.file.read_row_group(run, columns=columns, use_threads=False)
        return _columns(path, table)

    return read, lengths


def _open_arrow(
    path: Path, columns: list[str] | None, pa: Any
) -> tuple[Callable[[int], dict[str, Any]], list[int]]:
    def opened(**options: Any) -> Any:
        chosen = pa.ipc.IpcReadOptions(use_threads=False, **options)
        return pa.ipc.open_file(pa.memory_map(str(path)), options=chosen)

    # One column is enough to count rows, so the others are not decoded.
    counter = opened(included_fields=[0])
    lengths = [counter.get_batch(i).num_rows for i in range(counter.num_record_batches)]
    local = threading.local()

    def read(run: int) -> dict[str, Any]:
        if not hasattr(local, "reader"):
            local.reader = opened()
        table = pa.Table.from_batches([local.reader.get_batch(run)])
        return _columns(path, table.select(columns) if columns else table)

    return read, lengths


def _columns(path: Path, table: Any) -> dict[str, Any]:
    """Return columns as arrays: numbers, or lists of numbers of equal length."""
    found = {}
    for name in table.column_names:
        column = table.column(name).combine_chunks()
        if hasattr(column, "flatten") and "list" in str(column.type):
            values = column.flatten().to_numpy(zero_copy_only=False)
            if len(column) and len(values) % len(column):
                raise DataError(f"{path}: the lists in column {name!r} have different lengths")
            array = values.reshape(len(column), -1)
        else:
            array = column.to_numpy(zero_copy_only=False)
        if array.dtype == object:
            raise DataError(
                f"{path}: column {name!r} holds {table.schema.field(name).type}, not numbers; "
                "choose other columns with columns=[…]"
            )
        found[name] = np.ascontiguousarray(array)
    return found


class ImageFolderSource(Ready):
    """A folder of images for each class: `(image, class number)`."""

    runs: Sequence[range] | None = None

    def __init__(self, root: Path, transform: Callable[[torch.Tensor], Any] | None = None) -> None:
        self.classes = sorted(p.name for p in root.iterdir() if p.is_dir())
        self._files = [
            (path, number)
            for number, name in enumerate(self.classes)
            for path in sorted((root / name).rglob("*"))
            if path.suffix.lower() in (*IMAGES, ".npy")
        ]
        if not self._files:
            raise DataError(f"{root} has no images in folders of their classes (root/class/x.png)")
        self._transform = transform

    @property
    def paths(self) -> list[Path]:
        return [path for path, _ in self._files]

    def __len__(self) -> int:
        return len(self._files)

    def read(self, indices: Indices) -> Any:
        samples = []
        for i in indices:
            path, number = self._files[int(i)]
            image = decode(path.suffix, path.read_bytes(), str(path))
            samples.append((self._transform(image) if self._transform else image, number))
        return _collate(samples)


class TarSource(Ready):
    """Tar shards whose files with the same name up to the first dot are one sample, a dict by
    extension: `0001.npy` and `0001.cls` give `{"npy": …, "cls": …}`."""

    def __init__(
        self, shards: Sequence[Path], transform: Callable[[dict[str, Any]], Any] | None = None
    ) -> None:
        self.shards = list(shards)
        self._samples: list[tuple[Path, dict[str, tuple[int, int]]]] = []
        runs = []
        for shard in shards:
            start = len(self._samples)
            self._samples += [(shard, fields) for fields in _index_tar(shard)]
            runs.append(range(start, len(self._samples)))
        self.runs: Sequence[range] | None = [run for run in runs if len(run)]
        if not self._samples:
            raise DataError(f"no samples in {', '.join(map(str, shards)) or 'no shards'}")
        self._transform = transform

    def __len__(self) -> int:
        return len(self._samples)

    def read(self, indices: Indices) -> Any:
        samples = []
        for i in indices:
            shard, fields = self._samples[int(i)]
            sample = {}
            with shard.open("rb") as file:
                for extension, (offset, size) in fields.items():
                    file.seek(offset)
                    name = f"{shard} at {offset}"
                    sample[extension] = decode("." + extension, file.read(size), name)
            samples.append(self._transform(sample) if self._transform else sample)
        return _collate(samples)


def _index_tar(shard: Path) -> list[dict[str, tuple[int, int]]]:
    """Return the offsets of each sample's files, in the order of the archive."""
    found: dict[str, dict[str, tuple[int, int]]] = {}
    try:
        with tarfile.open(shard, "r:") as archive:
            for entry in archive:
                if not entry.isfile() or entry.size > RECORD_BYTES_MAX:
                    continue
                folder, _, base = entry.name.rpartition("/")
                stem, _, extension = base.partition(".")
                fields = found.setdefault(f"{folder}/{stem}", {})
                fields[extension.lower()] = entry.offset_data, entry.size
    except (OSError, tarfile.TarError) as error:
        raise DataError(f"{shard} cannot be read as an uncompressed tar: {error}") from None
    return list(found.values())


def decode(extension: str, data: bytes, name: str) -> Any:
    """Decode a file by its extension. Formats that can run code are rejected."""
    kind = "." + extension.lower().rpartition(".")[2]
    try:
        if kind == ".npy":
            with _parsing:
                return torch.from_numpy(np.load(io.BytesIO(data), allow_pickle=False))
        if kind in (".cls", ".id", ".index"):
            return int(data)
        if kind == ".json":
            return json.loads(data)
        if kind in (".txt", ".text"):
            return data.decode()
        if kind in (".ppm", ".pgm"):
            return _netpbm(data)
    except (ValueError, OSError) as error:
        raise DataError(f"{name} cannot be read as {kind}: {error}") from None
    if kind in IMAGES:
        return _image(data, name)
    raise DataError(
        f"{name}: Shoal does not read {kind!r} files; use .npy, .cls, .json, .txt or images"
    )


def _netpbm(data: bytes) -> torch.Tensor:
    """Decode a binary PPM or PGM picture to channels x height x width."""
    words: list[bytes] = []
    at = 0
    while len(words) < 4:
        while data[at : at + 1].isspace():
            at += 1
        if data[at : at + 1] == b"#":
            at = data.index(b"\n", at)
            continue
        start = at
        while at < len(data) and not data[at : at + 1].isspace():
            at += 1
        if start == at:
            raise ValueError("the header is cut off")
        words.append(data[start:at])
    channels = {b"P6": 3, b"P5": 1}.get(words[0], 0)
    width, height, depth = (int(word) for word in words[1:])
    pixels = np.frombuffer(data, np.uint8, offset=at + 1)
    if channels == 0 or depth > 255 or len(pixels) != channels * width * height:
        raise ValueError("not a binary picture of 8 bits, or cut off")
    return torch.from_numpy(pixels.reshape(height, width, channels).copy()).permute(2, 0, 1)


def _image(data: bytes, name: str) -> torch.Tensor:
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError:
        raise DataError(
            f"{name} needs Pillow, which is not installed; type: pip install pillow"
        ) from None
    try:
        with Image.open(io.BytesIO(data)) as image:
            pixels = np.asarray(image.convert("RGB"))
    except (OSError, UnidentifiedImageError, Image.DecompressionBombError) as error:
        raise DataError(f"{name} cannot be read as an image: {error}") from None
    return torch.from_numpy(pixels.copy()).permute(2, 0, 1)


def _collate(samples: list[Any]) -> Any:
    try:
        return default_collate(samples)
    except RuntimeError as error:
        raise DataError(
            f"the samples of a batch have different shapes; pass a transform=… that makes them equal "
            f"({str(error).splitlines()[0]})"
        ) from None
