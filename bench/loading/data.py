"""The pictures that `bench.loading` trains on, in each format that is read, and who reads them."""

from __future__ import annotations

import io
import itertools
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, default_collate

import shoal.train

SIDE, BATCH, CLASSES = 128, 32, 10
PICTURE_BYTES = 3 * SIDE * SIDE
SHARDS = 16
ROW_GROUP = 64  # pictures of a row group: 3 MiB, as writers of such tables choose
FORMATS = ("npy", "safetensors", "parquet", "tar", "folder")


def drawn(count: int) -> Iterator[tuple[int, Any]]:
    """Random pictures, a few at a time: their first number and the pixels."""
    rng = np.random.default_rng(0)
    for start in range(0, count, ROW_GROUP):
        size = min(ROW_GROUP, count - start)
        yield start, rng.integers(0, 256, (size, 3, SIDE, SIDE), np.uint8)


def write(folder: Path, kind: str, count: int) -> None:
    """Writes `count` pictures; the class of picture i is i mod 10."""
    writers: dict[str, Callable[[Path, int], None]] = {
        "npy": _write_npy,
        "safetensors": _write_safetensors,
        "parquet": _write_parquet,
        "tar": _write_tar,
        "folder": _write_folder,
    }
    writers[kind](folder, count)


def _write_npy(folder: Path, count: int) -> None:
    pictures = np.lib.format.open_memmap(folder / "x.npy", "w+", np.uint8, (count, 3, SIDE, SIDE))
    for start, pixels in drawn(count):
        pictures[start : start + len(pixels)] = pixels
    pictures.flush()
    np.save(folder / "y.npy", np.arange(count) % CLASSES)


def _write_safetensors(folder: Path, count: int) -> None:
    from safetensors.numpy import save_file

    pictures = np.concatenate([pixels for _, pixels in drawn(count)])
    save_file({"x": pictures, "y": np.arange(count) % CLASSES}, folder / "d.safetensors")


def _write_parquet(folder: Path, count: int) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    kind = pa.list_(pa.uint8(), PICTURE_BYTES)
    schema = pa.schema([("x", kind), ("y", pa.int64())])
    with pq.ParquetWriter(folder / "d.parquet", schema) as writer:
        for start, pixels in drawn(count):
            flat = pa.FixedSizeListArray.from_arrays(pixels.reshape(-1), PICTURE_BYTES)
            classes = np.arange(start, start + len(pixels)) % CLASSES
            writer.write_table(pa.table([flat, pa.array(classes)], schema=schema))


def _write_tar(folder: Path, count: int) -> None:
    pictures = ((start + i, p) for start, pixels in drawn(count) for i, p in enumerate(pixels))
    per_shard = -(-count // SHARDS)
    for shard in range(SHARDS):
        with tarfile.open(folder / f"s{shard:02}.tar", "w") as archive:
            for i, picture in itertools.islice(pictures, per_shard):
                buffer = io.BytesIO()
                np.save(buffer, picture)
                label = str(i % CLASSES).encode()
                for extension, data in (("npy", buffer.getvalue()), ("cls", label)):
                    entry = tarfile.TarInfo(f"{i:07}.{extension}")
                    entry.size = len(data)
                    archive.addfile(entry, io.BytesIO(data))


def _write_folder(folder: Path, count: int) -> None:
    header = f"P6 {SIDE} {SIDE} 255\n".encode()
    for c in range(CLASSES):
        (folder / str(c)).mkdir()
    for start, pixels in drawn(count):
        for i, picture in enumerate(pixels, start):
            data = np.ascontiguousarray(picture.transpose(1, 2, 0)).tobytes()
            (folder / str(i % CLASSES) / f"{i}.ppm").write_bytes(header + data)


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


# --- who reads them ---


def _pair(batch: dict[str, Any]) -> tuple[Any, Any]:
    pictures = batch["x"] if "x" in batch else batch["npy"]
    classes = batch["y"] if "y" in batch else batch["cls"]
    return pictures.reshape(-1, 3, SIDE, SIDE), classes


def ours(folder: Path, kind: str) -> Any:
    """Our loader, as the page shows it."""
    if kind == "npy":
        return shoal.train.load((folder / "x.npy", folder / "y.npy"), BATCH)
    if kind == "folder":
        return shoal.train.load(folder, BATCH)
    names = {"safetensors": "d.safetensors", "parquet": "d.parquet", "tar": "*.tar"}
    return shoal.train.load(str(folder / names[kind]), BATCH, transform=_pair)


class Mapped(Dataset[Any]):
    """What people write by hand for a large array. Opened anew in each process that reads.

    Pages that a process has mapped cannot be taken away from it here: it keeps them, beyond the share.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pictures = np.load(folder / "x.npy", mmap_mode="r")
        self._classes = np.load(folder / "y.npy")

    def __len__(self) -> int:
        return len(self._pictures)

    def __getitem__(self, i: int) -> Any:
        return torch.from_numpy(self._pictures[i].copy()), int(self._classes[i])

    def __reduce__(self) -> Any:
        return Mapped, (self._folder,)


class Safetensors(Dataset[Any]):
    """By safetensors' own slices."""

    def __init__(self, folder: Path, count: int) -> None:
        self._path, self._count = folder / "d.safetensors", count
        self._x: Any = None

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, i: int) -> Any:
        from safetensors import safe_open

        if self._x is None:
            opened = safe_open(self._path, "pt")
            self._x, self._y = opened.get_slice("x"), opened.get_slice("y")
        return self._x[i : i + 1][0], int(self._y[i : i + 1][0])


