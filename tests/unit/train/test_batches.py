"""Batches of any shape are divided and put together again."""

from __future__ import annotations

import itertools
from collections import UserDict
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.train.data import batches
from shoal.train.group.errors import BatchError


class Pair(NamedTuple):
    x: Any
    y: Any


class Encoding(UserDict[str, Any]):
    """Like Hugging Face's BatchEncoding: what its tokenizers and collators give."""


def trees(samples: int) -> st.SearchStrategy[Any]:
    leaves = st.sampled_from(
        [torch.arange(samples), torch.ones(samples, 2), np.zeros((samples, 3)), 7, None, "text"]
    )
    return st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.lists(inner, max_size=3).map(tuple),
            st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
            st.tuples(inner, inner).map(lambda both: Pair(*both)),
        ),
        max_leaves=6,
    )


def tensors(tree: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    batches.map_leaves(
        lambda leaf: found.append(leaf) if isinstance(leaf, torch.Tensor) else None, tree
    )
    return found


@given(st.data(), st.integers(1, 12))
def test_parts_are_the_whole(data: st.DataObject, samples: int) -> None:
    batch = batches.as_tensors((torch.arange(samples), data.draw(trees(samples))))
    assert batches.size(batch) == samples
    cuts = sorted(data.draw(st.lists(st.integers(0, samples), max_size=3)))
    edges = [0, *cuts, samples]
    counts = [b - a for a, b in itertools.pairwise(edges)]
    parts = batches.split(batch, counts)
    for i, whole in enumerate(tensors(batch)):
        assert torch.equal(torch.cat([tensors(part)[i] for part in parts]), whole)


def test_what_is_like_a_dict_is_one() -> None:
    encoding = Encoding(input_ids=torch.ones(4, 2), labels=np.zeros(4))
    batch = batches.as_tensors(encoding)
    assert type(batch) is dict
    assert isinstance(batch["labels"], torch.Tensor)
    output, target = batches.call(lambda input_ids, labels: input_ids.sum() + labels.sum(), batch)
    assert (output.item(), target) == (8, batch)


def test_kinds_are_kept() -> None:
    batch = Pair([torch.ones(2)], (torch.ones(2), {"a": torch.ones(2)}))
    part = batches.split(batch, [1, 1])[1]
    assert isinstance(part, Pair)
    assert isinstance(part.x, list)
    assert isinstance(part.y, tuple)


@pytest.mark.parametrize("batch", [(), {}, "text", torch.tensor(1.0)])
def test_nothing_to_count(batch: Any) -> None:
    with pytest.raises(BatchError, match="first dimension counts samples"):
        batches.size(batch)
