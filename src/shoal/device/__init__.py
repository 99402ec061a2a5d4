"""The torch device `shoal`: registration, leases, and the `torch.shoal` module.

Nothing here works with another torch than the core was built for, so the package looks first.
"""

from __future__ import annotations

import torch

import shoal
from shoal._constants import TORCH_VERSION


def check_torch(found: str) -> None:
    """Raise ImportError unless this is the torch that the core was built for.

    >>> check_torch(f"{TORCH_VERSION}+cpu")
    """
    if found.partition("+")[0] != TORCH_VERSION:
        raise ImportError(
            f"shoal {shoal.__version__} was built for torch {TORCH_VERSION}, and this environment has "
            f"torch {found}. Type: pip install torch=={TORCH_VERSION}"
        )


check_torch(str(torch.__version__))
