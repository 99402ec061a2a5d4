"""The torch.distributed backend of the device: collectives of gloo on copies in host memory.

Each rank is a program with a lease of its own, so a tensor's way to another rank leads over the hosts
anyway. A collective of device tensors has ended when its call returns.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d
from torch.distributed import ProcessGroup, ProcessGroupGloo
from torch.distributed.distributed_c10d import Store, Work

#: Collectives whose first argument is what they write.
_WRITING = (
    "_allgather_base", "_reduce_scatter_base", "allgather", "allgather_coalesced", "allreduce",
    "allreduce_coalesced", "alltoall", "alltoall_base", "broadcast", "gather", "recv",
    "recv_anysource", "reduce", "reduce_scatter", "scatter",
)  # fmt: skip
#: Names that process groups have for functions of gloo.
_ALIASES = {
    "all_gather_single": "_allgather_base",
    "all_to_all_single": "alltoall_base",
    "reduce_scatter_single": "_reduce_scatter_base",
}
_READING = ("barrier", "monitored_barrier", "send")


class HostGroup(ProcessGroup):
    """A process group for tensors of the device and of the host.

    Torch takes a process group that is written in Python for all devices of a group, so this one also
    does what gloo does for CPU tensors.
    """

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        # The constructor with a store makes an object whose methods C++ would not find.
        super().__init__(rank, size)  # type: ignore[call-arg]
        self.gloo = ProcessGroupGloo(store, rank, size, timeout=timeout)
        self.gloo._set_sequence_number_for_group()
        self._register_backend(torch.device("cpu"), ProcessGroup.BackendType.GLOO, self.gloo)
        self._set_default_backend(ProcessGroup.BackendType.GLOO)

    def getBackendName(self) -> str:
        return "shoal"


class _Copies:
    """Host copies of the device tensors among the arguments of one collective."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by id: tensor and copy

    def __bool__(self) -> bool:
        return bool(self._made)

    def of(self, value: Any) -> Any:
        """Return `value` with copies in the place of device tensors, also in lists of lists."""
        if isinstance(value, list | tuple):
            return [self.of(v) for v in value]
        if not isinstance(value, torch.Tensor) or value.device.type != "shoal":
            return value
        if id(value) not in self._made:
            self._made[id(value)] = (value, value.detach().cpu())
        return self._made[id(value)][1]

    def write_back(self, value: Any) -> None:
        """Copy what the collective wrote to the device tensors in `value`."""
        if isinstance(value, list | tuple):
            for one in value:
                self.write_back(one)
        elif id(value) in self._made:
            with torch.no_grad():
                value.copy_(self._made[id(value)][1])


def _collective(name: str, *, writes: bool) -> Callable[..., Work]:
    def call(self: HostGroup, *arguments: Any, **options: Any) -> Work:
        copies = _Copies()
        hosted = [copies.of(argument) for argument in arguments]
        work = getattr(self.gloo, name)(*hosted, **options)
        if not copies:
            return work  # type: ignore[no-any-return]
        work.wait()
        written = arguments[0] if writes else []
        copies.write_back(written)
        done: torch.futures.Future[Any] = torch.futures.Future()
        done.set_result(written)
        return c10d._create_work_from_future(done)  # type: ignore[attr-defined,no-any-return]

    call.__name__ = name
    return call


for _name in _WRITING:
    setattr(HostGroup, _name, _collective(_name, writes=True))
for _name, _gloo_name in _ALIASES.items():
    setattr(HostGroup, _name, _collective(_gloo_name, writes=True))
for _name in _READING:
    setattr(HostGroup, _name, _collective(_name, writes=False))
