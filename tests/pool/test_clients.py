"""What a client or node is told that cannot use its pool: a wrong clock, a verb of the owner."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import clock, commands
from tests.support.standing import StandingPool

DAY_S = 86400
DEVICE = "cpu,memory=16MiB,threads=1"
WRONG = [
    pytest.param(400 * DAY_S, "has expired", id="ahead"),
    pytest.param(-1 * DAY_S, "is not valid yet", id="behind"),
]


@pytest.fixture(scope="module")
def open_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandingPool]:
    with StandingPool(tmp_path_factory.mktemp("pool"), DEVICE, listen=True) as pool:
        yield pool


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return clock.build(tmp_path_factory.mktemp("clock"))


def names_the_clock(text: str, what: str) -> bool:
    return (
        f"the head's certificate {what} by this machine's clock, which shows 20" in text
        and "timedatectl set-ntp true" in text
        and "join it again" not in text
    )


@pytest.mark.parametrize(("seconds", "what"), WRONG)
def test_a_clients_wrong_clock_is_named(
    open_pool: StandingPool, library: Path, tmp_path: Path, seconds: int, what: str
) -> None:
    me = open_pool.join(f"late{abs(seconds)}")
    wrong = {**clock.wrong_by(library, seconds), "SHOAL_IDENTITY": str(me.path)}
    assert names_the_clock(commands.refused(tmp_path, "status", **wrong), what)
    doctor = commands.run(tmp_path, "doctor", **wrong)
    assert doctor.code == 1
    assert names_the_clock(doctor.out, what)


@pytest.mark.parametrize(("seconds", "what"), WRONG)
@pytest.mark.parametrize("verb", [("join",), ("node", "--device", DEVICE, "--join")])
def test_joining_with_a_wrong_clock_does_not_use_up_the_code(
    open_pool: StandingPool,
    library: Path,
    tmp_path: Path,
    seconds: int,
    what: str,
    verb: tuple[str, ...],
) -> None:
    role = "client" if verb == ("join",) else "node"
    invitation = f"{open_pool.make_code(role)}@127.0.0.1:{open_pool.port}"
    text = commands.refused(tmp_path, *verb, invitation, **clock.wrong_by(library, seconds))
    assert names_the_clock(text, what)
    assert "The code is still good" in text
    if role == "client":
        assert commands.run(tmp_path, "join", invitation).code == 0


@pytest.mark.parametrize(("seconds", "what"), WRONG)
def test_a_node_that_comes_back_with_a_wrong_clock(
    open_pool: StandingPool, library: Path, tmp_path: Path, seconds: int, what: str
) -> None:
    from shoal.pool.client import joining

    invitation = f"{open_pool.make_code('node')}@127.0.0.1:{open_pool.port}"
    path = tmp_path / "state" / "node" / "node.pem"
    joining.join(invitation, "node", f"n{abs(seconds)}", path)
    wrong = clock.wrong_by(library, seconds)
    text = commands.refused(tmp_path, "node", "--device", DEVICE, timeout=30, **wrong)
    assert names_the_clock(text, what)


@pytest.mark.parametrize(
    "verb", [("audit",), ("clients",), ("revoke", "bob"), ("code",)], ids=lambda verb: verb[0]
)
def test_verbs_of_the_owner_at_a_client_that_has_joined(
    open_pool: StandingPool, tmp_path: Path, verb: tuple[str, ...]
) -> None:
    me = open_pool.join(f"ann-{verb[0]}")
    text = commands.refused(
        tmp_path, *verb, "--name", "t-nothing-here", SHOAL_IDENTITY=str(me.path)
    )
    assert f"`shoal {verb[0]}` is for the pool's owner, on the head's machine" in text
    assert open_pool.network_url in text
    assert "none was joined" not in text
