"""`torch.shoal.manual_seed` and its kin. State lives at the workers; seeds go with the op stream."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from shoal import _core


def _index(device: Any) -> int:
    from shoal.device import module

    return module._index(device)


def default_generator(device: Any = None) -> torch.Generator:
    """Return the generator of random operators that are given none.

    >>> torch.shoal.default_generator().manual_seed(0)
    """
    return _core.default_generator(_index(device))


def manual_seed(seed: int) -> None:
    """Seed the current device.

    >>> torch.shoal.manual_seed(0)
    """
    default_generator().manual_seed(int(seed))


def manual_seed_all(seed: int) -> None:
    """Seed every device, also those of later leases.

    >>> torch.shoal.manual_seed_all(0)
    """
    _core.seed_default_generators(int(seed) % 2**64)


def seed() -> None:
    """Seed the current device with a number of the system's.

    >>> torch.shoal.seed()
    """
    default_generator().seed()


def seed_all() -> None:
    """Seed every device of the lease with a number of the system's.

    >>> torch.shoal.seed_all()
    """
    for index in range(_core.device_count() or 1):
        _core.default_generator(index).seed()


def initial_seed() -> int:
    """Return the seed of the current device.

    >>> torch.shoal.manual_seed(7)
    >>> torch.shoal.initial_seed()
    7
    """
    return default_generator().initial_seed()


def get_rng_state(device: Any = "shoal") -> torch.Tensor:
    """Return the state of a device's random numbers.

    >>> state = torch.shoal.get_rng_state()
    """
    return default_generator(device).get_state()


def set_rng_state(new_state: torch.Tensor, device: Any = "shoal") -> None:
    """Set the state of a device's random numbers.

    >>> state = torch.shoal.get_rng_state()
    >>> x = torch.rand(2, device="shoal")
    >>> torch.shoal.set_rng_state(state)
    >>> bool((torch.rand(2, device="shoal") == x).all())
    True
    """
    default_generator(device).set_state(new_state)


def get_rng_state_all() -> list[torch.Tensor]:
    """Return the states of all devices of the lease.

    >>> states = torch.shoal.get_rng_state_all()
    """
    return [get_rng_state(i) for i in range(_core.device_count() or 1)]


def set_rng_state_all(new_states: Iterable[torch.Tensor]) -> None:
    """Set the states of all devices of the lease.

    >>> torch.shoal.set_rng_state_all(torch.shoal.get_rng_state_all())
    """
    for index, state in enumerate(new_states):
        set_rng_state(state, index)
