"""A program whose user asked for a pool, and a program that names the device late."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import shoal_autoload
from shoal.pool.access.certificates import Authority
from shoal.pool.base import limits, paths
from shoal.pool.base.addresses import LOCAL_PREFIX
from tests.ecosystem import programs
from tests.ecosystem.test_guest import UNREACHABLE

ASK = """
    import json, torch
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    print(json.dumps([
        str(accelerator), torch.accelerator.is_available(), torch.accelerator.device_count(),
        torch.shoal.is_available(), torch.shoal.device_count(),
        torch.get_device_module() is torch.shoal, torch.shoal.is_initialized(),
    ]))
"""

USE = """
    import json, time, torch
    texts, longest = [], 0.0
    for _ in range(2):
        start = time.monotonic()
        try:
            torch.ones(2, device="shoal")
        except Exception as error:
            texts.append(f"{type(error).__name__}: {error}")
        longest = max(longest, time.monotonic() - start)
    print(json.dumps([longest, texts]))
"""


@pytest.mark.parametrize(
    "env",
    [{"SHOAL_DEFAULT": "1"}, {"SHOAL_POOL": UNREACHABLE},
     {"SHOAL_DEFAULT": "1", "SHOAL_POOL": UNREACHABLE}],
    ids=["SHOAL_DEFAULT", "SHOAL_POOL", "both"],
)  # fmt: skip
def test_the_device_is_there_and_asking_opens_nothing(env: dict[str, str]) -> None:
    found = programs.run(ASK, env=env)
    assert found["answer"] == ["shoal", True, 1, True, 1, True, False]
    assert found["error"] is None
    assert found["started"] == found["children"] == found["connections"] == []
    assert found["threads"] == 1


@pytest.mark.parametrize("word", ["0", "false", "No", "OFF", " 0 "])
def test_words_that_decline(word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_DEFAULT", word)
    monkeypatch.setenv("SHOAL_POOL", UNREACHABLE)
    assert shoal_autoload.declined()
    assert shoal_autoload.asked() == ""


def test_a_guest_that_names_the_device_has_it() -> None:
    found = programs.run(
        """
        import json, torch
        before = [torch.shoal.is_available(), torch.shoal.device_count()]
        total = torch.ones(2, device="shoal").sum().item()
        after = [torch.shoal.is_available(), torch.shoal.device_count()]
        print(json.dumps([before, total, after, str(torch.accelerator.current_accelerator())]))
        """
    )
    assert found["answer"] == [[False, 0], 2.0, [True, 1], "shoal"]


# --- an unreachable pool --------------------------------


@pytest.fixture
def silent_port() -> Iterator[int]:
    """A port that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture
def silent_pool() -> Iterator[str]:
    """A pool on this machine whose head accepts connections and never answers."""
    name = f"0-silent{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        server.bind(paths.socket_name(name, "head"))
        server.listen()
        yield LOCAL_PREFIX + name


def _one_error(found: dict[str, Any]) -> str:
    seconds, texts = found["answer"]
    assert limits.CONNECT_S < 5
    assert seconds < 5 * limits.CONNECT_S  # on a busy machine; bench.newcomer holds it to 5 s
    assert len(texts) == 2
    reason, help_line = str(texts[0]).split("\n")
    assert help_line.startswith("Shoal was asked for by SHOAL_POOL.")
    assert help_line.endswith("SHOAL_DEFAULT=0")
    return reason


@pytest.mark.parametrize(
    "pool",
    [UNREACHABLE, "shoal+local://0-nobody", "default", "http://head", "shoal://head:port"],
)
def test_an_unreachable_pool_is_one_error_that_says_what_to_set(pool: str) -> None:
    found = programs.run(USE, env={"SHOAL_POOL": pool})
    assert pool.removeprefix("shoal://") in _one_error(found)
    assert found["started"] == []


