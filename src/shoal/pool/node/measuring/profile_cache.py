"""What was measured of a node's devices, kept by hardware identity in one file.

The file is only a cache: one that cannot be read, or that another version wrote, is measured anew.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from shoal.pool.base import limits, paths
from shoal.schedule.model.device_profile import DeviceProfile

VERSION = 1


class Link(msgspec.Struct, frozen=True):
    """Bytes/s from one device of the node to another."""

    source: Annotated[str, Meta(max_length=64)]  # names, as declared
    target: Annotated[str, Meta(max_length=64)]
    source_identity: Annotated[str, Meta(max_length=512)]
    target_identity: Annotated[str, Meta(max_length=512)]
    bytes_per_s: Annotated[float, Meta(ge=0, le=1e18)]

    @property
    def key(self) -> tuple[str, str, str, str]:
        return self.source, self.target, self.source_identity, self.target_identity


class _File(msgspec.Struct):
    version: int
    profiles: Annotated[list[DeviceProfile], Meta(max_length=limits.PROFILES_CACHED_MAX)]
    links: Annotated[list[Link], Meta(max_length=limits.LINKS_CACHED_MAX)]


@dataclass
class ProfileCache:
    """Profiles by identity and links by their ends."""

    path: Path
    profiles: dict[str, DeviceProfile] = field(default_factory=dict)
    links: dict[tuple[str, str, str, str], Link] = field(default_factory=dict)

    @classmethod
    def open(cls, path: Path) -> ProfileCache:
        """Return the contents of the file, or an empty cache."""
        cache = cls(path)
        try:
            with path.open("rb") as file:
                raw = file.read(limits.PROFILE_FILE_BYTES_MAX + 1)
            if len(raw) > limits.PROFILE_FILE_BYTES_MAX:
                return cache
            stored = msgspec.json.decode(raw, type=_File)
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return cache
        if stored.version == VERSION:
            cache.profiles = {p.identity: p for p in stored.profiles}
            cache.links = {link.key: link for link in stored.links}
        return cache

    def save(self) -> None:
        """Write the file, whole or not at all."""
        newest = sorted(self.profiles.values(), key=lambda p: p.measured_at)[
            -limits.PROFILES_CACHED_MAX :
        ]
        stored = _File(VERSION, newest, list(self.links.values())[-limits.LINKS_CACHED_MAX :])
        paths.write_private(self.path, msgspec.json.encode(stored).decode())
