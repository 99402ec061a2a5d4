"""The web process's application: pages, the HTTP API, signing in, and the feed."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

import shoal
from shoal.people import qr
from shoal.pool.wire import messages
from shoal.pool.wire import people_messages as people
from shoal.pool.wire import task_messages as tasks
from shoal.web import doctor, problems, task_output
from shoal.web.feed import Feed
from shoal.web.head_connections import HeadAway, HeadConnections, Refused
from shoal.web.problems import Problem, ProblemError
from shoal.web.request_guard import Guard
from shoal.web.routes import (
    ROUTES,
    ApiRoute,
    AskLog,
    AskTask,
    AskTaskFiles,
    ClaimShown,
    CodeShown,
    LogText,
    ScreenShown,
    openapi,
)  # fmt: skip

STATIC = Path(__file__).parent / "static"
ASSETS = {
    "app.js": "text/javascript", "uPlot.esm.js": "text/javascript", "app.css": "text/css",
    "icon.svg": "image/svg+xml", "licences.txt": "text/plain",
}  # fmt: skip
MISSING = (
    "<!doctype html><meta charset=utf-8><title>Shoal</title><p>The dashboard is not built. "
    "Type in the project's folder: <code>make web</code>"
)


#: The Pool page's first view needs it: the browser asks while it still loads the script.
EARLY = "</v1/pool>; rel=preload; as=fetch; crossorigin"


class SignInBody(msgspec.Struct):
    ticket: str


class Web:
    """Args:
    address: where browsers find it, like http://127.0.0.1:7480
    join_host: where `shoal join` finds the head; "" if it does not listen.
    """

    def __init__(self, pool: str, head: HeadConnections, address: str, join_host: str = "") -> None:
        self.head = head
        self.address = address
        self.feed = Feed(head, address)
        self.followers = task_output.Followers(head)
        self.join_host = join_host
        self.cookie = f"shoal-{pool}"
        self._openapi = msgspec.json.encode(openapi(shoal.__version__))

    # --- tools -------------------------------------------------------------------------------------

    def token(self, request: Request) -> str:
        bearer = request.headers.get("authorization", "")
        if bearer.lower().startswith("bearer "):
            return bearer[7:].strip()[:64]
        return request.cookies.get(self.cookie, "")[:64]

    def _set_cookie(self, response: Response, token: str, seconds: float) -> None:
        response.set_cookie(
            self.cookie, token, max_age=int(seconds), httponly=True, samesite="strict",
            secure=self.address.startswith("https:"), path="/",
        )  # fmt: skip

    async def _body(self, request: Request) -> dict[str, object]:
        data = await request.body()
        if not data:
            return {}
        kind = request.headers.get("content-type", "").partition(";")[0].strip()
        if kind != "application/json":
            raise ProblemError(400, f"send JSON, as application/json (got {kind[:60]!r})")
        found = msgspec.json.decode(data)
        if not isinstance(found, dict):
            raise ProblemError(400, "the body is not a JSON object")
        return found

    # --- the API -----------------------------------------------------------------------------------

    def endpoint(self, route: ApiRoute) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            is_get = route.method == "GET"
            given: dict[str, object] = (
                dict(request.query_params) if is_get else await self._body(request)
            )
            unknown = sorted(given.keys() - {f.encode_name for f in route.other_fields})
            if unknown:
                raise ProblemError(400, f"there is no field {unknown[0][:60]!r} here")
            given.update(request.path_params)
            if route.has_versions:
                given["match"] = _wanted_version(request.headers.getlist("if-match"))
            message = msgspec.convert(given, route.ask, strict=not is_get)
            found = await self._ask(self.token(request), message)
            response = self._show(found)
            if isinstance(found, people.EventInfo | tasks.TaskInfo):
                response.headers["etag"] = f'"{found.version}"'
            return response

        return answer

    async def _ask(self, token: str, message: msgspec.Struct) -> msgspec.Struct:
        match message:
            case AskTask(task):
                page = await self.head.ask(token, tasks.AskTasks([task], 0, True))
                assert isinstance(page, tasks.TaskPage)
                if not page.tasks:
                    raise ProblemError(
                        404, f"there is no task {task[:60]!r}", ["shoal queue --all"]
                    )
                return page.tasks[0]
            case AskLog(task):
                return await self._log(token, task)
            case AskTaskFiles(task, first):
                message = tasks.AskFiles(task, [], first)
        return await self.head.ask(token, message)  # type: ignore[arg-type]

    async def _log(self, token: str, task: str) -> LogText:
        """Return the end of a task's log."""
        tail = task_output.Tail(self.head, token, task)
        data = await tail.read()
        return LogText(data.decode(errors="replace"), tail.ended)

    def _show(self, found: msgspec.Struct) -> Response:
        match found:
            case people.ProofText(text):
                return PlainTextResponse(text)
            case people.Screen(code, valid_s):
                link = f"{self.address}/enrol#{code}"
                return _json(ScreenShown(code, valid_s, link, qr.data_uri(link)))
            case messages.Code(code, expires):
                command = f"shoal join {code}@{self.join_host}"
                return _json(
                    CodeShown(code, command, expires, qr.data_uri(f"{code}@{self.join_host}"))
                )
            case people.EventInfo(mine=people.OwnEntry(join=code) as mine) if code:
                mine = msgspec.structs.replace(mine, join=f"shoal join {code}@{self.join_host}")
                return _json(msgspec.structs.replace(found, mine=mine))
            case people.Enrolled() if found.token:
                response = _json(msgspec.structs.replace(found, token=""))
                self._set_cookie(response, found.token, 7 * 86400)
                return response
        return _json(found)

    # --- signing in --------------------------------------------------------------------------------

    async def sign_in(self, request: Request) -> Response:
        body = msgspec.convert(await self._body(request), SignInBody)
        person = await self.head.send(people.WebSignIn(body.ticket[:64]))
        assert isinstance(person, people.WebPerson)
        response = _json(msgspec.structs.replace(person, token=""))
        self._set_cookie(response, person.token, 12 * 3600)
        return response

    async def claim(self, request: Request) -> Response:
        claimed = await self.head.send(people.WebClaim())
        assert isinstance(claimed, people.WebClaimed)
        link = f"{self.address}/approve#{claimed.digits}"
        return _json(ClaimShown(claimed.digits, claimed.claim, link, qr.data_uri(link)))

    async def sign_out(self, request: Request) -> Response:
        await self.head.send(people.WebSignOut(self.token(request)))
        response = Response(status_code=204)
        response.delete_cookie(self.cookie, path="/")
        return response

    async def me(self, request: Request) -> Response:
        return _json(await self.head.send(people.WebWho(self.token(request))))

    async def read_feed(self, request: Request) -> Response:
        token = self.token(request)
        person = await self.head.send(people.WebWho(token))
        assert isinstance(person, people.WebPerson)
        if not person.name:
            raise ProblemError(
                401, "the feed is for members and guests of the pool", ["shoal open"]
            )
        last = request.headers.get("last-event-id", "")
        return StreamingResponse(self.feed.read(token, last), media_type="text/event-stream")

    async def follow_log(self, request: Request) -> Response:
        if self.followers.full:
            raise ProblemError(503, "too many browsers follow logs now", ["shoal logs -f TASK"])
        token, task = self.token(request), request.path_params["id"][:200]
        last = request.headers.get("last-event-id", "") or request.query_params.get("from", "")
        ask = tasks.AskTasks([task], 0, True)
        page = await self.head.ask(token, ask)  # a refusal is an answer, not a stream
        assert isinstance(page, tasks.TaskPage)
        stream = self.followers.follow(token, task, last)
        return StreamingResponse(stream, media_type="text/event-stream")

    async def read_file(self, request: Request) -> Response:
        token, task = self.token(request), request.path_params["id"][:200]
        path = request.query_params.get("path", "")
        if not 0 < len(path) <= 4096:
            raise ProblemError(400, "name the file: ?path=runs/result.txt")
        first = await task_output.read_part(self.head, token, task, path, 0)
        headers = {"content-disposition": task_output.attachment(path)}
        parts = task_output.read_file(self.head, token, task, path, first)
        return StreamingResponse(parts, media_type="application/octet-stream", headers=headers)

    # --- pages -------------------------------------------------------------------------------------

    async def page(self, request: Request) -> Response:
        path = STATIC / "index.html"
        if not path.exists():
            return Response(MISSING, 503, media_type="text/html")
        response = Response(path.read_bytes(), media_type="text/html")
        if request.url.path == "/" and self.cookie in request.cookies:
            response.headers["link"] = EARLY
        return response

    async def asset(self, request: Request) -> Response:
        name = request.path_params["name"]
        path = STATIC / name
        if name not in ASSETS or not path.exists():
            raise ProblemError(404, "there is no such file")
        headers = {"cache-control": "no-cache"}
        packed = path.with_name(f"{name}.gz")
        if "gzip" in request.headers.get("accept-encoding", "") and packed.exists():
            headers["content-encoding"] = "gzip"
            path = packed
        return Response(path.read_bytes(), media_type=ASSETS[name], headers=headers)

    async def document(self, request: Request) -> Response:
        return Response(self._openapi, media_type="application/json")

    async def health(self, request: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def check(self, request: Request) -> Response:
        found = await self.head.ask(self.token(request), messages.AskStatus())
        assert isinstance(found, messages.PoolStatus)
        return _json(doctor.examine(found, self.feed.readers))


def _wanted_version(headers: list[str]) -> str:
    """Return the version that `If-Match: "VERSION"` names; empty for any."""
    text = ", ".join(headers).strip()
    if text in ("", "*"):
        return ""
    found = re.fullmatch(r'"([\w-]{1,64})"', text)
    if found is None:
        raise ProblemError(400, f"If-Match names one version, in quotes (got {text[:60]!r})")
    return found[1]


def _json(found: object) -> Response:
    return Response(msgspec.json.encode(found), media_type="application/json")


async def _on_problem(request: Request, error: Exception) -> Response:
    signed_in = bool(request.cookies) or "authorization" in request.headers
    match error:
        case ProblemError():
            problem = error.problem
        case Refused():
            problem = problems.of_refusal(error.refusal, signed_in)
        case HeadAway():
            problem = Problem(problems.TITLES[503], 503, str(error), unblock=["shoal status"])
        case _:  # of msgspec
            problem = Problem(problems.TITLES[400], 400, str(error)[:300])
    return problems.response(problem)


def make_app(web: Web, hosts: list[str]) -> Guard:
    """Return the whole application, behind its guard."""

    async def not_found(request: Request, error: Exception) -> Response:
        status = getattr(error, "status_code", 404)
        status = status if status in problems.TITLES else 404
        path, wants = request.url.path, request.headers.get("accept", "")
        if status == 404 and "text/html" in wants and not path.startswith(("/v1/", "/assets/")):
            response = await web.page(request)  # it says so, with a way back
            response.status_code = 404 if response.status_code == 200 else response.status_code
            return response
        where = f"{request.method} {path[:100]}"
        return problems.response(Problem(problems.TITLES[status], status, f"no route for {where}"))

    @asynccontextmanager
    async def life(app: Starlette) -> AsyncIterator[None]:
        task = asyncio.create_task(web.feed.run())
        yield
        task.cancel()

    routes = [
        *(Route(r.path, web.endpoint(r), methods=[r.method]) for r in ROUTES),
        Route("/v1/me", web.me),
        Route("/v1/sign-in", web.sign_in, methods=["POST"]),
        Route("/v1/sign-in/claim", web.claim, methods=["POST"]),
        Route("/v1/sign-out", web.sign_out, methods=["POST"]),
        Route("/v1/feed", web.read_feed),
        Route("/v1/tasks/{id}/log/stream", web.follow_log),
        Route("/v1/tasks/{id}/file", web.read_file),
        Route("/v1/doctor", web.check),
        Route("/v1/openapi.json", web.document),
        Route("/healthz", web.health),
        Route("/assets/{name}", web.asset),
        *(Route(path, web.page) for path in PAGES),
    ]
    handlers = dict.fromkeys((ProblemError, Refused, HeadAway, msgspec.MsgspecError), _on_problem)
    app = Starlette(routes=routes, lifespan=life, exception_handlers={
        **handlers, 404: not_found, 405: not_found
    })  # fmt: skip
    scheme = web.address.partition(":")[0]
    return Guard(app, hosts, scheme)


#: Every page is the same file; the browser shows what the address says.
PAGES = (
    "/", "/enrol", "/approve", "/device/{number:int}", "/task/{task}", "/tasks", "/memory",
    "/people", "/events", "/event/{event}", "/event/{event}/screen", "/audit", "/doctor",
)  # fmt: skip
