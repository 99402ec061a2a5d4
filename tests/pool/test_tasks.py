"""Tasks on a standing pool, by the commands that people type."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import shoal
from shoal.pool.client.tasks import TaskError
from tests.support import processes, programs
from tests.support.standing import StandingPool, shoal_command
from tests.support.waiting import wait_until

PYTHON = sys.executable
LEASE = """
import shoal, torch
lease = shoal.connect()
print([d.name for d in shoal.device_info()], shoal.device_info()[0].memory_bytes)
print(torch.ones(3, device="shoal").sum().item())
"""


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandingPool]:
    devices = ("cpu,memory=64MiB,threads=1,name=big", "cpu,memory=32MiB,threads=1,name=small")
    with StandingPool(tmp_path_factory.mktemp("tasks"), *devices, tasks=True) as made:
        yield made


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(pool: StandingPool, *arguments: str, **extra: str) -> programs.Outcome:
    return pool.run(*arguments, SHOAL_POOL=pool.url, **extra)


def asked(pool: StandingPool, *arguments: str, **extra: str) -> Any:
    done = run(pool, *arguments, **extra)
    assert done.code == 0, done.out + done.err
    return json.loads(done.out)


def submit(pool: StandingPool, *arguments: str, **extra: str) -> Any:
    return asked(pool, "submit", "--json", *arguments, **extra)


def task(pool: StandingPool, name: str) -> Any:
    return asked(pool, "queue", name, "--json")


def until_state(pool: StandingPool, name: str, *states: str) -> None:
    wait_until(lambda: task(pool, name)["state"] in states, 60, f"{name} is {states}")


FIELDS = {
    "id", "key", "name", "owner", "state", "needs", "devices", "reasons", "position", "attempt",
    "exit_code", "end_reason", "submitted_at", "started_at", "ended_at",
}  # fmt: skip


def test_a_task_from_submit_to_its_log(pool: StandingPool, here: Path) -> None:
    """It starts in the folder of `submit`, with its PATH and PYTHONPATH, and what --env says."""
    script = "pwd; echo $PYTHONPATH $MINE $SHELL_ONLY; echo wrong >&2; exit 3"
    made = submit(
        pool, "--env", "MINE=1", "--", "bash", "-c", script, PYTHONPATH="/a/b", SHELL_ONLY="no"
    )
    assert set(made) == FIELDS
    assert made["needs"] == {"devices": 1, "kind": None, "memory_bytes": None}
    assert made["state"] in ("waiting", "starting", "running")
    done = run(pool, "wait", made["id"])
    assert done.code == 3
    assert done.out == ""
    log = run(pool, "logs", made["id"])
    assert (log.code, log.err) == (0, "")
    assert sorted(log.out.splitlines()) == sorted([str(here), "/a/b 1", "wrong"])
    after = task(pool, made["id"])
    assert (after["state"], after["exit_code"], after["devices"]) == ("failed", 3, [])
    assert after["reasons"] == []
    assert after["ended_at"].endswith("Z")


def test_a_program_gets_the_lease_that_was_planned(pool: StandingPool, here: Path) -> None:
    made = submit(pool, "--memory", "16MiB", "--", PYTHON, "-c", LEASE)
    assert run(pool, "wait", made["id"], "--timeout", "100").code == 0
    log = run(pool, "logs", made["id"]).out.splitlines()
    assert log[0] in ("['big'] 16777216", "['small'] 16777216")
    assert log[1] == "3.0"


def test_asking_for_more_than_was_planned_is_refused(pool: StandingPool, here: Path) -> None:
    source = "import shoal; shoal.connect(devices=2)"
    made = submit(pool, "--memory", "16MiB", "--", PYTHON, "-c", source)
    assert run(pool, "wait", made["id"]).code == 1
    assert "1 were planned" in run(pool, "logs", made["id"]).out


def test_one_key_is_one_task(pool: StandingPool, here: Path) -> None:
    first = submit(pool, "--key", "mine", "--", "true")
    again = submit(pool, "--key", "mine", "--", "true", PATH=os.environ["PATH"] + ":/x")
    assert [again[f] for f in ("id", "key", "submitted_at")] == [
        first[f] for f in ("id", "key", "submitted_at")
    ]
    assert run(pool, "wait", "mine").code == 0
    assert submit(pool, "--key", "mine", "--", "true")["state"] == "succeeded"
    other = run(pool, "submit", "--json", "--key", "mine", "--", "false")
    assert other.code == 2
    error = json.loads(other.out)["error"]
    assert error["code"] == "key-conflict"
    assert error["unblock"]


def test_waiting_tasks_say_why_and_run_in_order(pool: StandingPool, here: Path) -> None:
    """Two devices: the third and fourth wait, with a position and a reason."""
    names = [submit(pool, "--memory", "20MiB", "--", "sleep", "100")["id"] for _ in range(3)]
    for name in names:
        until_state(pool, name, "running")
    both = submit(pool, "--devices", "2", "--memory", "30MiB", "--", "true")["id"]
    queue = asked(pool, "queue", "--json")
    assert [t["id"] for t in queue] == [*names, both]
    assert queue[-1]["state"] == "waiting"
    assert queue[-1]["position"] == 1
    assert queue[-1]["reasons"][0]["code"]
    assert queue[-1]["reasons"][0]["text"]
    assert {d for t in queue[:3] for d in t["devices"]} == {"big", "small"}
    for name in names:
        assert asked(pool, "cancel", name, "--json")["id"] == name
    assert run(pool, "wait", names[0]).code == 130
    assert run(pool, "wait", both).code == 0
    assert both in {t["id"] for t in asked(pool, "queue", "--all", "--json")}


def test_what_could_run_nowhere_is_accepted_and_waits(pool: StandingPool, here: Path) -> None:
    made = submit(pool, "--kind", "a100", "--", "true")
    assert task(pool, made["id"])["state"] == "waiting"
    assert task(pool, made["id"])["reasons"]
    assert run(pool, "wait", made["id"], "--timeout", "0.1").code == 124
    assert asked(pool, "cancel", made["id"], "--json")["state"] == "cancelled"
    assert run(pool, "wait", made["id"]).code == 130


def test_hold_and_release(pool: StandingPool, here: Path) -> None:
    made = submit(pool, "--hold", "--", "true")
    assert made["state"] == "held"
    assert made["reasons"][0]["code"] == "held"
    assert asked(pool, "release", made["id"], "--json")["id"] == made["id"]
    assert run(pool, "wait", made["id"]).code == 0
    waits = submit(pool, "--kind", "a100", "--", "true")
    asked(pool, "hold", waits["id"], "--json")
    why = json.loads(run(pool, "why", waits["id"], "--json").out)
    assert [reason["code"] for reason in why["reasons"]] == ["held", "too-few-devices"]
    assert (why["estimate"], task(pool, waits["id"])["position"]) == (None, None)
    asked(pool, "cancel", waits["id"], "--json")
    refused = run(pool, "hold", made["id"], "--json")
    assert refused.code == 1
    assert json.loads(refused.out)["error"]["code"] == "not-now"


STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.environ.clear()
        os.execv("/bin/sleep", ["sleep", "1000"])
    os._exit(0)
print("ready", flush=True)
time.sleep(1000)
"""


