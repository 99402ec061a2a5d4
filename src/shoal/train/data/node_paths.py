"""Data that is nothing but paths, so that a node can read it as the program would."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from shoal.pool.base.folders import MAGIC, split_pattern
from shoal.pool.wire.data_messages import DataPath, PathMark, Skeleton
from shoal.train.data import data_tree, fingerprints
from shoal.train.data.records import ImageFolderSource, TarSource
from shoal.train.data.sources import Source


def paths_of(data: Any, columns: list[str] | None) -> tuple[Skeleton, list[DataPath]] | None:
    """What is to be opened at a node; None if there is more to the data than paths."""
    if isinstance(data, (str, Path)):
        return 0, [DataPath(os.path.abspath(data), columns)]
    if not isinstance(data, (dict, tuple, list)):
        return None
    if isinstance(data, dict) and not all(isinstance(name, str) for name in data):
        return None
    skeleton, leaves = data_tree.flatten(data)
    if not leaves or not all(isinstance(leaf, (str, Path)) for leaf in leaves):
        return None
    return skeleton, [DataPath(os.path.abspath(leaf)) for leaf in leaves]


def mark_of(path: str, source: Source) -> PathMark:
    """The mark of all files behind a path, which `source` was opened from."""
    if any(c in path for c in MAGIC):
        assert isinstance(source, TarSource)
        return fingerprints.mark(Path(split_pattern(path)[0]), source.shards)
    if isinstance(source, ImageFolderSource):
        return fingerprints.mark(Path(path), source.paths)
    return fingerprints.mark(Path(path).parent, [Path(path)])
