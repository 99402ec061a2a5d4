"""Messages between a client and a data reader, the process that reads training data at a node.

No message holds samples: the reader puts them into memory that it shares with the session's worker,
and sends the client only their offsets.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta
from msgspec.msgpack import Decoder

from shoal.pool.base.limits import (
    DATA_LEAVES_MAX,
    DATA_PATHS_MAX,
    DATA_RUNS_MAX,
    READ_SAMPLES_MAX,
)
from shoal.pool.wire.message_fields import Count, Name, PathText, Sizes, Text

# Little-endian 64-bit integers, one after another: a list would take three times the bytes.
Numbers = Annotated[bytes, Meta(max_length=8 * READ_SAMPLES_MAX)]
RunStarts = Annotated[bytes, Meta(max_length=8 * DATA_RUNS_MAX)]


class Branch(msgspec.Struct, frozen=True):
    """A dict, tuple or list; its parts are branches, or numbers of leaves."""

    kind: Literal["dict", "tuple", "list"]
    names: Annotated[list[Name], Meta(max_length=DATA_LEAVES_MAX)]  # of a dict
    parts: Annotated[list[Count | Branch], Meta(max_length=DATA_LEAVES_MAX)]


Skeleton = Count | Branch


class DataPath(msgspec.Struct, frozen=True):
    """A file, a folder, or a pattern of tar shards."""

    path: PathText
    columns: Annotated[list[Name], Meta(max_length=DATA_LEAVES_MAX)] | None = None  # of a table


class Fingerprint(msgspec.Struct, frozen=True):
    """Shows whether a path means the same files on two machines (train/data/fingerprints.py)."""

    files: Count
    total_bytes: Count
    digest: Annotated[bytes, Meta(max_length=32)]


class SampleLeaf(msgspec.Struct, frozen=True):
    """A tensor of samples in the reader's memory."""

    dtype: Name
    shape: Sizes
    offset: Count  # in the slot


class OpenData(msgspec.Struct, frozen=True, tag=True):
    """Client → reader: which samples are in these?"""

    request: Count
    skeleton: Skeleton
    paths: Annotated[list[DataPath], Meta(max_length=DATA_PATHS_MAX)]


class DataOpened(msgspec.Struct, frozen=True, tag=True):
    """Reader → client."""

    request: Count
    source: Count  # the number by which it is read
    samples: Count
    run_starts: RunStarts  # where its runs begin; empty: all samples are equally near
    sample_bytes: Count  # of the first one, to know how much room others will need
    marks: Annotated[list[Fingerprint], Meta(max_length=DATA_PATHS_MAX)]  # by path


class ReadSamples(msgspec.Struct, frozen=True, tag=True):
    """Client → reader: these samples, into this slot of your memory."""

    request: Count
    source: Count
    numbers: Numbers
    offset: Count  # of the slot
    capacity_bytes: Count


class SamplesRead(msgspec.Struct, frozen=True, tag=True):
    """Reader → client: they are there."""

    request: Count
    skeleton: Skeleton
    leaves: Annotated[list[SampleLeaf], Meta(max_length=DATA_LEAVES_MAX)]


class SamplesTooLarge(msgspec.Struct, frozen=True, tag=True):
    """Reader → client: they need a slot of so many bytes."""

    request: Count
    needed_bytes: Count


class WarmData(msgspec.Struct, frozen=True, tag=True):
    """Client → reader: these will be asked for soon."""

    source: Count
    numbers: Numbers


class CloseData(msgspec.Struct, frozen=True, tag=True):
    """Client → reader: close this source."""

    source: Count


class DataFailed(msgspec.Struct, frozen=True, tag=True):
    """Reader → client: no, and why."""

    request: Count
    reason: Text


FromClient = OpenData | ReadSamples | WarmData | CloseData
FromReader = DataOpened | SamplesRead | SamplesTooLarge | DataFailed
FROM_CLIENT: Decoder[FromClient] = Decoder(FromClient)
FROM_READER: Decoder[FromReader] = Decoder(FromReader)
