"""Loaders: every sample once, in a seeded order, resumed anywhere, from every kind of file."""

from __future__ import annotations

import io
import itertools
import json
import struct
import sys
import tarfile
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from shoal.train.data import records
from shoal.train.data.loading import Feed, Loader, StreamLoader, load
from shoal.train.data.sources import ArraySource
from shoal.train.group.errors import DataError


def numbers(loader: Any) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


@given(st.integers(1, 40), st.integers(1, 12), st.booleans(), st.integers(0, 5), st.integers(0, 12))
def test_an_epoch_is_every_sample_once_and_resumes_anywhere(
    count: int, size: int, shuffle: bool, seed: int, stop: int
) -> None:
    def made() -> Loader:
        return Loader(ArraySource(np.arange(count)), size, shuffle=shuffle, seed=seed)

    loader = made()
    first = numbers(loader)
    second = numbers(loader)
    assert sorted(n for b in first for n in b) == list(range(count))
    assert sorted(n for b in second for n in b) == list(range(count))
    assert len(first) == len(loader)
    assert shuffle or first == second

    interrupted = made()
    read = []
    for batch in interrupted:
        read.append(batch.tolist())
        if len(read) == stop:
            break
    resumed = made()
    resumed.load_state_dict(interrupted.state_dict())
    rest = numbers(resumed)
    if 0 < stop <= len(first):
        assert read + rest == first
    else:
        assert (read, rest) == (first, second)


def test_epochs_differ_and_seeds_repeat() -> None:
    a, b = (Loader(ArraySource(np.arange(100)), 10, seed=4) for _ in range(2))
    first = numbers(a)
    assert first == numbers(b)
    assert numbers(a) != first
    with pytest.raises(DataError, match="seed 4"):
        Loader(ArraySource(np.arange(100)), 10, seed=5).load_state_dict(a.state_dict())


def test_the_last_batch_can_be_left_out() -> None:
    loader = Loader(ArraySource(np.arange(10)), 4, drop_last=True)
    assert [len(batch) for batch in loader] == [4, 4]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=9), st.integers(0, 3))
def test_runs_are_shuffled_without_losing_anything(lengths: list[int], seed: int) -> None:
    source = ArraySource(np.arange(sum(lengths)))
    starts = np.concatenate([[0], np.cumsum(lengths)])
    source.runs = [range(a, b) for a, b in itertools.pairwise(starts)]
    read = [n for b in Loader(source, 3, seed=seed) for n in b.tolist()]
    assert sorted(read) == list(range(sum(lengths)))


def test_npy_pairs(tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(20, 3)).astype(np.float32)
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "y.npy", np.arange(20))
    loader = load((tmp_path / "x.npy", tmp_path / "y.npy"), 6)
    for bx, by in loader:
        assert bx.dtype == torch.float32
        np.testing.assert_array_equal(bx.numpy(), x[by.numpy()])
    with pytest.raises(DataError, match="different numbers"):
        load((x, np.arange(19)))


def test_safetensors(tmp_path: Path) -> None:
    path = tmp_path / "d.safetensors"
    data = {"a": torch.randn(9, 2).bfloat16(), "b": torch.arange(9), "c": torch.ones(9) > 0}
    save_file(data, path)
    for batch in load(path, 4):
        assert batch["a"].dtype == torch.bfloat16
        assert torch.equal(batch["a"], data["a"][batch["b"]])
        assert batch["c"].all()


@pytest.mark.parametrize("kind", ["npy", "safetensors"])
def test_large_samples_are_read_and_a_cut_file_is_an_error(tmp_path: Path, kind: str) -> None:
    """Touching the map of a file that became shorter would end the program."""
    data = torch.arange(9)[:, None].repeat(1, 10_000).bfloat16()
    path = tmp_path / f"d.{kind}"
    if kind == "npy":
        np.save(path, data.view(torch.int16).numpy())
    else:
        save_file({"x": data}, path)

    def read(loader: Any) -> list[int]:
        found = []
        for batch in loader:
            x = batch if kind == "npy" else batch["x"].view(torch.int16)
            assert x.shape[1:] == (10_000,)
            assert (x == x[:, :1]).all()
            found += x[:, 0].view(torch.bfloat16).long().tolist()
        return found

    loader = load(path, 4)
    assert sorted(read(loader)) == list(range(9))
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 5)
    with pytest.raises(DataError, match=rf"{path.name} ends before .* was truncated"):
        read(loader)


