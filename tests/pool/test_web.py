"""The HTTP API: who may do what, and everything that is refused."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from shoal.errors import LeaseError, PoolStartError
from shoal.pool.wire import messages
from shoal.pool.wire import people_messages as people
from shoal.web.options import Options, listen
from shoal.web.routes import ROUTES, ApiRoute
from tests.support import processes
from tests.support.pages import web
from tests.support.pages.web import Browser
from tests.support.standing import StandingPool
from tests.support.waiting import wait_until


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandingPool]:
    with StandingPool(tmp_path_factory.mktemp("web"), listen=True, web=True) as made:
        yield made


@pytest.fixture(scope="module")
def owner(pool: StandingPool) -> Browser:
    return web.owner(pool)


def open_event(owner: Browser, **more: object) -> str:
    made = owner.request("POST", "/v1/events", {"title": "GPU hour", "places": 1, **more})
    assert made.status == 200, made.data
    return str(made.json["event"])


def code_of(owner: Browser, event: str) -> str:
    return str(owner.request("GET", f"/v1/events/{event}/screen").json["code"])


# --- signing in --------------------------------------------------------------------------------------


def test_a_sign_in_link_is_good_once(pool: StandingPool) -> None:
    ticket = web.ticket(pool)
    browser = Browser(pool)
    first = browser.sign_in(ticket)
    assert first.status == 200
    assert first.json["name"] == "owner"
    assert first.json["role"] == "admin"  # the owner's own rights need the Unix socket
    cookie = first.headers["set-cookie"]
    assert all(part in cookie for part in ("HttpOnly", "SameSite=strict", "Path=/"))
    again = Browser(pool).sign_in(ticket)
    assert again.status == 422
    assert "used before" in again.json["detail"]
    assert Browser(pool).sign_in("nonsense").status == 422


def test_a_browser_asks_and_a_member_approves(pool: StandingPool) -> None:
    browser = Browser(pool)
    asked = browser.request("POST", "/v1/sign-in/claim").json
    waiting = browser.sign_in(asked["claim"])
    assert "nobody has approved" in waiting.json["detail"]
    digits = asked["digits"]
    assert asked["link"] == f"{browser.address}/approve#{digits}"  # what its QR code says
    assert re.fullmatch(r"\d{6}", digits)
    done = pool.run("approve", f"{digits[:3]}-{digits[3:]}", "--pool", pool.name)
    assert done.code == 0, done.err
    assert browser.sign_in(asked["claim"]).json["name"] == "owner"
    assert Browser(pool).sign_in(asked["claim"]).status == 422  # once


def test_signing_out_ends_the_session(pool: StandingPool) -> None:
    browser = web.owner(pool)
    cookie = browser.cookie
    assert browser.request("GET", "/v1/pool").status == 200
    assert browser.request("POST", "/v1/sign-out").status == 204
    browser.cookie = cookie
    assert browser.request("GET", "/v1/pool").status == 401


# --- closed ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1", "127.0.0.1:1", "", "localhost.evil:7480"]
)
def test_another_host_is_refused(owner: Browser, host: str) -> None:
    for path in ("/", "/v1/pool", "/healthz", "/assets/app.js"):
        refused = owner.request("GET", path, Host=host)
        assert refused.status == 421, (host, path)


@pytest.mark.parametrize("method", ["POST", "DELETE"])
@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"},
        {"Origin": None},
        {"Origin": "null"},
        {"X_Shoal": None},
        {"Sec_Fetch_Site": "cross-site"},
        {"Sec_Fetch_Site": "same-site"},
        {"Sec_Fetch_Site": None},
    ],
)
def test_a_hostile_page_changes_nothing(
    owner: Browser, method: str, headers: dict[str, str | None]
) -> None:
    before = owner.request("GET", "/v1/events").json
    path = "/v1/events" if method == "POST" else "/v1/tokens/00000000"
    refused = owner.request(method, path, {"title": "evil", "places": 1}, **headers)
    assert refused.status == 403, refused.data
    assert refused.headers["content-type"] == "application/problem+json"
    assert owner.request("GET", "/v1/events").json == before


def test_methods_sizes_and_forms(owner: Browser) -> None:
    for method in ("PUT", "PATCH", "OPTIONS", "TRACE", "CONNECT"):
        assert owner.request(method, "/v1/pool").status in (400, 405), method
    assert owner.request("GET", "/v1/sign-in").status == 405
    assert owner.request("POST", "/v1/events", b"x" * (64 * 1024 + 1)).status == 413
    chunked = owner.request(
        "POST", "/v1/events", 2 * (b"10000\r\n" + b"x" * 65536 + b"\r\n") + b"0\r\n\r\n",
        Transfer_Encoding="chunked", Content_Type="application/json",
    )  # fmt: skip
    assert chunked.status in (400, 413)
    for body in (b"{", b"[]", b"\xff", b'{"title": 5, "places": 1}', b'{"title":"x","place":1}'):
        found = owner.request("POST", "/v1/events", body, Content_Type="application/json")
        assert found.status == 400, body
        assert found.json["status"] == 400
    form = owner.request("POST", "/v1/events", b"title=x", Content_Type="text/plain")
    assert form.status == 400


def test_every_answer_has_the_security_headers(owner: Browser) -> None:
    for path in ("/", "/v1/pool", "/v1/nothing", "/healthz"):
        found = owner.request("GET", path).headers
        assert "script-src 'self'" in found["content-security-policy"]
        assert "frame-ancestors 'none'" in found["content-security-policy"]
        assert found["x-content-type-options"] == "nosniff"
        assert found["cache-control"] == "no-store"
    assert owner.request("GET", "/v1/pool", Host="evil").headers["x-frame-options"] == "DENY"


def filled(route: ApiRoute) -> tuple[str, dict[str, object]]:
    """A path and a body that are well formed, and name nothing that exists."""
    values: dict[str, object] = {"event": "ZZZ", "name": "nobody", "token_id": "0", "digits": "000000",
              "id": "none", "action": "hold", "title": "t", "places": 1, "own": "00" * 16,
              "code": "x", "role": "user", "request": "none",
              "ttl_s": 60, "label": "l", "count": 1, "first": 0,
              "devices_max": None, "memory_bytes_max": None}  # fmt: skip
    path = re.sub(r"\{(\w+)\}", lambda m: str(values[m[1]]), route.path)
    needed = {f.encode_name: values[f.encode_name] for f in route.other_fields if f.required}
    return path, needed


ADMIN = {messages.ListClients, messages.RevokeClient, messages.MakeCode, messages.ReadAudit,
         people.OpenEvent, people.Decide, people.CloseEvent, people.DrawEvent, people.CancelEvent,
         people.ShowScreen}  # fmt: skip
GUEST = {people.ListEvents, people.ShowEvent, people.Enrol, people.AskPlace, people.WithdrawPlace,
         people.AskProof}  # fmt: skip


@pytest.fixture(scope="module")
def tokens(pool: StandingPool, owner: Browser) -> dict[str, str]:
    """A token for each role; "" is a stranger's."""
    pool.join("ana")
    made = {"stranger": "", "user": "", "admin": ""}
    environment = {
        "SHOAL_POOL": pool.network_url,
        "SHOAL_IDENTITY": str(pool.directory / "ana.pem"),
    }
    done = pool.run("token", "make", "test", "--scope", "full", "--json", **environment)
    made["user"] = json.loads(done.out)["token"]
    done = pool.run("token", "make", "test", "--scope", "full", "--json", "--pool", pool.name)
    made["admin"] = json.loads(done.out)["token"]
    done = pool.run("token", "make", "test", "--json", "--pool", pool.name)
    made["reader"] = json.loads(done.out)["token"]
    return made


