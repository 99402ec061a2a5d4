"""Memory that several programs of one owner have: `shoal.share` in one, `shoal.open` in another.

The tensor moves to a memory of its own, which the workers of all these programs map: no byte is copied
to open it, and what one writes the others see. The directory of the node (share_server.py in
pool/node/shares) knows who has it, and takes it back from everybody when its owner ends.
"""

from __future__ import annotations

import os
import re
import socket
import time
import weakref
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

import torch

from shoal import _core
from shoal.device import leases
from shoal.errors import ProtocolError, ShareError
from shoal.pool.base import limits, paths
from shoal.pool.base.addresses import LOCAL_PREFIX
from shoal.pool.base.process import check_same_user
from shoal.pool.client.head_connection import default_url
from shoal.pool.node.shares.share_server import make_memory, socket_address
from shoal.pool.wire import frames, messages, share_messages

__all__ = ["Handle", "acquire", "open", "release", "share", "shares", "unshare"]

Answer = TypeVar("Answer", bound=share_messages.FromAgent)

_PREFIX = "shoal-share"
_HANDLE = re.compile(_PREFIX + r":1:([\w.+/-]{1,128}):([0-9a-f]{16}):([0-9a-f]{48})", re.ASCII)


class Handle(str):
    """Names one shared tensor and holds the secret to open it: pass it like a password.

    It is a string, so it travels as an argument, an environment variable or a message. In the program
    that made it, `with` takes the memory back at the end of the block.

    >>> with shoal.share(table) as handle:
    ...     subprocess.run([sys.executable, "reader.py"], env={**os.environ, "TABLE": handle})
    """

    __slots__ = ()

    def __repr__(self) -> str:
        """Without the secret, for logs."""
        return f"<shoal.Handle {self.rpartition(':')[0]}:…>"

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *_: object) -> None:
        unshare(self)


@dataclass(frozen=True)
class _Name:
    """What a handle says."""

    place: str  # pool and node
    share: str
    secret: str


@dataclass
class _Part:
    """This program's part in a share."""

    name: _Name
    key: str
    address: str  # of the share server
    base: int  # of the segment
    exclusive: bool
    owned: torch.Tensor | None = None  # what this program shares stays until it is taken back


class _Late(ShareError):
    """No answer came in time."""


# By lease: with it, all parts in shares are over.
_parts: weakref.WeakKeyDictionary[leases.Lease, list[_Part]] = weakref.WeakKeyDictionary()


# --- sharing ---------------------------------------------------------------------------------------


def share(tensor: torch.Tensor, mode: share_messages.ShareMode = "read") -> Handle:
    """Share this tensor's memory with your other programs on this machine, without a copy.

    The tensor stays alive and shared until `unshare`, or until this program's lease ends.

    Args:
        tensor: on the shoal device. Its whole storage is shared; the opener gets the same view of it.
        mode: "read": read-only from now on for every program, this one included.
            "exclusive": one program at a time reads and writes, this one first: see `shoal.acquire`.

    >>> table = torch.randn(1000, 64, device="shoal")
    >>> handle = shoal.share(table)
    >>> print(handle)                          # in another program: table = shoal.open(handle)
    """
    if mode not in ("read", "exclusive"):
        raise ValueError(f'mode={mode!r}: write shoal.share(tensor, mode="read") or "exclusive"')
    _check_tensor(tensor)
    lease = leases.current()
    if lease is None:
        raise ShareError("the lease of this tensor has ended: make it anew after shoal.connect()")
    member = _local_member(lease, tensor.device.index or 0)
    device = lease.granted[member]
    storage = tensor.untyped_storage()
    layout = share_messages.ShareLayout(
        str(tensor.dtype).removeprefix("torch."), list(tensor.shape), list(tensor.stride()),
        int(tensor.storage_offset()),
    )  # fmt: skip
    request = share_messages.ShareCreate(device.token, storage.nbytes(), mode, layout)
    memory = make_memory(storage.nbytes())
    fds = [memory]
    try:
        made, received = _ask(
            socket_address(device.address), request, share_messages.ShareMade, [memory]
        )
        fds += received
        if len(received) != 2:
            raise ShareError("the node answered without the descriptors that belong to a share")
        shared = _core.SharedDescriptors(
            memory=memory, control=received[0], line=received[1], participant=made.participant
        )
        _core.share(tensor.detach(), member, shared, mode == "exclusive")
    finally:
        _close(fds)
    name = _Name(_place_of(device), made.share, made.secret)
    part = _Part(name, made.key, socket_address(device.address), storage.data_ptr(),
                 mode == "exclusive", tensor.detach())  # fmt: skip
    _parts.setdefault(lease, []).append(part)
    return Handle(f"{_PREFIX}:1:{name.place}:{name.share}:{name.secret}")


