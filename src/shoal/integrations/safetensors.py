"""safetensors: `load_file(device="shoal")`. Its compiled reader has a fixed list of device names."""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch

from shoal.integrations.library import Library

LIBRARY = Library(
    "safetensors",
    tested="0.8.0",
    versions=("0.4", "1.0"),
    instead='load to the CPU and move: {name: t.to("shoal") for name, t in load_file(path).items()}',
)
LIBRARIES = {"safetensors": LIBRARY}


@LIBRARY.after("safetensors.torch")
def _load_file(module: Any) -> None:
    LIBRARY.wrap(module, "load_file", _moving)


def _moving(own: Any) -> Any:
    """Read to the host, then move."""

    @wraps(own)
    def load_file(filename: Any, device: Any = "cpu", **options: Any) -> dict[str, torch.Tensor]:
        target = None if isinstance(device, int) else torch.device(device)
        if target is None or target.type != "shoal":
            return own(filename, device=device, **options)  # type: ignore[no-any-return]
        tensors = own(filename, device="cpu", **options)
        return {name: tensor.to(target) for name, tensor in tensors.items()}

    return load_file