def _header(entry: Any, size: int = 16) -> bytes:
    text = json.dumps({"x": entry}).encode()
    return struct.pack("<Q", len(text)) + text + bytes(size)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"1234567",
        struct.pack("<Q", 2**40),
        struct.pack("<Q", 4) + b"[1,2",
        _header({"dtype": "F32", "shape": [4], "data_offsets": [0, 999]}),
        _header({"dtype": "F32", "shape": [4], "data_offsets": [8, 0]}),
        _header({"dtype": "F32", "shape": [9], "data_offsets": [0, 16]}),
        _header({"dtype": "F32", "shape": [-4], "data_offsets": [0, 16]}),
        _header({"dtype": "X9", "shape": [4], "data_offsets": [0, 16]}),
        _header({"dtype": "F32"}),
        _header(7),
    ],
)
def test_broken_safetensors_are_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(data)
    with pytest.raises(DataError, match="safetensors"):
        load(path)


def test_parquet_and_arrow(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    feather = pytest.importorskip("pyarrow.feather")

    table = pa.table(
        {
            "id": list(range(30)),
            "pixels": [[float(i), float(-i)] for i in range(30)],
            "text": ["no"] * 30,
        }
    )
    parquet.write_table(table, tmp_path / "t.parquet", row_group_size=7)
    feather.write_feather(table, tmp_path / "t.feather", compression="uncompressed", chunksize=8)
    for name in ("t.parquet", "t.feather"):
        seen = []
        for batch in load(tmp_path / name, 4, columns=["id", "pixels"]):
            assert torch.equal(batch["pixels"][:, 0], batch["id"].double())
            seen += batch["id"].tolist()
        assert sorted(seen) == list(range(30))
        assert seen != list(range(30))
        with pytest.raises(DataError, match=r"'text'.*columns="):
            next(iter(load(tmp_path / name, 4)))
    feather.write_feather(table, tmp_path / "z.feather", compression="lz4", chunksize=8)
    assert sorted(n for b in load(tmp_path / "z.feather", 4, columns=["id"]) for n in b["id"]) == (
        list(range(30))
    )
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 nothing")
    with pytest.raises(DataError, match="cannot be read"):
        load(tmp_path / "bad.parquet")


def test_a_row_group_is_decoded_once_in_an_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads that need the same one wait for whoever is about it; it was begun ahead of its use."""
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(
        pa.table({"id": list(range(320))}), tmp_path / "t.parquet", row_group_size=20
    )
    decoded: list[int] = []
    columns = records._columns

    def counted(path: Path, table: Any) -> Any:
        found = columns(path, table)
        decoded.append(int(found["id"][0]) // 20)
        return found

    monkeypatch.setattr(records, "_columns", counted)
    loader = load(tmp_path / "t.parquet", 5, threads=4)
    assert sorted(n for batch in loader for n in batch["id"].tolist()) == list(range(320))
    assert sorted(decoded) == list(range(16))
    source = records.TableSource(tmp_path / "t.parquet")
    decoded.clear()
    source.warm(np.array([3, 25, 45]))
    source.warm(np.array([3, 25, 45]))
    assert decoded == [0, 1]  # one at a time


@pytest.mark.parametrize(("module", "file"), [("pyarrow", "t.parquet"), ("PIL", "c/x.png")])
def test_what_is_not_installed_says_what_to_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, file: str
) -> None:
    path = tmp_path / "data" / file
    path.parent.mkdir(parents=True)
    path.write_bytes(b"x")
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(DataError, match="pip install"):
        next(iter(load(path if module == "pyarrow" else tmp_path / "data")))


def ppm(value: int) -> bytes:
    return b"P6 # a comment\n2 3\n255\n" + bytes([value] * 18)


def test_image_folders(tmp_path: Path) -> None:
    for name, value in (("cat", 10), ("dog", 20)):
        (tmp_path / name).mkdir()
        for i in range(3):
            (tmp_path / name / f"{i}.ppm").write_bytes(ppm(value))
    image = pytest.importorskip("PIL.Image")
    image.new("RGB", (2, 3), (20, 20, 20)).save(tmp_path / "dog" / "9.png")
    loader = load(tmp_path, 7, sample_transform=lambda image: image.float() / 10)
    ((images, classes),) = list(loader)
    assert images.shape == (7, 3, 3, 2)
    assert torch.equal(images[:, 0, 0, 0], classes.float() + 1)
    (tmp_path / "dog" / "broken.png").write_bytes(b"no image")
    with pytest.raises(DataError, match=r"broken\.png"):
        list(load(tmp_path, 8))


def test_tar_shards(tmp_path: Path) -> None:
    for shard in range(3):
        with tarfile.open(tmp_path / f"s{shard}.tar", "w") as archive:
            for i in range(4):
                number = shard * 4 + i
                buffer = io.BytesIO()
                np.save(buffer, np.full(2, number, np.float32))
                files = {"npy": buffer.getvalue(), "cls": str(number).encode(), "ppm": ppm(number)}
                for extension, data in files.items():
                    entry = tarfile.TarInfo(f"dir/{i:04}.{extension}")
                    entry.size = len(data)
                    archive.addfile(entry, io.BytesIO(data))
    seen = []
    for batch in load(str(tmp_path / "*.tar"), 5):
        assert torch.equal(batch["npy"][:, 0].long(), batch["cls"])
        assert torch.equal(batch["ppm"][:, 0, 0, 0].long(), batch["cls"])
        seen += batch["cls"].tolist()
    assert sorted(seen) == list(range(12))
    with tarfile.open(tmp_path / "p.tar", "w") as archive:
        entry = tarfile.TarInfo("0.pkl")
        entry.size = 1
        archive.addfile(entry, io.BytesIO(b"x"))
    with pytest.raises(DataError, match=r"not read '\.pkl'"):
        list(load(tmp_path / "p.tar"))


class Counting(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(10))


def test_torch_data() -> None:
    data = TensorDataset(torch.arange(10), torch.arange(10) * 2)
    assert all(torch.equal(x * 2, y) for x, y in load(data, 3))
    stream = load(DataLoader(data, 4))
    assert isinstance(stream, StreamLoader)
    assert [len(x) for x, _ in stream] == [4, 4, 2]
    assert [b.tolist() for b in load(Counting(), 4)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    stream.load_state_dict({"epoch": 3, "batches": 2})
    assert [x.tolist() for x, _ in stream] == [[8, 9]]
    assert stream.epoch == 4


def test_wrong_data_is_explained(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("1,2")
    (tmp_path / "x.npy").write_bytes(b"no array")
    (tmp_path / "empty").mkdir()
    for data, text in [
        (tmp_path / "x.csv", "does not read '.csv' files"),
        (tmp_path / "x.npy", "cannot be read as .npy"),
        (tmp_path / "gone.npy", "does not exist"),
        (tmp_path / "empty", "no images"),
        (str(tmp_path / "*.tar"), "no file matches"),
        (object(), "object is not training data"),
        (np.float32(3), "not training data"),
        (np.zeros((0, 2)), "no samples"),
    ]:
        with pytest.raises(DataError, match=text):
            load(data)


def test_errors_come_out_of_threads() -> None:
    class Bad:
        def __len__(self) -> int:
            return 9

        def __getitem__(self, i: int) -> int:
            raise LookupError(f"sample {i}")

    with pytest.raises(LookupError, match="sample"):
        list(load(Bad(), 2))
    with pytest.raises(LookupError, match="sample"):
        list(load(DataLoader(Bad(), 2)))  # type: ignore[arg-type]
    with pytest.raises(ZeroDivisionError):
        list(Feed([1, 0], lambda x: 1 / x))


def test_threads_end_with_the_interest_in_them() -> None:
    stream = load(DataLoader(list(range(1000)), 2))  # type: ignore[arg-type]
    for batches in (load(np.arange(1000), 2), stream, Feed(range(9), str)):
        for _ in batches:
            break
    for thread in threading.enumerate():
        if thread.name.startswith(("shoal-load", "shoal-feed")):
            thread.join(5)
            assert not thread.is_alive()
