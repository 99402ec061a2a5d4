"""Programs of others on a node that offers it: what they get, and what they do not."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shoal.pool.client import joining
from shoal.pool.runner.sandbox import bubblewrap
from tests.support import needs, processes, programs
from tests.support.standing import StandingPool, free_port, shoal_command
from tests.support.waiting import wait_until

PYTHON = sys.executable


class Desk:
    """A member without a runner of its own, with a folder that it submits from."""

    def __init__(self, pool: StandingPool, name: str, role: str, folder: Path) -> None:
        self.folder = folder / name
        self.folder.mkdir()
        invitation = f"{pool.make_code(role)}@127.0.0.1:{pool.port}"
        identity = joining.join(invitation, "client", name, folder / f"{name}.pem")
        self.environment = programs.environment(
            SHOAL_STATE=str(folder / f"{name}-state"), SHOAL_IDENTITY=str(identity.path)
        )

    def run(self, *words: str) -> programs.Outcome:
        done = subprocess.run(
            shoal_command(*words), env=self.environment, cwd=self.folder, capture_output=True,
            text=True, timeout=100,
        )  # fmt: skip
        return programs.Outcome(done.returncode, done.stdout, done.stderr)

    def asked(self, *words: str) -> Any:
        done = self.run(*words, "--json")
        assert done.code == 0, done.out + done.err
        return json.loads(done.out)

    def submit(self, *words: str) -> str:
        done = self.run("submit", "--json", *words)
        assert done.code == 0, done.out + done.err
        return str(json.loads(done.out)["id"])

    def result(self, *words: str) -> tuple[int, str]:
        """Submit, wait, and return the exit code and the log."""
        name = self.submit(*words)
        code = self.run("wait", name, "--timeout", "60").code
        return code, self.run("logs", name).out

    def python(self, source: str) -> Any:
        """Run a program in the sandbox. Return what it prints as JSON."""
        (self.folder / "probe.py").write_text(source)
        code, log = self.result("--memory", "16MiB", "--", "python", "probe.py")
        assert code == 0, log
        return json.loads(log.splitlines()[-1])


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandingPool]:
    needs.command("bwrap")
    devices = ("cpu,memory=64MiB,threads=1,name=one", "cpu,memory=64MiB,threads=1,name=two")
    folder = tmp_path_factory.mktemp("sandbox")
    with StandingPool(folder, *devices, listen=True, tasks=True, options=("--tasks",)) as made:
        yield made


@pytest.fixture(scope="module")
def desk(pool: StandingPool) -> Desk:
    return Desk(pool, "ana", "submitter", pool.directory)


def test_a_submitters_program_runs_with_its_files_on_the_pools_device(desk: Desk) -> None:
    (desk.folder / "part").mkdir(exist_ok=True)
    (desk.folder / "part" / "data.txt").write_text("42")
    (desk.folder / "train.py").write_text("""
import os, pathlib, shoal, torch
lease = shoal.connect()
print(shoal.device_info()[0].name, os.getcwd(), os.environ["MINE"])
(pathlib.Path("runs")).mkdir()
x = torch.ones(3, device="shoal") * int(pathlib.Path("part/data.txt").read_text())
pathlib.Path("runs/sum.txt").write_text(str(x.sum().item()))
""")
    name = desk.submit("--env", "MINE=1", "--keep", "runs/**", "--memory", "16MiB", "--",
                       "python", "train.py")  # fmt: skip
    waited = desk.run("wait", name, "--timeout", "90")
    log = desk.run("logs", name).out
    assert waited.code == 0, log
    assert "/task 1" in log
    target = desk.folder / "brought"
    assert desk.run("fetch", name, "--to", str(target)).code == 0
    assert (target / "runs" / "sum.txt").read_text() == "126.0"


def tried(statement: str) -> str:
    """Return a program that prints what a statement raises, or null."""
    return f"""
import ctypes, errno, glob, json, mmap, os, signal, socket, struct, subprocess, sys
def attempt():
{chr(10).join("    " + line for line in statement.splitlines())}
try:
    found = attempt()
    print(json.dumps({{"found": found, "error": None}}))
