"""Three machines for tests, as network namespaces: a head, a node that joins it, and a desk."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path

from tests.support import processes, programs
from tests.support.namespaces import Host
from tests.support.standing import shoal_command
from tests.support.waiting import wait_until


class Machine:
    """A host with a home of its own."""

    def __init__(self, host: Host, directory: Path) -> None:
        self.host = host
        self.directory = directory
        self.environment = programs.environment(
            HOME=str(directory), SHOAL_STATE=str(directory / "state"),
            SHOAL_IDENTITY=str(directory / "identity.pem"),
        )  # fmt: skip

    def start(self, *words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.host.command(*words), env=self.environment, text=True, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip

    def run(self, *words: str) -> programs.Outcome:
        done = self.start(*words)
        out, err = done.communicate(timeout=100)
        return programs.Outcome(done.returncode, out, err)

    def shoal(self, *arguments: str) -> str:
        done = self.run(*shoal_command(*arguments))
        assert done.code == 0, done.out + done.err
        return done.out

    def python(self, source: str) -> programs.Outcome:
        return self.run(sys.executable, "-c", textwrap.dedent(source))


class Cluster:
    """head: `shoal up --listen`; node: `shoal node --join`; desk: `shoal join`."""

    def __init__(
        self,
        hosts: list[Host],
        directory: Path,
        memory: str = "32MiB",
        *,
        options: tuple[str, ...] = (),
        node_wrap: tuple[str, ...] = (),
    ) -> None:
        """`options` are of both `shoal up` and `shoal node`; `node_wrap` is what runs the latter."""
        machines = []
        for host, name in zip(hosts, ("head", "node", "desk"), strict=True):
            (directory / name).mkdir()
            machines.append(Machine(host, directory / name))
        self.head, self.node, self.desk = machines
        self.up = self.head.start(
            *shoal_command("up", "--json", "--listen", hosts[0].address, *options,
                           "--device", f"cpu,memory={memory},threads=1,name=near,kind=near")
        )  # fmt: skip
        assert self.up.stdout is not None
        line = self.up.stdout.readline()
        assert line, self.up.communicate()[1]
        self.join_line = json.loads(line)["join"]
        command = json.loads(self.head.shoal("code", "--node", "--json"))["command"]
        self.agent = self.node.start(
            *node_wrap,
            *shoal_command(*command.split()[1:], "--as", "faraway", "--json", *options,
                           "--device", f"cpu,memory={memory},threads=1,name=far,kind=far")
        )  # fmt: skip
        assert self.agent.stdout is not None
        assert self.agent.stdout.readline(), self.agent.communicate()[1]

    def close(self) -> None:
        for process in (self.agent, self.up):
            pids = [process.pid, *processes.descendants(process.pid)]
            process.terminate()
            process.communicate(timeout=20)
            wait_until(lambda p=pids: not any(map(processes.alive, p)), 30, "nothing is left")  # type: ignore[misc]