def sleepers() -> list[int]:
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdecimal() and processes.command(int(entry))[:2] == ["sleep", "1000"]:
            found.append(int(entry))
    return [pid for pid in found if processes.alive(pid)]


@pytest.mark.parametrize("how", ["cancel", "limit"])
def test_nothing_of_a_task_survives(pool: StandingPool, here: Path, how: str) -> None:
    """It ignores SIGTERM, forks twice, calls setsid and clears its environment."""
    limit = ["--limit", "1s"] if how == "limit" else []
    made = submit(pool, "--grace", "0.3s", *limit, "--", PYTHON, "-c", STUBBORN)
    if how == "cancel":
        wait_until(lambda: "ready" in run(pool, "logs", made["id"]).out, 60, "it runs")
        wait_until(lambda: len(sleepers()) == 1, 60, "its sleeper runs")
        run(pool, "cancel", made["id"])
    assert run(pool, "wait", made["id"]).code == (130 if how == "cancel" else 137)
    assert sleepers() == []
    assert task(pool, made["id"])["end_reason"].startswith(f"{how}")


def test_what_a_program_leaves_behind_ends_with_it(pool: StandingPool, here: Path) -> None:
    script = "setsid sleep 1000 & exit 0"
    made = submit(pool, "--", "bash", "-c", script)
    assert run(pool, "wait", made["id"]).code == 0
    assert sleepers() == []


