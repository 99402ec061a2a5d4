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
def _safe_open(module: Any) -> None:
    # load_file looks this up when it runs, so a name that a program has bound to load_file also works.
    LIBRARY.wrap(module, "safe_open", _moving)


class _Moved:
    """An open file whose tensors go to a device once they are read to the host."""

    def __init__(self, file: Any, device: torch.device) -> None:
        self._file, self._device = file, device

    def __enter__(self) -> _Moved:
        self._file.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._file.__exit__(*error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def get_tensor(self, name: str) -> torch.Tensor:
        return self._file.get_tensor(name).to(self._device)  # type: ignore[no-any-return]

    def get_tensors(self, *names: Any) -> dict[str, torch.Tensor]:
        found = self._file.get_tensors(*names)
        return {name: tensor.to(self._device) for name, tensor in found.items()}


def _moving(own: Any) -> Any:
    @wraps(own)
    def safe_open(filename: Any, framework: Any, device: Any = "cpu", **options: Any) -> Any:
        target = None if isinstance(device, int) else torch.device(device)
        if target is None or target.type != "shoal":
            return own(filename, framework=framework, device=device, **options)
        return _Moved(own(filename, framework=framework, device="cpu", **options), target)

    return safe_open
