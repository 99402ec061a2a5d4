"""What every request must pass, whatever it asks: host, origin, method and size. Pure ASGI."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shoal.web import problems
from shoal.web.problems import Problem, ProblemError

BODY_BYTES_MAX = 64 * 1024
METHODS = ("GET", "HEAD", "POST", "DELETE")
SAFE = ("GET", "HEAD")
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "x-frame-options": "DENY",
    "permissions-policy": "camera=(), microphone=(), geolocation=()",
}


def judge(scope: Scope, hosts: frozenset[str], scheme: str) -> Problem | None:
    """Return why a request is refused before anybody looks at it; None if it is not."""
    headers = Headers(scope=scope)
    found = headers.getlist("host")
    if len(found) != 1 or found[0].lower() not in hosts:
        named = ", ".join(found)[:100]
        return _problem(421, f"this server is not {named!r}; it is {', '.join(sorted(hosts))}")
    method = scope["method"]
    if method not in METHODS:
        return _problem(405, f"{method[:20]} is not allowed; {', '.join(METHODS)} are")
    length = headers.get("content-length")
    if length is not None and not (length.isascii() and length.isdigit() and len(length) < 12):
        return _problem(400, "Content-Length is not a number")
    if length is not None and int(length) > BODY_BYTES_MAX:
        return _problem(413, f"a request has at most {BODY_BYTES_MAX} bytes (got {length})")
    if method in SAFE:
        return None
    origin = headers.get("origin")
    if origin is not None and origin != f"{scheme}://{found[0].lower()}":
        return _problem(403, f"a page of {origin[:100]!r} may not do this")
    if headers.get("authorization", "").lower().startswith("bearer "):
        return None  # no browser sends it by itself
    for name, wanted in (("sec-fetch-site", "same-origin"), ("x-shoal", "1")):
        if headers.get(name) != wanted:
            return _problem(
                403, f"{name}: {wanted} is missing. A program sends Authorization: Bearer TOKEN"
            )
    if origin is None:
        return _problem(403, "the Origin is missing. A program sends Authorization: Bearer TOKEN")
    return None


def _problem(status: int, detail: str) -> Problem:
    return Problem(problems.TITLES[status], status, detail)


class Guard:
    """Refuses what `judge` refuses, bounds the body, and adds the security headers."""

    def __init__(self, app: ASGIApp, hosts: Iterable[str], scheme: str) -> None:
        self._app = app
        self._hosts = frozenset(h.lower() for h in hosts)
        self._scheme = scheme

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            return  # no web sockets

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                _add(MutableHeaders(scope=message), HEADERS)
            await send(message)

        refused = judge(scope, self._hosts, self._scheme)
        if refused is not None:
            await problems.response(refused)(scope, receive, with_headers)
            return
        taken = 0

        async def bounded() -> Message:
            nonlocal taken
            message = await receive()
            taken += len(message.get("body", b""))
            if taken > BODY_BYTES_MAX:
                raise ProblemError(413, f"a request has at most {BODY_BYTES_MAX} bytes")
            return message

        await self._app(scope, bounded, with_headers)


def _add(headers: MutableHeaders, more: Mapping[str, str]) -> None:
    for name, value in more.items():
        headers.setdefault(name, value)
    headers.setdefault("cache-control", "no-store")
