"""nn.DataParallel on the device. Torch has its copies between devices only in builds for CUDA.

One device, which may be a lease of many, is a plain call. Several replicas are what `shoal.train` does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch.nn.parallel import comm

TEXT = (
    "nn.DataParallel over several shoal devices is not supported. Use the whole lease as one device, "
    "nn.DataParallel(model, device_ids=[0]), or train one replica per device with shoal.train"
)


def install() -> None:
    """Replace the copies of nn.DataParallel where it would use the device."""
    ours: dict[str, Callable[..., Any]] = {
        "scatter": _scatter,
        "gather": _gather,
        "broadcast": _refuse,
        "broadcast_coalesced": _refuse,
        "reduce_add_coalesced": _refuse,
    }
    for name, function in ours.items():
        setattr(comm, name, _where_shoal(getattr(comm, name), function))


def _where_shoal(own: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    """Return torch's own function, which takes ours where nn.DataParallel's device is shoal."""

    @wraps(own)
    def call(*arguments: Any, **options: Any) -> Any:
        # The device type is chosen as nn.DataParallel chooses it.
        chosen = torch._utils._get_available_device_type()  # type: ignore[no-untyped-call]
        return (ours if chosen == "shoal" else own)(*arguments, **options)

    return call


def _scatter(
    tensor: torch.Tensor,
    devices: Sequence[int] = (),
    chunk_sizes: Sequence[int] | None = None,
    dim: int = 0,
    streams: Any = None,
    *,
    out: Any = None,
) -> tuple[torch.Tensor, ...]:
    if out is not None or len(devices) != 1:
        _refuse()
    return (tensor.to(torch.device("shoal", devices[0])),)


def _gather(
    tensors: Sequence[torch.Tensor], dim: int = 0, destination: Any = None, *, out: Any = None
) -> torch.Tensor:
    if out is not None or len(tensors) != 1:
        _refuse()
    if isinstance(destination, int):
        destination = "cpu" if destination < 0 else torch.device("shoal", destination)
    return tensors[0].to(destination or torch.device("shoal"))


def _refuse(*_: Any, **__: Any) -> Any:
    raise RuntimeError(TEXT)
