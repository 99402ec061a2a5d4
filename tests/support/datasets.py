"""Small data in every format that `shoal.train.load` reads."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

SAMPLES = 50


def ppm(value: int, width: int = 3, height: int = 2) -> bytes:
    pixels = bytes((value + i) % 256 for i in range(3 * width * height))
    return f"P6\n{width} {height}\n255\n".encode() + pixels


def write_all(folder: Path) -> dict[str, Any]:
    """Writes it; returns what to give to `load`, by name of the format."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((SAMPLES, 7)).astype(np.float32)
    np.save(folder / "x.npy", x)
    np.save(folder / "y.npy", rng.integers(0, 3, SAMPLES))
    np.save(folder / "large.npy", rng.standard_normal((SAMPLES, 5000)).astype(np.float32))
    tensors = {
        "half": torch.from_numpy(x).bfloat16(),
        "flag": torch.from_numpy(x[:, 0] > 0),
        "small": torch.arange(SAMPLES, dtype=torch.int8),
    }
    save_file(tensors, folder / "t.safetensors")
    _write_tables(folder, x)
    _write_images(folder / "images")
    _write_shards(folder)
    return {
        "npy": (folder / "x.npy", folder / "y.npy"),
        "dict": {"a": str(folder / "x.npy"), "b": {"c": folder / "y.npy"}},
        "large": folder / "large.npy",
        "safetensors": folder / "t.safetensors",
        "parquet": folder / "t.parquet",
        "arrow": folder / "t.arrow",
        "feather": folder / "t.feather",
        "images": folder / "images",
        "tar": folder / "s0.tar",
        "shards": str(folder / "s*.tar"),
    }


def _write_tables(folder: Path, x: Any) -> None:
    import pyarrow as pa
    from pyarrow import feather, parquet

    table = pa.table({"id": list(range(SAMPLES)), "v": x[:, 0], "w": x[:, 1].astype(np.float64)})
    parquet.write_table(table, folder / "t.parquet", row_group_size=9)
    feather.write_feather(table, str(folder / "t.feather"), chunksize=9)
    with pa.OSFile(str(folder / "t.arrow"), "wb") as sink:
        with pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=9)


def _write_images(folder: Path) -> None:
    from PIL import Image

    for name in ("cat", "dog"):
        (folder / name).mkdir(parents=True)
        for i in range(SAMPLES // 2):
            (folder / name / f"{i:03}.ppm").write_bytes(ppm(i + len(name)))
    Image.new("RGB", (3, 2), (20, 30, 40)).save(folder / "dog" / "zz.png")


def _write_shards(folder: Path) -> None:
    for shard in range(3):
        with tarfile.open(folder / f"s{shard}.tar", "w") as archive:
            for i in range(SAMPLES // 3):
                number = shard * 100 + i
                buffer = io.BytesIO()
                np.save(buffer, np.full((2, 2), number, np.float32))
                files = {
                    "npy": buffer.getvalue(), "cls": str(number).encode(), "ppm": ppm(number % 200),
                    "json": f"{{\"size\": {number}.5}}".encode(),
                }  # fmt: skip
                for extension, data in files.items():
                    entry = tarfile.TarInfo(f"dir/{i:04}.{extension}")
                    entry.size = len(data)
                    archive.addfile(entry, io.BytesIO(data))
