"""The planner's process: a question on each line of its input, an answer on each line of its output.

It keeps nothing: what the policy remembers comes with the question and goes with the answer.
"""

from __future__ import annotations

import sys
import time

import msgspec

from shoal.pool.base import process
from shoal.schedule.allocator.policy import View
from shoal.schedule.formats import records, views
from shoal.schedule.policies.shoal import Shoal
from shoal.schedule.simulate.replay import policy_of
from shoal.schedule.simulate.simulator import check

_QUESTION = msgspec.json.Decoder(records.Question)


def answer(question: records.Question) -> records.Answer:
    """Return the policy's plan, checked; or why there is none."""
    start = time.perf_counter()
    try:
        view = views.from_fields(question.view)
        policy = policy_of(question)
        policy.restore(question.memory, view)
        plan = policy.decide(view)
        check(view, plan)
        return records.Answer(
            question.number,
            views.plan_to_fields(plan),
            policy.state(),
            solve_s=time.perf_counter() - start,
        )
    except Exception as error:  # whatever a policy or solver raises: the head goes on without
        return records.Answer(question.number, None, error=f"{type(error).__name__}: {error}")


def warm_up() -> None:
    """Import the solver now: the first question has the same time as all others."""
    import numpy as np

    from shoal.schedule.model.entities import Pool
    from shoal.schedule.model.throughputs import Throughputs

    table = Throughputs(("warm",), [("up", 1)], np.ones((1, 1)))
    Shoal().decide(View(0.0, 1.0, 0.0, Pool.parse("warm:1"), table, []))


def main() -> None:
    process.die_with_parent_thread()
    warm_up()
    output = sys.stdout.buffer
    output.write(msgspec.json.encode(records.Answer(0, None)) + b"\n")  # it has started
    output.flush()
    for line in sys.stdin.buffer:
        try:
            found = answer(_QUESTION.decode(line))
        except msgspec.DecodeError as error:
            found = records.Answer(-1, None, error=str(error))
        output.write(msgspec.json.encode(found) + b"\n")
        output.flush()


if __name__ == "__main__":
    main()
