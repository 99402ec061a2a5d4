"""What torch.compile's default backend finds where it wants a code generator: a clear answer."""

from __future__ import annotations

from typing import Any, NoReturn

TEXT = (
    "torch.compile's default backend, inductor, generates code for the machine it runs on, which "
    "a shoal device is not. Use torch.compile(model, backend='aot_eager') or backend='eager', or "
    "leave torch.compile away."
)

#: The names under which inductor asks a device's module for its parts.
NAMES = ("Scheduling", "PythonWrapperCodegen", "CppWrapperCodegen", "WrapperFxCodegen")


class NoInductor:
    """Stands where inductor wants a scheduler and wrappers."""

    supports_caching = True  # asked of every device, also when a CPU function is compiled

    def __init__(self, *_: Any, **__: Any) -> None:
        raise NotImplementedError(TEXT)

    @classmethod
    def create(cls, *_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(TEXT)


def part(name: str) -> type[NoInductor]:
    """What inductor gets for one of NAMES. It asks for them when it is loaded, never before."""
    if name == "Scheduling":
        from torch._inductor.codegen import common
        from torch._inductor.codegen.cpu_device_op_overrides import CpuDeviceOpOverrides

        # Looked up right before the wrapper is made; without it the error would be a KeyError.
        common.register_device_op_overrides("shoal", CpuDeviceOpOverrides())
    return NoInductor
