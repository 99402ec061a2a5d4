"""The device over TCP, in one run: `python -m bench.network`.

One compute thread on each side. Bursts of both sides alternate; every figure is the median of the
ratios of neighbouring bursts. Everything that is Shoal's goes through TLS 1.3.
"""

from __future__ import annotations

import json
import os
import platform
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import click
import msgspec
import torch
from rich.console import Console
from tests.support.namespaces import Host, Hosts
from tests.support.standing import StandingPool, shoal_command

import shoal
from bench import report
from bench.device.training import pair_of_trainers
from bench.device.transfers import KIB, MIB, size_name
from bench.figures import RESULTS, Figure, Machine, Missing, Run, load, processor_name, speed
from bench.measure import Burst, Pair, Plan, compare, loop, rotate
from bench.models import PROGRAMS, Program, Trainer
from bench.network.delay_proxy import DelayProxy
from bench.network.socket_peer import FarEnd, SocketCopy
from shoal.pool.base import limits
from shoal.pool.wire import tls

DEVICE = "cpu,memory=2GiB,threads=1"
MEASURED = [p for p in PROGRAMS if p.kind in ("MLP", "GPT")]
READING = [p for p in PROGRAMS if p.kind == "GPT"]
GROUPS = ("step", "bandwidth", "delay", "narrow")
SIZES = (64 * KIB, MIB, 16 * MIB, 64 * MIB, 256 * MIB)
QUICK_SIZES = (64 * KIB, MIB, 16 * MIB)
DELAYS_MS = (0.1, 1.0, 10.0, 30.0)
RATES = ("1gbit", "10gbit")
STEP_TARGET, COPY_TARGET, DELAY_TARGET = 1.05, 0.9, 1.10
Tell = Callable[[str], None]


def figure(group: str, name: str, what: str, pair: Pair, target: float | None, note: str) -> Figure:
    return Figure(
        group=group, name=name, what=what, ratio=pair.slowdown, target=target,
        base_us=pair.base.median * 1e6, ours_us=pair.ours.median * 1e6, note=note,
    )  # fmt: skip


# --- a step --------------------------------


def steps(
    group: str,
    way: str,
    plan: Plan,
    tell: Tell,
    target: float | None,
    programs: list[Program] = MEASURED,
) -> list[Figure]:
    """Training steps of the present lease against local ones. The loss is read once in a burst."""
    found = []
    for program in programs:
        tell(f"{program.name} by {way}")
        local, ours = pair_of_trainers(program)
        pair = compare(
            loop(local.step, local.read_loss), loop(ours.step, ours.read_loss), plan, least=5
        )
        name = f"{program.name}, {way}"
        found.append(figure(group, name, "shoal / local time", pair, target, ""))
    return found


# --- bandwidth --------------------------------


