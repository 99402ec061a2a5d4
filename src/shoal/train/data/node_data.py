"""Data that the nodes of the devices read.

The program hands out batches of sample indices. If a group's sub-batch goes to a remote device whose
node serves the files, that node's reader reads it. The program reads the others. The program decides
the order of samples, so the result does not depend on the reader.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch.utils import _pytree as pytree

from shoal.device import leases
from shoal.errors import DeviceLostError
from shoal.pool.wire.data_messages import DataPath, Fingerprint, Skeleton
from shoal.train.data import batches, fingerprints, node_paths
from shoal.train.data.reader_client import NodeFile, ReaderClient, ReaderLostError, reader_of
from shoal.train.data.sources import Indices, Source
from shoal.train.group.errors import DataError

_log = logging.getLogger("shoal.train")

Where = Literal["auto", "node", "program"]
THREADS = 2  # that read in the program, for local devices
KEPT_READS = 32  # micro-batches that are read ahead in the program


def check_where(where: str) -> None:
    if where not in get_args(Where):
        raise ValueError(f"where is one of {', '.join(get_args(Where))}, not {where!r}")


class NodeSource:
    """Samples behind paths that nodes may have too."""

    def __init__(
        self,
        asked: tuple[Skeleton, list[DataPath]],
        program: Source | None,
        open_leaf: Callable[[str, Sequence[str] | None], Source],
        where: Where,
    ) -> None:
        self._skeleton, self._paths = asked
        self._program = program  # None: this program cannot open them
        self._open_leaf = open_leaf
        self._where = where
        self._lock = threading.RLock()
        self._lease: leases.Lease | None = None  # the one that the fields below describe
        self._places: dict[torch.device, tuple[ReaderClient, NodeFile]] = {}
        weakref.finalize(self, _close_files, self._places).atexit = False
        self._why_not: dict[str, str] = {}  # by name of the device: why the program reads for it
        self._fingerprints: list[Fingerprint] | None = None
        self._serial = 0
        self._division: list[tuple[torch.device, list[int]]] = []  # of the last batch, by device
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="shoal-load")
        self._reads: OrderedDict[bytes, Future[Any]] = OrderedDict()  # ahead, in the program

    # --- as a source -------------------

    def __len__(self) -> int:
        if self._program is not None:
            return len(self._program)
        return self._any_place()[1].opened.samples

    @property
    def runs(self) -> Sequence[range] | None:
        if self._program is not None:
            return self._program.runs
        opened = self._any_place()[1].opened
        starts = [int(n) for n in np.frombuffer(opened.run_starts, np.dtype("<i8"))]
        stops = [*starts[1:], opened.samples]
        return [range(a, b) for a, b in zip(starts, stops, strict=True)] if starts else None

    def read(self, indices: Indices) -> Any:
        """Return the samples in this program's memory."""
        if self._program is not None:
            return self._program.read(indices)
        reader, file = self._any_place()
        taken = reader.take(file, indices, 0)
        return pytree.tree_map(lambda leaf: leaf.cpu(), taken)

    def warm(self, indices: Indices) -> None:
        if self._program is not None:
            self._program.warm(indices)

    # --- who reads ---------------------

    def at_nodes(self) -> bool:
        """Return whether a node reads for a device of the present lease. The first call starts the
        readers and compares their files with the program's."""
        lease = leases.current()
        with self._lock:
            if lease is None:
                self._places.clear()
            elif lease is not self._lease:
                self._look(lease)
            self._lease = lease
            return bool(self._places)

    @property
    def places(self) -> dict[str, str]:
        """Who reads for each device of the lease: "node", or "program" and why."""
        self.at_nodes()
        at_node = {reader.name: "node" for reader, _ in self._places.values()}
        return {**{n: f"program: {why}" for n, why in self._why_not.items()}, **at_node}

    def _look(self, lease: leases.Lease) -> None:
        _close_files(self._places)
        self._why_not.clear()
        remote = [index for index, far in enumerate(lease.by_network) if far]
        with ThreadPoolExecutor(max(1, len(remote))) as threads:  # they take a while to start
            opening = {i: threads.submit(self._open_at, lease, i) for i in remote}
        for index, (granted, device) in enumerate(zip(lease.granted, lease.devices, strict=True)):
            name = granted.info.name
            if index not in opening:
                self._why_not[name] = "the device is on this machine"
                continue
            try:
                reader, file = opening[index].result()
                self._compare(reader, file)
                self._places[device] = reader, file
            except DataError as error:
                if self._where == "node":
                    self._places.update(
                        (lease.devices[i], one.result())
                        for i, one in opening.items()
                        if one.exception() is None
                    )
                    _close_files(self._places)
                    raise DataError(f'where="node": {error}') from None
                self._why_not[name] = str(error)
                _log.info("data for %s is read in the program: %s", name, error)

    def _open_at(self, lease: leases.Lease, index: int) -> tuple[ReaderClient, NodeFile]:
        reader = reader_of(lease, index)
        try:
            return reader, reader.open(self._skeleton, self._paths)
        except ReaderLostError:  # it may have died long ago, unnoticed
            reader = reader_of(lease, index)
            return reader, reader.open(self._skeleton, self._paths)

    def _compare(self, reader: ReaderClient, file: NodeFile) -> None:
        """Raise if the node's files differ from the reference."""
        for path, here, there in zip(
            self._paths, self._reference(file), file.opened.marks, strict=True
        ):
            different = fingerprints.difference(here, there)
            if different is not None:
                text = f"{path.path} is not the same file at the node of {reader.name}: {different}"
                if self._where == "auto":
                    _log.warning("%s; it is read in the program", text)
                reader.close_file(file)
                raise DataError(text)

    def _reference(self, file: NodeFile) -> list[Fingerprint]:
        """Return the reference: the program's files, or the first node's if it has none."""
        if self._fingerprints is None and self._program is not None:
            self._fingerprints = [
                node_paths.fingerprint_of(p.path, self._open_leaf(p.path, p.columns))
                for p in self._paths
            ]
        if self._fingerprints is None:
            self._fingerprints = file.opened.marks
        return self._fingerprints

    def _any_place(self) -> tuple[ReaderClient, NodeFile]:
        if not self.at_nodes():
            raise DataError(
                f"{self._paths[0].path} is not on this machine, and the program has no device at a "
                "node that serves it. Lease one first (shoal.connect, shoal.train.worker_groups), of a "
                "node with --data DIR"
            )
        places = list(self._places.values())
        return next((place for place in places if place[0].usable), places[0])

    def _fall_back(self, device: torch.device, error: ReaderLostError) -> None:
        """Let the program read for a device whose reader is lost, if it may and can."""
        if self._where == "node" or self._program is None:
            raise error
        with self._lock:
            lost = self._places.pop(device, None)
            if lost is not None:
                self._why_not[lost[0].name] = str(error)
                _log.warning("%s; the program reads for it", error)

    # --- batches -----------------------

    def batch(self, indices: Indices) -> NodeBatch:
        self._serial += 1
        return NodeBatch(self, indices, self._serial)

    def expect(self, indices: Indices, ahead: int) -> None:
        """Read samples of a later batch ahead (0: the next one), split as the last one was."""
        if len(indices) == 0:
            return
        if self.runs is not None:
            for reader, file in list(self._places.values()):
                reader.warm(file, indices)
        if sum(sum(sizes) for _, sizes in self._division) != len(indices):
            return
        start = 0
        for device, sizes in list(self._division):
            for size in sizes:
                self.ask(indices[start : start + size], self._serial + 1 + ahead, device)
                start += size

    def divided(self, division: list[tuple[torch.device, list[int]]]) -> None:
        self._division = division

    def ask(self, indices: Indices, serial: int, device: torch.device) -> None:
        """Read samples for a device ahead, if there is room; `take` raises the errors."""
        place = self._places.get(device)
        if place is not None:
            with suppress(DataError, DeviceLostError):
                place[0].ask(place[1], indices, serial)
        elif self._program is not None:
            key = indices.tobytes()
            with self._lock:
                if key not in self._reads:
                    self._reads[key] = self._threads.submit(self._program.read, indices)
                while len(self._reads) > KEPT_READS:
                    self._reads.popitem(last=False)[1].cancel()

    def take(self, indices: Indices, serial: int, device: torch.device) -> Any:
        """Return samples on their device."""
        place = self._places.get(device)
        if place is not None:
            try:
                return place[0].take(place[1], indices, serial)
            except ReaderLostError as error:
                self._fall_back(device, error)
        if self._program is None and device.type != "cpu":
            # Neither the program nor the device's node has it: read it through a device that does.
            reader, file = self._any_place()
            return batches.to_device(reader.take(file, indices, serial), device)
        return batches.to_device(self.take_here(indices), device)

    def take_here(self, indices: Indices) -> Any:
        """Return samples in this program's memory; wait if they are being read ahead."""
        with self._lock:
            ahead = self._reads.pop(indices.tobytes(), None)
        return ahead.result() if ahead is not None else self.read(indices)


