"""Batches: their size, how they are split, and how they are passed to a model.

A batch is `(inputs, target)`, `(input, input, …, target)`, or a dict of keyword arguments. Its
tensors have the samples in their first dimension.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from shoal.errors import DeviceLostError
from shoal.train.group.errors import BatchError

#: Mean loss of a micro-batch from the model's output and the target (for dict batches: the batch).
Loss = Callable[[Any, Any], torch.Tensor]


class IndexedBatch(ABC):
    """A batch, or a sub-batch, that holds only sample indices until a device needs the samples
    (node_data.py)."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of samples."""

    @abstractmethod
    def split(self, counts: Sequence[int]) -> list[IndexedBatch]:
        """Split into sub-batches of so many samples, in order."""

    @abstractmethod
    def to_device(self, device: torch.device) -> Any:
        """Return the samples as tensors on a device."""


def map_leaves(work: Callable[[Any], Any], batch: Any) -> Any:
    """Apply `work` to every leaf. Mappings become dicts (Hugging Face's BatchEncoding).

    This runs several times a step, so the usual kinds of batches take a short path.
    """
    if isinstance(batch, (torch.Tensor, np.ndarray)):
        return work(batch)
    kind = type(batch)
    if kind is tuple:
        return tuple([map_leaves(work, item) for item in batch])
    if kind is list:
        return [map_leaves(work, item) for item in batch]
    if kind is dict or isinstance(batch, Mapping):
        return {key: map_leaves(work, item) for key, item in batch.items()}
    return pytree.tree_map(work, batch)  # named tuples, and other containers that torch knows


def as_tensors(batch: Any) -> Any:
    """Turn numpy arrays into tensors of the same memory."""
    return map_leaves(
        lambda leaf: torch.from_numpy(leaf) if isinstance(leaf, np.ndarray) else leaf, batch
    )


def _divisible(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.dim() > 0


def size(batch: Any) -> int:
    """Return the number of samples. Raise if the tensors disagree."""
    if isinstance(batch, IndexedBatch):
        return len(batch)
    sizes: list[int] = []
    map_leaves(lambda leaf: sizes.append(leaf.shape[0]) if _divisible(leaf) else None, batch)
    if not sizes:
        raise BatchError(
            f"a batch holds tensors whose first dimension counts samples; this one is "
            f"{_describe(batch)}"
        )
    if min(sizes) != max(sizes):
        raise BatchError(
            f"the tensors of a batch have different numbers of samples: {_describe(batch)}"
        )
    if sizes[0] == 0:
        raise BatchError(f"the batch has no samples: {_describe(batch)}")
    return int(sizes[0])


def split(batch: Any, counts: Sequence[int]) -> list[Any]:
    """Split a batch into sub-batches of so many samples, in order, without a copy."""
    if isinstance(batch, IndexedBatch):
        return list(batch.split(counts))
    starts = itertools.accumulate(counts, initial=0)
    return [
        map_leaves(partial(_narrow, start, count), batch)
        for start, count in zip(starts, counts, strict=False)  # there is a start after the last
    ]


def _narrow(start: int, count: int, leaf: Any) -> Any:
    return leaf.narrow(0, start, count) if _divisible(leaf) else leaf


def to_device(batch: Any, device: torch.device) -> Any:
    """Copy a batch to a device; pinned memory is sent without waiting."""
    if isinstance(batch, IndexedBatch):
        return batch.to_device(device)
    return map_leaves(
        lambda leaf: leaf.to(device, non_blocking=True) if isinstance(leaf, torch.Tensor) else leaf,
        batch,
    )


def ahead_to_device(batch: Any, device: torch.device) -> Any:
    """Copy a batch to a device ahead of its step. If the device is lost, leave the error to the step,
    which knows the device's group."""
    try:
        return to_device(batch, device)
    except DeviceLostError:
        return batch


def call(model: Callable[..., Any], batch: Any) -> tuple[Any, Any]:
    """Run the model. Return its output and the target for the loss."""
    if isinstance(batch, dict):
        return model(**batch), batch
    if isinstance(batch, (tuple, list)) and len(batch) >= 2:
        *inputs, target = batch
        return model(*inputs), target
    raise BatchError(
        f"a batch is (inputs, target), (input, …, target) or a dict of the model's keyword "
        f"arguments; this one is {_describe(batch)}"
    )


def loss_of(loss: Loss | None, output: Any, target: Any) -> torch.Tensor:
    """Return the mean loss; without a loss function, the one that the model returned."""
    value: Any
    if loss is not None:
        value = loss(output, target)
    elif isinstance(output, dict) and "loss" in output:
        value = output["loss"]
    else:
        value = getattr(output, "loss", None)
    if not isinstance(value, torch.Tensor) or value.dim() != 0:
        raise BatchError(
            "the loss is one number (a tensor without dimensions), the mean over the samples; got "
            f"{_describe(value)}. Give loss=… as a function of (output, target), or none for models "
            "that return their own (Hugging Face models with labels in the batch)"
        )
    return value


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"tensor{tuple(value.shape)}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k}: {_describe(v)}" for k, v in list(value.items())[:8]) + "}"
    if isinstance(value, (tuple, list)):
        return "(" + ", ".join(_describe(v) for v in value[:8]) + ")"
    return type(value).__name__
