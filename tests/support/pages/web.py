"""Requests to a pool's dashboard as a browser or a program makes them, and a real browser."""

from __future__ import annotations

import http.client
import importlib.util
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.standing import StandingPool

STATIC = Path(__file__).parents[3] / "src" / "shoal" / "web" / "static"
CHROMIUM = shutil.which("chromium")
needs_pages = pytest.mark.skipif(
    not (STATIC / "app.js").exists(), reason="the dashboard is not built: run `make web`"
)
needs_browser = pytest.mark.skipif(
    CHROMIUM is None or importlib.util.find_spec("playwright") is None,
    reason="a browser is missing: apt install chromium, and `make setup` for playwright",
)


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    data: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.data)


class Browser:
    """One cookie jar. `request` sends what a page of the dashboard itself would send."""

    def __init__(self, pool: StandingPool) -> None:
        self.address = pool.told["web"]
        self.host = self.address.partition("//")[2]
        self.cookie = ""

    def request(
        self, method: str, path: str, body: object = None, token: str = "", **headers: str | None
    ) -> Answer:
        sent = {"Host": self.host}
        if method not in ("GET", "HEAD"):
            sent |= {"Origin": self.address, "Sec-Fetch-Site": "same-origin", "X-Shoal": "1"}
        data = body if isinstance(body, bytes) else None
        if body is not None and data is None:
            data = json.dumps(body).encode()
            sent["Content-Type"] = "application/json"
        if token:
            sent["Authorization"] = f"Bearer {token}"
        elif self.cookie:
            sent["Cookie"] = self.cookie
        for name, value in headers.items():
            sent.pop(name.replace("_", "-"), None)
            if value is not None:
                sent[name.replace("_", "-")] = value
        connection = http.client.HTTPConnection(self.host, timeout=20)
        try:
            connection.request(method, path, data, sent)
            got = connection.getresponse()
            answer = Answer(got.status, {k.lower(): v for k, v in got.getheaders()}, got.read())
        finally:
            connection.close()
        if "set-cookie" in answer.headers:
            self.cookie = answer.headers["set-cookie"].partition(";")[0]
        return answer

    def sign_in(self, ticket: str) -> Answer:
        return self.request("POST", "/v1/sign-in", {"ticket": ticket})


def ticket(pool: StandingPool) -> str:
    done = pool.run("open", "--print", "--pool", pool.name)
    assert done.code == 0, done.err
    return done.out.strip().partition("#ticket=")[2]


def owner(pool: StandingPool) -> Browser:
    """A browser that the pool's owner has signed in."""
    browser = Browser(pool)
    assert browser.sign_in(ticket(pool)).status == 200
    return browser
