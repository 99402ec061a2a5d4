"""Shoal on the device: are results right, and what do waits and steps cost beside local torch?"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F

import shoal
from bench import models
from bench.first_hour.driver import seconds
from bench.first_hour.finding import Finding

MiB = 2**20


def facts(quick: bool) -> Iterator[Finding]:
    """Say what the device is."""
    with shoal.up(devices=["cuda:0"]) as pool:
        start = time.perf_counter()
        with shoal.connect(pool.url) as lease:
            torch.ones(1, device="shoal").item()
            yield Finding(
                "from connect() to a first result", time.perf_counter() - start, "s", 0, 10
            )
            found = lease.granted[0].info
            yield Finding("device", found.hardware)
            yield Finding("capability", f"{found.major}.{found.minor}")
            yield Finding("memory that it offers", found.memory_bytes / 2**30, "GiB", 1, 400)
            yield Finding("memory of a context", found.context_bytes / MiB, "MiB", 50, 1500)
            gpu = _await_gpu(5.0)
            yield Finding("temperature, by NVML", gpu.celsius if gpu else None, "°C", 10, 95,
                          "pip install nvidia-ml-py" if gpu is None else "")  # fmt: skip


def _await_gpu(patience_s: float) -> shoal.pool.wire.messages.GpuState | None:
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        gpu = torch.shoal.get_device_properties(0).gpu
        if gpu is not None:
            return gpu
        time.sleep(0.1)
    return None


Unary = Callable[[torch.Tensor], torch.Tensor]
OPERATORS: dict[str, Unary] = {
    "matrix product": lambda x: x @ x.mT,
    "linear solve": lambda x: torch.linalg.solve(x[0] + 30 * torch.eye(64, device=x.device), x[1]),
    "svd values": lambda x: torch.linalg.svdvals(x),
    "sort": lambda x: x.sort(dim=-1).values,
    "cumsum": lambda x: x.cumsum(-1),
    "softmax": lambda x: x.softmax(-1),
    "layer norm": lambda x: F.layer_norm(x, (64,)),
    "convolution": lambda x: F.conv2d(x[:, None], torch.ones(4, 1, 3, 3, device=x.device)),
    "pooling": lambda x: F.max_pool2d(x[:, None], 2),
    "attention": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None]),
    "index": lambda x: x[:, torch.tensor([3, 1, 2], device=x.device)],
    "scatter": lambda x: torch.zeros_like(x).scatter_add_(2, x.argsort(-1), x),
    "where": lambda x: torch.where(x > 0, x, x.exp()),
    "fft": lambda x: torch.fft.rfft(x).abs(),
    "nonzero": lambda x: x.nonzero().double(),
}  # fmt: skip


def results(quick: bool) -> Iterator[Finding]:
    """Compare operators and a training with the CPU."""
    with shoal.up(devices=["cuda:0"]) as pool, shoal.connect(pool.url):
        x = torch.randn(4, 64, 64, generator=torch.Generator().manual_seed(0))
        wrong = []
        for name, run in OPERATORS.items():
            try:
                torch.testing.assert_close(run(x.to("shoal")).cpu(), run(x), rtol=2e-3, atol=2e-3)
            except (AssertionError, RuntimeError) as error:
                wrong.append(f"{name}: {str(error).splitlines()[0]}")
        yield Finding(f"{len(OPERATORS)} operators as on the CPU", not wrong, note="; ".join(wrong))
        local = torch.nn.LSTM(16, 32, num_layers=2)
        remote = copy.deepcopy(local).to("shoal")
        steps = torch.randn(5, 3, 16, generator=torch.Generator().manual_seed(1))
        for model, data in ((local, steps), (remote, steps.to("shoal"))):
            model(data)[0].square().sum().backward()
        pairs = zip(local.parameters(), remote.parameters(), strict=True)
        close = [torch.allclose(a.grad, b.grad.cpu(), rtol=1e-2, atol=1e-3) for a, b in pairs]
        yield Finding("gradients of an LSTM as on the CPU", all(close))


def settings(quick: bool) -> Iterator[Finding]:
    """Check that the program's settings reach the device."""
    with shoal.up(devices=["cuda:0"]) as pool, shoal.connect(pool.url) as lease:
        x = torch.randn(512, 512, generator=torch.Generator().manual_seed(0))
        exact = x.double() @ x.double()

        def error(precision: str) -> float:
            torch.set_float32_matmul_precision(precision)
            y = x.to("shoal")
            return float(((y @ y).cpu().double() - exact).abs().max())

        highest, high, again = error("highest"), error("high"), error("highest")
        has_tf32 = lease.granted[0].info.capability >= (8, 0) and not _is_standin(lease)
        yield Finding("error of float32 products, highest", highest, "", 0, 1e-3)
        yield Finding("… with TF32", high / highest if has_tf32 else None, "times as large", 10)
        yield Finding("… and highest again", again == highest)
        torch.use_deterministic_algorithms(True)
        try:
            torch.zeros(4, device="shoal").put_(
                torch.tensor([1, 1], device="shoal"), torch.ones(2, device="shoal")
            ).cpu()
            refused = False
        except RuntimeError as failure:
            refused = "deterministic implementation" in str(failure)
        finally:
            torch.use_deterministic_algorithms(False)
        yield Finding("refuses what is not deterministic, if asked to", refused)


