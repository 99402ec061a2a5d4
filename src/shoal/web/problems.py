"""Errors of the HTTP API, by RFC 9457: what happened, all reasons, and what would help."""

from __future__ import annotations

import msgspec
from starlette.responses import Response

from shoal.pool.wire.messages import Refusal

TITLES = {
    400: "The request is not valid",
    401: "Sign in first",
    403: "That needs another role",
    404: "There is no such thing",
    405: "This method is not allowed here",
    409: "The state does not allow this",
    412: "It is not as you saw it",
    413: "The request is too large",
    421: "This is not the address of this server",
    422: "The pool refused",
    503: "The head does not answer",
}


_UNKNOWN = ("there is no event", "there is no token", "there is no client", "no request ")


class ProblemReason(msgspec.Struct, frozen=True):
    code: str
    text: str
    numbers: dict[str, float] = {}


class Problem(msgspec.Struct, frozen=True, omit_defaults=False):
    """The body of every error."""

    title: str
    status: int
    detail: str
    type: str = "about:blank"
    reasons: list[ProblemReason] = []
    unblock: list[str] = []


class ProblemError(Exception):
    """Ends a request with an error."""

    def __init__(self, status: int, detail: str, unblock: list[str] | None = None) -> None:
        super().__init__(detail)
        self.problem = Problem(TITLES[status], status, detail, unblock=unblock or [])


def response(problem: Problem) -> Response:
    return Response(
        msgspec.json.encode(problem),
        problem.status,
        media_type="application/problem+json",
    )


def of_refusal(refusal: Refusal, signed_in: bool) -> Problem:
    """Return the problem for a refusal of the head."""
    text = refusal.reason
    status, unblock = 422, list(refusal.unblock)
    if "you are signed out" in text or "is not a member of this pool any more" in text:
        status, unblock = 401, ["shoal open"]
    elif " may not send " in text or "this token may only read" in text:
        status = 403 if signed_in else 401
        unblock = [] if signed_in else ["shoal open"]
    elif refusal.code == "changed":
        status = 412
    elif refusal.code == "not-yours":
        status = 403
    elif refusal.code == "no-such-task" or text.startswith(_UNKNOWN):
        status = 404
    elif text.startswith("the event "):
        status = 409
    code = refusal.code or {401: "signed-out", 403: "role", 404: "not-found", 409: "state"}.get(
        status, "refused"
    )
    return Problem(
        TITLES[status], status, text, reasons=[ProblemReason(code, text)], unblock=unblock
    )
