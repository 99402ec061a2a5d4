"""Where a task's files have to be before it is submitted: here, or also at the head.

A task that no runner on this machine would start runs on another's, if its owner may do that. Then its
folder is copied as it is now, and only what the head does not have yet.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from shoal.errors import PoolError
from shoal.pool.base import limits, snapshots
from shoal.pool.client import snapshot
from shoal.pool.client.tasks import TaskClient
from shoal.pool.wire import messages, task_messages
from shoal.pool.wire.task_messages import FileChunk
from shoal.tasks.spec import TaskSpec


def place(client: TaskClient, wanted: Sequence[TaskSpec]) -> list[TaskSpec]:
    """Return the tasks of one folder as they are submitted, with their files where they run."""
    places = client.ask(task_messages.AskPlaces(wanted[0].machine), task_messages.Places)
    chosen = bool(wanted[0].snapshot)
    if not places.may or (places.here and not chosen) or not (places.elsewhere or chosen):
        return list(wanted)
    if places.here and not places.elsewhere:
        return list(wanted)
    if not chosen:
        name = snapshot.take(Path(wanted[0].folder))
        wanted = [msgspec.structs.replace(one, snapshot=name, implied=True) for one in wanted]
    send(client, wanted[0].snapshot)
    return list(wanted)


def send(client: TaskClient, name: str) -> None:
    """Send the files of a snapshot that the head does not have."""
    root = snapshots.store()
    try:
        listed = snapshots.read_list(snapshots.file_of(root, name).read_bytes())
        hashes = [*sorted({file.hash for file in listed if file.link is None}), name]
        for batch in _messages(root, _missing(client, hashes)):
            client.ask(task_messages.PutFiles(batch), messages.Done)
    except OSError as error:
        raise PoolError(f"the snapshot cannot be read: {error}. Submit the task again") from None


def _missing(client: TaskClient, hashes: list[str]) -> Iterator[str]:
    size = limits.FILES_PER_MESSAGE_MAX
    for first in range(0, len(hashes), size):
        ask = task_messages.FindFiles(hashes[first : first + size])
        yield from client.ask(ask, task_messages.MissingFiles).hashes


def _messages(root: Path, names: Iterator[str]) -> Iterator[list[FileChunk]]:
    """Yield the files as messages that fit a frame: small ones together."""
    batch: list[FileChunk] = []
    batch_bytes = 0
    for chunk in (chunk for name in names for chunk in _chunks(root, name)):
        chunk_bytes = len(chunk.data) + 128
        full = batch_bytes + chunk_bytes > limits.FRAME_BYTES_MAX - 4096
        if batch and (full or len(batch) >= limits.FILES_PER_MESSAGE_MAX):
            yield batch
            batch, batch_bytes = [], 0
        batch.append(chunk)
        batch_bytes += chunk_bytes
    if batch:
        yield batch


def _chunks(root: Path, name: str) -> Iterator[FileChunk]:
    with open(snapshots.file_of(root, name), "rb") as file:
        offset, data = 0, file.read(limits.FILE_CHUNK_BYTES)
        while True:
            following = file.read(limits.FILE_CHUNK_BYTES)
            yield FileChunk(name, offset, data, not following)
            if not following:
                return
            offset, data = offset + len(data), following