def open(handle: str) -> torch.Tensor:
    """Return the tensor that another program of yours shares, on `torch.device("shoal")`.

    It stays open until the tensor is freed. If its owner ends or takes it back, using it raises
    `shoal.ShareRevokedError`. A program without a lease gets one of the handle's pool.

    >>> table = shoal.open(os.environ["TABLE"])
    >>> logits = x @ table.T
    """
    name = _parse(handle)
    lease = _lease_for(name)
    device = _device_for(lease, name)
    request = share_messages.ShareOpen(device.token, name.share, name.secret)
    address = socket_address(device.address)
    opened, fds = _ask(address, request, share_messages.ShareOpened)
    try:
        if len(fds) != 3:
            raise ShareError("the node answered without the descriptors that belong to a share")
        layout = opened.layout
        dtype = _check_layout(layout, opened.bytes)
        shared = _core.SharedDescriptors(
            memory=fds[0], control=fds[1], line=fds[2], participant=opened.participant
        )
        tensor = _core.open_shared(
            opened.bytes, _local_member(lease, 0), shared, opened.mode == "exclusive", dtype,
            layout.sizes, layout.strides, layout.offset,
        )  # fmt: skip
    finally:
        _close(fds)
    base = tensor.untyped_storage().data_ptr()
    part = _Part(name, opened.key, address, base, opened.mode == "exclusive")
    parts = _parts.setdefault(lease, [])
    parts[:] = [p for p in parts if p.base != base]  # that of a tensor that was freed
    parts.append(part)
    return tensor


def unshare(what: str | torch.Tensor) -> None:
    """Stop sharing a tensor. This program keeps it; the others lose it.

    Of an exclusive share, `acquire` it first if what another program is writing matters.

    >>> shoal.unshare(handle)
    """
    part = _part_of(what, owned=True)
    tensor = part.owned
    assert tensor is not None
    with suppress(ShareError):  # the directory may have taken it back already
        _ask(part.address, share_messages.ShareEnd(part.name.share, part.key), messages.Done)
    lease = leases.current()
    if lease is not None:
        _parts[lease].remove(part)
    _core.unshare(tensor)


# --- one at a time ---------------------------------------------------------------------------------


class Acquired:
    """A share that this program holds; leaving its `with` block releases it."""

    def __init__(self, part: _Part) -> None:
        self._part = part

    def __enter__(self) -> Acquired:
        return self

    def __exit__(self, *_: object) -> None:
        _release(self._part)


def acquire(what: str | torch.Tensor, *, timeout_s: float = limits.ACQUIRE_S) -> Acquired:
    """Wait until this program holds an exclusive share, in the order of asking.

    Args:
        what: its handle, or the tensor from `shoal.share` or `shoal.open`.
        timeout_s: how long to wait before raising `shoal.ShareError`.

    >>> with shoal.acquire(weights):
    ...     weights.add_(update)
    """
    part = _part_of(what)
    request = share_messages.ShareAcquire(part.name.share, part.key)
    try:
        _ask(part.address, request, messages.Done, timeout_s=timeout_s)
    except _Late:
        # It may have been given to us at this very moment.
        _ask(part.address, share_messages.ShareRelease(part.name.share, part.key), messages.Done)
        raise ShareError(
            f"another program held this memory for {timeout_s:g} s; shoal.shares() says which. Wait "
            "longer with shoal.acquire(…, timeout_s=…)"
        ) from None
    return Acquired(part)


def release(what: str | torch.Tensor) -> None:
    """Let other programs hold an exclusive share, once all work sent to the device is done.

    >>> handle = shoal.share(weights, mode="exclusive")   # this program holds it
    >>> shoal.release(handle)
    """
    _release(_part_of(what))


def _release(part: _Part) -> None:
    try:
        _core.synchronize(0)
    finally:
        with suppress(ShareError):  # what was taken back needs no release; the next use says so
            _ask(
                part.address, share_messages.ShareRelease(part.name.share, part.key), messages.Done
            )


# --- listing --------------------------------------------------------------------------------------


def shares() -> list[share_messages.ShareInfo]:
    """List what your programs share on this machine, on the nodes of this program's lease.

    >>> for share in shoal.shares():
    ...     print(share.owner_pid, share.bytes, share.mode, share.readers)
    """
    leases.ensure()
    lease = leases.current()
    assert lease is not None
    found: list[share_messages.ShareInfo] = []
    nodes = {_place_of(d): d for d in lease.granted if _is_here(d)}
    for device in nodes.values():
        listing, _ = _ask(
            socket_address(device.address),
            share_messages.ShareList(device.token),
            share_messages.ShareListing,
        )
        found += listing.shares
    return found


# --- helpers ---------------------------------------------------------------------------------------


def _check_tensor(tensor: torch.Tensor) -> None:
    if tensor.device.type != "shoal":
        raise ShareError(
            f"this tensor is on {tensor.device}; shared memory is the pool's. Type: "
            'shoal.share(tensor.to("shoal"))'
        )
    if tensor.layout != torch.strided or tensor.untyped_storage().nbytes() == 0:
        raise ShareError("this tensor has no memory of its own that could be shared")
    if tensor.is_conj() or tensor.is_neg():
        raise ShareError(
            "this view is conjugated or negated only when it is read. Share its values: "
            "shoal.share(tensor.resolve_conj().resolve_neg())"
        )


def _is_here(device: messages.GrantedDevice) -> bool:
    return device.machine in ("", paths.machine_id())


