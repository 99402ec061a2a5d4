"""The head's checker says what the simulator's says, and the plan without a planner is a good one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from tests.unit.schedule.schedule_worlds import views as any_view

from shoal.schedule.allocator.policy import View
from shoal.schedule.formats import plan_check, views
from shoal.schedule.formats.records import PlanFields
from shoal.schedule.policies.shoal import Shoal
from shoal.schedule.simulate.simulator import check


def accepted(view: View, plan: PlanFields) -> bool:
    try:
        check(view, views.plan_from_fields(plan))
    except (AssertionError, KeyError):
        return False
    return True


@given(any_view(), st.data())
def test_both_checkers_agree(view: View, data: st.DataObject) -> None:
    ids = st.integers(0, len(view.tasks) - 1)
    kinds = st.integers(0, len(view.pool.kinds) - 1)
    groups = st.lists(st.tuples(kinds, st.lists(ids, min_size=1, max_size=3)), max_size=5)
    plan = PlanFields(data.draw(groups))
    fields = views.to_fields(view)
    assert (plan_check.problem(fields, plan) is None) == accepted(view, plan)


@given(any_view())
def test_a_policys_plan_is_accepted(view: View) -> None:
    plan = views.plan_to_fields(Shoal().decide(view))
    assert plan_check.problem(views.to_fields(view), plan) is None


@given(any_view(), st.data())
def test_the_plan_without_a_planner_is_accepted_and_leaves_no_task_that_fits(
    view: View, data: st.DataObject
) -> None:
    fields = views.to_fields(view)
    ids = st.integers(-1, len(view.tasks))
    groups = st.lists(st.tuples(st.integers(-1, 4), st.lists(ids, max_size=3)), max_size=5)
    keep = data.draw(st.one_of(st.none(), st.builds(PlanFields, groups)))
    plan = plan_check.fill(fields, keep)
    assert plan_check.problem(fields, plan) is None
    assigned = {task for _, tasks in plan.assignments for task in tasks}
    for state in fields.tasks:
        if state.id not in assigned:
            for kind in range(len(fields.kinds)):
                more = PlanFields([*plan.assignments, (kind, [state.id])])
                assert plan_check.problem(fields, more) is not None


def test_a_plan_for_what_does_not_exist_is_refused() -> None:
    import numpy as np

    from shoal.schedule.model.entities import Pool
    from shoal.schedule.model.throughputs import Throughputs

    view = View(0, 60, 0, Pool.parse("t4:1"), Throughputs(("t4",), [("a", 1)], np.ones((1, 1))), [])
    fields = views.to_fields(view)
    for wrong in ([(0, [5])], [(7, [])], [(-1, [0])], [(0, [])]):
        assert plan_check.problem(fields, PlanFields(wrong)) is not None
