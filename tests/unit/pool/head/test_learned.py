"""What the planner has learned, kept and read again."""

from __future__ import annotations

import msgspec

from shoal.pool.base import limits
from shoal.pool.planner import learned
from shoal.pool.planner.facts import Knowledge
from shoal.pool.planner.learned import Learned
from shoal.schedule.model.device_profile import DeviceProfile
from shoal.schedule.model.predictor import Operators, Predictor, TaskProfile

SLOW = DeviceProfile("slow", "", 0, {"float32": 1e9}, 1e9, 0.0)
FAST = DeviceProfile("fast", "", 0, {"float32": 4e9}, 4e9, 0.0)


def profile(number: int) -> TaskProfile:
    return TaskProfile(f"t{number}", 1, number, 0, 0, [Operators("mm", "float32", 1, 1e8, 1e6)])


def test_a_later_head_predicts_as_the_earlier_one() -> None:
    before = Knowledge(Predictor([SLOW, FAST]), {"t1": profile(1), "t2": profile(2)})
    before.predictor.observe(profile(1), SLOW, 8.0)
    before.predictor.observe(profile(1), FAST, 30.0)
    before.pairs["slow", ("t1", "t2")] = (4.0, 5.0)
    kept = learned.decode(learned.encode(learned.of_knowledge(before)))
    after = Knowledge(Predictor([SLOW, FAST]))
    learned.restore(after, kept)
    assert (after.types, after.pairs) == (before.types, before.pairs)
    for one in (profile(1), profile(2)):
        for device in (SLOW, FAST):
            assert after.predictor.predict(one, device) == before.predictor.predict(one, device)


def test_the_newest_types_are_kept() -> None:
    types = {f"t{n}": profile(n) for n in range(limits.LEARNED_TYPES_MAX + 5)}
    known = Knowledge(Predictor([SLOW]), types, {("slow", ("t0", "t9")): (1.0, 1.0)})
    known.predictor.observe(profile(0), SLOW, 1.0)
    kept = learned.of_knowledge(known)
    assert [p.type for p in kept.types] == [f"t{n}" for n in range(5, limits.LEARNED_TYPES_MAX + 5)]
    assert (kept.speeds, kept.pairs) == ([], [])


def test_what_is_too_long_or_cannot_be_read_is_forgotten() -> None:
    long = Learned(policy={"x": "y" * (limits.LEARNED_BYTES_MAX + 1)}, base=1.0, errors=[0.5])
    assert learned.decode(learned.encode(long)) == Learned(errors=[0.5])
    names = [("o", "n" * limits.LEARNED_BYTES_MAX, "t")]
    assert learned.encode(Learned(names=names)) == b""
    for data in (b"", b"{", msgspec.json.encode({"types": 3})):
        assert learned.decode(data) == Learned()