def _local_member(lease: leases.Lease, index: int) -> int:
    """Return the member device that holds shared memory of device `index`."""
    near = enumerate(zip(lease.granted, lease.by_network, strict=True))
    here = [i for i, (device, by_network) in near if _is_here(device) and not by_network]
    if index > 0 and len(lease.granted) > 1:
        here = [i for i in here if i == index - 1]
    here = [i for i in here if lease.granted[i].info.device == "cpu"]
    if not here:
        raise ShareError(
            "programs share memory of CPU devices on their own machine, and this lease reaches none "
            "there without the network. Copy the tensor instead (tensor.cpu()), or lease a device of "
            "this machine"
        )
    return here[0]


def _place_of(device: messages.GrantedDevice) -> str:
    """Pool and node of a device, as handles name them."""
    return socket_address(device.address).removeprefix("\0shoal/").removesuffix("/shares")


def _parse(handle: str) -> _Name:
    found = _HANDLE.fullmatch(handle) if isinstance(handle, str) else None
    if found is None:
        raise ShareError(
            f"this is not a handle of shared memory. A handle begins with {_PREFIX}:1: and comes from "
            "shoal.share(tensor)"
        )
    return _Name(*found.groups())


def _lease_for(name: _Name) -> leases.Lease:
    lease = leases.current()
    if lease is not None:
        return lease
    return leases.connect(default_url() or LOCAL_PREFIX + name.place.partition("/")[0])


def _device_for(lease: leases.Lease, name: _Name) -> messages.GrantedDevice:
    """Return a device of the lease on the node where the memory is."""
    for device in lease.granted:
        if _place_of(device) != name.place:
            continue
        if not _is_here(device):
            raise ShareError(
                f"the memory is on {device.info.node or name.place}, and programs share memory on one "
                f"machine only. Run this program there, or send the tensor's values"
            )
        return device
    raise ShareError(
        f"the memory is in {name.place}; this program's lease is on "
        f"{', '.join(sorted({_place_of(d) for d in lease.granted}))}. Lease a device there first: "
        f'shoal.connect("{LOCAL_PREFIX}{name.place.partition("/")[0]}")'
    )


def _check_layout(layout: share_messages.ShareLayout, size: int) -> torch.dtype:
    """Nothing outside of the memory is described."""
    dtype = getattr(torch, layout.dtype, None)
    if not isinstance(dtype, torch.dtype) or len(layout.sizes) != len(layout.strides):
        raise ShareError(f"the shared tensor has a dtype that this torch lacks: {layout.dtype}")
    last = layout.offset
    if 0 not in layout.sizes:
        last += sum((n - 1) * s for n, s in zip(layout.sizes, layout.strides, strict=True)) + 1
    if last * dtype.itemsize > size:
        raise ShareError("the shared tensor is described as larger than its memory")
    return dtype


def _part_of(what: str | torch.Tensor, *, owned: bool = False) -> _Part:
    """Return this program's part in a share, by handle or tensor."""
    lease = leases.current()
    parts = _parts.get(lease, []) if lease is not None else []
    if isinstance(what, torch.Tensor):
        base = what.untyped_storage().data_ptr() if what.device.type == "shoal" else 0
        parts = [p for p in parts if p.base == base]
    else:
        name = _parse(what)
        parts = [p for p in parts if p.name == name]
    parts = [p for p in parts if p.owned is not None] if owned else parts
    if not parts:
        raise ShareError(
            "this program does not share this tensor. Call shoal.share(tensor) first"
            if owned
            else "this program has not opened this tensor. Type: tensor = shoal.open(handle)"
        )
    return parts[-1]


def _close(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)


def _ask(
    address: str,
    request: share_messages.FromClient,
    answer: type[Answer],
    fds: list[int] | None = None,
    *,
    timeout_s: float = limits.ANSWER_S,
) -> tuple[Answer, list[int]]:
    """Send one request to a share server. Raise ShareError if it refuses or does not answer."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    inbox = frames.Inbox(fds_max=3)
    try:
        connection.settimeout(limits.HANDSHAKE_S)
        connection.connect(address)
        check_same_user(connection)
        frames.send(connection, request, fds or [])
        message = _receive(connection, inbox, timeout_s)
        if isinstance(message, answer):
            found, inbox.fds = inbox.fds, []
            return message, found
    except TimeoutError:
        raise _Late(
            f"the node that keeps the shared memory gave no answer in {timeout_s:g} s"
        ) from None
    except (OSError, ProtocolError) as error:
        raise ShareError(f"the node that keeps the shared memory is gone: {error}") from None
    finally:
        inbox.close_fds()
        connection.close()
    if isinstance(message, messages.Refusal):
        raise ShareError(message.reason)
    raise ShareError(f"the node answered {type(message).__name__}")


def _receive(
    connection: socket.socket, inbox: frames.Inbox, timeout_s: float
) -> share_messages.FromAgent:
    deadline = time.monotonic() + timeout_s
    while (message := inbox.next(share_messages.FROM_AGENT)) is None:
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        if not inbox.read(connection):
            raise frames.Closed
    return message
