"""Batches from files and datasets, several ahead, in a seeded order that can be resumed."""

from __future__ import annotations

import glob
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from queue import Empty, Full, Queue
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from shoal.pool.base.folders import MAGIC
from shoal.train.data import node_data, node_paths, sources
from shoal.train.data.batches import map_leaves
from shoal.train.data.node_data import NodeSource, Where
from shoal.train.data.records import ImageFolderSource, TableSource, TarSource
from shoal.train.data.sources import ArraySource, DatasetSource, Indices, Source, TreeSource
from shoal.train.group.devices import has_lease
from shoal.train.group.errors import DataError

AHEAD = 4  # batches that are read before they are asked for
THREADS = 2
MIXED_RUNS = 4  # runs (row groups, shards) whose samples are shuffled together
LOOK_EVERY_S = 0.1


class Loader:
    """Batches of a source, one epoch for each iteration.

    `state_dict()` holds how many batches were *handed out*; a loader that loads it goes on with the
    next one, with nothing read twice.

    >>> loader = shoal.train.load(("x.npy", "y.npy"), batch_size=64, seed=1)
    >>> for x, y in loader:
    ...     trainer.step((x, y))
    """

    def __init__(
        self,
        source: Source,
        batch_size: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        ahead: int = AHEAD,
        threads: int = THREADS,
        transform: Callable[[Any], Any] | None = None,
    ) -> None:
        if batch_size < 1 or ahead < 1 or threads < 1:
            raise DataError("batch_size, ahead and threads are at least 1")
        if len(source) < 1:
            raise DataError("the data has no samples")
        self.source = source
        self.batch_size = batch_size
        self.epoch = 0
        self._at = 0  # batches of this epoch that were handed out
        self._shuffle = shuffle
        self._seed = seed
        self._drop_last = drop_last
        self._ahead = ahead
        self._threads = threads
        self._transform = transform

    def __len__(self) -> int:
        """Batches of an epoch."""
        whole, rest = divmod(len(self.source), self.batch_size)
        return whole + (1 if rest and not self._drop_last else 0)

    def order(self, epoch: int) -> Indices:
        """The numbers of an epoch's samples, in the order they are read."""
        count = len(self.source)
        if not self._shuffle:
            return np.arange(count, dtype=np.int64)
        rng = np.random.default_rng([self._seed, epoch])
        if self.source.runs is None:
            return rng.permutation(count).astype(np.int64)
        return _mixed(self.source.runs, rng)

    def __iter__(self) -> Iterator[Any]:
        """The rest of this epoch; then the next epoch begins."""
        order = self.order(self.epoch)
        if isinstance(self.source, NodeSource) and self.source.at_nodes():
            yield from self._numbers(self.source, order)
        else:
            yield from self._read_ahead(order)
        self.epoch, self._at = self.epoch + 1, 0

    def _numbers(self, source: NodeSource, order: Indices) -> Iterator[Any]:
        """Batches that are read at the nodes of the devices that they are divided among."""
        for near in range(self._ahead):
            source.expect(self._samples(order, self._at + near), near)
        for number in range(self._at, len(self)):
            source.expect(self._samples(order, number + self._ahead), self._ahead)
            batch = source.batch(self._samples(order, number))
            self._at += 1
            yield batch

    def _read_ahead(self, order: Indices) -> Iterator[Any]:
        wanted = iter(range(self._at, len(self)))
        with ThreadPoolExecutor(self._threads, thread_name_prefix="shoal-load") as pool:
            reading: deque[Future[Any]] = deque()
            try:
                for number in wanted:
                    pool.submit(self.source.warm, self._samples(order, number + self._ahead))
                    reading.append(pool.submit(self._read, order, number))
                    if len(reading) >= self._ahead:
                        yield self._next(reading)
                while reading:
                    yield self._next(reading)
            finally:
                for future in reading:
                    future.cancel()

    @property
    def places(self) -> dict[str, str]:
        """Where the part of each device of the lease is read, by name of the device: "node", or
        "program" and why."""
        return self.source.places if isinstance(self.source, NodeSource) else {}

    def _next(self, reading: deque[Future[Any]]) -> Any:
        batch = reading.popleft().result()
        self._at += 1
        return batch

    def _samples(self, order: Indices, number: int) -> Indices:
        start = number * self.batch_size
        return order[start : start + self.batch_size]

    def _read(self, order: Indices, number: int) -> Any:
        batch = self.source.read(self._samples(order, number))
        if self._transform is not None:
            batch = self._transform(batch)
        return pin(batch)

    def state_dict(self) -> dict[str, int]:
        """Where the loader is: an epoch, and batches of it that were handed out."""
        return {"epoch": self.epoch, "batches": self._at, "seed": self._seed}

    def load_state_dict(self, state: dict[str, int]) -> None:
        if int(state["seed"]) != self._seed:
            raise DataError(
                f"the state is of a loader with seed {state['seed']}, this one has {self._seed}: it "
                "would read other samples"
            )
        if not 0 <= int(state["batches"]) <= len(self):
            raise DataError(f"the state is of other data: an epoch has {len(self)} batches here")
        self.epoch, self._at = int(state["epoch"]), int(state["batches"])


