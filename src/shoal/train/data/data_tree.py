"""Trees of dicts, tuples and lists, flattened for the wire and rebuilt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shoal.pool.wire.data_messages import Branch, Skeleton
from shoal.train.group.errors import DataError


def flatten(tree: Any) -> tuple[Skeleton, list[Any]]:
    """Return the skeleton of a tree, with numbers for leaves, and the leaves in that order.

    >>> flatten({"x": "a.npy", "y": "b.npy"})[1]
    ['a.npy', 'b.npy']
    """
    leaves: list[Any] = []
    return _flatten(tree, leaves), leaves


def _flatten(tree: Any, leaves: list[Any]) -> Skeleton:
    if isinstance(tree, dict):
        names = list(tree)
        if not all(isinstance(name, str) for name in names):
            raise DataError("a dict that a node reads must have strings for names")
        return Branch("dict", names, [_flatten(part, leaves) for part in tree.values()])
    if isinstance(tree, (tuple, list)):
        kind = "tuple" if isinstance(tree, tuple) else "list"
        return Branch(kind, [], [_flatten(part, leaves) for part in tree])  # type: ignore[arg-type]
    leaves.append(tree)
    return len(leaves) - 1


def rebuild(skeleton: Skeleton, leaves: Sequence[Any]) -> Any:
    """Rebuild a tree from its skeleton and leaves. Raise DataError if they do not match."""
    if isinstance(skeleton, int):
        if not 0 <= skeleton < len(leaves):
            raise DataError(f"the skeleton names leaf {skeleton}, but there are {len(leaves)}")
        return leaves[skeleton]
    parts = [rebuild(part, leaves) for part in skeleton.parts]
    if skeleton.kind == "dict":
        if len(set(skeleton.names)) != len(skeleton.names) or len(skeleton.names) != len(parts):
            raise DataError("the names of a dict do not match its values")
        return dict(zip(skeleton.names, parts, strict=True))
    return tuple(parts) if skeleton.kind == "tuple" else parts
