"""Alternates ours with each peer and says by which factor we are ahead."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch

from bench.figures import Figure, Missing, speed
from bench.measure import Burst, Plan, compare, loop, nothing
from bench.peers.driver import ELEMENTS, TRANSFER_BYTES

GROUP = "peers"
ROOT = Path(__file__).parent.parent.parent

#: name -> (module to look for, how to get it)
PEERS = {
    "torch.distributed.rpc": ("torch.distributed.rpc", "comes with torch"),
    "Ray": ("ray", "pip install ray"),
    "mycelya-torch": (
        "mycelya_torch",
        "in an environment of its own: pip install torch==2.13.0 numpy wheel ninja modal "
        "cloudpickle, then pip install --no-build-isolation mycelya-torch==0.1.7; run with "
        "--peer-python mycelya-torch=PYTHON",
    ),
    "Monarch": ("monarch", "pip install torchmonarch"),
}
TASKS = {
    "issue": ("issue an operator", 1000, 100),
    "read": ("operator and read", 200, 50),
    "send": ("send 16 MiB", 4, 4),
    "fetch": ("fetch 16 MiB", 4, 4),
}


class Ours:
    """The same tasks on a shoal device. Pageable memory, as the peers have it."""

    def __init__(self) -> None:
        self.a = torch.ones(ELEMENTS, device="shoal")
        self.b = torch.ones(ELEMENTS, device="shoal")
        self.big = torch.ones(TRANSFER_BYTES // 4)
        self.there = self.big.to("shoal")

    def burst(self, task: str) -> Burst:
        wait = torch.shoal.synchronize
        if task == "issue":
            return loop(lambda: self.a + self.b, wait, timed_finish=False)
        if task == "read":
            return loop(lambda: (self.a + self.b)[0].item(), nothing)
        if task == "send":
            return loop(self.send, nothing)
        return loop(lambda: self.there.cpu(), nothing)

    def send(self) -> None:
        self.there = self.big.to("shoal")
        torch.shoal.synchronize()


class Child:
    """A peer's process."""

    def __init__(self, name: str, python: str) -> None:
        environment = os.environ | {
            "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(
                filter(None, (str(ROOT), os.environ.get("PYTHONPATH", "")))
            ),
        }
        # A pipe could fill and stop the peer.
        self.errors = tempfile.TemporaryFile(mode="w+")  # noqa: SIM115
        self.process = subprocess.Popen(
            [python, "-m", "bench.peers.driver", name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            env=environment,
        )

    def ready(self) -> str | None:
        """None if the peer runs, else why not."""
        assert self.process.stdout is not None
        if self.process.stdout.readline() == "ready\n":
            return None
        return self.last_words()

    def last_words(self) -> str:
        """The last line that the peer wrote before it ended."""
        self.process.wait(15)
        self.errors.seek(0)
        lines = self.errors.read().strip().splitlines()
        return lines[-1] if lines else "it ended without a word"

    def burst(self, task: str) -> Burst:
        def run(count: int) -> float:
            assert self.process.stdin is not None
            assert self.process.stdout is not None
            self.process.stdin.write(json.dumps({"task": task, "count": count}) + "\n")
            self.process.stdin.flush()
            answer = self.process.stdout.readline()
            if not answer:
                raise RuntimeError(self.last_words())
            return float(answer)

        return run

    def close(self) -> None:
        if self.process.stdin is not None:
            with suppress(OSError):
                self.process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(15)
        self.process.kill()
        self.process.wait()
        self.errors.close()


def importable(module: str, python: str) -> bool:
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    environment = os.environ | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    found = subprocess.run([python, "-c", code], env=environment, capture_output=True)
    return found.returncode == 0


def measure(
    plan: Plan, pythons: dict[str, str], tell: Callable[[str], None]
) -> tuple[list[Figure], list[Missing]]:
    figures: list[Figure] = []
    missing: list[Missing] = []
    ours = Ours()
    for name, (module, how) in PEERS.items():
        python = pythons.get(name, sys.executable)
        tell(f"{name}: start")
        if not importable(module, python):
            missing.append(Missing(name, f"not installed ({how})"))
            continue
        child = Child(name, python)
        try:
            reason = child.ready()
            if reason is not None:
                missing.append(Missing(name, f"did not start: {reason}"))
                continue
            for task, (words, our_count, their_count) in TASKS.items():
                tell(f"{name}: {words}")
                pair = compare(
                    child.burst(task),
                    ours.burst(task),
                    plan,
                    count=their_count,
                    ours_count=our_count,
                )
                what = "peer / shoal time"
                figures.append(speed(GROUP, f"{name}: {words}", pair, what, 1.0))
        except RuntimeError as error:
            missing.append(Missing(name, f"broke off: {error}"))
        finally:
            child.close()
    return figures, missing
