"""How `shoal.integrations` reaches a library: whatever was imported first, and only a known version.

The library here is a small package that the tests write. It asks as real ones do.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support import programs

_LIBRARY = {
    "small/__init__.py": "__version__ = '{version}'\nfrom small.chooser import choose\n",
    "small/chooser.py": "{imports}\ndef {function}():\n    return 'cpu'\nchoose = {function}\n",
}
#: What a file of shoal.integrations looks like.
_KNOWN = """
import sys, types, warnings, json
from shoal import integrations

def know():
    from shoal.integrations.library import Library
    library = Library("small", "1.2", ("1.1", "2"), 'pass device="shoal"')

    @library.after("small.chooser")
    def replace(module):
        library.wrap(module, "choose", lambda original: lambda: "shoal instead of " + original())
        library.wrap(module, "pick", lambda original: original)

    ours = types.ModuleType("shoal.integrations.small")
    ours.LIBRARIES = {"small": library}
    sys.modules["shoal.integrations.small"] = ours
    integrations.FILES["small"] = "small"
"""
_REPORT = """
print(json.dumps({"answers": [small.choose(), small.chooser.choose()],
                  "warnings": [str(w.message) for w in seen if "small" in str(w.message)]}))
"""


def _ask(
    folder: Path, body: str, *, version: str = "1.2", function: str = "pick", imports: str = ""
) -> dict[str, Any]:
    (folder / "small").mkdir()
    for name, text in _LIBRARY.items():
        values = {"version": version, "function": function, "imports": imports}
        (folder / name).write_text(text.format(**values))
    lines = [_KNOWN, f"sys.path.insert(0, {str(folder)!r})", "know()"]
    lines += ["seen = warnings.catch_warnings(record=True).__enter__()"]
    lines += ["warnings.simplefilter('always')", body, _REPORT]
    found: dict[str, Any] = json.loads(programs.succeed("\n".join(lines)).splitlines()[-1])
    return found


REPLACED = {"answers": ["shoal instead of cpu"] * 2, "warnings": []}


@pytest.mark.parametrize(
    "body",
    [
        "integrations.install()\nimport small",
        "import small\nintegrations.install()",
        "integrations.install()\nintegrations.install()\nimport small",
    ],
    ids=["before the import", "after the import", "twice"],
)
def test_replaces(tmp_path: Path, body: str) -> None:
    assert _ask(tmp_path, body) == REPLACED


def test_library_that_installs_while_it_is_imported(tmp_path: Path) -> None:
    """As one does that imports torch first, in a program that asked."""
    imports = "from shoal import integrations\nintegrations.install()"
    assert _ask(tmp_path, "import small", imports=imports) == REPLACED


@pytest.mark.parametrize("version", ["1.0.9", "2.0", "unknown"])
def test_unknown_version_steps_aside(tmp_path: Path, version: str) -> None:
    found = _ask(tmp_path, "integrations.install()\nimport small", version=version)
    assert found["answers"] == ["cpu", "cpu"]
    (warning,) = found["warnings"]
    assert f"small {version} " in warning
    assert 'device="shoal"' in warning


def test_missing_function_steps_aside(tmp_path: Path) -> None:
    """What was replaced before the missing one is put back."""
    found = _ask(tmp_path, "integrations.install()\nimport small", function="renamed")
    assert found["answers"] == ["cpu", "cpu"]
    (warning,) = found["warnings"]
    assert "small.chooser has no pick" in warning


def test_failed_import_is_the_libraries_own_error(tmp_path: Path) -> None:
    body = """
integrations.install()
try:
    import small
except ZeroDivisionError:
    small = types.SimpleNamespace(choose=lambda: "failed")
    small.chooser = small
"""
    assert _ask(tmp_path, body, imports="1 / 0") == {"answers": ["failed"] * 2, "warnings": []}


def test_asked_program_imports_no_library() -> None:
    """The integrations of libraries that nobody imports are not imported either."""
    source = """
        import sys, torch
        assert "shoal.integrations" in sys.modules
        print([name for name in sys.modules if name.startswith("shoal.integrations.")])
        print([name for name in ("accelerate", "transformers", "lightning") if name in sys.modules])
    """
    assert programs.succeed(source, SHOAL_DEFAULT="1").split() == ["[]", "[]"]


def test_guest_has_no_hook() -> None:
    source = """
        import sys, torch
        print([finder for finder in sys.meta_path if type(finder).__module__.startswith("shoal")])
    """
    assert programs.succeed(source).strip() == "[]"