except BaseException as error:
    print(json.dumps({{"found": None, "error": f"{{type(error).__name__}}: {{error}}"}}))
"""


#: What must not work in a sandbox: a name, and what is tried. Timeouts count as having got out.
OUT = [
    ("DNS", 'return socket.getaddrinfo("deb.debian.org", 443)'),
    ("DNS by UDP", 'datagram.sendto(b"\\0" * 20, ("8.8.8.8", 53))'),
    ("DNS of a link", 'datagram.sendto(b"\\0" * 20, ("169.254.1.1", 53))'),
    ("multicast DNS", 'datagram.sendto(b"\\0" * 20, ("224.0.0.251", 5353))'),
    ("link-local", 'socket.create_connection(("169.254.169.254", 80), 3)'),
    ("link-local, IPv6", 'socket.create_connection(("fe80::1%lo", 80), 3)'),
    ("internet", 'socket.create_connection(("1.1.1.1", 443), 3)'),
    ("virtual machine", "socket.socket(40, socket.SOCK_STREAM).connect((2, 22))"),
    ("packets", "socket.socket(socket.AF_PACKET, socket.SOCK_RAW)"),
    ("raw IP", "socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)"),
    ("programs", 'open("/usr/bin/mine", "w")'),
    ("settings", 'open("/etc/passwd", "a")'),
    ("the top folder", 'open("/mine", "w")'),
    ("devices", 'open("/dev/mine", "w")'),
    ("Python", 'open(os.path.join(sys.prefix, "mine"), "w")'),
    ("Shoal", 'import shoal; open(os.path.join(os.path.dirname(shoal.__file__), "mine"), "w")'),
    ("core_pattern", 'open("/proc/sys/kernel/core_pattern", "a").write("")'),
    ("sysctl", 'open("/proc/sys/vm/overcommit_memory", "a").write("")'),
    ("sysrq", 'open("/proc/sysrq-trigger", "w").write("h")'),
    ("mtrr", 'open("/proc/mtrr", "a").write("")'),
    ("mount", 'check(libc.mount(b"none", b"/tmp", b"tmpfs", 0, 0))'),
    ("remount", 'check(libc.mount(None, b"/proc/sys", None, 0x1020, 0))'),
    ("unmount", 'check(libc.umount2(b"/proc/sys", 2))'),
    ("a user namespace", "check(libc.unshare(0x10000000))"),
    ("io_uring", "check(libc.syscall(425, 8, 0))"),
    ("a keyring", "check(libc.syscall({'x86_64': 250}.get(os.uname().machine, 219), 0, -3, 0))"),
    ("another user", "os.setuid(0)"),
    ("a disk", 'open("/dev/sda", "rb")'),
    ("the kernel's log", 'open("/dev/kmsg", "rb").read(1)'),
    ("the machine's memory", 'open("/dev/mem", "rb").read(1)'),
    ("the clock", "time.clock_settime(time.CLOCK_REALTIME, time.time())"),
    ("the host's name", 'socket.sethostname("mine")'),
    ("more than its limits", "resource.setrlimit(resource.RLIMIT_NPROC, (10**6, 10**6))"),
]


def test_it_does_not_get_out(desk: Desk) -> None:
    found = desk.python(f"""
import ctypes, json, os, resource, socket, sys, time
libc = ctypes.CDLL(None, use_errno=True)
datagram = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
def check(result):
    if result < 0:
        raise OSError(ctypes.get_errno(), "refused")
worked = []
for name, statement in {OUT!r}:
    space = dict(globals())
    try:
        exec("def attempt():\\n    " + statement, space)
        space["attempt"]()
        worked.append(name)
    except TimeoutError:
        worked.append(name + ": nobody answered, but nothing refused it")
    except (OSError, ValueError):
        pass
