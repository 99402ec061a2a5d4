"""MkDocs hooks: pages from outside of docs/, and one page of reference for each public module."""

from __future__ import annotations

import ast
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
#: Files of the project, and what they are called in the site.
OUTSIDE = {
    "README.md": "index.md",
    "CHANGELOG.md": "project/changelog.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "SECURITY.md": "project/security.md",
    "LICENSE": "project/LICENSE",
}
#: Public modules: the file with their names, and where mkdocstrings finds each name.
REFERENCE = {
    "shoal": ("src/shoal/__init__.py", "shoal"),
    "shoal.train": ("src/shoal/train/__init__.py", "shoal.train"),
    "shoal.memory": ("src/shoal/memory/__init__.py", "shoal.memory"),
    "shoal.task": ("src/shoal/task.py", "shoal.task"),
    "torch.shoal": ("src/shoal/device/module.py", "shoal.device.module"),
}
_LINK = re.compile(r"\]\((?!\w+:|#)([^)#\s]+)")
_FENCE = re.compile(r"^( *```)(python|sh) (?:fragment|run)$", re.MULTILINE)


def public_names(source: str) -> list[str]:
    """Return the `__all__` of a module's source."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return [str(name) for name in ast.literal_eval(node.value)]
    raise ValueError("the module has no __all__")


def reference_page(module: str, file: str, found_in: str) -> str:
    """Return a page that has mkdocstrings document each public name."""
    source = (ROOT / file).read_text()
    parts = [f"# {module}", ast.get_docstring(ast.parse(source), clean=True) or ""]
    parts[1] = fenced(parts[1])
    for name in public_names(source):
        if f"{module}.{name}" not in REFERENCE:  # a module has a page of its own
            heading = f"      heading: {module}.{name}\n      toc_label: {name}"
            parts.append(f"::: {found_in}.{name}\n    options:\n{heading}")
    return "\n\n".join(parts) + "\n"


def fenced(text: str) -> str:
    """Put every example of a docstring into a block of code, as far as its paragraph reaches."""
    return re.sub(r"(?m)^( *)>>> (?:.*\n?)(?:^ *\S.*\n?)*", _fence, text)


def _fence(found: re.Match[str]) -> str:
    indent = found[1]
    return f"{indent}```pycon\n{found[0].rstrip()}\n{indent}```\n"


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that do not lie in docs/."""
    for name, uri in OUTSIDE.items():
        files.append(File.generated(config, uri, abs_src_path=str(ROOT / name)))
    for module, (file, found_in) in REFERENCE.items():
        page = reference_page(module, file, found_in)
        files.append(File.generated(config, f"reference/{module}.md", content=page))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point links at the pages' places in the site, and drop what only the tests read."""
    uri = page.file.src_uri
    came_from = {there: here for here, there in OUTSIDE.items()}.get(uri, f"docs/{uri}")

    def moved(found: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(came_from), found[1]))
        if (ROOT / target / "README.md").exists():
            target += "/README.md"
        there = OUTSIDE.get(target, target.removeprefix("docs/"))
        return "](" + posixpath.relpath(there, posixpath.dirname(uri) or ".")

    return _FENCE.sub(r"\1\2", _LINK.sub(moved, markdown))
