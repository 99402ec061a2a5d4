"""The last part of the demo: three small tasks wait for two unequal devices of a standing pool."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

#: Trains a small network for some steps and says how it went.
PROGRAM = """
import sys, torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 1))
model.to("shoal")
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
x = torch.rand(256, 64, device="shoal")
for step in range(int(sys.argv[1])):
    loss = torch.nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(f"loss {loss.item():.4f} after {sys.argv[1]} steps")
"""
DEVICES = (
    "cpu,memory=256MiB,threads=1,name=fast",
    "cpu,memory=128MiB,threads=1,speed=0.5,name=slow",
)
TASKS = (("long", 300), ("medium", 150), ("short", 75))  # name, steps
COLUMNS = 56


@dataclass
class Span:
    """A task on a device, in seconds since the first submission."""

    device: str
    task: str
    start_s: float
    end_s: float


def shoal(*arguments: str, **extra: str) -> str:
    """Run a `shoal` command as a user types it. Return what it prints."""
    command = [sys.executable, "-m", "shoal", *arguments]
    done = subprocess.run(command, env={**os.environ, **extra}, capture_output=True, text=True)
    return done.stdout or done.stderr


def show(console: Console, *arguments: str) -> None:
    console.print(f"[bold]$ shoal {' '.join(arguments)}[/bold]", highlight=False)
    console.print(shoal(*arguments).rstrip(), highlight=False, markup=False, soft_wrap=True)


def demonstrate(console: Console) -> None:
    """Start a standing pool, submit three tasks, and show the queue until it is empty."""
    with tempfile.TemporaryDirectory(prefix="shoal-demo-") as folder:
        name = f"demo-{os.getpid()}"
        environment = {**os.environ, "SHOAL_STATE": folder}
        command = [sys.executable, "-m", "shoal", "up", "--json", "--no-profile", "--name", name]
        for device in DEVICES:
            command += ["--device", device]
        pool = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        try:
            assert pool.stdout is not None
            told = json.loads(pool.stdout.readline())
            os.environ["SHOAL_POOL"] = told["url"]
            os.environ["SHOAL_STATE"] = folder
            show_dashboard(console, told["web"])
            _run(console, Path(folder))
        finally:
            os.environ.pop("SHOAL_POOL", None)
            os.environ.pop("SHOAL_STATE", None)
            pool.send_signal(signal.SIGTERM)
            pool.wait(20)


def show_dashboard(console: Console, address: str | None) -> None:
    """Print where to watch, with a link that signs in once, within a minute."""
    if address is not None:
        link = shoal("open", "--print", "--page", "tasks").strip()
        console.print(f"Watch it in a browser: {link}\n", highlight=False, soft_wrap=True)


def _run(console: Console, folder: Path) -> None:
    (folder / "train.py").write_text(PROGRAM)
    begin = time.monotonic()
    for name, steps in TASKS:
        script = str(folder / "train.py")
        program = ("--name", name, "--", sys.executable, script, str(steps))
        console.print(f"[bold]$ shoal submit --name {name} -- python train.py {steps}[/bold]")
        console.print(shoal("submit", *program).rstrip(), highlight=False, markup=False)
    console.print()
    show(console, "queue")
    waiting = [task for task in _queue() if task["state"] == "waiting"]
    if waiting:
        console.print()
        show(console, "why", waiting[-1]["id"])
    spans = watch(begin)
    console.print()
    for name, _ in TASKS:
        show(console, "logs", name)
    console.print(f"\n{gantt(spans)}", highlight=False, markup=False)


def _queue() -> list[dict[str, object]]:
    found = json.loads(shoal("queue", "--json"))
    return found if isinstance(found, list) else []


def watch(begin: float) -> list[Span]:
    """Look at the queue until it is empty. Return which task had which device when."""
    from shoal.pool.client.tasks import TaskClient

    spans: dict[tuple[str, str], Span] = {}
    with TaskClient(os.environ["SHOAL_POOL"]) as client:
        while tasks := list(client.tasks()):
            now_s = time.monotonic() - begin
            for task in tasks:
                for device in task.devices:
                    key = (device, task.id)
                    spans.setdefault(key, Span(device, task.name, now_s, now_s)).end_s = now_s
            time.sleep(0.05)
    return list(spans.values())


def gantt(spans: list[Span]) -> str:
    """Draw the devices' time as rows of text: a block for each task, and the seconds below."""
    if not spans:
        return "no task had a device"
    end_s = max(max(span.end_s for span in spans), 0.1)
    devices = sorted({span.device for span in spans})
    width = max(map(len, devices))
    fills = {task: "▒▓░█"[i % 4] for i, task in enumerate(dict.fromkeys(s.task for s in spans))}
    lines = []
    for device in devices:
        cells = [" "] * COLUMNS
        for span in sorted((s for s in spans if s.device == device), key=lambda s: s.start_s):
            first = round(span.start_s / end_s * (COLUMNS - 1))
            last = max(first + 1, round(span.end_s / end_s * (COLUMNS - 1)))
            room = last - first - 1
            label = span.task[:room].center(room, "\0").replace("\0", fills[span.task])
            cells[first:last] = ["│", *label]
            if last < COLUMNS:
                cells[last] = "│"
        lines.append(f"{device.ljust(width)}  {''.join(cells).rstrip()}")
    scale = f"{'0 s'.ljust(COLUMNS - 6)}{end_s:.1f} s"
    return "\n".join([*lines, f"{' ' * width}  {scale}"])


if __name__ == "__main__":
    demonstrate(Console())