@pytest.mark.parametrize("route", ROUTES, ids=lambda r: f"{r.method} {r.path}")
def test_role_by_route(owner: Browser, tokens: dict[str, str], route: ApiRoute) -> None:
    path, body = filled(route)
    if route.method == "GET" and body:
        path += "?" + "&".join(f"{k}={v}" for k, v in body.items())
    nobody = Browser.__new__(Browser)
    nobody.address, nobody.host, nobody.cookie = owner.address, owner.host, ""
    found = {}
    for role, token in tokens.items():
        answer = nobody.request(route.method, path, body if route.method != "GET" else None, token)
        assert answer.status < 500, answer.data
        found[role] = answer.status
    least = "admin" if route.ask in ADMIN else "stranger" if route.ask in GUEST else "user"
    assert (found["stranger"] in (401, 403)) == (least != "stranger"), found
    assert (found["user"] == 403) == (least == "admin"), found
    assert found["admin"] not in (401, 403), found
    assert (found["reader"] == 403) == (route.method != "GET"), found


def test_a_revoked_member_is_out_at_once(pool: StandingPool, owner: Browser) -> None:
    pool.join("ben")
    environment = {
        "SHOAL_POOL": pool.network_url,
        "SHOAL_IDENTITY": str(pool.directory / "ben.pem"),
    }
    link = pool.run("open", "--print", **environment).out.strip()
    ben = Browser(pool)
    assert ben.sign_in(link.partition("#ticket=")[2]).json["role"] == "user"
    connection = http.client.HTTPConnection(ben.host, timeout=20)
    connection.request("GET", "/v1/feed", headers={"Cookie": ben.cookie})
    feed = connection.getresponse()
    assert feed.status == 200
    ended: list[float] = []
    heard: list[bytes] = []

    def listen() -> None:
        heard.append(feed.read())
        ended.append(time.monotonic())

    thread = threading.Thread(target=listen, daemon=True)
    thread.start()
    assert owner.request("POST", "/v1/members/ben/revoke").status == 200
    revoked = time.monotonic()
    assert ben.request("GET", "/v1/pool").status == 401
    thread.join(20)
    assert ended
    assert ended[0] - revoked < 5  # a loaded machine; a quiet one takes a tenth of a second
    assert b"event: signed-out" in heard[0]


