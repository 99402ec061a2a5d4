"""Profile tasks on one CPU device, predict them on others, and run them there."""

from __future__ import annotations

import time

import click
import torch

from bench.schedule.results import print_row, save
from shoal.schedule.model import measure
from shoal.schedule.model.predictor import Predictor, TaskProfile


class Declared:
    """A clock for a CPU device that is declared slower: its seconds last longer.

    It counts the seconds in which this process ran, so what else the machine does is left out.
    """

    def __init__(self, speed: float) -> None:
        self.speed = speed

    def __call__(self) -> float:
        return time.process_time() / self.speed


def _models() -> dict[str, tuple[torch.nn.Module, torch.Tensor]]:
    wide = torch.nn.Sequential(
        torch.nn.Linear(512, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 10)
    )
    deep = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(16)])
    conv = torch.nn.Sequential(
        torch.nn.Conv2d(3, 16, 3),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.Linear(16 * 900, 10),
    )
    layer = torch.nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    return {
        "wide": (wide, torch.randn(64, 512)),
        "deep": (deep, torch.randn(16, 64)),
        "conv": (conv, torch.randn(8, 3, 32, 32)),
        "transformer": (layer, torch.randn(8, 32, 64)),
    }


def _profile(name: str, device: object, clock: Declared) -> TaskProfile:
    model, batch = _models()[name]
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    return measure.measure_task(name, step, model, optimizer, len(batch), device, clock=clock)  # type: ignore[arg-type]


@click.command()
def predict() -> None:
    """Profile tasks on one CPU device, predict them on others, then run them there.

    The others are the same CPU declared at other speeds, and a roofline that was never corrected.
    """
    torch.set_num_threads(1)
    speeds = {"cpu-1.0": 1.0, "cpu-0.5": 0.5, "cpu-0.25": 0.25}
    clocks = {kind: Declared(speed) for kind, speed in speeds.items()}
    devices = {kind: measure.measure_device("cpu", kind, clock=clocks[kind]) for kind in speeds}
    rows: list[dict[str, object]] = []
    predictor = Predictor(list(devices.values()))
    for name in _models():
        first = _profile(name, devices["cpu-1.0"], clocks["cpu-1.0"])
        bare = Predictor([]).predict(
            TaskProfile(name, 1, 0, 0, 0, first.operators), devices["cpu-1.0"]
        )
        observed = first.steps_per_s["cpu-1.0"]
        row: dict[str, object] = {
            "task": name,
            "roofline_error": round(bare.steps_per_s / observed - 1, 3),
        }
        predictor.observe(first, devices["cpu-1.0"], observed)
        for kind in ("cpu-0.5", "cpu-0.25"):
            guess = predictor.predict(first, devices[kind]).steps_per_s
            real = _profile(name, devices[kind], clocks[kind]).steps_per_s[kind]
            row[f"error_{kind}"] = round(guess / real - 1, 3)
            predictor.observe(first, devices[kind], real)
        rows.append(row)
        print_row(row)
    rows.append({"mean_error": round(predictor.error(), 3)})
    print_row(rows[-1])
    save("predict", rows)