@pytest.mark.parametrize(
    ("script", "code", "reason"),
    [("kill -9 $$", 137, "signal"), ("exit 75", 75, "exited"), ("exit 0", 0, "exited")],
)
def test_how_programs_end(
    pool: StandingPool, here: Path, script: str, code: int, reason: str
) -> None:
    made = submit(pool, "--", "bash", "-c", script)
    assert run(pool, "wait", made["id"]).code == code
    assert task(pool, made["id"])["end_reason"].startswith(reason)


@pytest.mark.parametrize(("program", "code"), [("no-such-program", 127), ("/etc/hosts", 126)])
def test_a_program_that_cannot_run(
    pool: StandingPool, here: Path, program: str, code: int
) -> None:  # fmt: skip
    made = submit(pool, "--", program)
    assert run(pool, "wait", made["id"]).code == code
    assert program in run(pool, "logs", made["id"]).out


def test_retries_of_exits(pool: StandingPool, here: Path) -> None:
    """Each attempt has a log of its own; `--attempt` chooses one."""
    script = "echo run >> runs; wc -l < runs; test $(wc -l < runs) = 3"
    made = submit(pool, "--retry-exits", "5", "--", "bash", "-c", script)
    assert run(pool, "wait", made["id"]).code == 0
    assert task(pool, made["id"])["attempt"] == 3
    assert run(pool, "logs", made["id"]).out == "3\n"
    assert run(pool, "logs", made["id"], "--attempt", "1").out == "1\n"
    assert run(pool, "logs", made["id"], "--attempt", "4").code == 1


def test_an_array_and_its_follower(pool: StandingPool, here: Path) -> None:
    script = "echo {lr} $lr"
    made = submit(pool, "--name", "sweep", "--each", "lr=1e-3,1e-4", "--", "bash", "-c", script)
    assert [t["name"] for t in made] == ["sweep", "sweep"]
    after = [word for t in made for word in ("--after", t["id"])]
    last = submit(pool, *after, "--", "true")
    assert run(pool, "wait", last["id"]).code == 0
    logs = [run(pool, "logs", t["id"]).out for t in made]
    assert logs == ["1e-3 1e-3\n", "1e-4 1e-4\n"]
    bad = submit(pool, "--", "false")
    follower = submit(pool, "--after", bad["id"], "--", "true")
    assert run(pool, "wait", follower["id"]).code == 130
    assert bad["id"] in task(pool, follower["id"])["end_reason"]


def test_until_expires(pool: StandingPool, here: Path) -> None:
    made = submit(pool, "--kind", "a100", "--until", "0.2s", "--", "true")
    assert run(pool, "wait", made["id"]).code == 125
    assert task(pool, made["id"])["state"] == "expired"
    late = submit(pool, "--until", "2020-01-01T00:00:00Z", "--", "true")
    assert (late["state"], late["attempt"]) == ("expired", 0)


def test_fetch_brings_results(pool: StandingPool, here: Path) -> None:
    script = "mkdir -p runs/1 && echo a > runs/1/a.txt && echo b > b.txt"
    made = submit(pool, "--keep", "runs/**", "--", "bash", "-c", script)
    assert run(pool, "wait", made["id"]).code == 0
    found = asked(pool, "fetch", made["id"], "--to", "kept", "--json")
    assert [f["path"] for f in found] == ["runs/1/a.txt"]
    assert (here / "kept/runs/1/a.txt").read_text() == "a\n"
    run(pool, "fetch", made["id"], "*.txt", "--to", "kept")
    assert (here / "kept/b.txt").read_text() == "b\n"