class StreamLoader:
    """Any iterable of batches (a DataLoader), read ahead by a thread. Resuming skips what was read
    before; the order is the iterable's own."""

    def __init__(self, batches: Any, ahead: int = AHEAD) -> None:
        self._batches = batches
        self._ahead = ahead
        self.epoch = 0
        self._at = 0

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        queue: Queue[tuple[str, Any]] = Queue(self._ahead)
        stop = threading.Event()
        skip = self._at
        thread = threading.Thread(
            target=_pump, args=(self._batches, skip, queue, stop), name="shoal-load", daemon=True
        )
        thread.start()
        try:
            while True:
                kind, value = queue.get()
                if kind == "error":
                    raise value
                if kind == "end":
                    break
                self._at += 1
                yield value
        finally:
            stop.set()
        self.epoch, self._at = self.epoch + 1, 0

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "batches": self._at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self._at = int(state["epoch"]), int(state["batches"])


def _pump(batches: Any, skip: int, queue: Queue[tuple[str, Any]], stop: threading.Event) -> None:
    """Fills the queue until the batches or the interest in them end."""

    def put(item: tuple[str, Any]) -> bool:
        while not stop.is_set():
            try:
                queue.put(item, timeout=LOOK_EVERY_S)
                return True
            except Full:
                continue
        return False

    try:
        for number, batch in enumerate(batches):
            if number >= skip and not put(("batch", pin(batch))):
                return
        put(("end", None))
    except BaseException as error:
        put(("error", error))


def pin(batch: Any) -> Any:
    """The batch in memory that devices read without a copy, where it is not there already."""
    if not has_lease():
        return batch

    def one(leaf: Any) -> Any:
        if isinstance(leaf, np.ndarray):
            leaf = torch.from_numpy(leaf)
        if isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu" and not leaf.is_pinned():
            out = torch.empty(leaf.shape, dtype=leaf.dtype, pin_memory=True)
            return out.copy_(leaf)
        return leaf

    return map_leaves(one, batch)


def _mixed(runs: Sequence[range], rng: np.random.Generator) -> Indices:
    """Runs in random order; samples of a few neighbouring runs at a time are shuffled together, so
    that each run is read about once."""
    order = rng.permutation(len(runs))
    parts = []
    for start in range(0, len(order), MIXED_RUNS):
        together = [
            np.arange(runs[i].start, runs[i].stop) for i in order[start : start + MIXED_RUNS]
        ]
        parts.append(rng.permutation(np.concatenate(together)))
    return np.concatenate(parts).astype(np.int64)


def load(
    data: Any, batch_size: int = 32, *, where: Where = "auto", **options: Any
) -> Loader | StreamLoader:
    """A loader of whatever holds training data.

    Args:
        data: a path (`.npy`, `.safetensors`, `.parquet`, `.arrow`, `.feather`, `.tar` or a pattern
            like `"shards/*.tar"`, or a folder of images by class); arrays or tensors; a tuple or a
            dict of those; a torch Dataset; a DataLoader (then `batch_size` is its own).
        batch_size: samples of a batch, over all groups.
        where: who reads. "auto": for a device elsewhere its node, if it serves these files
            (`shoal node --data DIR`) and they are the same there as here; else the program. "node":
            an error where nodes cannot; the program need not have the files. "program": the program.
        options: `shuffle`, `seed`, `drop_last`, `ahead`, `threads`, `transform` (of a batch),
            `sample_transform` (of one image or tar sample), `columns` (of a table).

    >>> loader = shoal.train.load({"input_ids": "tokens.npy", "labels": "labels.npy"}, 16)
    """
    node_data.check_where(where)
    if isinstance(data, (Loader, StreamLoader)):
        return data
    if isinstance(data, (DataLoader, IterableDataset)) and where != "node":
        batches = data if isinstance(data, DataLoader) else DataLoader(data, batch_size)
        return StreamLoader(batches, options.get("ahead", AHEAD))
    special = {k: options.pop(k) for k in ("sample_transform", "columns") if k in options}
    asked = node_paths.paths_of(data, special.get("columns"))
    code = options.get("transform") or special.get("sample_transform")
    if where == "node" and (asked is None or code):
        what = "a transform" if code else f"{type(data).__name__}, which is more than paths,"
        raise DataError(
            f'where="node": {what} is this program\'s own and is not sent to nodes. Leave it out, or '
            'read in the program: where="program"'
        )
    if where == "program" or asked is None or code:
        return Loader(open_source(data, **special), batch_size, **options)
    program = None
    try:
        program = open_source(data, **special)
    except DataError:
        if where != "node":
            raise
    return Loader(NodeSource(asked, program, _open_leaf, where), batch_size, **options)


