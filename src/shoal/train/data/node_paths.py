"""Data that consists of paths only, so that a node can read it as the program does."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from shoal.pool.base.folders import MAGIC, split_pattern
from shoal.pool.wire.data_messages import DataPath, Fingerprint, Skeleton
from shoal.train.data import data_tree, fingerprints
from shoal.train.data.records import ImageFolderSource, TarSource
from shoal.train.data.sources import Source


def paths_of(data: Any, columns: list[str] | None) -> tuple[Skeleton, list[DataPath]] | None:
    """Return the paths to open at a node; None if the data is more than paths."""
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


def fingerprint_of(path: str, source: Source) -> Fingerprint:
    """Compute the fingerprint of all files behind a path that `source` was opened from."""
    if any(c in path for c in MAGIC):
        assert isinstance(source, TarSource)
        return fingerprints.fingerprint(Path(split_pattern(path)[0]), source.shards)
    if isinstance(source, ImageFolderSource):
        return fingerprints.fingerprint(Path(path), source.paths)
    return fingerprints.fingerprint(Path(path).parent, [Path(path)])
