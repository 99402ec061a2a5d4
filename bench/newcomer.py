"""What a newcomer meets first, with an exit code: `python -m bench.newcomer`.

- `import torch` with Shoal installed: the median of alternating runs is at most 10 ms longer.
- Ctrl-C while the program waits for its device: heard within 0.2 s, in each kind of wait.
- A pool that accepts connections and never answers: an error within 5 s.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

from shoal.pool.access.certificates import Authority

IMPORT_MS_MAX = 10.0
INTERRUPT_S_MAX = 0.2
UNREACHABLE_S_MAX = 5.0

_IMPORT = "import time; t = time.perf_counter(); import torch; print(time.perf_counter() - t)"

_INTERRUPT = """
    import os, signal, threading, time
    import torch, shoal

    def interrupt():
        global sent
        time.sleep(1.0)
        sent = time.perf_counter()
        os.kill(os.getpid(), signal.SIGINT)

    with shoal.up(devices=["cpu,threads=1"]) as pool, shoal.connect(pool.url) as lease:
        small = torch.ones(10, device="shoal", requires_grad=True)
        chain = small
        for _ in range(20_000):
            chain = chain * 1.0001
        torch.shoal.synchronize()
        os.kill(lease.worker_pids[0], signal.SIGSTOP)
        threading.Thread(target=interrupt, daemon=True).start()
        try:
            {wait}
            heard = float("inf")
        except KeyboardInterrupt:
            heard = time.perf_counter() - sent
        os.kill(lease.worker_pids[0], signal.SIGCONT)
        assert torch.ones(3, device="shoal").sum().item() == 3
        print(heard)
"""
_UNREACHABLE = """
    import time, torch
    start = time.perf_counter()
    try:
        torch.ones(2, device="shoal")
    except RuntimeError as error:
        assert "timed out" in str(error), error
        print(time.perf_counter() - start)
"""
WAITS = {
    "item()": "small.sum().item()",
    "cpu()": "(small + 1).cpu()",
    "synchronize()": "torch.shoal.synchronize()",
    "a full op stream": "for _ in range(10**6): small.detach() * 2",
    "backward()": "chain.sum().backward()",
}


def _run(source: str, **extra: str) -> float:
    # pip compiles what it installs. An editable install is compiled by its first run, unless this
    # variable forbids that: then each import would compile Shoal's files anew, and no one else's.
    environment = {k: v for k, v in os.environ.items() if not k.startswith("SHOAL_")}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(source)],
        env={**environment, **extra}, stdout=subprocess.PIPE, text=True, check=True, timeout=120,
    )  # fmt: skip
    return float(done.stdout)


def import_difference_ms(runs: int) -> tuple[float, float]:
    """The median time of `import torch` without and with Shoal, in milliseconds."""
    without, with_shoal = [], []
    for _ in range(runs + 1):
        without.append(_run(_IMPORT, TORCH_DEVICE_BACKEND_AUTOLOAD="0"))
        with_shoal.append(_run(_IMPORT))
    # The first of each fills the page cache.
    return 1e3 * statistics.median(without[1:]), 1e3 * statistics.median(with_shoal[1:])


def unreachable_s() -> float:
    """The time until the first use of a pool raises that was joined and never answers."""
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        tempfile.TemporaryDirectory() as directory,
    ):
        url = f"shoal://127.0.0.1:{silent.getsockname()[1]}"
        authority = Authority.open(Path(directory), "silent")
        own = authority.own_identity(Path(directory), "client", "newcomer", time.time())
        dataclasses.replace(own, url=url).save()
        return _run(_UNREACHABLE, SHOAL_POOL=url, SHOAL_IDENTITY=str(own.path))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=10, help="Of each import.")
    runs = parser.parse_args().runs
    started = time.perf_counter()
    without, with_shoal = import_difference_ms(runs)
    good = with_shoal - without <= IMPORT_MS_MAX
    print(
        f"import torch: {without:.0f} ms without Shoal, {with_shoal:.0f} ms with it, ratio "
        f"{with_shoal / without:.3f} (at most {IMPORT_MS_MAX:g} ms more): {_verdict(good)}"
    )
    for name, code in WAITS.items():
        heard_s = _run(_INTERRUPT.replace("{wait}", code))
        good = good and heard_s <= INTERRUPT_S_MAX
        verdict = _verdict(heard_s <= INTERRUPT_S_MAX)
        print(
            f"Ctrl-C in {name}: heard after {heard_s:.3f} s (at most {INTERRUPT_S_MAX:g}): {verdict}"
        )
    took_s = unreachable_s()
    good = good and took_s <= UNREACHABLE_S_MAX
    verdict = _verdict(took_s <= UNREACHABLE_S_MAX)
    print(f"a silent pool: error after {took_s:.1f} s (at most {UNREACHABLE_S_MAX:g}): {verdict}")
    print(f"measured in {time.perf_counter() - started:.0f} s")
    return 0 if good else 1


def _verdict(good: bool) -> str:
    return "holds" if good else "DOES NOT HOLD"


if __name__ == "__main__":
    sys.exit(main())
