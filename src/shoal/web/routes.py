"""The HTTP API as a table: each route is a message to the head, and the head's answer is the body.

Fields of a message come from the path, then from the query (GET) or the JSON body (POST, DELETE).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from shoal.pool.wire import admission_messages, messages
from shoal.pool.wire import people_messages as people
from shoal.pool.wire import task_messages as tasks
from shoal.pool.wire.message_fields import Count


@dataclass(frozen=True, slots=True)
class ApiRoute:
    method: str
    path: str  # {name} is a field of the message
    ask: type[msgspec.Struct]
    answer: type[msgspec.Struct]
    summary: str

    @property
    def path_fields(self) -> list[str]:
        return [part[1:-1] for part in self.path.split("/") if part.startswith("{")]

    @property
    def has_versions(self) -> bool:
        """Whether it takes If-Match, which is the message's field `match`."""
        return any(f.name == "match" for f in msgspec.structs.fields(self.ask))

    @property
    def other_fields(self) -> list[msgspec.structs.FieldInfo]:
        """The fields of the query or the body."""
        known = {*self.path_fields, "match"}
        return [f for f in msgspec.structs.fields(self.ask) if f.name not in known]


class AskTask(msgspec.Struct, frozen=True):
    """One task, by its id, name or number."""

    id: str


class AskLog(msgspec.Struct, frozen=True):
    """What a task has written."""

    id: str


class AskTaskFiles(msgspec.Struct, frozen=True):
    """The files of a task that `--keep` names, a page at a time."""

    id: str
    first: Count = 0


class LogText(msgspec.Struct, frozen=True):
    """The end of a task's log, as text."""

    text: str
    ended: bool


class CodeShown(msgspec.Struct, frozen=True):
    """A join code with its command and QR code."""

    code: str
    command: str
    expires: float
    qr: str  # an image as a data: address


class ClaimShown(msgspec.Struct, frozen=True):
    """What a browser shows that asks to be signed in."""

    digits: str
    claim: str
    link: str  # for a member's phone that is signed in
    qr: str  # the link, as an image


class ScreenShown(msgspec.Struct, frozen=True):
    """What an event's screen shows now."""

    code: str
    valid_s: float
    link: str
    qr: str  # an image as a data: address


_EVENT = "/v1/events/{event}"


def _change_event(verb: str, ask: type[msgspec.Struct], summary: str) -> ApiRoute:
    return ApiRoute("POST", f"{_EVENT}/{verb}", ask, people.EventInfo, summary)


ROUTES = (
    ApiRoute("GET", "/v1/pool", messages.AskStatus, messages.PoolStatus,
             "The pool: nodes, devices, sessions."),
    ApiRoute("GET", "/v1/profiles", messages.AskProfiles, messages.Profiles,
             "Measured speeds of the devices, a page at a time."),
    ApiRoute("GET", "/v1/history", people.AskHistory, people.History,
             "Memory, calls and sessions of the last hour."),
    ApiRoute("GET", "/v1/members", messages.ListClients, messages.ClientList,
             "Clients and nodes."),
    ApiRoute("POST", "/v1/members/{name}/revoke", messages.RevokeClient, messages.Done,
             "Remove a client or node."),
    ApiRoute("POST", "/v1/codes", messages.MakeCode, messages.Code,
             "Make a join code."),
    ApiRoute("GET", "/v1/events", people.ListEvents, people.EventList,
             "Events, the newest first."),
    ApiRoute("POST", "/v1/events", people.OpenEvent, people.EventInfo,
             "Open an event."),
    ApiRoute("POST", "/v1/enrol", people.Enrol, people.Enrolled,
             "Enter the code of an event's screen. A stranger becomes a guest of the event."),
    ApiRoute("GET", _EVENT, people.ShowEvent, people.EventInfo,
             "One event, with a page of its people."),
    ApiRoute("POST", f"{_EVENT}/requests", people.AskPlace, people.Receipt,
             "Ask for a place."),
    ApiRoute("DELETE", f"{_EVENT}/requests", people.WithdrawPlace, people.EventInfo,
             "Take the request back."),
    _change_event("decide", people.Decide, "Approve or refuse an entrant."),
    _change_event("close", people.CloseEvent, "Fix the list now."),
    _change_event("draw", people.DrawEvent, "Make the result now."),
    _change_event("cancel", people.CancelEvent, "End an event without a result."),
    ApiRoute("GET", f"{_EVENT}/screen", people.ShowScreen, people.Screen,
             "The code that the screen shows now."),
    ApiRoute("GET", f"{_EVENT}/proof", people.AskProof, people.ProofText,
             "The proof of a draw."),
    ApiRoute("GET", "/v1/tasks", tasks.AskTasks, tasks.TaskPage,
             "Tasks, a page at a time."),
    ApiRoute("GET", "/v1/tasks/{id}", AskTask, tasks.TaskInfo,
             "One task."),
    ApiRoute("GET", "/v1/tasks/{id}/log", AskLog, LogText,
             "The end of a task's log."),
    ApiRoute("GET", "/v1/tasks/{id}/files", AskTaskFiles, tasks.FileList,
             "The results of a task that --keep names."),
    ApiRoute("GET", "/v1/why/{request}", admission_messages.AskWhy, admission_messages.WhyAnswer,
             "Why a task or a request for a lease waits; with needs: as if it asked for these."),
    ApiRoute("POST", "/v1/tasks/{id}/{action}", tasks.ChangeTask, tasks.TaskPage,
             "Cancel, hold or release a task."),
    ApiRoute("GET", "/v1/audit", messages.ReadAudit, messages.AuditLog,
             "The audit log, newest last."),
    ApiRoute("GET", "/v1/tokens", people.ListTokens, people.TokenList,
             "Tokens and browser sessions."),
    ApiRoute("POST", "/v1/tokens", people.MakeToken, people.Token,
             "Make a token for a program."),
    ApiRoute("DELETE", "/v1/tokens/{token_id}", people.RevokeToken, messages.Done,
             "End a token or browser session."),
    ApiRoute("POST", "/v1/browsers/{digits}/approve", people.ApproveBrowser, messages.Done,
             "Sign in the browser that shows these digits."),
)  # fmt: skip