def _close_files(places: dict[torch.device, tuple[ReaderClient, NodeFile]]) -> None:
    for reader, file in places.values():
        reader.close_file(file)
    places.clear()


class NodeBatch(batches.IndexedBatch):
    """Sample indices, which are read where the samples are needed.

    In a loop without a trainer it unpacks like the batch that it stands for: the program then reads it.
    """

    def __init__(self, source: NodeSource, indices: Indices, serial: int) -> None:
        self._source = source
        self._indices = indices
        self._serial = serial
        self._tensors: Any = None

    def __len__(self) -> int:
        return len(self._indices)

    def split(self, counts: Sequence[int]) -> list[batches.IndexedBatch]:
        found: list[batches.IndexedBatch] = []
        start = 0
        for count in counts:
            indices = self._indices[start : start + count]
            found.append(NodeBatch(self._source, indices, self._serial))
            start += count
        return found

    def ask(self, device: torch.device) -> None:
        if len(self) > 0 and self._tensors is None:
            self._source.ask(self._indices, self._serial, device)

    def divided(self, division: list[tuple[torch.device, list[int]]]) -> None:
        self._source.divided(division)

    def to_device(self, device: torch.device) -> Any:
        if self._tensors is not None:
            return batches.to_device(self._tensors, device)
        return self._source.take(self._indices, self._serial, device)

    def tensors(self) -> Any:
        """Return the samples in this program's memory."""
        if self._tensors is None:
            self._tensors = self._source.take_here(self._indices)
        return self._tensors

    def __iter__(self) -> Iterator[Any]:
        return iter(self.tensors())

    def __getitem__(self, key: Any) -> Any:
        return self.tensors()[key]

    def keys(self) -> Any:
        return self.tensors().keys()


def ask(by_group: Sequence[Sequence[Any]], devices: Sequence[torch.device]) -> None:
    """Start to read all micro-batches of a batch, each for its group's device."""
    wanted = [
        (device, [batch for batch in group if isinstance(batch, NodeBatch)])
        for device, group in zip(devices, by_group, strict=True)
    ]
    first = next((group[0] for _, group in wanted if group), None)
    if first is None:
        return
    for device, group in wanted:
        for batch in group:
            batch.ask(device)
    first.divided([(device, [len(batch) for batch in group]) for device, group in wanted])
