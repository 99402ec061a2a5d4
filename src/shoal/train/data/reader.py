"""A reader: a process at a node that reads training data there, for one session on one device.

The device server forks it beside the session's worker. It opens only paths that its node serves
(pool/base/folders.py), puts samples into memory that the worker maps, and sends their offsets to the
client. It runs no code from other machines, and ends with its connection or its session.
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
from shoal.train.data.node_paths import fingerprint_of
from shoal.train.data.records import ImageFolderSource, TarSource
from shoal.train.data.slots import ALIGN_BYTES, aligned
from shoal.train.data.sources import Indices, Source, destination
from shoal.train.group.errors import DataError

if TYPE_CHECKING:
    import ssl

THREADS = 2
GUESS_BYTES = 2**20  # by which samples may exceed the estimate from the first one


def serve(
    connection: ssl.SSLSocket, memory_fd: int, memory_bytes: int, folders: Folders, number: int
) -> None:
    """Serve the client until it is gone."""
    _prefer_for_oom_killer()
    torch.set_num_threads(1)
    memory = mmap.mmap(memory_fd, memory_bytes)
    channel = ThreadedChannel(connection, data_messages.FROM_CLIENT)
    reader = Reader(torch.frombuffer(memory, dtype=torch.uint8), folders, channel.send)
    channel.send(session_messages.ReaderReady(number, memory_bytes))
    channel.run(reader.hear)


def _prefer_for_oom_killer() -> None:
    """Make the OOM killer choose this process first."""
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


class Opened:
    """A source and the largest size of its samples so far, an estimate for the next ones."""

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
                return  # enough requests wait already
            self._waiting += 1
            if self._waiting > limits.READS_MAX:
                raise ProtocolError("too many requests at once")
        self._threads.submit(self._answer, message)

    def _answer(self, message: OpenData | ReadSamples | WarmData) -> None:
        try:
            answer = self._work(message)
        except (ShoalError, OSError, ValueError, TypeError, RuntimeError, MemoryError) as error:
            # Also errors of decoders, from files with the wrong content: the reader goes on.
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
        indices = _indices(message.numbers, len(opened.source))
        if isinstance(message, WarmData):
            opened.source.warm(indices)
            return None
        return self._read(opened, indices, message)

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
                f"the data has {len(starts)} row groups or shards; a node reads at most "
                f"{limits.DATA_RUNS_MAX}"
            )
        _, first = data_tree.flatten(source.read(np.zeros(1, np.int64)))
        sample_bytes = sum(_bytes_of(leaf) for leaf in _tensors(first, 1))
        with self._lock:
            self._opened += 1
            number = self._opened
        self._sources[number] = Opened(source, sample_bytes)
        return DataOpened(
            message.request, number, len(source), starts.tobytes(), sample_bytes,
            [fingerprint for _, fingerprint in found],
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
        return source, fingerprint_of(asked.path, source)

    # --- reading -----------------------

    def _read(
        self, opened: Opened, indices: Indices, message: ReadSamples
    ) -> SamplesRead | SamplesTooLarge:
        stop = message.offset + message.capacity_bytes
        if stop > len(self._memory) or message.offset % ALIGN_BYTES:
            raise DataError("the slot lies outside of the reader's memory")
        guess = len(indices) * opened.sample_bytes
        if guess > message.capacity_bytes + GUESS_BYTES:
            return SamplesTooLarge(message.request, guess)
        slot = _Slot(self._memory[message.offset : stop])
        destination.allocate = slot.allocate
        try:
            skeleton, read = data_tree.flatten(opened.source.read(indices))
        finally:
            destination.allocate = None
        tensors = _tensors(read, len(indices))
        leaves = [slot.leaf(tensor) for tensor in tensors]
        needed = sum(aligned(_bytes_of(tensor)) for tensor in tensors)
        opened.sample_bytes = max(opened.sample_bytes, needed // len(indices))
        if any(leaf is None for leaf in leaves):
            return SamplesTooLarge(message.request, needed)
        return SamplesRead(message.request, skeleton, [leaf for leaf in leaves if leaf is not None])


class _Slot:
    """A range of the memory, filled from its beginning."""

    def __init__(self, memory: torch.Tensor) -> None:
        self._memory = memory
        self._start = memory.data_ptr()
        self._used = 0

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor | None:
        """Allocate a tensor. Return None if it does not fit."""
        size = math.prod(shape) * dtype.itemsize
        begin, end = self._used, self._used + size
        if end > len(self._memory):
            return None
        self._used = aligned(end)
        return self._memory[begin:end].view(dtype).view(tuple(shape))

    def leaf(self, tensor: torch.Tensor) -> SampleLeaf | None:
        """Return the offset of a tensor in the slot. Copy the tensor there if it is not there yet."""
        inside = 0 <= tensor.data_ptr() - self._start < len(self._memory) and tensor.is_contiguous()
        if not inside:
            placed = self.allocate(tensor.shape, tensor.dtype)
            if placed is None:
                return None
            tensor = placed.copy_(tensor)
        name = str(tensor.dtype).removeprefix("torch.")
        return SampleLeaf(name, list(tensor.shape), tensor.data_ptr() - self._start)


def _bytes_of(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.itemsize


def _indices(data: bytes, samples: int) -> Indices:
    indices = np.frombuffer(data, np.dtype("<i8")).astype(np.int64)
    if len(indices) == 0 or indices.min() < 0 or indices.max() >= samples:
        raise DataError(f"samples are numbered from 0 to {samples - 1}")
    return indices


def _tensors(leaves: Sequence[Any], samples: int) -> list[torch.Tensor]:
    """Return the leaves. Raise if one is not a tensor of so many samples."""
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor) or leaf.dim() < 1 or leaf.shape[0] != samples:
            raise DataError(
                f"samples that are read at a node are numbers only, and these hold "
                f'{type(leaf).__name__}; read them in the program: where="program"'
            )
    return list(leaves)
