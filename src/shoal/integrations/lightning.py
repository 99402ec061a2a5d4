"""Lightning and Fabric, in both packages. See docs/upstream/lightning.md.

The registries of accelerators and strategies are Lightning's own extension points. What they cannot
say is replaced: the choice of "auto", the strategy of an unknown accelerator, and its precision.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from shoal.integrations.library import Library

_MIXED = ("16-mixed", "bf16-mixed")
LIBRARIES = {
    package: Library(
        package=package,
        tested="2.6.6",
        versions=("2.6", "3"),
        instead='pass strategy=SingleDeviceStrategy(device="shoal") and, for mixed precision, '
        'plugins=[MixedPrecision("bf16-mixed", "shoal")]',
    )
    for package in ("lightning", "lightning_fabric", "pytorch_lightning")
}


def _trainer(library: Library, package: str) -> None:
    """Register what is replaced for `Trainer`."""

    @library.after(f"{package}.accelerators")
    def accelerator(module: Any) -> None:
        _register(library, module.AcceleratorRegistry, accelerator_class(module.Accelerator))

    @library.after(f"{package}.strategies")
    def strategy(module: Any) -> None:
        _register(library, module.StrategyRegistry, module.SingleDeviceStrategy, device="shoal:0")

    @library.after(f"{package}.trainer.connectors.accelerator_connector")
    def connector(module: Any) -> None:
        owner = module._AcceleratorConnector
        library.wrap(owner, "_choose_auto_accelerator", auto_accelerator(library))
        library.wrap(owner, "_choose_strategy", single_device(module))
        library.wrap(
            owner, "_check_and_init_precision",
            mixed_precision(module, "_precision_flag", "_precision_plugin_flag"),
        )  # fmt: skip

    @library.after(f"{package}.utilities.memory")
    def memory(module: Any) -> None:
        library.wrap(module, "is_oom_error", out_of_memory)


def _fabric(library: Library, package: str) -> None:
    """Register what is replaced for `Fabric`."""

    @library.after(f"{package}.accelerators")
    def accelerator(module: Any) -> None:
        _register(library, module.ACCELERATOR_REGISTRY, accelerator_class(module.Accelerator))

    @library.after(f"{package}.strategies")
    def strategy(module: Any) -> None:
        _register(library, module.STRATEGY_REGISTRY, module.SingleDeviceStrategy, device="shoal:0")

    @library.after(f"{package}.connector")
    def connector(module: Any) -> None:
        owner = module._Connector
        library.wrap(owner, "_choose_auto_accelerator", auto_accelerator(library))
        library.wrap(owner, "_choose_strategy", single_device(module))
        library.wrap(
            owner, "_check_and_init_precision",
            mixed_precision(module, "_precision_input", "_precision_instance"),
        )  # fmt: skip


_trainer(LIBRARIES["lightning"], "lightning.pytorch")
_fabric(LIBRARIES["lightning"], "lightning.fabric")
_trainer(LIBRARIES["pytorch_lightning"], "pytorch_lightning")
_fabric(LIBRARIES["lightning_fabric"], "lightning_fabric")


def _register(library: Library, registry: Any, registered: type, **parameters: Any) -> None:
    registry.register("shoal", registered, description="Shoal", override=True, **parameters)
    library.undo_by(lambda: registry.remove("shoal"))


def accelerator_class(base: type) -> type:
    """Make Lightning's accelerator `shoal`. Each package has a base class of its own."""

    class ShoalAccelerator(base):  # type: ignore[misc]
        def setup_device(self, device: torch.device) -> None:
            if device.type != "shoal":
                raise ValueError(f'accelerator="shoal" cannot use the device {device}')

        def get_device_stats(self, device: Any) -> dict[str, Any]:
            stats: dict[str, Any] = torch.shoal.memory_stats(device)  # type: ignore[attr-defined]
            return stats

        def teardown(self) -> None:
            pass

        @staticmethod
        def parse_devices(devices: Any) -> list[int]:
            return device_numbers(devices)

        @staticmethod
        def get_parallel_devices(devices: Any) -> list[torch.device]:
            return [torch.device("shoal", number) for number in device_numbers(devices)]

        @staticmethod
        def auto_device_count() -> int:
            return 1  # shoal:0 is the whole lease

        @staticmethod
        def is_available() -> bool:
            available: bool = torch.shoal.is_available()  # type: ignore[attr-defined]
            return available

        @staticmethod
        def name() -> str:
            return "shoal"

    return ShoalAccelerator


def device_numbers(devices: Any) -> list[int]:
    """Return the numbers of the devices that `devices=` means: 1 means shoal:0, [2] means shoal:2."""
    numbers = devices
    if isinstance(devices, str):
        words = [word for word in devices.split(",") if word.strip()]
        numbers = [int(word) for word in words] if "," in devices else int(devices)
    if numbers in (1, -1):
        return [0]
    if isinstance(numbers, list | tuple) and len(numbers) == 1 and numbers[0] >= 0:
        return list(numbers)
    raise ValueError(
        f"devices={devices!r} is not possible with shoal. shoal:0 is all devices of the lease: pass "
        "devices=1. To train on one of them, pass its number in a list: devices=[2]. To train replicas "
        "on several of them, use shoal.train."
    )


def auto_accelerator(library: Library) -> Callable[[staticmethod[[], str]], staticmethod[[], str]]:
    """Choose shoal where "auto" means the CPU."""

    def make(original: staticmethod[[], str]) -> staticmethod[[], str]:
        def _choose_auto_accelerator() -> str:
            name = original.__func__()
            return "shoal" if name == "cpu" and library.chooses_shoal() else name

        return staticmethod(_choose_auto_accelerator)

    return make


def single_device(module: Any) -> Callable[[Any], Any]:
    """Run on the accelerator's device: Lightning gives the CPU to an accelerator it does not know."""

    def make(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        @wraps(original)
        def _choose_strategy(self: Any) -> Any:
            if self.accelerator.name() == "shoal" and self._num_nodes_flag == 1:
                return module.SingleDeviceStrategy(device=self._parallel_devices[0])
            return original(self)

        return _choose_strategy

    return make


def mixed_precision(module: Any, flag: str, plugin: str) -> Callable[[Any], Any]:
    """Autocast for shoal: Lightning autocasts for CUDA, and the device computes in float32."""

    def make(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        @wraps(original)
        def _check_and_init_precision(self: Any) -> Any:
            alone = isinstance(self.strategy, module.SingleDeviceStrategy)
            on_shoal = alone and self.strategy.root_device.type == "shoal"
            if on_shoal and getattr(self, plugin) is None and getattr(self, flag) in _MIXED:
                setattr(self, plugin, module.MixedPrecision(getattr(self, flag), "shoal"))
            return original(self)

        return _check_and_init_precision

    return make


def out_of_memory(original: Callable[[BaseException], bool]) -> Callable[[BaseException], bool]:
    """Recognize torch's own error type: Lightning looks for CUDA's text."""

    @wraps(original)
    def is_oom_error(exception: BaseException) -> bool:
        return isinstance(exception, torch.OutOfMemoryError) or original(exception)

    return is_oom_error
