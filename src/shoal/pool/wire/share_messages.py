"""Messages between a client and the agent of its node, about memory that programs share."""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec.msgpack import Decoder

from shoal.pool.wire.message_fields import Count, Name, Sizes
from shoal.pool.wire.messages import Done, Refusal

ShareMode = Literal["read", "exclusive"]


class ShareLayout(msgspec.Struct, frozen=True):
    """How the tensor that was shared lies in its memory."""

    dtype: Name  # "float32"
    sizes: Sizes
    strides: Sizes
    offset: Count  # elements


class ShareCreate(msgspec.Struct, frozen=True, tag=True):
    """Client → agent, with the descriptor of a new memory: my programs may have this."""

    token: Name  # of the lease's device on this node
    bytes: Count
    mode: ShareMode
    layout: ShareLayout


class ShareMade(msgspec.Struct, frozen=True, tag=True):
    """Agent → client, with two descriptors: control page, and the owner's line."""

    share: Name
    secret: Name  # for those who may open it
    participant: Count
    key: Name  # by which this participant is known from now on


class ShareOpen(msgspec.Struct, frozen=True, tag=True):
    """Client → agent: I have a handle."""

    token: Name
    share: Name
    secret: Name


class ShareOpened(msgspec.Struct, frozen=True, tag=True):
    """Agent → client, with three descriptors: memory, control page, and the participant's line."""

    bytes: Count
    mode: ShareMode
    layout: ShareLayout
    participant: Count
    key: Name


class ShareAcquire(msgspec.Struct, frozen=True, tag=True):
    """Client → agent: I want it for myself. `Done` comes when it is."""

    share: Name
    key: Name


class ShareRelease(msgspec.Struct, frozen=True, tag=True):
    """Client → agent: others may have it."""

    share: Name
    key: Name


class ShareEnd(msgspec.Struct, frozen=True, tag=True):
    """Client → agent: I take it back (its owner), or no longer need it."""

    share: Name
    key: Name


class ShareList(msgspec.Struct, frozen=True, tag=True):
    """Client → agent: what do my programs share?"""

    token: Name


class ShareInfo(msgspec.Struct, frozen=True):
    """A share, as the directory of its node has it."""

    share: Name
    client: Name
    owner_pid: Count
    epoch: Count  # of the owner's lease
    bytes: Count
    mode: ShareMode
    readers: list[Count]  # processes that have opened it
    holder_pid: Count  # in mode "exclusive": the process that has it now; 0: none
    dtype: Name
    sizes: Sizes


class ShareListing(msgspec.Struct, frozen=True, tag=True):
    """Agent → client: this."""

    shares: list[ShareInfo]


FromClient = ShareCreate | ShareOpen | ShareAcquire | ShareRelease | ShareEnd | ShareList
FromAgent = ShareMade | ShareOpened | ShareListing | Done | Refusal
FROM_CLIENT: Decoder[FromClient] = Decoder(FromClient)
FROM_AGENT: Decoder[FromAgent] = Decoder(FromAgent)