def test_the_log_is_followed_to_its_end(pool: StandingPool, here: Path) -> None:
    script = "for i in $(seq 5); do echo $i; sleep 0.1; done"
    made = submit(pool, "--", "bash", "-c", script)
    follows = subprocess.run(
        shoal_command("logs", "-f", made["id"]), env=pool.environment(SHOAL_POOL=pool.url),
        capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert follows.stdout == "1\n2\n3\n4\n5\n"


@pytest.mark.parametrize(
    "verb", ["queue", "logs", "cancel", "hold", "release", "wait", "fetch", "why"]
)
def test_a_task_that_does_not_exist(pool: StandingPool, verb: str) -> None:
    """The codes of `wait` are its program's, so a failure of its own is 125."""
    done = run(pool, verb, "nobody", "--json")
    assert done.code == (125 if verb == "wait" else 1)
    assert json.loads(done.out)["error"]["code"] == "no-such-task"


@pytest.mark.parametrize(
    "words",
    [
        ["--devices", "0", "--", "true"], ["--memory", "much", "--", "true"], ["--", ""],
        ["--each", "lr", "--", "true"], ["--limit", "soon", "--", "true"],
        ["--kind", "|", "--", "true"],
        ["--name", "a b", "--", "true"], ["--env", "NOT_SET", "--", "true"], ["--no-such", "--", "t"],
    ],
)  # fmt: skip
def test_wrong_requests_are_json_errors(pool: StandingPool, words: list[str]) -> None:
    done = run(pool, "submit", "--json", *words)
    assert done.code == 2
    error = json.loads(done.out)["error"]
    assert set(error) == {"code", "text", "unblock"}
    assert error["text"]
    assert error["unblock"]


def test_a_wrong_timeout_is_no_code_of_a_program(pool: StandingPool) -> None:
    done = run(pool, "wait", "nobody", "--timeout", "soon", "--json")
    assert done.code == 2
    assert "--timeout" in json.loads(done.out)["error"]["text"]


def test_a_dry_run_says_whether_it_would_wait(pool: StandingPool, here: Path) -> None:
    before = asked(pool, "queue", "--all", "--json")
    hopeless = asked(pool, "submit", "--dry-run", "--json", "--memory", "4TiB", "--", "true")
    assert hopeless["never"]
    assert [reason["code"] for reason in hopeless["reasons"]] == ["too-large"]
    assert hopeless["reasons"][0]["numbers"]["memory_bytes"] == 4 * 2**40
    held = asked(pool, "submit", "--dry-run", "--json", "--each", "a=1,2", "--", "true", "{a}")
    assert [one["program"] for one in held] == [["true", "1"], ["true", "2"]]
    assert not held[0]["never"]
    wrong = run(pool, "submit", "--dry-run", "--json", "--after", "nobody", "--", "true")
    assert json.loads(wrong.out)["error"]["code"] == "no-such-task"
    assert asked(pool, "queue", "--all", "--json") == before


def test_the_python_interface(
    pool: StandingPool, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_POOL", pool.url)
    made = shoal.submit(["bash", "-c", "echo hi; exit 4"], name="api", key="api-1")
    assert made.wait(timeout=60).exit_code == 4
    assert (made.state, made.name, made.key) == ("failed", "api", "api-1")
    assert made.logs() == "hi\n"
    waits = shoal.submit(["true"], kind="a100")
    with pytest.raises(TimeoutError):
        waits.wait(timeout=0.1)
    assert waits.why().never
    assert waits.why().reasons
    assert waits.cancel().wait().state == "cancelled"
    with pytest.raises(TaskError) as refused:
        shoal.submit(["false"], name="api", key="api-1")
    assert refused.value.code == "key-conflict"
    assert not hasattr(made, "nothing")


def test_a_long_line_of_tasks_is_listed_whole(pool: StandingPool, here: Path) -> None:
    many = ",".join(str(i) for i in range(450))
    made = submit(pool, "--kind", "a100", "--name", "many", "--each", f"n={many}", "--", "true")
    assert len({t["id"] for t in made}) == 450

    def places() -> list[int]:
        return [t["position"] for t in asked(pool, "queue", "--json") if t["name"] == "many"]

    wait_until(lambda: places() == list(range(1, 451)), 60, "each has its place")
    for one in shoal.pool.client.tasks.TaskClient(pool.url).tasks():
        if one.name == "many":
            with shoal.pool.client.tasks.TaskClient(pool.url) as client:
                client.change(one.id, "cancel")
    assert not [t for t in asked(pool, "queue", "--json") if t["name"] == "many"]


def test_a_snapshot_runs_what_was_there_at_submission(pool: StandingPool, here: Path) -> None:
    (here / "say.sh").write_text("echo old; echo result > out.txt\n")
    (here / "large.bin").write_text("x")
    (here / ".shoalignore").write_text("*.bin\n")
    made = submit(
        pool, "--hold", "--snapshot", "--keep", "out.txt", "--", "bash", "-c", ". ./say.sh; ls"
    )
    (here / "say.sh").write_text("echo new\n")
    run(pool, "release", made["id"])
    assert run(pool, "wait", made["id"]).code == 0
    assert run(pool, "logs", made["id"]).out.split() == ["old", "out.txt", "say.sh"]
    assert not (here / "out.txt").exists()
    run(pool, "fetch", made["id"])
    assert (here / "out.txt").read_text() == "result\n"


def test_run_is_in_the_foreground_with_what_it_needs(pool: StandingPool, here: Path) -> None:
    done = run(pool, "run", "--memory", "8MiB", "--", PYTHON, "-c", LEASE)
    assert done.code == 0, done.err
    assert "8388608" in done.out
    assert run(pool, "run", "--", "bash", "-c", "exit 7").code == 7
    assert run(pool, "run", "--", "no-such-program").code == 127
    script = "setsid sleep 1000 & kill -9 $$"
    assert run(pool, "run", "--grace", "1s", "--", "bash", "-c", script).code == 137
    assert run(pool, "run", "--limit", "0.3s", "--", "sleep", "1000").code == 143
    assert sleepers() == []


def test_status_lists_the_processes(pool: StandingPool) -> None:
    found = asked(pool, "status", "--json")["processes"]
    roles = {p["role"] for p in found}
    assert roles >= {"head", "runner", "agent", "server"}
    assert all(processes.alive(p["pid"]) and p["node"] for p in found)
    server = next(p["pid"] for p in found if p["role"] == "server")
    assert "shoal.pool.node.device_server" in processes.command(server)


def test_a_joined_client_runs_its_tasks_on_its_own_machine(tmp_path: Path) -> None:
    """`shoal runner` over TLS; the owner's runner does not get the client's tasks."""
    (tmp_path / "work").mkdir()
    with StandingPool(tmp_path, "cpu,memory=32MiB,threads=1", listen=True, tasks=True) as pool:
        identity = pool.join("ana")
        environment = pool.environment(SHOAL_IDENTITY=str(identity.path))

        def ana(*words: str) -> programs.Outcome:
            done = subprocess.run(
                shoal_command(*words), env=environment, cwd=tmp_path / "work",
                capture_output=True, text=True, timeout=100,
            )  # fmt: skip
            return programs.Outcome(done.returncode, done.stdout, done.stderr)

        made = json.loads(ana("submit", "--json", "--", PYTHON, "-c", LEASE).out)
        assert made["owner"] == "ana"
        found = json.loads(ana("queue", made["id"], "--json").out)
        assert "no-runner" in {reason["code"] for reason in found["reasons"]}
        runner = subprocess.Popen(
            shoal_command("runner", "--json"), env=environment, stdout=subprocess.PIPE, text=True
        )
        try:
            assert runner.stdout is not None
            assert json.loads(runner.stdout.readline())["runner"].startswith("ana@")
            assert ana("wait", made["id"]).code == 0
            assert "33554432" in ana("logs", made["id"]).out
            seen = asked(pool, "queue", made["id"], "--json")
            assert seen["key"] == made["key"]  # the pool's owner governs
        finally:
            runner.terminate()
            assert runner.wait(30) == 0
