"""What a GPU's driver says of it, from the stand-in's NVML to everything that shows it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator

import pytest

from shoal.pool.head import metrics
from shoal.pool.node.gpu_state import Gpus
from shoal.pool.wire import messages
from tests.standin.environment import Options, Run
from tests.support import programs

pytest.importorskip("pynvml")
MiB = 2**20
NAME = "GPU-7374616e-642d-696e-2d30-303030303000"  # "stand-in-000000" in hexadecimal


@pytest.fixture(scope="module")
def standin() -> Iterator[dict[str, str]]:
    run = Run(Options("late", devices=2, memory_bytes=1024 * MiB))
    found = run.environment()
    found["PYTHONPATH"] = os.pathsep.join([found["PYTHONPATH"], str(programs.ROOT)])
    yield found
    run.close()


def test_the_driver_is_asked_by_the_devices_own_name(standin: dict[str, str]) -> None:
    source = """
        import sys, msgspec
        from shoal.pool.node.gpu_state import Gpus
        gpus = Gpus()
        assert gpus.open()
        print(msgspec.json.encode(gpus.look(sys.argv[1:])).decode())
        # Another program's context and memory count, though Shoal did not start them.
        from tests.standin.driver import Driver
        import os
        driver = Driver(os.environ["SHOAL_CUDA_DRIVER"], 0)
        driver.allocate()
        print(gpus.look(sys.argv[1:])[sys.argv[1]].used_bytes)
    """
    first, second = programs.succeed(source, NAME, "GPU-of-another", **standin).splitlines()
    state = json.loads(first)[NAME]
    assert state.pop("used_bytes") == 0
    assert state == {
        "total_bytes": 1024 * MiB, "busy": 0.0, "celsius": 40, "watts": 50.0, "watts_max": 300.0,
    }  # fmt: skip
    assert int(second) >= 32 * MiB


def test_a_machine_without_the_driver_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_NVML", "/nowhere/libnvidia-ml.so.1")
    assert not Gpus().open()
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert not Gpus().open()


def test_metrics_have_what_a_gpu_says() -> None:
    page = metrics.Page()
    plain = messages.DeviceInfo(0, "cpu", "cpu", 1, 1, 0, 1.0, 1)
    gpu = messages.GpuState(5, 9, busy=0.25, celsius=40)  # it does not say its power
    found = messages.DeviceInfo(1, "cuda:0", "cuda:0", 1, 1, 0, 1.0, 1, gpu=gpu)
    metrics.add_gpus(page, [plain, found], {0: {"device": "cpu"}, 1: {"device": "cuda:0"}})
    samples = [line for line in page.text().splitlines() if not line.startswith("#")]
    assert samples == [
        'shoal_gpu_used_bytes{device="cuda:0"} 5.0',
        'shoal_gpu_utilization_ratio{device="cuda:0"} 0.25',
        'shoal_gpu_temperature_celsius{device="cuda:0"} 40.0',
    ]


def test_everything_that_shows_devices_shows_it(standin: dict[str, str]) -> None:
    source = """
        import json, sys, urllib.request
        import torch, shoal
        from click.testing import CliRunner
        from shoal.cli.main import main
        from shoal.pool.local import local_pool
        from tests.support.waiting import wait_until

        def say(*arguments):
            result = CliRunner().invoke(main, list(arguments), catch_exceptions=False)
            assert result.exit_code == 0, result.output
            return result.output

        with shoal.up(devices=["cuda:1", "cpu,memory=64MiB"]) as pool:
            lease = shoal.connect(pool.url, kind="stand-in")
            x = torch.ones(10, device="shoal")
            x.sum().item()
            def busy():
                gpu = torch.shoal.get_device_properties(0).gpu
                return gpu is not None and gpu.used_bytes > 0
            wait_until(busy, 60, "the driver's answer has come")
            found = torch.shoal.get_device_properties(0)
            as_json = json.loads(say("devices", "--pool", pool.url, "--json"))
            print(json.dumps({
                "gpu": [found.gpu.celsius, found.gpu.watts, found.gpu.busy],
                "torch": [found.total_memory == found.memory_bytes, found.major, found.minor],
                "json": [d["gpu"] and d["gpu"]["celsius"] for d in as_json],
                "devices": say("devices", "--pool", pool.url),
                "top": say("top", "--pool", pool.url, "--count", "1"),
            }))
    """
    found = json.loads(programs.succeed(source, COLUMNS="250", **standin))
    assert found["gpu"] == [41, 50.0, 0.5]
    assert found["torch"] == [True, 8, 0]
    assert found["json"] == [41, None]
    for text in (found["devices"], found["top"]):
        assert "of 1 GiB" in text
        for part in ("in use by all", "50%", "41 °C", "50 of 300 W"):
            assert part in text, text
