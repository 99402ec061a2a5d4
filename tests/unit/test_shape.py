"""Folders, files, functions and classes stay small enough to read."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER_FILES_MAX, FILE_LINES_MAX, FUNCTION_LINES_MAX = 20, 450, 70
METHODS_MAX, FIELDS_MAX = 40, 20
PYTHON, CPP = {".py", ".pyi"}, {".cpp", ".h"}
ENDINGS = PYTHON | CPP
PLACES = ("src", "csrc", "bench", "tests")
#: Bindings list what torch and Python call; they have no shape of their own.
BINDINGS = {Path("csrc/python"), Path("src/shoal")}  # src/shoal: _core.pyi

_CPP_FUNCTION = re.compile(r"^(?!namespace\b|class\b|struct\b|enum\b|union\b|extern\b|#|//|\}| )\S")
_CPP_CLASS = re.compile(r"^(?:class|struct) (?:\w+\([^)]*\) )?(\w+)[^;]*$")
_NO_MEMBER = (
    r"(?!return\b|using\b|friend\b|static_assert\b|struct\b|class\b|enum\b|template\b|//| )"
)
_CPP_METHOD = re.compile(rf"^  {_NO_MEMBER}[^=]*?[\w\])]\([^=]*")
_CPP_FIELD = re.compile(rf"^  {_NO_MEMBER}(?!static\b)[^()]*?\b\w+(?:\[\w*\])?(?: = .*|\{{.*)?;")


def sources(*places: str, endings: set[str] = ENDINGS) -> list[Path]:
    """Return the source files below these folders of the project."""
    found = (path for place in places for path in (ROOT / place).rglob("*"))
    return sorted(path for path in found if path.suffix in endings)


def python_sources(*places: str) -> list[Path]:
    return [path for path in sources(*places) if path.suffix in (".py", ".pyi")]


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def too_large(found: dict[str, int], most: int) -> dict[str, int]:
    return {where: size for where, size in found.items() if size > most}


def python_blocks(text: str) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node


def lines_of(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    assert node.end_lineno is not None
    return node.end_lineno - node.lineno + 1


def methods_of(node: ast.ClassDef) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [n for n in node.body if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))]


def fields_of(node: ast.ClassDef) -> set[str]:
    """Return the fields that the class declares, and those that its methods assign to `self`."""
    found = {
        n.target.id
        for n in node.body
        if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)
    }
    for method in methods_of(node):
        for n in ast.walk(method):
            if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store):
                found |= {n.attr} if ast.unparse(n.value) == "self" else set()
    return found


def cpp_functions(text: str) -> Iterator[tuple[str, int]]:
    """Yield first line and length of every function at the level of a namespace. clang-format puts
    its first line and its closing brace into column 0; a table's brace is followed by `;`."""
    first, start = "", 0
    for number, line in enumerate(text.splitlines(), 1):
        if line == "}" and start:
            yield first, number - start + 1
        if line.startswith("}") or (line.endswith(";") and not line.startswith(" ")):
            start = 0
        elif not start and _CPP_FUNCTION.match(line):
            first, start = line, number


def declarators(line: str) -> int:
    """Return how many fields a declaration has: `int a, b;` has two."""
    depth, found = 0, 1
    for character in line.partition("//")[0]:
        depth += (character in "<({[") - (character in ">)}]")
        found += character == "," and depth == 0
    return found


def cpp_classes(text: str) -> Iterator[tuple[str, int, int]]:
    """Yield name, number of methods and number of fields of every class at a namespace's level."""
    current, methods, fields = "", 0, 0
    for line in text.splitlines():
        if line.startswith("};") and current:
            yield current, methods, fields
            current = ""
        elif found := _CPP_CLASS.match(line):
            current, methods, fields = found[1], 0, 0
        elif current and _CPP_FIELD.match(line):
            fields += declarators(line)
        elif current and _CPP_METHOD.match(line):
            methods += 1