def _is_standin(lease: shoal.Lease) -> bool:
    return lease.granted[0].info.hardware.startswith("stand-in")


def waits(quick: bool) -> Iterator[Finding]:
    """Measure transfers and `.item()`, beside local torch where it has CUDA."""
    size = (8 if quick else 256) * MiB
    times = 3 if quick else 20
    with shoal.up(devices=["cuda:0"]) as pool, shoal.connect(pool.url):
        pageable = torch.ones(size // 4)
        pinned = pageable.pin_memory()

        def up(source: torch.Tensor) -> None:
            source.to("shoal", non_blocking=True)
            torch.shoal.synchronize()

        there = pageable.to("shoal")
        for name, work, low in (
            ("upload, pageable", lambda: up(pageable), 1),
            ("upload, pinned", lambda: up(pinned), 5),
            ("download, pageable", there.cpu, 1),
        ):
            yield Finding(name, size / seconds(work, times) / 1e9, "GB/s", low, 60)
        one = torch.ones(8, device="shoal")
        ours = seconds(lambda: (one + 1).sum().item(), 20 if quick else 500)
    yield Finding("`.item()` after two operators", ours * 1e6, "µs", 20, 500)
    if torch.cuda.is_available():
        local = torch.ones(8, device="cuda")
        base = seconds(lambda: (local + 1).sum().item(), 500)
        yield Finding("… beside local torch", ours / base, "times as long", 0.5, 5)
    else:
        yield Finding("… beside local torch", None, note="this torch does not have CUDA")


def steps(quick: bool) -> Iterator[Finding]:
    """Measure training steps beside local torch."""
    torch.manual_seed(0)
    model = models.Gpt(64, 2, 2, 100, 32) if quick else models.Gpt(512, 8, 8, 8192, 256)
    tokens = torch.randint(0, 100, (2, 32) if quick else (8, 256))

    def stepper(device: str) -> Callable[[], float]:
        mine = copy.deepcopy(model).to(device)
        optimizer = torch.optim.AdamW(mine.parameters())
        data = tokens.to(device)

        def step() -> float:
            for _ in range(2 if quick else 10):
                out = mine(data)
                loss = F.cross_entropy(out.flatten(0, 1), data.flatten())
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            return loss.item()

        return step

    with shoal.up(devices=["cuda:0"]) as pool, shoal.connect(pool.url):
        ours = seconds(stepper("shoal"), 2 if quick else 5)
    yield Finding("ten steps of a small GPT", ours, "s", 0.01, 60)
    if torch.cuda.is_available():
        base = seconds(stepper("cuda"), 5)
        yield Finding("… beside local torch", ours / base, "times as long", 0.5, 1.5)
    else:
        yield Finding("… beside local torch", None, note="this torch does not have CUDA")


def peers(quick: bool) -> Iterator[Finding]:
    """Measure a copy between two GPUs."""
    from shoal.pool.local import local_pool

    found = [name for name in local_pool.default_devices() if name != "cpu"][:2]
    if len(found) < 2:
        yield Finding("copy between two devices", None, note="there is one device")
        return
    size = (8 if quick else 256) * MiB
    with shoal.up(devices=found) as pool, shoal.connect(pool.url, devices=2):
        x = torch.ones(size // 4, device="shoal:1")

        def move() -> None:
            x.to("shoal:2")
            torch.shoal.synchronize(2)

        rate = size / seconds(move, 2 if quick else 10) / 1e9
        yield Finding(
            "copy between two devices", rate, "GB/s", 1, 900, "through host memory: 1 to 20"
        )
        yield Finding("… arrives", torch.equal(x.to("shoal:2").cpu(), x.cpu()))
