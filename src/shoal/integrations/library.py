"""What the files of this package share: versions, replacing a function, and stepping aside."""

from __future__ import annotations

import importlib.metadata
import re
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch

from shoal import _core
from shoal.integrations import FILES
from shoal_autoload import asked

Replacement = Callable[[Any], None]
#: Packages that import functions of the libraries by name and need no file of their own.
_IMPORTERS = ("diffusers", "peft", "trl")


@dataclass
class Library:
    """A library whose functions Shoal replaces, if its version is one that is known."""

    package: str
    tested: str  # the newest version that the tests ran with
    versions: tuple[str, str]  # the first that is accepted, and the first that is not
    instead: str  # what a user types where this library does not choose shoal by itself
    replacements: dict[str, list[Replacement]] = field(default_factory=dict)  # by module
    aside: bool = False
    _undo: list[Callable[[], None]] = field(default_factory=list)
    _warned: bool = False

    def after(self, module: str) -> Callable[[Replacement], Replacement]:
        """Register a function that runs with a module after the module was imported."""

        def register(replacement: Replacement) -> Replacement:
            self.replacements.setdefault(module, []).append(replacement)
            return replacement

        return register

    def apply(self, module: ModuleType) -> None:
        """Replace what is to be replaced in a module. Never raises: the library's import goes on."""
        if self.aside:
            return
        version = self._version()
        first, end = self.versions
        if not _release(first) <= _release(version) < _release(end):
            self._step_aside(version, f"Shoal knows {self.package} from {first} to before {end}")
            return
        try:
            for replacement in self.replacements[module.__name__]:
                replacement(module)
        except Exception as error:
            self._step_aside(version, f"{type(error).__name__}: {error}")

    def wrap(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Replace a function of a module or class by `make(function)`."""
        if name not in vars(owner):
            raise LookupError(f"{owner.__name__} has no {name}")
        original = vars(owner)[name]
        replaced = make(original)
        if hasattr(replaced, "__set_name__"):
            replaced.__set_name__(owner, name)
        setattr(owner, name, replaced)
        self.undo_by(lambda: setattr(owner, name, original))
        if isinstance(owner, ModuleType):
            self._rebind(original, replaced)

    def undo_by(self, undo: Callable[[], None]) -> None:
        """Register what takes a change back, should this library step aside later."""
        self._undo.append(undo)

    def chooses_shoal(self) -> bool:
        """Return whether the library takes `shoal` where it would take the CPU.

        A program that uses the device by name keeps the library's choice, and gets one warning.
        """
        if asked():
            return True
        if _core.wanted():
            self._warn(
                f"{self.package} chose the CPU in a program that uses shoal. Set SHOAL_DEFAULT=1 to "
                f"let libraries choose shoal, or {self.instead}."
            )
        return False

    def _rebind(self, original: Any, replaced: Any) -> None:
        """Change the copies of a function that other modules have imported by name already."""
        importers = {self.package, *FILES, *_IMPORTERS}
        for name, module in list(sys.modules.items()):
            if name.partition(".")[0] not in importers or module is None:
                continue
            for key in [key for key, value in list(vars(module).items()) if value is original]:
                setattr(module, key, replaced)
                self.undo_by(lambda module=module, key=key: setattr(module, key, original))  # type: ignore[misc]

    def _step_aside(self, version: str, reason: str) -> None:
        self.aside = True
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()
        self._warn(
            f"{self.package} {version} will not choose shoal by itself: {reason}. To use shoal, "
            f"{self.instead}."
        )

    def _warn(self, text: str) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(text, RuntimeWarning, stacklevel=2)

    def _version(self) -> str:
        package = sys.modules.get(self.package)
        version = getattr(package, "__version__", None)  # a package may set it after its imports
        return str(version or importlib.metadata.version(self.package))


def _release(version: str) -> tuple[int, ...]:
    """Return the numbers of a version: (1, 15) for "1.15rc1"."""
    numbers = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(n) for n in numbers[0].split(".")) if numbers else ()


def another_accelerator() -> bool:
    """Return whether this machine has an accelerator that libraries prefer to the CPU."""
    modules = (torch.cuda, torch.backends.mps, torch.xpu, getattr(torch, "hpu", None))
    return any(module is not None and module.is_available() for module in modules)
