"""The client's end of a reader: asks for samples, and has the device copy them into tensors.

A micro-batch may be requested long before it is needed. Its samples lie in a slot of the reader's
memory until the device has copied them. A micro-batch that was not fetched gives its slot up when
another needs it.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from shoal import _core
from shoal.device import leases
from shoal.errors import DeviceLostError, LeaseError, ProtocolError
from shoal.pool.base import limits
from shoal.pool.wire import data_messages
from shoal.pool.wire.data_messages import (
    DataOpened,
    DataPath,
    SamplesRead,
    SamplesTooLarge,
    Skeleton,
)
from shoal.pool.wire.threaded_channel import ThreadedChannel
from shoal.train.data import data_tree
from shoal.train.data.slots import Slots
from shoal.train.data.sources import Indices
from shoal.train.group import devices
from shoal.train.group.errors import DataError
from shoal.units import show_bytes

ANSWER_S = 120.0  # for a reader to open or to read: a disk may be slow
POLL_S = 0.1  # between checks for a lost device during a wait
ROOM_POLL_S = 0.001
DYING_S = 2.0  # until the device server notices that a reader has died
CHUNKS_MIN = 4  # a request fills at most one of so many fractions of a reader's memory

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64,
        torch.complex128, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8,
        torch.uint16, torch.uint32, torch.uint64, torch.bool,
    )
}  # fmt: skip


class ReaderLostError(DataError):
    """A reader has ended, but its session goes on."""


@dataclass
class Asked:
    """Requested samples, and the offset of their slot."""

    source: int
    serial: int  # of the batch that they are for
    offset: int
    answer: Future[data_messages.FromReader]


@dataclass
class NodeFile:
    """Data that a reader has opened."""

    source: int
    opened: DataOpened
    sample_bytes: int = field(init=False)  # the largest so far

    def __post_init__(self) -> None:
        self.sample_bytes = max(1, self.opened.sample_bytes)


class ReaderClient:
    """A reader beside the worker of one remote device."""

    def __init__(self, lease: leases.Lease, index: int) -> None:
        attached = lease.attached[index]
        assert attached is not None
        self.name = attached.name
        self.device = lease.devices[index]
        self._lease = lease
        connection, ready = attached.open_reader(lease.number, lease.epoch)
        self._number = ready.number
        self._slots = Slots(ready.memory_bytes)
        self._channel = ThreadedChannel(connection, data_messages.FROM_READER)
        self._lock = threading.Lock()
        self._requests = itertools.count(1)
        self._answers: dict[int, Future[data_messages.FromReader]] = {}
        self._pending: OrderedDict[tuple[int, bytes], Asked] = OrderedDict()
        self._copied: deque[tuple[int, int]] = deque()  # message and slot, free after it
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="shoal-reader", daemon=True)
        self._thread.start()

    # --- the connection ----------------

    def _run(self) -> None:
        why = "its process has ended"
        try:
            self._channel.run(self._hear)
        except ProtocolError as error:
            why = str(error)
        with self._lock:
            self._ended = True
            waiting, self._answers = list(self._answers.values()), {}
        for answer in waiting:
            answer.set_exception(
                ReaderLostError(f"the data reader of device {self.name} is lost: {why}")
            )

    def _hear(self, message: data_messages.FromReader) -> None:
        with self._lock:
            answer = self._answers.pop(message.request, None)
        if answer is None:
            raise ProtocolError(f"it sent {type(message).__name__} without a request")
        answer.set_result(message)

    def _ask(
        self, build: Callable[[int], data_messages.FromClient]
    ) -> Future[data_messages.FromReader]:
        number = next(self._requests)
        answer: Future[data_messages.FromReader] = Future()
        with self._lock:
            if self._ended:
                raise ReaderLostError(f"the data reader of device {self.name} is lost")
            self._answers[number] = answer
        try:
            self._channel.send(build(number))
        except ConnectionError:
            with self._lock:
                self._answers.pop(number, None)
            raise ReaderLostError(f"the data reader of device {self.name} is lost") from None
        return answer

    def _await(
        self, answer: Future[data_messages.FromReader], what: str
    ) -> data_messages.FromReader:
        """The answer. The device's loss is noticed meanwhile, and told as what it is."""
        until = time.monotonic() + ANSWER_S
        while True:
            try:
                message = answer.result(POLL_S)
                break
            except TimeoutError:
                self._check_device()
            except ReaderLostError:
                if devices.is_lost(self.device):
                    raise DeviceLostError(
                        f"device {self.name} and its data reader are lost", self.name
                    ) from None
                raise
            if time.monotonic() > until:
                raise DataError(
                    f"waited {ANSWER_S:g} s for the data reader of device {self.name} to {what}"
                )
        if isinstance(message, data_messages.DataFailed):
            raise DataError(f"device {self.name}: {message.reason}")
        return message

    def _check_device(self) -> None:
        if not self._lease.active:
            raise DeviceLostError(f"the lease of device {self.name} has ended", self.name)
        _core.is_past(self._index, 0)  # raises if the device is lost

    @property
    def _index(self) -> int:
        return int(self.device.index)

    @property
    def usable(self) -> bool:
        return not self._ended and self._lease.active

    def close(self) -> None:
        """Ends the reader; its memory goes with it."""
        self._channel.close()
        self._thread.join(5)

    # --- opening -----------------------

    def open(self, skeleton: Skeleton, paths: list[DataPath]) -> NodeFile:
        answer = self._ask(lambda number: data_messages.OpenData(number, skeleton, paths))
        opened = self._await(answer, f"open {paths[0].path}")
        if not isinstance(opened, DataOpened) or len(opened.marks) != len(paths):
            raise DataError(
                f"the data reader of device {self.name} answered {type(opened).__name__}"
            )
        return NodeFile(opened.source, opened)

    def close_file(self, file: NodeFile) -> None:
        """Close data that is no longer read."""
        self._forget(lambda asked: asked.source == file.source)
        with suppress(ConnectionError):  # gone with everything that it had open
            self._channel.send(data_messages.CloseData(file.source))

    def warm(self, file: NodeFile, indices: Indices) -> None:
        """Announce samples that will be read soon; do not wait."""
        for chunk in _cut(indices, limits.READ_SAMPLES_MAX):
            try:
                self._channel.send(
                    data_messages.WarmData(file.source, chunk.astype("<i8").tobytes())
                )
            except ConnectionError:
                return  # the next read raises the error

    # --- samples -----------------------

    def _chunks(self, file: NodeFile, indices: Indices) -> Iterator[Indices]:
        most = self._slots.memory_bytes // CHUNKS_MIN // file.sample_bytes
        return _cut(indices, max(1, min(most, limits.READ_SAMPLES_MAX)))

    def ask(self, file: NodeFile, indices: Indices, serial: int) -> None:
        """Request samples ahead, if there is room for them now."""
        for chunk in self._chunks(file, indices):
            key = file.source, chunk.astype("<i8").tobytes()
            if key in self._pending:
                continue
            if len(self._answers) >= limits.READS_MAX // 2:
                return
            offset = self._room(_capacity(file, len(chunk)))
            if offset is None:
                return
            asked = self._read(file, key[1], serial, offset, len(chunk))
            with self._lock:
                kept = self._pending.setdefault(key, asked)
            if kept is not asked:  # another thread was faster
                self._give_after(asked)

    def _read(self, file: NodeFile, indices: bytes, serial: int, offset: int, count: int) -> Asked:
        capacity = _capacity(file, count)
        try:
            answer = self._ask(
                lambda number: data_messages.ReadSamples(
                    number, file.source, indices, offset, capacity
                )
            )
        except ReaderLostError:
            self._give(offset)
            raise
        return Asked(file.source, serial, offset, answer)

    def take(self, file: NodeFile, indices: Indices, serial: int) -> Any:
        """Return the samples as tensors on the device: the same tree that the program would read."""
        self._forget(lambda asked: asked.source == file.source and asked.serial < serial)
        start = 0
        skeleton: Skeleton | None = None
        targets: list[torch.Tensor] = []
        while start < len(indices):
            chunk = next(self._chunks(file, indices[start:]))  # samples may be larger than expected
            found = self._claim(file, chunk, serial)
            if found is None:
                continue
            asked, read = found
            try:
                if skeleton is None:
                    skeleton = read.skeleton
                    targets = [self._target(leaf, len(indices)) for leaf in read.leaves]
                self._copy(read, asked.offset, skeleton, targets, start, len(chunk))
            except BaseException:
                self._give(asked.offset)
                raise
            start += len(chunk)
        if skeleton is None:
            raise DataError("no samples were asked for")
        return data_tree.rebuild(skeleton, targets)

    def _claim(
        self, file: NodeFile, chunk: Indices, serial: int
    ) -> tuple[Asked, SamplesRead] | None:
        """Wait for requested samples; request them now if they are not. Return None if they need more
        room than expected."""
        indices = chunk.astype("<i8").tobytes()
        with self._lock:
            asked = self._pending.pop((file.source, indices), None)
        if asked is None:
            offset = self._await_room(file, len(chunk))
            asked = self._read(file, indices, serial, offset, len(chunk))
        try:
            message = self._await(asked.answer, f"read {len(chunk)} samples")
        except BaseException:
            self._give_after(asked)
            raise
        if isinstance(message, SamplesRead):
            return asked, message
        self._give(asked.offset)
        if not isinstance(message, SamplesTooLarge):
            raise DataError(
                f"the data reader of device {self.name} answered {type(message).__name__}"
            )
        file.sample_bytes = max(file.sample_bytes + 1, -(-message.needed_bytes // len(chunk)))
        return None

    def _target(self, leaf: data_messages.SampleLeaf, samples: int) -> torch.Tensor:
        if leaf.dtype not in DTYPES or not leaf.shape:
            raise DataError(f"the data reader of device {self.name} read a tensor of {leaf.dtype}")
        shape = (samples, *leaf.shape[1:])
        return torch.empty(shape, dtype=DTYPES[leaf.dtype], device=self.device)

    def _copy(
        self, read: SamplesRead, offset: int, skeleton: Skeleton,
        targets: Sequence[torch.Tensor], start: int, count: int,
    ) -> None:  # fmt: skip
        """Queue the copies of a chunk in the device's stream."""
        same = read.skeleton == skeleton and len(read.leaves) == len(targets)
        last = 0
        for leaf, target in zip(read.leaves, targets, strict=same):
            rows = target.narrow(0, start, count)
            if not same or DTYPES.get(leaf.dtype) != rows.dtype or leaf.shape != list(rows.shape):
                raise DataError(
                    f"the samples of a batch have different shapes: {leaf.shape} and "
                    f"{list(rows.shape)}"
                )
            if rows.numel() > 0:
                last = _core.load(rows, self._number, offset + leaf.offset)
        with self._lock:
            self._copied.append((last, offset))

    # --- room --------------------------

    def _give(self, offset: int) -> None:
        with self._lock:
            self._slots.release(offset)

    def _give_after(self, asked: Asked) -> None:
        """Free a slot once the reader no longer writes to it."""
        asked.answer.add_done_callback(lambda _: self._give(asked.offset))

    def _forget(self, stale: Callable[[Asked], bool]) -> None:
        """Drop requests that will not be fetched."""
        with self._lock:
            found = [(key, asked) for key, asked in self._pending.items() if stale(asked)]
            for key, _ in found:
                del self._pending[key]
        for _, asked in found:
            self._give_after(asked)

    def _room(self, wanted_bytes: int) -> int | None:
        """Reserve a slot; None if there is no room now."""
        with self._lock:
            while self._copied and _core.is_past(self._index, self._copied[0][0]):
                self._slots.release(self._copied.popleft()[1])
            return self._slots.reserve(wanted_bytes)

    def _await_room(self, file: NodeFile, count: int) -> int:
        """Reserve a slot. Requests made ahead give way, the latest first."""
        wanted_bytes = _capacity(file, count)
        if wanted_bytes > self._slots.memory_bytes:
            raise DataError(
                f"a sample of {show_bytes(file.sample_bytes)} does not fit the memory of the data "
                f"reader of device {self.name}, {show_bytes(self._slots.memory_bytes)}. Read it in the "
                'program: where="program"'
            )
        until = time.monotonic() + ANSWER_S
        while (offset := self._room(wanted_bytes)) is None:
            with self._lock:
                latest = next(reversed(self._pending.values()), None)
            if latest is not None:
                self._forget(lambda asked: asked is latest)  # noqa: B023  (called at once)
            self._check_device()
            if not self.usable:
                raise ReaderLostError(f"the data reader of device {self.name} is lost")
            if time.monotonic() > until:
                raise DataError(f"waited {ANSWER_S:g} s for device {self.name} to copy samples")
            time.sleep(ROOM_POLL_S)
        return offset


def _capacity(file: NodeFile, samples: int) -> int:
    """Return the bytes of a slot for so many samples, with the alignment of each tensor."""
    return samples * file.sample_bytes + 64 * limits.DATA_LEAVES_MAX // 16


def _cut(indices: Indices, most: int) -> Iterator[Indices]:
    for start in range(0, len(indices), most):
        yield indices[start : start + most]


# --- the readers of this program's lease -----------


class _Entry:
    """A reader that runs or starts. Only threads that want this reader wait for its start."""

    def __init__(self, lease: leases.Lease) -> None:
        self.lease = lease
        self.starting = threading.Lock()
        self.reader: ReaderClient | None = None


_readers_lock = threading.Lock()
_readers: dict[tuple[int, int], _Entry] = {}  # by id of the lease and index of the device


def reader_of(lease: leases.Lease, index: int) -> ReaderClient:
    """Return the reader of a device of the lease; the first call starts it. Raise DataError."""
    attached = lease.attached[index]
    if attached is None:
        raise DataError("the device is on this machine")
    if not attached.welcome.serves_data:
        raise DataError(
            f"the node of device {attached.name} serves no files. Its owner can serve a folder: add "
            "--data DIR to `shoal node` or `shoal up`"
        )
    with _readers_lock:
        for key in [k for k, entry in _readers.items() if not entry.lease.active]:
            ended = _readers.pop(key).reader
            if ended is not None:
                ended.close()
        entry = _readers.setdefault((id(lease), index), _Entry(lease))
    with entry.starting:
        if entry.reader is None or not entry.reader.usable:
            try:
                entry.reader = _start(lease, index, after_another=entry.reader is not None)
            except LeaseError as error:
                raise DataError(f"device {attached.name}: {error}") from None
        return entry.reader


def _start(lease: leases.Lease, index: int, after_another: bool) -> ReaderClient:
    """Start a reader. If one has died, the device server may learn of that a moment after us."""
    until = time.monotonic() + (DYING_S if after_another else 0)
    while True:
        try:
            return ReaderClient(lease, index)
        except LeaseError:
            if time.monotonic() >= until:
                raise
            time.sleep(POLL_S)
