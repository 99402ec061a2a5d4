"""The kinds of values in a pool's messages, with their bounds: what exceeds them is no message."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from shoal.pool.base.limits import (
    DATA_FOLDERS_MAX,
    DATA_PATH_CHARS_MAX,
    DIMENSIONS_MAX,
    NAME_CHARS_MAX,
    TEXT_CHARS_MAX,
)

Name = Annotated[str, Meta(max_length=NAME_CHARS_MAX)]
Text = Annotated[str, Meta(max_length=TEXT_CHARS_MAX)]
Pem = Annotated[str, Meta(max_length=4096)]
Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Device = Annotated[int, Meta(ge=0, lt=2**31)]
# Device number and session: a lease has one session number, and a part of it on each of its devices.
SessionPart = tuple[Count, Count]
PathText = Annotated[str, Meta(max_length=DATA_PATH_CHARS_MAX)]
Folders = Annotated[list[PathText], Meta(max_length=DATA_FOLDERS_MAX)]
Sizes = Annotated[list[Count], Meta(max_length=DIMENSIONS_MAX)]