def openapi(version: str) -> dict[str, object]:
    """Return the OpenAPI 3.1 document, from the same types that the head decodes."""
    from shoal.web.problems import Problem

    kinds: list[type] = [Problem, CodeShown, ScreenShown]
    kinds += [kind for route in ROUTES for kind in (route.ask, route.answer)]
    unique = list(dict.fromkeys(kinds))
    schemas, components = msgspec.json.schema_components(
        unique, ref_template="#/components/schemas/{name}"
    )
    of = dict(zip(unique, schemas, strict=True))
    paths: dict[str, dict[str, object]] = {}
    for route in ROUTES:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, of, components)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Shoal",
            "version": version,
            "description": "Sign in with a browser (cookie) or with Authorization: Bearer TOKEN. "
            "`shoal token make` prints a token.",
        },
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"token": []}, {}],
    }


def _operation(
    route: ApiRoute, of: Mapping[type, object], components: Mapping[str, object]
) -> dict[str, object]:
    properties = _properties(route, components)
    required = [f.name for f in route.other_fields if f.required]
    shown = {people.Screen: ScreenShown, messages.Code: CodeShown}.get(route.answer, route.answer)
    ok: dict[str, object] = {"description": "Done."}
    kind = "text/plain" if route.answer is people.ProofText else "application/json"
    ok["content"] = {kind: {"schema": {"type": "string"} if kind == "text/plain" else of[shown]}}
    operation: dict[str, object] = {
        "summary": route.summary,
        "operationId": f"{route.method.lower()}{route.ask.__name__}",
        "responses": {
            "200": ok,
            "default": {
                "description": "An error.",
                "content": {"application/problem+json": {"schema": of[_problem()]}},
            },
        },
    }
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": properties[name]}
        for name in route.path_fields
    ]
    if route.has_versions:
        parameters.append(
            {"name": "If-Match", "in": "header", "required": False, "schema": {"type": "string"},
             "description": "The ETag of what you saw. If it has changed since, nothing is done (412)."}
        )  # fmt: skip
    others = {f.encode_name: properties[f.encode_name] for f in route.other_fields}
    if route.method == "GET":
        parameters += [
            {"name": name, "in": "query", "required": name in required, "schema": schema}
            for name, schema in others.items()
        ]
    elif others:
        body = {"type": "object", "properties": others, "required": required}
        operation["requestBody"] = {
            "required": bool(required),
            "content": {"application/json": {"schema": body}},
        }
    if parameters:
        operation["parameters"] = parameters
    return operation


def _problem() -> type:
    from shoal.web.problems import Problem

    return Problem


def _properties(route: ApiRoute, components: Mapping[str, object]) -> dict[str, object]:
    schema = components[route.ask.__name__]
    assert isinstance(schema, dict)
    found = schema["properties"]
    assert isinstance(found, dict)
    return found