@pytest.mark.parametrize("place", PLACES)
def test_no_folder_is_crowded(place: str) -> None:
    counts: dict[str, int] = {}
    for path in sources(place):
        if path.name != "__init__.py":
            counts[name(path.parent)] = counts.get(name(path.parent), 0) + 1
    assert not too_large(counts, FOLDER_FILES_MAX)


@pytest.mark.parametrize("place", ["src", "csrc", "bench"])
def test_no_file_is_long(place: str) -> None:
    counts = {name(p): len(p.read_text().splitlines()) for p in sources(place)}
    assert not too_large(counts, FILE_LINES_MAX)


@pytest.mark.parametrize("place", ["src", "bench", "tests"])
def test_no_python_function_is_long(place: str) -> None:
    found = {
        f"{name(path)}: {node.name}": lines_of(node)
        for path in python_sources(place)
        for node in python_blocks(path.read_text())
        if not isinstance(node, ast.ClassDef)
    }
    assert found
    assert not too_large(found, FUNCTION_LINES_MAX)


@pytest.mark.parametrize("place", ["src", "bench", "tests"])
def test_no_python_class_is_large(place: str) -> None:
    found = {
        f"{name(path)}: {node.name}": node
        for path in python_sources(place)
        if path.relative_to(ROOT).parent not in BINDINGS
        for node in python_blocks(path.read_text())
        if isinstance(node, ast.ClassDef)
    }
    assert found
    assert not too_large({w: len(methods_of(n)) for w, n in found.items()}, METHODS_MAX)
    assert not too_large({f"{w}, fields": len(fields_of(n)) for w, n in found.items()}, FIELDS_MAX)


def test_no_cpp_function_is_long() -> None:
    found = {
        f"{name(path)}: {first}": lines
        for path in sources("csrc", "tests", endings=CPP)
        if path.relative_to(ROOT).parent not in BINDINGS
        for first, lines in cpp_functions(path.read_text())
    }
    assert len(found) > 500
    assert not too_large(found, FUNCTION_LINES_MAX)


def test_no_cpp_class_is_large() -> None:
    found = {
        f"{name(path)}: {klass}": (methods, fields)
        for path in sources("csrc", "tests", endings=CPP)
        if path.relative_to(ROOT).parent not in BINDINGS
        for klass, methods, fields in cpp_classes(path.read_text())
    }
    assert len(found) > 100
    assert not too_large({where: methods for where, (methods, _) in found.items()}, METHODS_MAX)
    fields = {f"{where}, fields": fields for where, (_, fields) in found.items()}
    assert not too_large(fields, FIELDS_MAX)


def test_every_room_says_what_lives_there() -> None:
    """A folder of sources has a README.md of at most 40 lines."""
    rooms = {path.parent for path in sources("src/shoal", "csrc", "bench")}
    missing = [name(room) for room in sorted(rooms) if not (room / "README.md").exists()]
    assert not missing
    long = [room for room in rooms if len((room / "README.md").read_text().splitlines()) > 40]
    assert not long


def test_the_scan_sees_what_it_counts() -> None:
    body = "\n".join(["  int x = 1;"] * 80)
    table = f"const int t[] = {{\n{body}\n}};\n"
    text = f"namespace a {{\n\nint f(\n    int y) {{\n{body}\n}}\n\n{table}"
    assert list(cpp_functions(text)) == [("int f(", 83)]

    fields = "\n".join(f"  std::vector<int> field{i}_;" for i in range(3))
    methods = "  void f(int x);\n  int g() const {\n    return last_;\n  }\n"
    text = f"class A final : public B {{\n public:\n{methods}{fields}\n  int last_ = 2;\n}};\n"
    assert list(cpp_classes(text)) == [("A", 2, 4)]
    text = "struct A {\n  int a = f(1, 2), b;  // c, d\n  std::map<int, int> e, f;\n};\n"
    assert list(cpp_classes(text)) == [("A", 0, 4)]

    text = "class C:\n  x: int\n  def f(self):\n    self.y, other.z = 1, 2\n"
    (node,) = (n for n in python_blocks(text) if isinstance(n, ast.ClassDef))
    assert fields_of(node) == {"x", "y"}
    assert [lines_of(n) for n in methods_of(node)] == [2]
