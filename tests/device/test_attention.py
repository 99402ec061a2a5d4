"""Attention picks the worker's kernel; the choice must follow everything that it depends on."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F


@pytest.mark.parametrize("dropout_first", [False, True])
def test_dropout_is_part_of_the_choice(dropout_first: bool) -> None:
    """The fused kernel of the CPU has no dropout: the same shapes with and without it differ."""
    shape = (1, 2, 5 + dropout_first, 8)
    host = torch.randn(shape)
    remote = host.to("shoal")
    for dropout in (0.5, 0.0) if dropout_first else (0.0, 0.5):
        torch.manual_seed(1)
        expected = F.scaled_dot_product_attention(host, host, host, dropout_p=dropout)
        torch.manual_seed(1)
        actual = F.scaled_dot_product_attention(remote, remote, remote, dropout_p=dropout)
        assert torch.equal(actual.cpu(), expected)


def test_growing_sequences_ask_once() -> None:
    """Decoding: every token has a new length, and only the first asks which kernel to use."""
    key = torch.randn(1, 2, 3, 8)
    waits = []
    for length in range(3, 9):
        key = torch.cat([key, torch.randn(1, 2, 1, 8)], dim=2)
        remote = key.to("shoal")
        query = remote[:, :, -1:].contiguous()
        before = torch.shoal.traffic()["round_trips"]
        actual = F.scaled_dot_product_attention(query, remote, remote)
        waits.append(torch.shoal.traffic()["round_trips"] - before)
        expected = F.scaled_dot_product_attention(key[:, :, -1:].contiguous(), key, key)
        assert torch.equal(actual.cpu(), expected), length
    assert waits[1:] == [0] * (len(waits) - 1), waits
