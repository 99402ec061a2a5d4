"""A reader: a process at a node that reads training data there, for one session on one device.

The device server forks it beside the session's worker. It opens only what its node serves
(pool/folders.py), puts samples into memory that the worker maps, and tells the client where. It runs no
code that came from elsewhere, and ends with its connection or its session.
"""

from __future__ import annotations

import math
import mmap
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from shoal.errors import ProtocolError, ShoalError
from shoal.pool.base import limits
from shoal.pool.base.folders import MAGIC, Folders
from shoal.pool.wire import data_messages, session_messages
from shoal.pool.wire.data_messages import (
    CloseData,
    DataFailed,
    DataOpened,
    DataPath,
    OpenData,
    ReadSamples,
    SampleLeaf,
    SamplesRead,
    SamplesTooLarge,
    WarmData,
)
from shoal.pool.wire.threaded_channel import ThreadedChannel
from shoal.train.data import data_tree, loading
from shoal.train.data.node_paths import mark_of
from shoal.train.data.records import ImageFolderSource, TarSource
from shoal.train.data.slots import ALIGN_BYTES
from shoal.train.data.sources import Indices, Source, placing
from shoal.train.group.errors import DataError

if TYPE_CHECKING:
    import ssl

THREADS = 2
GUESS_BYTES = 2**20  # by how much samples may be larger than the first one made us think


def serve(
    connection: ssl.SSLSocket, memory_fd: int, memory_bytes: int, folders: Folders, number: int
) -> None:
    """Serves the client until it is gone."""
    _be_first_to_go()
    torch.set_num_threads(1)
    memory = mmap.mmap(memory_fd, memory_bytes)
    channel = ThreadedChannel(connection, data_messages.FROM_CLIENT)
    reader = Reader(torch.frombuffer(memory, dtype=torch.uint8), folders, channel.send)
    channel.send(session_messages.ReaderReady(number, memory_bytes))
    channel.run(reader.hear)


def _be_first_to_go() -> None:
    """Where the machine's memory runs out, a reader is the smallest loss."""
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


class Opened:
    """A source and what its samples took so far, which is a guess for those to come."""

    def __init__(self, source: Source, sample_bytes: int) -> None:
        self.source = source
        self.sample_bytes = sample_bytes