def test_the_feed_resumes(pool: StandingPool, owner: Browser) -> None:
    def events(last: str, until: bytes) -> bytes:
        connection = http.client.HTTPConnection(owner.host, timeout=20)
        headers = {"Cookie": owner.cookie, **({"Last-Event-ID": last} if last else {})}
        connection.request("GET", "/v1/feed", headers=headers)
        found = connection.getresponse()
        read = b""
        while until not in read:
            read += found.read1(1000)
        connection.close()
        return read

    first = events("", b"\n\n")
    assert b"event: reset" in first
    last = re.findall(rb"id: (\d+)", first)[-1].decode()
    event = open_event(owner)
    wanted = f'"event {event}"'.encode()
    assert b"event: reset" not in events(last, wanted)
    assert b"event: reset" in events("5", b"\n\n")  # of another time


# --- tasks -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tasks_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandingPool]:
    with StandingPool(tmp_path_factory.mktemp("web-tasks"), web=True, tasks=True) as made:
        yield made


def submit(pool: StandingPool, *arguments: str) -> str:
    done = pool.run("submit", "--json", *arguments, SHOAL_POOL=pool.url)
    assert done.code == 0, done.err
    return str(json.loads(done.out)["id"])


def stream(browser: Browser, path: str) -> list[tuple[str, str, dict[str, object]]]:
    """All (event, id, data) of a stream that ends."""
    text = browser.request("GET", path).data.decode()
    found = []
    for block in text.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines() if ": " in line)
        if "event" in fields:
            found.append((fields["event"], fields.get("id", ""), json.loads(fields["data"])))
    return found