def device_copies(direction: str, size: int, pinned: bool) -> Burst:
    host = torch.zeros(size // 4)
    host = host.pin_memory() if pinned else host
    remote = torch.zeros(size // 4).to("shoal")
    to, source = (remote, host) if direction == "up" else (host, remote)
    return loop(lambda: to.copy_(source, non_blocking=pinned), torch.shoal.synchronize)


def bandwidth(
    group: str, plain: SocketCopy, secure: SocketCopy, sizes: tuple[int, ...], plan: Plan, tell: Tell
) -> list[Figure]:  # fmt: skip
    """Transfers against socket copies of the same size over the same way, plain and by TLS.

    A download to pageable memory is there when the call returns, so it is compared with copies that
    are asked for one by one; all else flows.
    """
    found = []
    for size in sizes:
        for direction in ("up", "down"):
            tell(f"{size_name(size)} {direction}")
            flowing = {
                "plain": plain.burst(direction, size),
                "TLS": secure.burst(direction, size),
                "shoal, pinned": device_copies(direction, size, True),
            }
            pageable = {"shoal, pageable": device_copies(direction, size, False)}
            name = f"{size_name(size)} {direction}"
            if direction == "up":
                found += copies(group, name, size, flowing | pageable, plan)
                continue
            found += copies(group, name, size, flowing, plan)
            asked = {
                "plain": plain.burst(direction, size, one_by_one=True),
                "TLS": secure.burst(direction, size, one_by_one=True),
            }
            found += copies(group, f"{name}, one by one", size, asked | pageable, plan)
    return found


def copies(group: str, name: str, size: int, bursts: dict[str, Burst], plan: Plan) -> list[Figure]:
    """Each side against the plain socket, and ours against TLS as well."""
    times, count = rotate(bursts, plan, least=2, most=256)
    found = []
    for side in bursts:
        for base in ("plain", "TLS"):
            if side in (base, "plain"):
                continue
            pair = Pair.of(times[base], times[side], count)
            rates = [size / t.median / 2**30 for t in (pair.base, pair.ours)]
            note = f"{base} socket {rates[0]:.2f} GiB/s, this {rates[1]:.2f} GiB/s"
            target = COPY_TARGET if side != "TLS" else None
            title = "a TLS socket" if side == "TLS" else side
            what = f"{base} socket copy / this time"
            found.append(speed(group, f"{name}, {title} / {base}", pair, what, target, note))
    return found


# --- a long way --------------------------------


@contextmanager
def delayed(port: int, round_trip_ms: float) -> Iterator[None]:
    """Connections of this program to `port` of this machine take the long way."""
    proxy = DelayProxy(port, round_trip_ms)
    connect = socket.create_connection

    def redirect(address: tuple[str, int], *args: object, **kwargs: object) -> socket.socket:
        host, wanted = address
        return connect((host, proxy.port if wanted == port else wanted), *args, **kwargs)  # type: ignore[arg-type]

    try:
        with mock.patch.object(socket, "create_connection", redirect):
            yield
    finally:
        proxy.close()


def round_trip_ms() -> float:
    """What one read of a scalar takes when there is nothing else to do."""
    x = torch.ones((), device="shoal")
    burst = loop(x.item, lambda: None)
    burst(5)
    return min(burst(10) / 10 for _ in range(5)) * 1000


def reading(trainer: Trainer) -> Callable[[], None]:
    def step() -> None:
        trainer.step()
        trainer.read_loss()

    return step


def delays(pool: StandingPool, plan: Plan, tell: Tell) -> list[Figure]:
    """One `.item()` a step, which no device elsewhere can answer sooner than a read alone takes here.

    That floor is in the note. The target holds for steps whose floor is below it.
    """
    found = []
    with shoal.connect(pool.network_url, transport="network") as lease:
        assert lease.granted[0].network is not None
        port = lease.granted[0].network.port
    for delay in DELAYS_MS:
        with delayed(port, delay), shoal.connect(pool.network_url, transport="network"):
            trip = round_trip_ms()
            for program in READING:
                tell(f"{program.name}, {delay:g} ms round trip")
                local, ours = pair_of_trainers(program)
                pair = compare(
                    loop(reading(local), local.read_loss), loop(reading(ours), ours.read_loss),
                    plan, least=5, most=60,
                )  # fmt: skip
                local_ms, ours_ms = pair.base.median * 1000, pair.ours.median * 1000
                floor = (local_ms + trip) / local_ms
                note = (
                    f"local {local_ms:.2f} ms, shoal {ours_ms:.2f} ms, one read on an idle device "
                    f"{trip:.2f} ms: floor {floor:.3f}"
                )
                target = DELAY_TARGET if delay == 1.0 and floor < DELAY_TARGET else None
                name = f"{program.name}, {delay:g} ms"
                found.append(figure("delay", name, "shoal / local time", pair, target, note))
    return found


# --- a narrow way --------------------------------


def narrow(plan: Plan, tell: Tell) -> tuple[list[Figure], list[Missing]]:
    """Two hosts as network namespaces, joined by a limited veth pair."""
    found: list[Figure] = []
    made = Hosts(2)
    try:
        with made as hosts, tempfile.TemporaryDirectory() as directory:
            server, desk = hosts
            for rate in RATES:
                for host in hosts:
                    host.limit(rate)
                tell(f"two hosts, {rate}")
                found += between(server, desk, Path(directory) / rate, rate, plan)
    except BaseException as error:
        if isinstance(error, (OSError, subprocess.SubprocessError)) or "not allowed" in str(error):
            return found, [Missing("veth pair", str(error))]
        raise
    return found, []


def between(server: Host, desk: Host, home: Path, rate: str, plan: Plan) -> list[Figure]:
    home.mkdir()
    environment = {**os.environ, "SHOAL_STATE": str(home / "state")}
    up = subprocess.Popen(
        server.command(
            *shoal_command("up", "--json", "--listen", server.address, "--device", DEVICE)
        ),
        env=environment, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert up.stdout is not None
        line = json.loads(up.stdout.readline())["join"].split()[1:]
        environment["SHOAL_IDENTITY"] = str(home / "identity.pem")
        subprocess.run(
            desk.command(*shoal_command(*line)), env=environment, check=True, capture_output=True
        )
        node = next((home / "state").glob("*/node.pem"))
        far = FarEnd(server.address, server.command())
        secure = FarEnd(server.address, server.command(), node)
        inside = [server.address, str(far.port), str(secure.port), str(node), rate,
                  str(plan.rounds), str(plan.burst_s)]  # fmt: skip
        try:
            done = subprocess.run(
                desk.command(sys.executable, "-m", "bench.network", "--inside", json.dumps(inside)),
                env=environment, check=True, capture_output=True, text=True, timeout=300,
            )  # fmt: skip
        finally:
            far.close()
            secure.close()
        return msgspec.json.decode(done.stdout.encode(), type=list[Figure])
    finally:
        up.terminate()
        up.wait(20)


def measure_inside(
    address: str, port: str, secure_port: str, node: str, rate: str, rounds: str, burst_s: str
) -> list[Figure]:
    """Runs on the desk's host; the sockets' far ends run at `address` already."""
    plan = Plan(int(rounds), float(burst_s))
    plain = SocketCopy(address, int(port))
    member = tls.default_identity()
    assert member is not None
    secure = SocketCopy(address, int(secure_port), Path(node), member)
    with shoal.connect(f"shoal://{address}:{limits.PORT}"):
        group = "narrow"
        figures = bandwidth(group, plain, secure, (MIB, 64 * MIB), plan, lambda text: None)
        figures += steps(group, "TCP", plan, lambda text: None, STEP_TARGET, READING)
    return [msgspec.structs.replace(f, name=f"{rate}: {f.name}") for f in figures]


# --- the run --------------------------------


def measure(
    groups: tuple[str, ...], plan: Plan, quick: bool, tell: Tell
) -> tuple[list[Figure], list[Missing]]:
    figures: list[Figure] = []
    missing: list[Missing] = []
    shorter = Plan(max(3, plan.rounds // 2), plan.burst_s)
    with (
        tempfile.TemporaryDirectory() as directory,
        StandingPool(Path(directory), DEVICE, listen=True) as pool,
    ):
        member = pool.join("bench")
        os.environ["SHOAL_IDENTITY"] = str(member.path)
        if "step" in groups:
            with shoal.connect(pool.network_url):
                figures += steps("step", "shared memory", plan, tell, None)
            with shoal.connect(pool.network_url, transport="network"):
                figures += steps("step", "TCP", plan, tell, STEP_TARGET)
        if "bandwidth" in groups:
            node = Path(directory) / "state" / pool.name / "node.pem"
            with shoal.connect(pool.network_url, transport="network"):
                sizes = QUICK_SIZES if quick else SIZES
                figures += over_loopback(node, tls.Identity.load(member.path), sizes, plan, tell)
        if "delay" in groups:
            figures += delays(pool, shorter, tell)
    if "narrow" in groups:
        found, missing = narrow(shorter, tell)
        figures += found
    return figures, missing


def over_loopback(
    node: Path, member: tls.Identity, sizes: tuple[int, ...], plan: Plan, tell: Tell
) -> list[Figure]:
    ends = [FarEnd("127.0.0.1"), FarEnd("127.0.0.1", identity=node)]
    plain = SocketCopy("127.0.0.1", ends[0].port)
    secure = SocketCopy("127.0.0.1", ends[1].port, node, member)
    try:
        return bandwidth("bandwidth", plain, secure, sizes, plan, tell)
    finally:
        for one in (plain, secure, *ends):
            one.close()


@click.command()
@click.option("--quick", is_flag=True, help="Fewer and shorter bursts, no large transfers.")
@click.option("--rounds", type=click.IntRange(2), help="Bursts of each side, per figure.")
@click.option("--only", multiple=True, type=click.Choice(GROUPS), help="A group; may be repeated.")
@click.option("--update", is_flag=True, help="With --only: the other groups of network.json stay.")
@click.option("--inside", hidden=True, help="The desk's part of the narrow way.")
@click.option(
    "--output", type=click.Path(path_type=Path, file_okay=False), default=RESULTS,
    help="Folder for network.json.",
)  # fmt: skip
def main(
    quick: bool, rounds: int | None, only: tuple[str, ...], update: bool, inside: str | None,
    output: Path,
) -> None:  # fmt: skip
    """Measures the device over TCP against local torch, shared memory and plain sockets."""
    torch.set_num_threads(1)
    if inside:
        sys.stdout.write(msgspec.json.encode(measure_inside(*json.loads(inside))).decode())
        return
    plan = Plan(rounds or (3 if quick else 9), 0.06 if quick else 0.2)
    console = Console()
    before = load()
    console.print(f"load average at start: {before:.2f}")
    with console.status("…") as status:
        tell = status.update if console.is_terminal else print
        figures, missing = measure(only or GROUPS, plan, quick, tell)
    machine = Machine(
        processor=processor_name(), cores=torch.multiprocessing.cpu_count(),
        torch=str(torch.__version__), python=platform.python_version(), load_before=before,
        load_after=load(), rounds=plan.rounds, quick=quick,
    )  # fmt: skip
    run = Run(machine, figures, missing, {})
    whole = output / "network.json"
    if update:
        kept = [f for f in Run.load(whole).figures if f.group not in only]
        run.figures = sorted(kept + figures, key=lambda f: GROUPS.index(f.group))
    path = output / "network-partial.json" if (quick or only) and not update else whole
    run.save(path)
    report.print_tables(run, console)
    console.print(f"written: {path}")


if __name__ == "__main__":
    main()