class Reader:
    """Answers requests, each in one of a few threads."""

    def __init__(
        self,
        memory: torch.Tensor,
        folders: Folders,
        send: Callable[[data_messages.FromReader], None],
    ) -> None:
        self._memory = memory
        self._folders = folders
        self._send = send
        self._sources: dict[int, Opened] = {}
        self._opened = 0
        self._waiting = 0
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="shoal-read")

    def hear(self, message: data_messages.FromClient) -> None:
        """Take a request. Raise ProtocolError, which ends the reader, if too many wait."""
        if isinstance(message, CloseData):
            self._sources.pop(message.source, None)
            return
        with self._lock:
            if isinstance(message, WarmData) and self._waiting > limits.READS_MAX // 2:
                return  # it has enough to do
            self._waiting += 1
            if self._waiting > limits.READS_MAX:
                raise ProtocolError("too many requests at once")
        self._threads.submit(self._answer, message)

    def _answer(self, message: OpenData | ReadSamples | WarmData) -> None:
        try:
            answer = self._work(message)
        except (ShoalError, OSError, ValueError, TypeError, RuntimeError, MemoryError) as error:
            # Also what decoders say of files that are not what they seem: the reader lives on.
            text = str(error) or type(error).__name__
            request = 0 if isinstance(message, WarmData) else message.request
            answer = DataFailed(request, text[: limits.TEXT_CHARS_MAX])
        with self._lock:
            self._waiting -= 1
        if not isinstance(message, WarmData):
            with suppress(ConnectionError):
                self._send(answer)

    def _work(self, message: OpenData | ReadSamples | WarmData) -> Any:
        if isinstance(message, OpenData):
            return self._open(message)
        opened = self._sources.get(message.source)
        if opened is None:
            raise DataError(f"there is no source {message.source}")
        numbers = _numbers(message.numbers, len(opened.source))
        if isinstance(message, WarmData):
            opened.source.warm(numbers)
            return None
        return self._read(opened, numbers, message)

    # --- opening -----------------------

    def _open(self, message: OpenData) -> DataOpened:
        if len(self._sources) >= limits.DATA_SOURCES_MAX:
            raise DataError(f"a reader has {limits.DATA_SOURCES_MAX} sources at most")
        found = [self._open_path(path) for path in message.paths]
        tree = data_tree.rebuild(message.skeleton, [source for source, _ in found])
        source = loading.open_source(tree)
        if len(source) < 1:
            raise DataError("the data has no samples")
        starts = np.array([run.start for run in source.runs or ()], np.dtype("<i8"))
        if len(starts) > limits.DATA_RUNS_MAX:
            raise DataError(
                f"it has {len(starts)} row groups or shards, too many to read elsewhere"
            )
        _, first = data_tree.flatten(source.read(np.zeros(1, np.int64)))
        sample_bytes = sum(_bytes_of(leaf) for leaf in _tensors(first, 1))
        with self._lock:
            self._opened += 1
            number = self._opened
        self._sources[number] = Opened(source, sample_bytes)
        return DataOpened(
            message.request, number, len(source), starts.tobytes(), sample_bytes,
            [mark for _, mark in found],
        )  # fmt: skip

    def _open_path(self, asked: DataPath) -> tuple[Source, Any]:
        files = self._folders.resolve(asked.path)
        source: Source
        if any(c in asked.path for c in MAGIC):
            source = TarSource(files)
        else:
            source = loading.open_file(files[0], None, asked.columns)
        if isinstance(source, ImageFolderSource):
            for path in source.paths:  # a link in the folder may lead out of it
                self._folders.check(path)
        return source, mark_of(asked.path, source)

    # --- reading -----------------------

    def _read(
        self, opened: Opened, numbers: Indices, message: ReadSamples
    ) -> SamplesRead | SamplesTooLarge:
        stop = message.offset + message.capacity_bytes
        if stop > len(self._memory) or message.offset % ALIGN_BYTES:
            raise DataError("the slot lies outside of the reader's memory")
        guess = len(numbers) * opened.sample_bytes
        if guess > message.capacity_bytes + GUESS_BYTES:
            return SamplesTooLarge(message.request, guess)
        slot = _Slot(self._memory[message.offset : stop])
        placing.place = slot.place
        try:
            skeleton, read = data_tree.flatten(opened.source.read(numbers))
        finally:
            placing.place = None
        tensors = _tensors(read, len(numbers))
        leaves = [slot.leaf(tensor) for tensor in tensors]
        needed = sum(_aligned(_bytes_of(tensor)) for tensor in tensors)
        opened.sample_bytes = max(opened.sample_bytes, needed // len(numbers))
        if any(leaf is None for leaf in leaves):
            return SamplesTooLarge(message.request, needed)
        return SamplesRead(message.request, skeleton, [leaf for leaf in leaves if leaf is not None])


class _Slot:
    """A range of the memory that is filled from its beginning."""

    def __init__(self, memory: torch.Tensor) -> None:
        self._memory = memory
        self._start = memory.data_ptr()
        self._used = 0

    def place(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor | None:
        """Room for a tensor; None if there is none left."""
        size = math.prod(shape) * dtype.itemsize
        begin, end = self._used, self._used + size
        if end > len(self._memory):
            return None
        self._used = _aligned(end)
        return self._memory[begin:end].view(dtype).view(tuple(shape))

    def leaf(self, tensor: torch.Tensor) -> SampleLeaf | None:
        """Where the tensor is in the slot; it is put there if it is not there yet."""
        inside = 0 <= tensor.data_ptr() - self._start < len(self._memory) and tensor.is_contiguous()
        if not inside:
            placed = self.place(tensor.shape, tensor.dtype)
            if placed is None:
                return None
            tensor = placed.copy_(tensor)
        name = str(tensor.dtype).removeprefix("torch.")
        return SampleLeaf(name, list(tensor.shape), tensor.data_ptr() - self._start)


def _aligned(size: int) -> int:
    return -(-size // ALIGN_BYTES) * ALIGN_BYTES


def _bytes_of(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.itemsize


def _numbers(data: bytes, samples: int) -> Indices:
    numbers = np.frombuffer(data, np.dtype("<i8")).astype(np.int64)
    if len(numbers) == 0 or numbers.min() < 0 or numbers.max() >= samples:
        raise DataError(f"samples are numbered from 0 to {samples - 1}")
    return numbers


def _tensors(leaves: Sequence[Any], samples: int) -> list[torch.Tensor]:
    """The leaves, which are tensors of so many samples: nothing else can go to a device."""
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor) or leaf.dim() < 1 or leaf.shape[0] != samples:
            raise DataError(
                f"samples that are read at a node are numbers only, and these hold "
                f'{type(leaf).__name__}; read them in the program: where="program"'
            )
    return list(leaves)
