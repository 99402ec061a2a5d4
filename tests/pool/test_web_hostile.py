"""What strangers send: values of any kind to every route, and codes that are guessed."""

from __future__ import annotations

import json
import secrets
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import msgspec
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from shoal.errors import LeaseError
from shoal.pool.access import codes, screen_codes
from shoal.pool.client import head_connection
from shoal.pool.wire import people_messages as people
from tests.support.pages import web
from tests.support.pages.web import Browser
from tests.support.standing import StandingPool

pytestmark = pytest.mark.slow
GUESSES = 100_000
EXAMPLES = 20  # of each route and kind of values
ALL = list(HealthCheck)
CHECKS = [
    not_a_server_error,
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
]


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandingPool]:
    with StandingPool(tmp_path_factory.mktemp("hostile"), web=True) as made:
        yield made


@pytest.fixture(scope="module")
def owner(pool: StandingPool) -> Browser:
    return web.owner(pool)


@pytest.fixture(scope="module")
def token(pool: StandingPool) -> str:
    done = pool.run("token", "make", "test", "--scope", "full", "--json", "--pool", pool.name)
    return f"Bearer {json.loads(done.out)['token']}"


@pytest.fixture(scope="module")
def document(owner: Browser) -> Any:
    return owner.request("GET", "/v1/openapi.json").json


# --- every route with any value ----------------------------------------------------------------------


@pytest.mark.timeout(900)
def test_every_route_keeps_to_the_document(
    pool: StandingPool, document: dict[str, Any], token: str
) -> None:
    """Answers to values that fit the document, and to others, are what it says; none is a 5xx."""
    schema = schemathesis.openapi.from_dict(document)
    answered: Counter[tuple[str, int]] = Counter()
    for found in schema.get_all_operations():
        operation = found.ok()
        for make in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):

            @settings(
                max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=ALL
            )
            @given(case=operation.as_strategy(generation_mode=make))
            def answers(case: Any) -> None:
                answer = case.call(base_url=pool.told["web"], headers={"Authorization": token})
                case.validate_response(answer, checks=CHECKS)
                answered[f"{case.method} {case.path}", answer.status_code] += 1
                assert answer.status_code < 400 or answer.json()["detail"]

            with suppress(Unsatisfiable):  # no value is wrong where there is nothing to send
                answers()
    routes = {(m.upper(), path) for path, ways in document["paths"].items() for m in ways}
    assert {name for name, _ in answered} == {f"{method} {path}" for method, path in routes}
    assert {status for _, status in answered} >= {200, 400, 404, 422}


# --- codes that are guessed --------------------------------------------------------------------------


@pytest.mark.timeout(900)
def test_a_hundred_thousand_wrong_codes_and_a_right_one(pool: StandingPool, owner: Browser) -> None:
    """None is accepted, and nobody in the same room waits for that."""
    made = owner.request("POST", "/v1/events", {"title": "guessed", "places": 1}).json["event"]
    accepted: list[str] = []
    reasons: set[str] = set()
    sent = [0, 0]

    def guess(which: int) -> None:
        with head_connection.Connection(pool.url, 30) as connection:
            for _ in range(GUESSES // 2):
                body = made + "".join(secrets.choice(codes.SYMBOLS) for _ in range(10))
                code = body + screen_codes._check_symbol(body)  # only the secret part is wrong
                ask = people.WebAsk("", msgspec.msgpack.encode(people.Enrol(code, "eve")))
                try:
                    connection.ask(ask, 30)
                except LeaseError as error:
                    reasons.add(str(error))
                else:
                    accepted.append(code)
                sent[which] += 1

    threads = [threading.Thread(target=guess, args=(n,), daemon=True) for n in (0, 1)]
    for thread in threads:
        thread.start()
    enrolled = 0
    while any(thread.is_alive() for thread in threads):
        code = owner.request("GET", f"/v1/events/{made}/screen").json["code"]
        body = {"code": code, "name": f"guest {enrolled}"}
        right = Browser(pool).request("POST", "/v1/enrol", body)
        assert right.status == 200, right.data
        enrolled += 1
        threads[0].join(2)
    for thread in threads:
        thread.join()
    assert sum(sent) == GUESSES
    assert accepted == []
    assert reasons == {"the code is wrong. Type the one that the screen shows now."}
    assert enrolled > 0
    shown = owner.request("GET", f"/v1/events/{made}").json
    assert shown["enrolled"] == enrolled
    assert shown["wrong_codes"] > 0
