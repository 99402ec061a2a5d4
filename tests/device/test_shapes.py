"""Shapes that the client knows by itself: they are local torch's, and nobody is asked for them.

A new shape that has to be asked for waits for everything before it on the device, so a program whose
shapes change would march in step with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.support.compare import close

Made = Callable[[str, int], Any]
aten = torch.ops.aten


def numbers(device: str, *sizes: int) -> torch.Tensor:
    torch.manual_seed(sum(sizes))
    return torch.randn(*sizes).to(device)


def channels_last(device: str, *sizes: int) -> torch.Tensor:
    return numbers(device, *sizes).contiguous(memory_format=torch.channels_last)


def convolved(device: str, n: int, *more: Any) -> Any:
    x, w, b = numbers(device, n, 4, 9, 10), numbers(device, 6, 4, 3, 3), numbers(device, 6)
    return aten.convolution(x, w, b, *more)


def convolved_back(device: str, n: int, mask: Sequence[bool], lies: str = "packed") -> Any:
    x, w, grad = (
        numbers(device, n, 4, 9, 10),
        numbers(device, 6, 4, 3, 3),
        numbers(device, n, 6, 7, 8),
    )
    if lies == "channels last":
        grad = grad.contiguous(memory_format=torch.channels_last)
    if lies == "all channels last":
        x, w, grad = (t.contiguous(memory_format=torch.channels_last) for t in (x, w, grad))
    if lies == "expanded":
        grad = grad[:, :, :1, :1].expand(n, 6, 7, 8)
    args = ([6], [1, 1], [0, 0], [1, 1], False, [0, 0], 1, list(mask))
    return aten.convolution_backward(grad, x, w, *args)


def normalised(device: str, n: int, *sizes: int, last: bool = False) -> list[torch.Tensor]:
    x = channels_last(device, n, 4, *sizes) if last else numbers(device, n, 4, *sizes)
    w, b = numbers(device, 4), numbers(device, 4)
    mean, variance = torch.zeros(4, device=device), torch.ones(4, device=device)
    made = list(aten.native_batch_norm(x, w, b, mean, variance, True, 0.1, 1e-5))
    grad = torch.ones_like(x)
    made += aten.native_batch_norm_backward(
        grad, x, w, mean, variance, made[1], made[2], True, 1e-5, [True, True, True]
    )
    return made


def layer_norm(device: str, n: int) -> list[Any]:
    x, w, b = numbers(device, n, 5, 8), numbers(device, 8), numbers(device, 8)
    out, mean, rstd = aten.native_layer_norm(x, [8], w, b, 1e-5)
    mask = [True, True, False]
    return [out, *aten.native_layer_norm_backward(out, x, [8], mean, rstd, w, b, mask)]


def group_norm(device: str, n: int) -> list[Any]:
    x, w, b = numbers(device, n, 4, 5), numbers(device, 4), numbers(device, 4)
    out, mean, rstd = aten.native_group_norm(x, w, b, n, 4, 5, 2, 1e-5)
    mask = [True, True, True]
    back = aten.native_group_norm_backward(out, x, mean, rstd, w, n, 4, 5, 2, mask)
    return [out, mean, rstd, *back]


def attended(device: str, n: int, causal: bool) -> list[torch.Tensor]:
    q, k, v = (
        numbers(device, n, 7, 2 * 8).view(n, 7, 2, 8).transpose(1, 2).detach() + i for i in range(3)
    )
    out, weights = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
    back = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        numbers(device, n, 2, 7, 8), q, k, v, out, weights, 0.0, causal
    )
    return [out, weights, *back]


def dropped_back(device: str, n: int) -> Any:
    mask = numbers(device, n, 6) > 0
    return aten.native_dropout_backward(numbers(device, n, 6), mask, 2.0)


KNOWN: dict[str, Made] = {
    "convolution": lambda d, n: convolved(d, n, [1, 1], [0, 0], [1, 1], False, [0, 0], 1),
    "strided": lambda d, n: convolved(d, n, [2, 3], [1, 2], [2, 1], False, [0, 0], 1),
    "one number for all": lambda d, n: convolved(d, n, [2], [1], [1], False, [0], 1),
    "transposed": lambda d, n: aten.convolution(
        numbers(d, n, 6, 5, 4),
        numbers(d, 6, 3, 3, 2),
        None,
        [2, 2],
        [1, 0],
        [1, 1],
        True,
        [1, 0],
        2,
    ),
    "grouped": lambda d, n: aten.convolution(
        numbers(d, n, 6, 5), numbers(d, 9, 2, 3), None, [1], [1], [1], False, [0], 3
    ),
    "in three dimensions": lambda d, n: F.conv3d(
        numbers(d, n, 2, 4, 5, 6), numbers(d, 3, 2, 2, 2, 2)
    ),
    "one channel": lambda d, n: F.conv2d(numbers(d, n, 1, 8, 8), numbers(d, 5, 1, 1, 1)),
    "one by one": lambda d, n: F.conv2d(numbers(d, n, 6, 1, 1), numbers(d, 5, 6, 1, 1)),
    "channels last": lambda d, n: F.conv2d(channels_last(d, n, 4, 9, 10), numbers(d, 6, 4, 3, 3)),
    "weights with channels last": lambda d, n: F.conv2d(
        numbers(d, n, 4, 9, 10), channels_last(d, 6, 4, 3, 3), stride=2
    ),
    "both channels last": lambda d, n: F.conv2d(
        channels_last(d, n, 4, 9, 10), channels_last(d, 6, 4, 1, 1)
    ),
    "clone with channels last": lambda d, n: channels_last(d, n, 4, 3, 2),
    "convolution back": lambda d, n: convolved_back(d, n, (True, True, True)),
    "only to weights": lambda d, n: convolved_back(d, n, (False, True, False)),
    "from channels last": lambda d, n: convolved_back(d, n, (True, True, True), "channels last"),
    "all channels last": lambda d, n: convolved_back(d, n, (True, True, True), "all channels last"),
    "from one number": lambda d, n: convolved_back(d, n, (True, True, True), "expanded"),
    "batch norm": lambda d, n: normalised(d, n, 5, 6),
    "batch norm, channels last": lambda d, n: normalised(d, n, 5, 6, last=True),
    "batch norm of vectors": lambda d, n: normalised(d, n),
    "layer norm": layer_norm,
    "group norm": group_norm,
    "attention": lambda d, n: attended(d, n, False),
    "causal attention": lambda d, n: attended(d, n, True),
    "pooled": lambda d, n: aten._adaptive_avg_pool2d(numbers(d, n, 3, 8, 6), [2, 3]),
    "pooled back": lambda d, n: aten._adaptive_avg_pool2d_backward(
        numbers(d, n, 3, 2, 3), numbers(d, n, 3, 8, 6)
    ),
    "relu": lambda d, n: numbers(d, n, 6).relu(),
    "relu of columns": lambda d, n: numbers(d, n, 6).t().relu(),
    "relu of every other": lambda d, n: numbers(d, n, 6)[:, ::2].relu(),
    "number": lambda d, n: aten.mul.Scalar(numbers(d, n, 6), 2.5),
    "whole number": lambda d, n: aten.add.Scalar(numbers(d, n, 6).long(), 2),
    "number of an expanded": lambda d, n: aten.div.Scalar(
        numbers(d, n, 3)[:, :, None, None].expand(n, 3, 4, 5), 20
    ),
    "number of a part": lambda d, n: aten.sub.Scalar(numbers(d, n, 4, 6).transpose(0, 1)[1:3], 1),
    "dropout back": dropped_back,
    "where": lambda d, n: torch.where(numbers(d, n, 1) > 0, numbers(d, 1, 6), numbers(d, n, 6)),
    "stack": lambda d, n: torch.stack([numbers(d, n, 3), numbers(d, n, 3)], dim=-1),
    "slice back": lambda d, n: aten.slice_backward(numbers(d, n, 2), [n, 6], 1, 1, 3, 1),
    "select back": lambda d, n: aten.select_backward(numbers(d, n), [n, 6], 1, 1),
    "pad": lambda d, n: aten.constant_pad_nd(numbers(d, n, 6), [1, 2, 0, 3], 0.5),
    "safe softmax": lambda d, n: aten._safe_softmax(numbers(d, n, 6), -1),
    "pixel shuffle": lambda d, n: F.pixel_shuffle(numbers(d, n, 8, 3, 4), 2),
    "pixel unshuffle": lambda d, n: F.pixel_unshuffle(numbers(d, n, 2, 6, 4), 2),
    "clone of columns": lambda d, n: numbers(d, n, 6).t().clone(),
    "clone of a part": lambda d, n: numbers(d, n, 4, 6).transpose(0, 2)[::2].clone(),
}


def tensors(made: Any) -> list[torch.Tensor | None]:
    return [made] if isinstance(made, torch.Tensor) else list(made)


@pytest.mark.parametrize("name", KNOWN)
def test_a_new_shape_is_known_without_asking(name: str) -> None:
    for n in (3, 1):
        asked = torch.shoal.traffic()["round_trips"]
        ours = tensors(KNOWN[name]("shoal", n))
        assert torch.shoal.traffic()["round_trips"] == asked
        theirs = tensors(KNOWN[name]("cpu", n))
        for our, their in zip(ours, theirs, strict=True):
            assert (our is None) == (their is None)
            if our is None or their is None:
                continue
            assert (our.shape, our.dtype) == (their.shape, their.dtype)
            # Of dimensions of one element torch's strides mean nothing.
            strides = [
                (a, b)
                for a, b, size in zip(our.stride(), their.stride(), our.shape, strict=True)
                if size > 1
            ]
            assert all(a == b for a, b in strides), (our.stride(), their.stride())
            close(our, their)


def test_wrong_shapes_are_refused_in_their_line() -> None:
    x, w = numbers("shoal", 3, 4, 9, 10), numbers("shoal", 6, 5, 3, 3)
    with pytest.raises(RuntimeError, match="channels"):
        F.conv2d(x, w)
    with pytest.raises(RuntimeError, match="size of tensor"):
        torch.where(x > 0, x, numbers("shoal", 7))
    with pytest.raises(RuntimeError, match="Kernel size can't be greater"):
        F.conv2d(x, numbers("shoal", 6, 4, 11, 3))
    torch.shoal.synchronize()


def test_a_step_of_a_convolutional_network_with_another_batch_asks_nothing() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3, groups=2), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 4),
    ).to("shoal")  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters())
    asked = []
    for n in (8, 7, 6):
        before = torch.shoal.traffic()["round_trips"]
        target = torch.zeros(n, dtype=torch.long, device="shoal")
        F.cross_entropy(model(numbers("shoal", n, 3, 12, 12)), target).backward()
        optimizer.step()
        optimizer.zero_grad()
        asked.append(torch.shoal.traffic()["round_trips"] - before)
    assert asked[1:] == [0, 0]
