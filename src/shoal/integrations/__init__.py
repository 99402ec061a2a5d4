"""Help libraries to choose the device.

A library that looks for an accelerator in a list of its own does not find `shoal`. One file of this
package per library replaces the functions that read such lists. `install()` runs in a program whose
user asked for Shoal, or that uses the device. It imports no library: it changes those that are
imported already, and the others right after their import.
"""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal.integrations.library import Library

#: The file of this package that knows a library, by the library's top-level package.
FILES = {
    "accelerate": "accelerate",
    "lightning": "lightning",
    "lightning_fabric": "lightning",
    "pytorch_lightning": "lightning",
    "safetensors": "safetensors",
    "sentence_transformers": "sentence_transformers",
    "torch_geometric": "torch_geometric",
    "transformers": "transformers",
}
_lock = threading.Lock()
_installed = False


def install() -> None:
    """Let the libraries of this program choose `shoal`. A second call does nothing."""
    global _installed
    with _lock:
        if _installed:
            return
        _installed = True
    sys.meta_path.insert(0, _Finder())
    for name, module in list(sys.modules.items()):
        library = _library(name)
        spec = getattr(module, "__spec__", None)
        if library is None or spec is None:
            continue
        if getattr(spec, "_initializing", False):  # it is importing torch at this moment
            spec.__class__ = _WatchedSpec
        else:
            library.apply(module)


def _library(name: str) -> Library | None:
    """Return the library that replaces something in the module `name`."""
    package = name.partition(".")[0]
    file = FILES.get(package)
    if file is None:
        return None
    libraries: dict[str, Library] = importlib.import_module(f"{__name__}.{file}").LIBRARIES
    library = libraries[package]
    return library if name in library.replacements else None


class _WatchedSpec(ModuleSpec):
    """A module's spec that knows when the module's code has run.

    The import system clears `_initializing` then, before any other thread may see the module. A
    wrapped loader would not do for a module that imports torch, and thereby Shoal, itself.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "_initializing" and not value:
            self.__class__ = ModuleSpec  # type: ignore[assignment]
            module, library = sys.modules.get(self.name), _library(self.name)
            if module is not None and library is not None:  # None: its import failed
                library.apply(module)
        object.__setattr__(self, name, value)  # not super(): the class may have changed above


class _Finder:
    """Finds the modules in which something is replaced, by means of the finders behind it."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if _library(name) is None:
            return None
        for finder in sys.meta_path:
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec = None if find is None else find(name, path, target)
            if spec is not None:
                spec.__class__ = _WatchedSpec
                return spec  # type: ignore[no-any-return]
        return None