def test_a_log_is_a_stream_that_resumes_and_ends(tasks_pool: StandingPool) -> None:
    owner = web.owner(tasks_pool)
    program = "print('first', flush=True); import time; time.sleep(1); print('zweites ü')"
    path = f"/v1/tasks/{submit(tasks_pool, '--', sys.executable, '-c', program)}/log/stream"
    whole = stream(owner, path)
    assert whole[0][0] == "begin"
    assert whole[-1] == ("end", "", {"state": "succeeded"})
    texts = [(number, data["text"]) for name, number, data in whole if name == "text"]
    assert "".join(str(text) for _, text in texts) == "first\nzweites ü\n"
    assert len(texts) == 2  # it came as it was written
    resumed = stream(owner, f"{path}?from={texts[0][0]}")
    assert [(name, data) for name, _, data in resumed] == [
        ("text", {"text": "zweites ü\n"}),
        ("end", {"state": "succeeded"}),
    ]
    assert Browser(tasks_pool).request("GET", path).status == 401
    missing = owner.request("GET", "/v1/tasks/none/log/stream")
    assert (missing.status, missing.json["reasons"][0]["code"]) == (404, "no-such-task")
    assert missing.json["unblock"]


def test_files_are_kept_and_stay_below_the_folder(
    tasks_pool: StandingPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    owner = web.owner(tasks_pool)
    (tmp_path / "secret.txt").write_text("secret")
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    program = "open('a b.html', 'w').write('<script>' * 40000)"
    task = submit(tasks_pool, "--keep", "*.html", "--", sys.executable, "-c", program)
    stream(owner, f"/v1/tasks/{task}/log/stream")
    listed = owner.request("GET", f"/v1/tasks/{task}/files").json["files"]
    assert [(f["path"], f["size_bytes"]) for f in listed] == [("a b.html", 8 * 40000)]
    read = owner.request("GET", f"/v1/tasks/{task}/file?path=a%20b.html")
    assert read.data == b"<script>" * 40000
    assert read.headers["content-disposition"].startswith("attachment;")
    assert read.headers["content-type"] == "application/octet-stream"
    for first in ("-1", str(2**80)):
        listed = owner.request("GET", f"/v1/tasks/{task}/files?first={first}")
        assert listed.status == 400
    for path in ("../secret.txt", str(tmp_path / "secret.txt"), "none", ""):
        refused = owner.request("GET", f"/v1/tasks/{task}/file?path={path}")
        assert refused.status in (400, 422), path
        assert refused.data != b"secret"


def test_a_task_is_changed_as_it_was_seen(tasks_pool: StandingPool) -> None:
    owner = web.owner(tasks_pool)
    task = submit(tasks_pool, "--devices", "3", "--", sys.executable, "-c", "")
    path = f"/v1/tasks/{task}"
    waiting = owner.request("GET", path).headers["etag"]
    assert owner.request("POST", f"{path}/hold", {}, If_Match=waiting).status == 200
    assert owner.request("POST", f"{path}/cancel", {}, If_Match=waiting).status == 412
    assert owner.request("GET", path).json["state"] == "held"
    held = owner.request("GET", path).headers["etag"]
    assert owner.request("POST", f"{path}/cancel", {}, If_Match=held).status == 200


def test_why_and_what_if(tasks_pool: StandingPool) -> None:
    owner = web.owner(tasks_pool)
    task = submit(tasks_pool, "--devices", "3", "--", sys.executable, "-c", "")

    def waits() -> bool:
        found = owner.request("GET", f"/v1/why/{task}").json["why"]
        return bool(found["never"])

    wait_until(waits, 30, "the task has its reasons")
    now = owner.request("GET", f"/v1/why/{task}").json
    assert now["why"]["reasons"][0]["code"] == "too-few-devices"
    supposed = owner.request("GET", f"/v1/why/{task}?devices=1&memory_bytes=1000").json
    assert not supposed["why"]["never"]
    assert owner.request("GET", f"/v1/why/{task}?devices=nine").status == 400
    assert owner.request("POST", f"/v1/tasks/{task}/cancel").status == 200


# --- events ------------------------------------------------------------------------------------------


def test_a_guest_enrols_and_joins_with_what_was_granted(pool: StandingPool, owner: Browser) -> None:
    event = open_event(owner, approval="hand", devices=1)
    guest = Browser(pool)
    wrong = guest.request("POST", "/v1/enrol", {"code": "0" * 14, "name": "Eva"})
    assert wrong.status == 422
    good = guest.request(
        "POST", "/v1/enrol", {"code": code_of(owner, event), "name": "Eva <script>"}
    )
    assert good.json["name"] == "eva-script"
    assert good.json["token"] == ""  # only the cookie has it
    assert good.json["standing"] == "waiting"
    assert guest.request("GET", "/v1/pool").status == 403
    asked = guest.request("POST", f"/v1/events/{event}/requests", {"own": "ab" * 16})
    assert asked.json["commitment"] == good.json["commitment"]
    owner.request("POST", f"/v1/events/{event}/decide", {"name": "eva-script"})
    done = owner.request("POST", f"/v1/events/{event}/draw").json
    assert done["winners"] == ["eva-script"]
    mine = guest.request("GET", f"/v1/events/{event}").json["mine"]
    assert mine["ended"] == "granted"
    proof = pool.directory / "proof.txt"
    proof.write_bytes(guest.request("GET", f"/v1/events/{event}/proof").data)
    checked = pool.run("draw", "verify", str(proof), "--receipt", asked.json["receipt"],
                       "--commitment", asked.json["commitment"], "--json")  # fmt: skip
    assert json.loads(checked.out)["winners"] == ["eva-script"]
    environment = {"SHOAL_IDENTITY": str(pool.directory / "eva.pem"), "HOME": str(pool.directory)}
    joined = pool.run(
        "join", mine["join"].removeprefix("shoal join "), "--as", "eva", **environment
    )
    assert joined.code == 0, joined.err


def test_what_an_event_refuses_is_said_to_a_command_too(pool: StandingPool, owner: Browser) -> None:
    """A refusal of an event ended the connection without a word."""
    event = open_event(owner, rule="first-come")
    pool.ask(people.CancelEvent(event))
    close = people.CloseEvent(event)
    for refused, text in (
        (close, "is cancelled"),
        (people.CancelEvent(event), "is cancelled already"),
        (people.AskPlace(event, "ab" * 16), "is cancelled"),
        (people.OpenEvent(" ", 1), "a title has 1 to 80"),
        (people.OpenEvent("t", 0), "places"),
    ):
        with pytest.raises(LeaseError, match=text):
            pool.ask(refused)
    shown = pool.run("event", "close", event, "--json", "--pool", pool.name)
    assert shown.code == 1
    assert "is cancelled" in json.loads(shown.out or shown.err)["error"]["text"]


def test_a_room_behind_one_address(pool: StandingPool, owner: Browser) -> None:
    """Fifty people, each of whom mistypes the code three times first."""
    event = open_event(owner, places=5)

    def enter(number: int) -> list[int]:
        guest = Browser(pool)
        wrong = {"code": f"{event}00000000000", "name": f"guest {number}"}
        found = [guest.request("POST", "/v1/enrol", wrong).status for _ in range(3)]
        right = {**wrong, "code": code_of(owner, event)}
        found.append(guest.request("POST", "/v1/enrol", right).status)
        own = {"own": f"{number:032x}"}
        return [*found, guest.request("POST", f"/v1/events/{event}/requests", own).status]

    with ThreadPoolExecutor(50) as room:
        answers = list(room.map(enter, range(50)))
    assert answers == [[422, 422, 422, 200, 200]] * 50
    shown = owner.request("GET", f"/v1/events/{event}").json
    assert (shown["enrolled"], shown["requests"]) == (50, 50)


def test_what_has_changed_meanwhile_is_not_changed_again(
    pool: StandingPool, owner: Browser
) -> None:
    """With If-Match, an admin closes the list that it saw, or none."""
    event = open_event(owner)
    seen = owner.request("GET", f"/v1/events/{event}").headers["etag"]
    guest = Browser(pool)
    guest.request("POST", "/v1/enrol", {"code": code_of(owner, event), "name": "Eva"})
    for verb, body in (("close", {}), ("draw", {}), ("cancel", {}), ("decide", {"name": "eva"})):
        refused = owner.request("POST", f"/v1/events/{event}/{verb}", body, If_Match=seen)
        assert refused.status == 412, refused.data
        assert "has changed since you saw it" in refused.json["detail"]
        unquoted = owner.request("POST", f"/v1/events/{event}/{verb}", body, If_Match="x")
        assert unquoted.status == 400, unquoted.data
    looked = owner.request("GET", f"/v1/events/{event}")
    assert looked.json["state"] == "open"
    seen = looked.headers["etag"]
    closed = owner.request("POST", f"/v1/events/{event}/close", {}, If_Match=seen)
    assert closed.json["state"] == "closed"
    assert closed.headers["etag"] not in ("", seen)
    assert owner.request("POST", f"/v1/events/{event}/draw", {}, If_Match=seen).status == 412
    assert owner.request("POST", f"/v1/events/{event}/draw", {}, If_Match="*").status == 200


def test_a_member_enrols_by_the_command_line(pool: StandingPool, owner: Browser) -> None:
    pool.join("carl", devices_max=0)
    environment = {
        "SHOAL_POOL": pool.network_url,
        "SHOAL_IDENTITY": str(pool.directory / "carl.pem"),
    }
    event = open_event(owner, rule="first-come", devices=1, minutes=5)
    enrolled = pool.run("enrol", code_of(owner, event), "--json", **environment)
    assert enrolled.code == 0, enrolled.err
    assert json.loads(enrolled.out)["standing"] == "approved"
    shown = json.loads(pool.run("event", "close", event, "--json", "--pool", pool.name).out)[
        "event"
    ]
    assert shown["state"] == "done"
    assert shown["winners"] == ["carl"]
    seen = json.loads(pool.run("event", "show", event, "--json", **environment).out)
    assert seen["screen"] is None  # only an admin sees it
    assert seen["event"]["mine"]["grant"]["until"] > time.time() + 200


def test_the_audit_log_is_a_chain(pool: StandingPool, owner: Browser) -> None:
    whole = json.loads(pool.run("audit", "verify", "--json", "--name", pool.name).out)
    assert whole["wrong"] is None
    open_event(owner)
    noted = pool.run("audit", "verify", "--noted", whole["last_hash"], "--name", pool.name)
    assert noted.code == 0, noted.err
    other = pool.run("audit", "verify", "--noted", "00", "--name", pool.name)
    assert other.code == 1
    entries = owner.request("GET", "/v1/audit?count=500").json["entries"]
    assert entries[-1]["action"] == "event open"
    assert entries[-1]["hash"]


def test_the_document_names_every_route(owner: Browser) -> None:
    document = owner.request("GET", "/v1/openapi.json").json
    assert document["openapi"] == "3.1.0"
    for route in ROUTES:
        assert route.method.lower() in document["paths"][route.path]
    text = json.dumps(document)
    for name in re.findall(r"#/components/schemas/([\w.]+)", text):
        assert name in document["components"]["schemas"]


def test_browsers_wait_for_a_web_process_that_starts_again(
    pool: StandingPool, owner: Browser
) -> None:
    ours = processes.children(pool.process.pid)
    found = [p for p in ours if "shoal.web.process" in processes.command(p)]
    os.kill(found[0], signal.SIGKILL)
    wait_until(lambda: not processes.alive(found[0]), 30, "the web process is gone")
    assert owner.request("GET", "/v1/pool").status == 200  # no connection is refused meanwhile


def test_a_port_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(PoolStartError, match=f"cannot listen at 127.0.0.1:{port}"):
            listen(Options("p", "127.0.0.1", port))
        wanted = Options("p", "127.0.0.1", port)
        with listen(wanted, any_port=True) as made:
            assert wanted.port == made.getsockname()[1] != port
