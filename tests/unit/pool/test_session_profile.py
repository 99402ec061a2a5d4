"""What a device server makes of a worker's counters."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shoal.pool.base.limits import PROFILED_OPERATORS_MAX
from shoal.pool.node import session_profile
from shoal.pool.node.session_profile import CallUse
from shoal.pool.wire import node_messages, profile_messages

FLOAT = session_profile.DTYPES.index("float32")
counts = st.integers(0, 2**64 - 1)


def use(name: str, calls: int, *, repeats: int = 0, ns: int = 1000, flops: int = 0) -> CallUse:
    return CallUse(
        f"aten::{name}".encode(), hash(name) % 2**64, FLOAT, flops, 8, repeats > 0, calls,
        ns * calls, repeats,
    )  # fmt: skip


TRAINING = [
    use("addmm", 300, flops=10),
    use("mm", 600, flops=10),
    use("_foreach_addcdiv_", 100, repeats=99),
    use("_foreach_lerp_.Scalar", 100, repeats=99),
    use("native_batch_norm", 400, repeats=399),
]


def test_steps_are_an_optimizers_updates() -> None:
    assert session_profile.steps(TRAINING) == 100


def test_steps_of_a_program_without_an_optimizer_are_its_repetitions() -> None:
    assert session_profile.steps([use("mm", 50), use("relu", 50), use("ones", 1)]) == 50
    assert session_profile.steps([use("mm", 1), use("relu", 1)]) == 0
    assert session_profile.steps([]) == 0


def test_alike_programs_have_one_type() -> None:
    longer = [u._replace(calls=7 * u.calls, repeats=7 * u.repeats) for u in TRAINING]
    with_logging = [*longer, use("mean", 9)]
    types = {session_profile.type_of(u, session_profile.steps(u)) for u in (TRAINING, with_logging)}
    assert len(types) == 1
    wider = [*TRAINING[1:], use("addmm", 300)._replace(hash=5)]
    assert session_profile.type_of(wider, 100) not in types
    assert session_profile.type_of(TRAINING, 2) == ""


def test_operators_are_summed_by_name_and_dtype() -> None:
    found = session_profile.operators([use("mm", 2, flops=5), use("mm", 3, flops=7)])
    assert found == [profile_messages.OperatorUse("aten::mm", "float32", 5, 5000, 31, 40)]


def test_too_many_operators_become_others() -> None:
    found = session_profile.operators([use(f"op{i}", 1, ns=1000 - i) for i in range(200)])
    assert len(found) == PROFILED_OPERATORS_MAX
    assert found[0].name == "aten::op0"
    assert (found[-1].name, found[-1].calls) == ("others", 200 - PROFILED_OPERATORS_MAX + 1)


@given(
    st.lists(
        st.builds(
            CallUse, st.binary(max_size=63), counts, st.integers(0, 2**32 - 1), counts, counts,
            st.booleans(), counts, counts, counts,
        ),
        max_size=100,
    )
)  # fmt: skip
def test_a_hostile_worker_cannot_make_a_message_that_is_refused(uses: list[CallUse]) -> None:
    steps = session_profile.bounded(session_profile.steps(uses))
    profile = profile_messages.SessionProfile(
        1,
        1,
        "running",
        task_type=session_profile.type_of(uses, steps),
        steps=steps,
        operators=session_profile.operators(uses),
    )
    import msgspec

    encoded = msgspec.msgpack.encode(profile)
    assert node_messages.FROM_SERVER.decode(encoded) == profile
