"""Token by token with a growing KV cache: every token brings shapes that were never seen before."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch

from bench.device.llama import Decoder, Llama
from bench.figures import Figure, slowdown
from bench.measure import Plan, compare, loop, nothing

GROUP = "decoding"
BURST_TOKENS = 12
WARM_TOKENS = 2


def measure(plan: Plan, tell: Callable[[str], None]) -> tuple[list[Figure], dict[str, bool]]:
    context = WARM_TOKENS + BURST_TOKENS * plan.rounds
    torch.manual_seed(0)
    model = Llama(256, 4, 8, 512, context)
    local, ours = Decoder(copy.deepcopy(model), "cpu"), Decoder(model, "shoal")
    figures = []
    for name, note in (
        ("Llama-like, new shapes", "a first generation: the cache grows with every token"),
        ("Llama-like, shapes seen before", "the same once more: every call is prepared already"),
    ):
        tell(name)
        local.restart()
        ours.restart()
        pair = compare(
            loop(local.token, nothing),
            loop(ours.token, nothing),
            plan,
            count=BURST_TOKENS,
            warm=WARM_TOKENS,
        )
        note = f"{note}; each token is read"
        figures.append(slowdown(GROUP, name, pair, None, note))
    same = local.written == ours.written
    return figures, {f"decoding: {len(ours.written)} tokens are the same as local": same}
