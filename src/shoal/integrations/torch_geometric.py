"""PyG: `torch_geometric.device("auto")`. See docs/upstream/torch_geometric.md."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from shoal.integrations.library import Library

LIBRARY = Library(
    package="torch_geometric",
    tested="2.8.1",
    versions=("2.8", "3"),
    instead='write torch_geometric.device("shoal")',
)
LIBRARIES = {"torch_geometric": LIBRARY}


@LIBRARY.after("torch_geometric.device")
def auto(module: Any) -> None:
    """Choose shoal where "auto" means the CPU."""

    def make(original: Callable[[Any], torch.device]) -> Callable[[Any], torch.device]:
        @wraps(original)
        def device(device: Any) -> torch.device:
            found = original(device)
            chosen = device == "auto" and found.type == "cpu" and LIBRARY.chooses_shoal()
            return torch.device("shoal") if chosen else found

        return device

    LIBRARY.wrap(module, "device", make)
