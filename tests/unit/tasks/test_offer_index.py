"""The index gives the answers of a look at every offer, whatever has changed before."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.tasks.offer_index import OfferIndex
from shoal.tasks.room import Needs, Offer, in_order, pick, suitable

SIZES = st.sampled_from([40, 100])


@st.composite
def offers(draw: st.DrawFn) -> Offer:
    memory = draw(SIZES)
    return Offer(
        draw(st.integers(0, 11)), "d", f"n{draw(st.integers(0, 3))}",
        draw(st.sampled_from(["cpu", "NVIDIA A100", "t4"])), memory, draw(st.integers(0, memory)),
        draw(st.integers(0, 3)), draw(st.booleans()),
    )  # fmt: skip


NEEDS = st.builds(
    Needs,
    devices=st.integers(1, 5),
    memory_bytes=st.none() | st.integers(1, 110),
    kind=st.sampled_from([None, None, "cpu", "a100|t4", "v100"]),
    only=st.none() | st.frozensets(st.integers(0, 13), max_size=8),
) | st.builds(Needs, devices=st.integers(1, 4), fraction=st.floats(0.01, 1.0))


def scan(needs: Needs, there: list[Offer]) -> list[Offer]:
    """What placement did before there was an index."""
    return pick(needs.devices, in_order(needs, suitable(needs, there)))


@settings(max_examples=600)
@given(
    changes=st.lists(st.tuples(offers(), st.booleans()) | st.integers(0, 11), max_size=40),
    needs=st.lists(NEEDS, min_size=1, max_size=6),
)
def test_the_index_chooses_as_a_scan_does(
    changes: list[tuple[Offer, bool] | int], needs: list[Needs]
) -> None:
    index, there, marked = OfferIndex(), dict[int, Offer](), set[int]()
    for change in changes:
        if isinstance(change, int):
            index.remove(change)
            there.pop(change, None)
            marked.discard(change)
            continue
        offer, mark = change
        index.put(offer, marked=mark)
        there[offer.number] = offer
        (marked.add if mark else marked.discard)(offer.number)
    assert index.offers == there
    for one in needs:
        assert index.choose(one) == scan(one, list(there.values()))
        plain = [o for o in there.values() if o.number not in marked]
        assert index.choose(one, marked=False) == scan(one, plain)
        could = [
            o
            for o in suitable(one, there.values())
            if Offer(0, "", "", o.kind, o.memory_bytes, o.memory_bytes, 0, o.elastic).share_bytes(
                one
            )
        ]
        assert index.could_ever(one) == (len(could) >= one.devices)


def test_a_choice_does_not_look_at_every_offer() -> None:
    """4,000 devices without room are one row: one look, not 4,000."""
    looks = 0

    class Counted(Offer):
        __slots__ = ()

        def share_bytes(self, needs: Needs) -> int:
            nonlocal looks
            looks += 1
            return super().share_bytes(needs)

    full = [Counted(n, "d", f"n{n // 8}", "a100", 80, 10, 1) for n in range(4000)]
    index = OfferIndex(full)
    assert index.choose(Needs(memory_bytes=20)) == []
    assert index.choose(Needs(4, memory_bytes=20)) == []
    assert [o.number for o in index.choose(Needs(memory_bytes=5))] == [0]
    assert [o.number for o in index.choose(Needs(8, memory_bytes=5))] == list(range(8))
    assert looks < 40