print(json.dumps(worked))
""")
    assert found == []


def test_it_does_not_reach_the_nodes_loopback(desk: Desk, pool: StandingPool) -> None:
    """Neither a server of this machine, nor one behind an abstract Unix socket, such as the head's."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        found = desk.python(tried(f'socket.create_connection(("127.0.0.1", {port}), 3)'))
        assert "refused" in found["error"]
        assert (
            "refused"
            in desk.python(tried(f'socket.create_connection(("127.0.0.1", {pool.port}), 3)'))[
                "error"
            ]
        )
    names = [f"\0shoal/{pool.url.rpartition('/')[2]}/head"]
    with socket.socket(socket.AF_UNIX) as abstract:
        abstract.bind("\0shoal-test-abstract" + str(os.getpid()))
        abstract.listen()
        names.append("\0shoal-test-abstract" + str(os.getpid()))
        for name in names:
            with socket.socket(socket.AF_UNIX) as probe:
                probe.connect(name)  # out here it is there
            statement = f"socket.socket(socket.AF_UNIX).connect({name!r})"
            assert "refused" in desk.python(tried(statement))["error"]


def test_its_door_opens_to_the_pool_only(desk: Desk, pool: StandingPool) -> None:
    ask = """
s = socket.socket(socket.AF_UNIX)
s.connect(os.environ["SHOAL_DOOR"])
s.sendall({line!r})
return s.recv(100).decode()
"""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.5)
        port = server.getsockname()[1]
        other = f"127.0.0.1:{port}\n".encode()
        assert desk.python(tried(ask.format(line=other)))["found"].startswith("-a sandbox reaches")
        with pytest.raises(TimeoutError):
            server.accept()
    for line in (b"localhost:7433\n", b"169.254.169.254:80\n", b"/etc/passwd\n", b"\xff\n"):
        assert desk.python(tried(ask.format(line=line)))["found"].startswith("-")
    head = f"127.0.0.1:{pool.port}\n".encode()
    assert desk.python(tried(ask.format(line=head)))["found"] == "+\n"