class RowGroups(Dataset[Any]):
    """A sample is a row group: reading single rows would read its row group for each."""

    def __init__(self, folder: Path) -> None:
        import pyarrow.parquet as pq

        self._path = folder / "d.parquet"
        self._count = pq.ParquetFile(self._path).metadata.num_row_groups
        self._file: Any = None

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, i: int) -> Any:
        import pyarrow.parquet as pq

        if self._file is None:
            self._file = pq.ParquetFile(self._path)
        table = self._file.read_row_group(i)
        pixels = table.column("x").combine_chunks().flatten().to_numpy()
        classes = table.column("y").to_numpy()
        return torch.from_numpy(pixels.reshape(-1, 3, SIDE, SIDE).copy()), torch.from_numpy(
            classes.copy()
        )


def halves(batch: list[Any]) -> list[Any]:
    """The batches of one row group."""
    pictures, classes = batch[0]
    return list(zip(pictures.split(BATCH), classes.split(BATCH), strict=True))


class TarSamples(Dataset[Any]):
    """An index of the shards, then reading by offset."""

    def __init__(self, folder: Path) -> None:
        self._samples: list[tuple[Path, int, int, int]] = []
        for shard in sorted(folder.glob("*.tar")):
            with tarfile.open(shard, "r:") as archive:
                entries = list(archive)
            for x, y in zip(entries[::2], entries[1::2], strict=True):
                self._samples.append((shard, x.offset_data, x.size, y.offset_data))

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, i: int) -> Any:
        shard, at, size, class_at = self._samples[i]
        with shard.open("rb") as file:
            file.seek(at)
            picture = np.load(io.BytesIO(file.read(size)))
            file.seek(class_at)
            return torch.from_numpy(picture), int(file.read(1))


class Folder(Dataset[Any]):
    """As torchvision's ImageFolder: a path for each sample, opened with Pillow."""

    def __init__(self, folder: Path) -> None:
        self._samples = [(path, int(path.parent.name)) for path in files(folder)]

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, i: int) -> Any:
        from PIL import Image

        path, number = self._samples[i]
        with Image.open(path) as image:
            pixels = np.array(image)
        return torch.from_numpy(pixels).permute(2, 0, 1).contiguous(), number


def torchs(folder: Path, kind: str, workers: int) -> Iterator[Any]:
    """torch's DataLoader over a dataset as people write it: shuffled, pinned, two batches ahead in
    each worker."""
    options: dict[str, Any] = {"shuffle": True, "num_workers": workers, "pin_memory": True}
    if workers:
        options |= {"multiprocessing_context": "forkserver", "prefetch_factor": 2}
    if kind == "parquet":
        for group in DataLoader(RowGroups(folder), 1, collate_fn=halves, **options):
            yield from group
        return
    datasets: dict[str, Callable[[], Dataset[Any]]] = {
        "npy": lambda: Mapped(folder),
        "safetensors": lambda: Safetensors(folder, _count(folder)),
        "tar": lambda: TarSamples(folder),
        "folder": lambda: Folder(folder),
    }
    yield from DataLoader(datasets[kind](), BATCH, collate_fn=default_collate, **options)


def _count(folder: Path) -> int:
    from safetensors import safe_open

    with safe_open(folder / "d.safetensors", "pt") as opened:
        return int(opened.get_slice("y").get_shape()[0])
