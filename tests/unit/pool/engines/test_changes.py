"""Events between two looks lead from one to the other."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shoal.pool.engines import changes
from shoal.pool.engines.engine import NodeCame, NodeWent, PartEnded, PartStarted, Placed

RUNS = st.builds(
    Placed,
    st.sampled_from(["head", "agent"]),
    st.sampled_from("abc"),
    st.integers(0, 4),
    st.sampled_from([1.0, 2.0]),
)
LOOKS = st.lists(RUNS, max_size=6, unique_by=lambda p: (p.part, p.node))


@given(LOOKS, LOOKS)
def test_events_lead_from_one_look_to_the_next(before: list[Placed], after: list[Placed]) -> None:
    parts = {p for p in before if p.pid}
    nodes = {p.node for p in parts}
    for event in changes.between(before, after):
        match event:
            case PartEnded(one):
                parts.remove(one)
            case PartStarted(one):
                assert one not in parts
                parts.add(one)
            case NodeWent(node):
                nodes.remove(node)
            case NodeCame(node):
                assert node not in nodes
                nodes.add(node)
    assert parts == {p for p in after if p.pid}
    assert nodes == {p.node for p in parts}


def test_watch_begins_with_what_is_there_and_ends_with_the_pool() -> None:
    looks = iter([[Placed("head", "a", 1, 1.0)], [Placed("head", "a", 2, 2.0)], []])
    waits: list[float] = []
    found = list(changes.watch(lambda: next(looks), waits.append))
    kinds = [type(event).__name__ for event in found]
    assert kinds == [
        "NodeCame", "PartStarted", "PartEnded", "PartStarted", "PartEnded", "NodeWent",
    ]  # fmt: skip
    assert len(waits) == 2
