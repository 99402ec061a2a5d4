"""Say what to type when a tensor of the device is pickled for another process.

Torch would try to share its memory as if it were the host's. Sharing it by `shoal.share` on its own
would be a surprise: a shared tensor is read-only, and it stays alive until it is taken back.
"""

from __future__ import annotations

from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch.multiprocessing import reductions

from shoal.errors import ShareError

TEXT = (
    "a shoal tensor cannot be sent to another process: its memory belongs to this program's lease. "
    "Send its values: tensor.cpu(). Or share its memory with a process on this machine: send the "
    "string shoal.share(tensor), and call shoal.open(string) there"
)


def register() -> None:
    """Register the reducer. Tensors, parameters and subclasses all end with an UntypedStorage."""
    ForkingPickler.register(torch.UntypedStorage, _reduce)


def _reduce(storage: torch.UntypedStorage) -> Any:
    if storage.device.type == "shoal":
        raise ShareError(TEXT)
    return reductions.reduce_storage(storage)  # type: ignore[no-untyped-call]
