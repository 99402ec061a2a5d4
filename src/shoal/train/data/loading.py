"""Batches from files and datasets, several ahead, in a seeded order that can be resumed."""

from __future__ import annotations

import glob
import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import Full, Queue
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

AHEAD = 4  # batches that are read ahead
THREADS = 2
MIXED_RUNS = 4  # runs (row groups, shards) whose samples are shuffled together
POLL_S = 0.1


class Loader:
    """Batches of a source, one epoch for each iteration.

    `state_dict()` holds how many batches the loader *handed out*. A loader that loads it goes on with
    the next one.

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
            raise DataError(
                f"batch_size, ahead and threads must be at least 1 (got "
                f"{batch_size}, {ahead} and {threads})"
            )
        if len(source) < 1:
            raise DataError("the data has no samples")
        self.source = source
        self.batch_size = batch_size
        self.epoch = 0
        self._at = 0  # batches of this epoch that are handed out
        self._shuffle = shuffle
        self._seed = seed
        self._drop_last = drop_last
        self._ahead = ahead
        self._threads = threads
        self._transform = transform

    def __len__(self) -> int:
        """Return the batches of an epoch."""
        whole, rest = divmod(len(self.source), self.batch_size)
        return whole + (1 if rest and not self._drop_last else 0)

    def order(self, epoch: int) -> Indices:
        """Return the sample indices of an epoch, in reading order."""
        count = len(self.source)
        if not self._shuffle:
            return np.arange(count, dtype=np.int64)
        rng = np.random.default_rng([self._seed, epoch])
        if self.source.runs is None:
            return rng.permutation(count).astype(np.int64)
        return _mixed(self.source.runs, rng)

    def __iter__(self) -> Iterator[Any]:
        """Yield the rest of this epoch. Then the next epoch begins."""
        order = self.order(self.epoch)
        if isinstance(self.source, NodeSource) and self.source.at_nodes():
            yield from self._read_at_nodes(self.source, order)
        else:
            yield from self._read_here(order)
        self.epoch, self._at = self.epoch + 1, 0

    def _read_at_nodes(self, source: NodeSource, order: Indices) -> Iterator[Any]:
        """Yield batches that the nodes of their devices read."""
        for near in range(self._ahead):
            source.expect(self._samples(order, self._at + near), near)
        for number in range(self._at, len(self)):
            source.expect(self._samples(order, number + self._ahead), self._ahead)
            batch = source.batch(self._samples(order, number))
            self._at += 1
            yield batch

    def _read_here(self, order: Indices) -> Iterator[Any]:
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
        """Who reads for each device of the lease, by its name: "node", or "program" and why."""
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
        """Return the position: the epoch, and its batches that are handed out."""
        return {"epoch": self.epoch, "batches": self._at, "seed": self._seed}

    def load_state_dict(self, state: dict[str, int]) -> None:
        if int(state["seed"]) != self._seed:
            raise DataError(
                f"the state belongs to a loader with seed {state['seed']}, this one has "
                f"seed {self._seed} and would read other samples"
            )
        if not 0 <= int(state["batches"]) <= len(self):
            raise DataError(
                f"the state belongs to other data: an epoch has {len(self)} batches here"
            )
        self.epoch, self._at = int(state["epoch"]), int(state["batches"])


class StreamLoader:
    """Any iterable of batches (a DataLoader), which a thread reads ahead in its own order.

    A resumed one skips the batches before its position.

    >>> batches = torch.utils.data.DataLoader(dataset, batch_size=16)
    >>> for x, y in shoal.train.load(batches):
    ...     print(x.shape)
    """

    def __init__(self, batches: Any, ahead: int = AHEAD) -> None:
        self._batches = batches
        self._ahead = ahead
        self.epoch = 0
        self._at = 0

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        rest = itertools.islice(self._batches, self._at, None)
        for batch in _read_ahead(rest, self._ahead, "shoal-load"):
            self._at += 1
            yield batch
        self.epoch, self._at = self.epoch + 1, 0

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "batches": self._at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self._at = int(state["epoch"]), int(state["batches"])


@dataclass(frozen=True, slots=True)
class _End:
    """The end of a queue of batches."""

    error: BaseException | None = None


def _read_ahead(batches: Iterable[Any], ahead: int, name: str, join_s: float = 0) -> Iterator[Any]:
    """Yield batches that a thread reads ahead. At the end, wait so long for the thread."""
    queue: Queue[Any] = Queue(ahead)
    stop = threading.Event()
    thread = threading.Thread(target=_fill, args=(batches, queue, stop), name=name, daemon=True)
    thread.start()
    try:
        while True:
            found = queue.get()
            if not isinstance(found, _End):
                yield found
            elif found.error is not None:
                raise found.error
            else:
                return
    finally:
        stop.set()
        thread.join(join_s)


def _fill(batches: Iterable[Any], queue: Queue[Any], stop: threading.Event) -> None:
    """Fill the queue until the batches end or `stop` is set."""

    def put(found: Any) -> bool:
        while not stop.is_set():
            try:
                queue.put(found, timeout=POLL_S)
                return True
            except Full:
                continue
        return False

    try:
        for batch in batches:
            if not put(pin(batch)):
                return
        put(_End())
    except BaseException as error:
        put(_End(error))


def pin(batch: Any) -> Any:
    """Copy a batch to memory that devices read without a copy, if it is not there already."""
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
    """Order the runs at random and shuffle the samples of a few runs together, so that each run is read
    about once."""
    order = rng.permutation(len(runs))
    mixed = []
    for start in range(0, len(order), MIXED_RUNS):
        together = [
            np.arange(runs[i].start, runs[i].stop) for i in order[start : start + MIXED_RUNS]
        ]
        mixed.append(rng.permutation(np.concatenate(together)))
    return np.concatenate(mixed).astype(np.int64)


def load(
    data: Any, batch_size: int = 32, *, where: Where = "auto", **options: Any
) -> Loader | StreamLoader:
    """Make a loader for training data.

    Args:
        data: a path (`.npy`, `.safetensors`, `.parquet`, `.arrow`, `.feather`, `.tar` or a pattern
            like `"shards/*.tar"`, or a folder of images by class); arrays or tensors; a tuple or a
            dict of those; a torch Dataset; a DataLoader (then `batch_size` is its own).
        batch_size: samples of a batch, over all groups.
        where: who reads. "auto": the node of a remote device, if it serves the same files (`shoal node
            --data DIR`); else the program. "node": always the node; the program does not need the
            files. "program": always the program.
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
            f'where="node": {what} exists in this program only; Shoal does not send it to nodes. Leave '
            'it out, or read in the program: where="program"'
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
    """Open a path, arrays, a tuple or dict of them, or a torch dataset."""
    if isinstance(data, (np.ndarray, torch.Tensor)):
        return ArraySource(data)
    if isinstance(data, (str, Path)):
        return _open_path(str(data), sample_transform, columns)
    if isinstance(data, dict):
        return TreeSource({k: open_source(v) for k, v in data.items()}, dict)
    if isinstance(data, (tuple, list)):
        opened = {i: open_source(v) for i, v in enumerate(data)}
        return TreeSource(opened, lambda read: tuple(read[i] for i in sorted(read)))
    if isinstance(data, Dataset) or (hasattr(data, "__getitem__") and hasattr(data, "__len__")):
        return DatasetSource(data)
    if all(hasattr(data, name) for name in ("read", "warm", "runs", "__len__")):
        source: Source = data
        return source
    raise DataError(
        f"{type(data).__name__} is not training data; pass a path, arrays, a tuple or dict of them, a "
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
    """Open one file, or a folder of images."""
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
            f"{path}: Shoal does not read {path.suffix!r} files; use "
            f"{', '.join(openers)}, or a torch Dataset"
        )
    return openers[path.suffix]()


class Feed:
    """Prepares the next batches in a thread while the devices compute earlier ones.

    >>> for batch in Feed(loader, prepare, ahead=2): ...
    """

    def __init__(self, batches: Any, prepare: Callable[[Any], Any], ahead: int = 2) -> None:
        self._batches = batches
        self._prepare = prepare
        self._ahead = ahead

    def __iter__(self) -> Iterator[Any]:
        prepared = map(self._prepare, self._batches)
        return _read_ahead(prepared, self._ahead, "shoal-feed", join_s=5)
