"""sentence-transformers: the device of a model. See docs/upstream/sentence-transformers.md."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from shoal.integrations.library import Library

LIBRARY = Library(
    package="sentence_transformers",
    tested="6.2.0",
    versions=("6.2", "7"),
    instead='pass SentenceTransformer(device="shoal")',
)
LIBRARIES = {"sentence_transformers": LIBRARY}


@LIBRARY.after("sentence_transformers.util.environment")
def device_name(environment: Any) -> None:
    """Choose shoal where the library's list ends with the CPU."""

    def make(original: Callable[[], str]) -> Callable[[], str]:
        @wraps(original)
        def get_device_name() -> str:
            name = original()
            return "shoal" if name == "cpu" and LIBRARY.chooses_shoal() else name

        return get_device_name

    LIBRARY.wrap(environment, "get_device_name", make)
