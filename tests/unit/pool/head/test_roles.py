"""Every message of a client has a handler and a right, and a role has those of the roles below it."""

from __future__ import annotations

from typing import get_args

import msgspec
import pytest

from shoal.errors import ProtocolError
from shoal.pool.head.head import Head
from shoal.pool.head.store import Store
from shoal.pool.wire import admission_messages, messages, roles, task_messages
from shoal.pool.wire import people_messages as people
from shoal.pool.wire.roles import Role


def test_every_message_of_a_client_has_a_route() -> None:
    head = Head("test", Store(None), standing=False)
    assert head.requests.kinds == set(get_args(messages.FromClient))


#: What each message needs. A new message is added here, by a person who thought about it.
LEAST: dict[Role, set[type[msgspec.Struct]]] = {
    Role.GUEST: {
        people.ListEvents, people.ShowEvent, people.Enrol, people.AskPlace, people.WithdrawPlace,
        people.AskProof,
    },
    Role.TASK: {
        messages.Describe, messages.AskLease, messages.Resume, messages.Release, messages.LostSight,
        messages.Beat, messages.AskProfiles,
    },
    Role.SUBMITTER: {task_messages.FindFiles, task_messages.PutFiles},
    Role.USER: {
        messages.AskStatus, task_messages.AskPlaces,
        # Tasks: the handlers show and change another owner's only for an admin.
        task_messages.SubmitTasks, task_messages.AskTasks, task_messages.ChangeTask,
        task_messages.WaitTask, task_messages.ReadLog, task_messages.AskFiles,
        task_messages.ReadFile,
        admission_messages.AskDryRun, admission_messages.AskWhy,
        people.AskHistory, people.MakeTicket, people.MakeToken, people.ListTokens,
        people.RevokeToken, people.ApproveBrowser,
    },
    Role.ADMIN: {
        messages.Measure, messages.MakeCode, messages.RevokeClient, messages.ListClients,
        messages.AskSessionProfile, messages.OrderLease,
        messages.ReadAudit, messages.VerifyAudit, people.OpenEvent, people.Decide, people.CloseEvent,
        people.DrawEvent, people.CancelEvent, people.ShowScreen,
    },
    Role.OWNER: {
        messages.EnrolNode,
        people.WebAsk, people.WebSignIn, people.WebClaim, people.WebWho, people.WebSignOut,
        people.WebWatch,
    },
}  # fmt: skip


def test_the_right_that_each_message_needs() -> None:
    head = Head("test", Store(None), standing=False)
    found = {kind: head.requests.role_of(kind) for kind in head.requests.kinds}
    assert found == {kind: role for role, kinds in LEAST.items() for kind in kinds}


@pytest.mark.parametrize("role", roles.OF_CODES)
def test_a_role_has_those_below_it(role: Role) -> None:
    rising = [Role.GUEST, Role.USER, Role.SUBMITTER, Role.ADMIN, Role.OWNER]
    who = roles.member("ana", role)
    allowed = {other for other in rising if who.may(other)}
    assert allowed == (set(rising[: rising.index(role) + 1]) if role in rising else set())
    with pytest.raises(ProtocolError, match="ana may not do it: only the pool's owner may"):
        who.require(Role.OWNER, "do it")


def test_a_task_may_lease_and_nothing_else() -> None:
    who = roles.member("task.1.1", Role.TASK, "ana")
    assert who.highest is Role.TASK
    assert not any(who.may(r) for r in Role if r is not Role.TASK)
    with pytest.raises(ValueError, match="a code is for"):
        roles.of_code("task")


def test_a_node_has_no_role_of_a_person() -> None:
    assert not any(roles.member("n", Role.NODE).may(r) for r in Role if r is not Role.NODE)


@pytest.mark.parametrize(
    ("unit", "role"),
    [("client", Role.USER), ("user", Role.USER), ("admin", Role.ADMIN), ("node", Role.NODE),
     ("owner", None), ("head", None), ("Admin", None), ("", None)],
)  # fmt: skip
def test_roles_of_certificates(unit: str, role: Role | None) -> None:
    """Nobody is the owner by a certificate."""
    assert roles.of_certificate(unit) is role
    assert roles.is_client(unit) == (role not in (None, Role.NODE))