def test_it_sees_no_files_of_others(desk: Desk, pool: StandingPool, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("s")
    secret.chmod(0o644)
    hidden = [
        secret, pool.directory, Path(desk.environment["SHOAL_IDENTITY"]), Path.home() / ".ssh",
        Path("/home"), Path("/var"), Path("/etc/shadow"), Path("/sys"), Path("/run/shoal/x"),
        Path(__file__),
    ]  # fmt: skip
    seen = desk.python(
        tried(f"return [p for p in {[str(p) for p in hidden]} if os.path.exists(p)]")
    )
    assert seen["found"] == []
    users = desk.python(tried("import pwd\nreturn sorted(p.pw_name for p in pwd.getpwall())"))
    assert users["found"] == ["nobody", "task"]
    root = desk.python(tried('return sorted(os.listdir("/"))'))["found"]
    system = {"bin", "dev", "etc", "lib", "lib32", "lib64", "libx32", "proc", "run", "sbin",
              "task", "tmp", "usr"}  # fmt: skip
    assert set(root) <= system | {Path(path).parts[1] for path in bubblewrap.python_folders()}


def test_it_sees_and_reaches_no_processes_of_others(desk: Desk) -> None:
    other = subprocess.Popen([PYTHON, "-c", "import time; secret = 'x' * 100; time.sleep(600)"])
    try:
        found = desk.python(
            tried(f"""
seen = sorted(int(e) for e in os.listdir("/proc") if e.isdecimal())
commands = [open(f"/proc/{{p}}/cmdline").read() for p in seen]
errors = []
for act in (lambda: os.kill({other.pid}, 9), lambda: open("/proc/{other.pid}/mem", "rb"),
            lambda: os.pidfd_open({other.pid}), lambda: os.kill(-1, 0) or 1 / 0):
    try:
        act()
        errors.append(None)
    except OSError as error:
        errors.append(error.errno)
    except ZeroDivisionError:
        errors.append("itself only")
return [len(seen), commands, errors]
""")
        )["found"]
        count, commands, errors = found
        assert count < 10
        assert not [c for c in commands if "sleep(600)" in c or "shoal.pool" in c]
        assert None not in errors
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_shared_memory_and_names_are_its_own(desk: Desk) -> None:
    name = f"shoal-test-{os.getpid()}"
    Path("/dev/shm", name).write_text("x")
    try:
        found = desk.python(
            tried(f"""
theirs = os.path.exists("/dev/shm/{name}")
return [theirs, os.uname().nodename, os.getuid(), open("/proc/sysvipc/shm").read()]
""")
        )["found"]
    finally:
        Path("/dev/shm", name).unlink()
    assert found[:3] == [False, "task", 1000]
    assert found[3].count("\n") <= 1


def test_a_user_does_not_get_in(pool: StandingPool, tmp_path: Path) -> None:
    """The role `user` is not enough, and the program with a user's snapshot waits for a runner."""
    ben = Desk(pool, "ben", "user", tmp_path)
    (ben.folder / "a.txt").write_text("a")
    name = ben.submit("--snapshot", "--", "true")
    found = ben.asked("queue", name)
    assert {reason["code"] for reason in found["reasons"]} >= {"no-runner"}
    assert ben.run("cancel", name).code == 0


def test_a_members_own_runner_cannot_offer_it(pool: StandingPool, desk: Desk) -> None:
    """Only nodes get programs of others."""
    from shoal.pool.client.head_connection import Connection
    from shoal.pool.wire import messages, runner_messages

    os.environ["SHOAL_IDENTITY"], before = (
        desk.environment["SHOAL_IDENTITY"],
        os.environ.get("SHOAL_IDENTITY"),
    )
    try:
        with Connection(pool.network_url) as connection:
            hello = runner_messages.RunnerHello("tasks@x", "m", "v", 1, [], True)
            connection.send(hello)  # type: ignore[arg-type]
            answer = connection.receive(10)
    finally:
        del os.environ["SHOAL_IDENTITY"]
        if before is not None:
            os.environ["SHOAL_IDENTITY"] = before
    assert isinstance(answer, messages.Refusal)
    assert "only a node" in answer.reason


def test_its_certificate_is_good_for_its_lease_and_nothing_else(desk: Desk, tmp_path: Path) -> None:
    found = desk.python("""
import json, os, shoal
from shoal.pool.client.tasks import TaskClient
from shoal.errors import ShoalError
said = []
def attempt(act):
    try:
        act()
        said.append("it worked")
    except ShoalError as error:
        said.append(str(error))
with TaskClient(os.environ["SHOAL_POOL"], 0.0) as client:
    attempt(lambda: list(client.tasks()))
attempt(lambda: shoal.submit(["true"]))
ticket = os.environ.pop("SHOAL_TICKET")
attempt(shoal.connect)
os.environ["SHOAL_TICKET"] = ticket
attempt(shoal.connect)
print(json.dumps(said))
""")
    assert "it worked" not in found[:3]
    assert "planned" in found[2]
    assert found[3] == "it worked"


def below(marker: str) -> list[int]:
    return [
        int(p) for p in os.listdir("/proc") if p.isdecimal() and marker in processes.command(int(p))
    ]


def test_cancel_gives_it_its_grace_and_leaves_nothing(desk: Desk) -> None:
    (desk.folder / "slow.py").write_text("""
import os, pathlib, signal, subprocess, sys, time
def asked(*_):
    pathlib.Path("asked.txt").write_text("x")
    print("saved", flush=True)
    time.sleep(0.2)
    sys.exit(3)
signal.signal(signal.SIGTERM, asked)
subprocess.Popen(["setsid", "sleep", "987654"])
print("runs", flush=True)
time.sleep(600)
""")
    name = desk.submit("--memory", "16MiB", "--", "python", "slow.py")
    wait_until(lambda: "runs" in desk.run("logs", name).out, 60, "it runs")
    assert desk.run("cancel", name).code == 0
    assert desk.run("wait", name, "--timeout", "60").code == 130
    assert "saved" in desk.run("logs", name).out
    assert below("987654") == []


def test_a_killed_runner_leaves_nothing(desk: Desk, pool: StandingPool) -> None:
    source = "import subprocess; subprocess.run(['sleep', '987655'])"
    name = desk.submit("--memory", "16MiB", "--", "python", "-c", source)
    wait_until(lambda: below("987655"), 60, "it runs")
    first = set(below("987655"))
    found = pool.status().processes
    sandboxes = [p.pid for p in found if p.role == "runner"
                 and "tasks-of-others" in Path(f"/proc/{p.pid}/cmdline").read_text()]  # fmt: skip
    os.kill(sandboxes[0], 9)
    wait_until(lambda: not first & set(below("987655")), 30, "the first attempt has ended")
    wait_until(lambda: below("987655"), 60, "it runs again")
    assert len(below("987655")) == 1
    assert desk.run("cancel", name).code == 0
    assert desk.run("wait", name, "--timeout", "60").code == 130
    assert below("987655") == []


def test_links_in_its_folder_bring_nothing_of_the_node(desk: Desk, pool: StandingPool) -> None:
    (desk.folder / "links.py").write_text("""
import os
os.symlink("/etc/passwd", "passwd.txt")
os.symlink("/", "root")
os.mkfifo("pipe.txt")
open("mine.txt", "w").write("mine")
""")
    name = desk.submit("--memory", "16MiB", "--", "python", "links.py")
    assert desk.run("wait", name, "--timeout", "60").code == 0
    brought = desk.asked("fetch", name, "**", "--to", str(desk.folder / "links"))
    assert {f["path"] for f in brought} & {"passwd.txt", "pipe.txt", "mine.txt"} == {"mine.txt"}
    from shoal.pool.client.tasks import TaskClient, TaskError

    with TaskClient(pool.url) as owner:
        for path in ("passwd.txt", "root/etc/passwd", "../log.0", "pipe.txt", "/etc/passwd"):
            with pytest.raises(TaskError):
                list(owner.read_file(name, path))


@pytest.mark.parametrize(
    ("program", "code"),
    [(["no-such-program"], 127), (["./note.txt"], 126), (["sh", "-c", "exit 5"], 5)],
)
def test_exit_codes_are_a_shells(desk: Desk, program: list[str], code: int) -> None:
    (desk.folder / "note.txt").write_text("x")
    assert desk.result("--memory", "16MiB", "--", *program)[0] == code


def start_node(pool: StandingPool, folder: Path, **extra: str) -> tuple[subprocess.Popen[str], Any]:
    command = shoal_command(
        "node", "--join", f"{pool.make_code('node')}@127.0.0.1:{pool.port}", "--json", "--tasks",
        "--as", folder.name, "--no-profile", "--listen", f"127.0.0.1:{free_port()}",
        "--device", "cpu,memory=32MiB,threads=1",
    )  # fmt: skip
    environment = programs.environment(SHOAL_STATE=str(folder / "state"), **extra)
    node = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert node.stdout is not None
    assert node.stderr is not None
    line = node.stdout.readline()
    return node, json.loads(line or node.stderr.read())


@pytest.mark.slow
def test_a_node_runs_programs_of_submitters_if_it_has_bubblewrap(tmp_path: Path) -> None:
    needs.command("bwrap")
    (tmp_path / "without").mkdir()
    (tmp_path / "with").mkdir()
    with StandingPool(tmp_path, "cpu,memory=32MiB,threads=1", listen=True) as pool:
        desk = Desk(pool, "ana", "submitter", tmp_path)
        (desk.folder / "hello.py").write_text("import os; print(os.uname().nodename, os.getcwd())")
        poor, told = start_node(pool, tmp_path / "without", PATH=str(Path(sys.executable).parent))
        rich = None
        try:
            assert told["tasks"] is False
            name = desk.submit("--snapshot", "--", "python", "hello.py")
            reasons = desk.asked("queue", name)["reasons"]
            assert {r["code"] for r in reasons} >= {"no-runner"}
            assert "shoal node --tasks" in "".join(r["text"] for r in reasons)
            rich, told = start_node(pool, tmp_path / "with")
            assert told["tasks"] is True
            assert desk.run("wait", name, "--timeout", "90").code == 0
            assert desk.run("logs", name).out == "task /task\n"
        finally:
            for node in (poor, rich):
                if node is not None:
                    node.terminate()
                    _, said = node.communicate(timeout=30)
                    if node is poor:
                        assert "apt install bubblewrap" in said