def _open_leaf(path: str, columns: Sequence[str] | None) -> Source:
    return _open_path(path, None, columns)


def open_source(
    data: Any,
    sample_transform: Callable[[Any], Any] | None = None,
    columns: Sequence[str] | None = None,
) -> Source:
    """The samples behind a path, arrays, a tuple or dict of them, or a torch dataset."""
    if isinstance(data, (np.ndarray, torch.Tensor)):
        return ArraySource(data)
    if isinstance(data, (str, Path)):
        return _open_path(str(data), sample_transform, columns)
    if isinstance(data, dict):
        return TreeSource({k: open_source(v) for k, v in data.items()}, dict)
    if isinstance(data, (tuple, list)):
        parts = {i: open_source(v) for i, v in enumerate(data)}
        return TreeSource(parts, lambda read: tuple(read[i] for i in sorted(read)))
    if isinstance(data, Dataset) or (hasattr(data, "__getitem__") and hasattr(data, "__len__")):
        return DatasetSource(data)
    if all(hasattr(data, name) for name in ("read", "warm", "runs", "__len__")):
        source: Source = data
        return source
    raise DataError(
        f"{type(data).__name__} is no training data; give a path, arrays, a tuple or dict of them, a "
        "torch Dataset or a DataLoader"
    )


def _open_path(
    text: str, transform: Callable[[Any], Any] | None, columns: Sequence[str] | None
) -> Source:
    path = Path(text)
    if any(c in text for c in MAGIC):
        found = [Path(p) for p in sorted(glob.glob(text))]
        if not found:
            raise DataError(f"no file matches {text}")
        return TarSource(found, transform)
    if not path.exists():
        raise DataError(f"{path} does not exist")
    return open_file(path, transform, columns)


def open_file(
    path: Path,
    transform: Callable[[Any], Any] | None = None,
    columns: Sequence[str] | None = None,
) -> Source:
    """The samples in one file, or in a folder of images."""
    if path.is_dir():
        return ImageFolderSource(path, transform)
    openers: dict[str, Callable[[], Source]] = {
        ".npy": lambda: sources.npy(path),
        ".safetensors": lambda: sources.safetensors(path),
        ".parquet": lambda: TableSource(path, columns),
        ".arrow": lambda: TableSource(path, columns),
        ".feather": lambda: TableSource(path, columns),
        ".tar": lambda: TarSource([path], transform),
    }
    if path.suffix not in openers:
        raise DataError(
            f"{path}: files of the kind {path.suffix!r} are not read; use "
            f"{', '.join(openers)}, or a torch Dataset"
        )
    return openers[path.suffix]()


class Feed:
    """Prepares the next batches in a thread while the devices work on earlier ones.

    >>> for batch in Feed(loader, prepare, ahead=2): ...
    """

    def __init__(self, batches: Any, prepare: Callable[[Any], Any], ahead: int = 2) -> None:
        self._batches = batches
        self._prepare = prepare
        self._ahead = ahead

    def __iter__(self) -> Iterator[Any]:
        queue: Queue[tuple[str, Any]] = Queue(self._ahead)
        stop = threading.Event()
        thread = threading.Thread(
            target=_pump,
            args=(map(self._prepare, self._batches), 0, queue, stop),
            name="shoal-feed",
            daemon=True,
        )
        thread.start()
        try:
            while True:
                try:
                    kind, value = queue.get(timeout=LOOK_EVERY_S)
                except Empty:
                    continue
                if kind == "error":
                    raise value
                if kind == "end":
                    return
                yield value
        finally:
            stop.set()
            thread.join(5)