def test_a_pool_that_was_not_joined_is_one_error(silent_port: int) -> None:
    pool = f"shoal://127.0.0.1:{silent_port}"
    reason = _one_error(programs.run(USE, env={"SHOAL_POOL": pool}))
    assert f"this machine has not joined {pool}" in reason


def test_a_remote_pool_that_never_answers_is_one_error(silent_port: int, tmp_path: Path) -> None:
    pool = f"shoal://127.0.0.1:{silent_port}"
    identity = Authority.open(tmp_path, "p").own_identity(tmp_path, "client", "ana", time.time())
    replace(identity, url=pool).save()
    env = {"SHOAL_POOL": pool, "SHOAL_IDENTITY": str(identity.path)}
    reason = _one_error(programs.run(USE, env=env))
    assert f"the pool {pool} cannot be reached" in reason
    assert "timed out" in reason


def test_a_pool_of_this_machine_that_never_answers_is_one_error(silent_pool: str) -> None:
    """The program waited for a minute: a head that is stopped accepts connections, too."""
    reason = _one_error(programs.run(USE, env={"SHOAL_POOL": silent_pool}))
    assert f"the pool {silent_pool} cannot be reached: no whole message came in time" in reason


# --- late naming --------------------------------

LATE = """
    import json, sys, torch, shoal

    def losses(device):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        model = model.to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = torch.arange(8.0).view(2, 4).to(device)
        found = []
        for _ in range(3):
            loss = model(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return found

    answers = [losses("cpu")]
    answers.append(losses("shoal"))
    with shoal.up(devices=["cpu,memory=256MiB", "cpu,memory=256MiB"]) as pool:
        with shoal.connect(pool.url, devices=2):
            answers += [losses("shoal"), losses("shoal:1"), losses("shoal:2")]
    print(json.dumps(answers))
"""


@pytest.mark.parametrize("env", [{}, {"SHOAL_DEFAULT": "1"}], ids=["guest", "asked"])
def test_backward_on_the_cpu_first_then_on_every_device(env: dict[str, str]) -> None:
    found = programs.run(LATE, env=env)
    local, *remote = found["answer"]
    assert len(remote) == 4
    for losses in remote:
        assert losses == pytest.approx(local, rel=1e-5)


def test_backward_in_another_thread_first() -> None:
    found = programs.run(
        """
        import json, threading, torch
        def work(device):
            x = torch.ones(3, device=device, requires_grad=True)
            (x * x).sum().backward()
            totals.append(x.grad.sum().item())
        totals = []
        for device in ("cpu", "shoal", "cpu", "shoal:0"):
            thread = threading.Thread(target=work, args=(device,))
            thread.start()
            thread.join()
        print(json.dumps(totals))
        """
    )
    assert found["answer"] == [6.0] * 4


def test_the_only_device_of_a_lease_has_a_name_of_its_own() -> None:
    found = programs.run(
        """
        import json, torch, shoal
        torch.nn.Linear(2, 1)(torch.ones(1, 2)).sum().backward()
        with shoal.up(devices=["cpu"]) as pool, shoal.connect(pool.url) as lease:
            layer = torch.nn.Linear(2, 1).to(lease.devices[0])
            for _ in range(50):  # autograd has arrays that are indexed by the device
                layer(torch.ones(1, 2, device="shoal:1")).sum().backward()
            print(json.dumps([str(layer.weight.device), layer.weight.grad.tolist()]))
        """
    )
    assert found["answer"] == ["shoal:1", [[50.0, 50.0]]]


def test_an_event_of_a_guest_starts_nothing_and_one_of_the_device_does() -> None:
    found = programs.run(
        """
        import json, torch
        try:
            torch.Event().record()
            first = "recorded"
        except RuntimeError as error:
            first = str(error)
        before = torch.shoal.is_initialized()
        event = torch.shoal.Event()
        event.record()
        event.synchronize()
        print(json.dumps([first, before, torch.shoal.is_initialized()]))
        """
    )
    none = "Cannot access accelerator device when none is available."
    assert found["answer"] == [none, False, True]
