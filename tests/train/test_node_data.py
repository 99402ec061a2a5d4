"""Data that is read at the node: what comes is what the program would have read, and nothing of it goes
through the program. The devices are reached by network, though they are on this machine.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.data import TensorDataset

import shoal
import shoal.train
from shoal.device import leases
from shoal.pool.base import limits
from shoal.train.data import reader_client
from shoal.train.data.node_data import NodeBatch
from tests.support import datasets, processes, programs
from tests.support.standing import StandingPool, shoal_command
from tests.support.waiting import wait_until

DEVICE = torch.device("shoal", 1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("served")


@pytest.fixture(scope="module")
def formats(folder: Path) -> dict[str, Any]:
    return datasets.write_all(folder)


@pytest.fixture(scope="module")
def pool(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandingPool]:
    directory = tmp_path_factory.mktemp("pool")
    device = "cpu,memory=512MiB,threads=1"
    options = ("--data", str(folder))
    with StandingPool(directory, *[device] * 2, listen=True, options=options) as made:
        identity = made.join("me")
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("SHOAL_IDENTITY", str(identity.path))
            yield made


def connected(pool: StandingPool) -> shoal.Lease:
    made = shoal.connect(pool.network_url, devices=2, memory="128MiB", transport="network")
    assert all(made.by_network)
    return made


@pytest.fixture(scope="module")
def shared() -> Iterator[list[shoal.Lease]]:
    """The lease that most tests here have in common: a reader takes seconds to start."""
    kept: list[shoal.Lease] = []
    yield kept
    for one in kept:
        one.close()


@pytest.fixture
def lease(pool: StandingPool, shared: list[shoal.Lease]) -> shoal.Lease:
    if not shared or not shared[0].active:
        shared[:] = [connected(pool)]
    return shared[0]


@pytest.fixture
def fresh(pool: StandingPool) -> Iterator[shoal.Lease]:
    """A lease for a test that breaks something."""
    with connected(pool) as made:
        yield made


def equal(got: Any, wanted: Any) -> bool:
    left, shape = pytree.tree_flatten(got)
    right, wanted_shape = pytree.tree_flatten(wanted)
    return shape == wanted_shape and all(
        a.dtype == b.dtype and torch.equal(a.cpu(), b) for a, b in zip(left, right, strict=True)
    )


def reader_pids(lease: shoal.Lease) -> list[int]:
    """Readers are the children of the workers' fork servers that are no workers."""
    forkers = {processes.parent(pid) for pid in lease.worker_pids}
    found = [child for forker in forkers for child in processes.children(forker)]
    return [p for p in found if p not in lease.worker_pids and processes.alive(p)]


def both(data: Any, **options: Any) -> tuple[Any, Any]:
    """The same loader, read at the nodes and in the program."""
    return (
        shoal.train.load(data, where="node", **options),
        shoal.train.load(data, where="program", **options),
    )


# --- what comes ---


@pytest.mark.parametrize(
    "name",
    [
        "npy",
        "dict",
        "large",
        "safetensors",
        "parquet",
        "arrow",
        "feather",
        "images",
        "tar",
        "shards",
    ],
)
def test_every_format_is_what_the_program_reads(
    lease: shoal.Lease, formats: dict[str, Any], name: str
) -> None:
    before = torch.shoal.traffic(1)
    there, here = both(formats[name], batch_size=8, seed=3)
    assert len(there) == len(here)
    assert set(there.places.values()) == {"node"}
    count = 0
    for got, wanted in zip(there, here, strict=True):
        assert isinstance(got, NodeBatch)
        first, second = got.split([len(got) // 2, len(got) - len(got) // 2])
        whole = pytree.tree_map(
            lambda a, b: torch.cat([a.cpu(), b.cpu()]),
            first.to_device(DEVICE),
            second.to_device(torch.device("shoal", 2)),
        )
        assert equal(whole, wanted)
        assert equal(got.to_device(DEVICE), wanted)
        count += len(got)
    assert count == len(there.source)
    after = torch.shoal.traffic(1)
    assert after["bytes_in"] == before["bytes_in"]
    assert after["bytes_node"] > before["bytes_node"]


def test_columns_of_a_table(lease: shoal.Lease, formats: dict[str, Any]) -> None:
    there, here = both(formats["parquet"], batch_size=8, columns=["v"])
    assert equal(next(iter(there)).to_device(DEVICE), next(iter(here)))


def test_a_loop_without_a_trainer_unpacks_the_batch(
    lease: shoal.Lease, formats: dict[str, Any]
) -> None:
    there, here = both(formats["npy"], batch_size=8)
    for (x, y), (wanted_x, wanted_y) in zip(there, here, strict=True):
        assert torch.equal(x, wanted_x)
        assert torch.equal(y, wanted_y)
    there, here = both(formats["dict"], batch_size=8)
    for got, wanted in zip(there, here, strict=True):
        assert torch.equal(got["a"], wanted["a"])
        assert set({**got}) == {"a", "b"}


def test_a_part_larger_than_the_readers_memory_comes_in_pieces(
    fresh: shoal.Lease, formats: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As much of the memory is used as there is, and used again when the worker is past the copies."""
    reader = reader_client.reader_of(fresh, 0)
    reader._slots = type(reader._slots)(256 * 1024)  # the large format has 20 KB a sample
    there, here = both(formats["large"], batch_size=40, shuffle=False)
    for _ in range(3):
        for got, wanted in zip(there, here, strict=True):
            assert equal(got.to_device(DEVICE), wanted)
    assert reader._slots.memory_bytes == 256 * 1024
    reader._slots = type(reader._slots)(8192)
    batch = next(iter(there))
    with pytest.raises(shoal.train.DataError, match=r'does not fit.*where="program"'):
        batch.to_device(DEVICE)


def test_a_slot_is_not_used_again_before_its_copy_is_done(
    fresh: shoal.Lease, formats: dict[str, Any]
) -> None:
    """The device is busy while batch after batch is sent through two slots' worth of memory."""
    reader = reader_client.reader_of(fresh, 0)
    reader._slots = type(reader._slots)(2**18)
    busy = torch.randn(400, 400, device=DEVICE)
    there, here = both(formats["large"], batch_size=5)
    sent = []
    for _ in range(2):
        for batch in there:
            busy = (busy @ busy).clamp(-1, 1)
            sent.append(batch.to_device(DEVICE))
    for got, wanted in zip(sent, [*here, *here], strict=True):
        assert equal(got, wanted)


def test_images_of_a_batch_may_differ_from_those_of_another(
    lease: shoal.Lease, folder: Path
) -> None:
    """The reader asks for a larger slot than the first picture made the program think."""
    images = folder / "sizes"
    for i, size in enumerate((2, 400, 900)):
        (images / f"c{i}").mkdir(parents=True)
        (images / f"c{i}" / "x.ppm").write_bytes(datasets.ppm(i, size, size))
    there, here = both(images, batch_size=1, shuffle=False)
    for got, wanted in zip(there, here, strict=True):
        assert equal(got.to_device(DEVICE), wanted)
    mixed = shoal.train.load(images, 3, where="node")
    with pytest.raises(shoal.train.DataError, match="different shapes"):
        next(iter(mixed)).to_device(DEVICE)


# --- training ---


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 16), nn.ReLU(), nn.Linear(16, 3))
    return model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)


def train(loader: Any, groups: int, epochs: int = 2, **options: Any) -> list[float]:
    model, optimizer = made()
    losses = []
    options.setdefault("balance", False)
    with shoal.train.worker_groups(groups) as formed:
        with shoal.train.Trainer(
            model, nn.functional.cross_entropy, optimizer, formed, micro_batches=2, **options
        ) as trainer:
            for _ in range(epochs):
                for batch in shoal.train.Feed(loader, trainer.prepare):
                    losses.append(trainer.step(batch).loss)
    return losses


def test_losses_are_the_same_bits_and_no_data_goes_through_the_program(
    lease: shoal.Lease, formats: dict[str, Any]
) -> None:
    there, here = both(formats["npy"], batch_size=16, seed=5)
    train(here, 2)  # weights go to the devices and come back, whoever reads
    before = [torch.shoal.traffic(d) for d in (1, 2)]
    by_program = train(shoal.train.load(formats["npy"], 16, seed=5, where="program"), 2)
    between = [torch.shoal.traffic(d) for d in (1, 2)]
    assert train(there, 2) == by_program
    after = [torch.shoal.traffic(d) for d in (1, 2)]

    def moved(start: list[dict[str, int]], stop: list[dict[str, int]], key: str) -> int:
        return sum(b[key] - a[key] for a, b in zip(start, stop, strict=True))

    data_bytes = 2 * datasets.SAMPLES * (7 * 4 + 8)  # two epochs
    saved = moved(before, between, "bytes_in") - moved(between, after, "bytes_in")
    assert saved >= data_bytes * 0.7  # but for the first batch, which builds the model
    assert moved(between, after, "bytes_node") >= data_bytes


def test_fit_reads_at_the_nodes_and_validates_there(
    lease: shoal.Lease, formats: dict[str, Any]
) -> None:
    losses = {}
    for where in ("node", "program"):
        model, optimizer = made()
        history = shoal.train.fit(
            model, nn.functional.cross_entropy, optimizer,
            shoal.train.load(formats["npy"], 16, seed=1, where=where),
            groups=2, epochs=2, balance=False, progress=False,
            validation=shoal.train.load(formats["npy"], 20, shuffle=False, where=where),
        )  # fmt: skip
        losses[where] = history.losses, history.validation
    assert losses["node"][0] == losses["program"][0]
    for got, wanted in zip(losses["node"][1], losses["program"][1], strict=True):
        assert got == pytest.approx(wanted, abs=1e-6)  # divided by the devices' speeds


def test_two_stages(lease: shoal.Lease, formats: dict[str, Any]) -> None:
    losses = []
    for where in ("node", "program"):
        model, optimizer = made()
        with shoal.train.worker_groups(groups=1, devices=2) as groups:
            with shoal.train.Trainer(
                model, nn.functional.cross_entropy, optimizer, groups, tell=lambda _: None
            ) as trainer:
                loader = shoal.train.load(formats["npy"], 16, where=where)
                losses.append([trainer.step(batch).loss for batch in loader])
    assert losses[0] == losses[1]


def test_resuming_in_the_middle_of_an_epoch(lease: shoal.Lease, formats: dict[str, Any]) -> None:
    there, here = both(formats["shards"], batch_size=7, seed=2)
    wanted = list(here)
    started = iter(there)
    for _ in range(3):
        next(started)
    resumed = shoal.train.load(formats["shards"], 7, seed=2, where="node")
    resumed.load_state_dict(there.state_dict())
    rest = list(resumed)
    assert len(rest) == len(wanted) - 3
    for got, expected in zip(rest, wanted[3:], strict=True):
        assert equal(got.to_device(DEVICE), expected)
    # A state of either kind of reading goes on with the other.
    here.load_state_dict(there.state_dict())
    assert equal(next(iter(here)), wanted[3])


def test_batches_are_asked_for_ahead_of_their_step(
    lease: shoal.Lease, formats: dict[str, Any]
) -> None:
    """Once it is known how batches are divided, their parts are read before they are taken."""
    there, _ = both(formats["npy"], batch_size=4)
    model, optimizer = made()
    waits = []
    with shoal.train.worker_groups(2) as groups:
        with shoal.train.Trainer(
            model, nn.functional.cross_entropy, optimizer, groups, balance=False
        ) as trainer:
            reader = reader_client.reader_of(lease, 0)
            for batch in there:
                wanted = set(reader._pending)
                trainer.step(batch)
                waits.append(len(wanted) - len(wanted & reader._pending.keys()))
    assert waits[0] == 0  # nobody knew yet
    assert all(taken == 1 for taken in waits[6:-1]), waits  # the last batch is smaller


# --- where ---


def test_auto_reads_at_the_node_where_it_can(
    lease: shoal.Lease, formats: dict[str, Any], tmp_path: Path
) -> None:
    assert set(shoal.train.load(formats["npy"]).places.values()) == {"node"}
    np.save(tmp_path / "x.npy", np.arange(9))
    elsewhere = shoal.train.load(tmp_path / "x.npy", 3)
    for why in elsewhere.places.values():
        assert why.startswith("program: ")
        assert "--data" in why
    assert all(isinstance(batch, torch.Tensor) for batch in elsewhere)
    with_code = shoal.train.load(formats["npy"], 8, transform=lambda batch: batch)
    assert not isinstance(next(iter(with_code)), NodeBatch)
    assert with_code.places == {}


def test_what_cannot_be_read_at_the_node_says_why(
    lease: shoal.Lease, formats: dict[str, Any], folder: Path, tmp_path: Path
) -> None:
    def refused(data: Any, match: str, **options: Any) -> None:
        with pytest.raises(shoal.train.DataError, match=match):
            iter(next(iter(shoal.train.load(data, where="node", **options))))

    np.save(tmp_path / "x.npy", np.arange(9))
    refused(tmp_path / "x.npy", rf'where="node".*{tmp_path}.*--data {tmp_path}')
    (folder / "escape.npy").unlink(missing_ok=True)
    (folder / "escape.npy").symlink_to(tmp_path / "x.npy")
    refused(folder / "escape.npy", "not below a folder")
    (folder / "links" / "c").mkdir(parents=True, exist_ok=True)
    (tmp_path / "secret.ppm").write_bytes(datasets.ppm(1))
    (folder / "links" / "c" / "x.ppm").unlink(missing_ok=True)
    (folder / "links" / "c" / "x.ppm").symlink_to(tmp_path / "secret.ppm")
    refused(folder / "links", "not below a folder")
    refused(folder / "nothing.npy", "No such file")
    refused(np.arange(4), "more than paths")
    refused(TensorDataset(torch.arange(4)), "more than paths")
    refused(formats["npy"], "a transform", transform=lambda batch: batch)
    with tarfile.open(folder / "text.tar", "w") as archive:
        (tmp_path / "0.txt").write_text("words")
        archive.add(tmp_path / "0.txt", "0.txt")
    refused(folder / "text.tar", "numbers only")
    with pytest.raises(ValueError, match="where is one of"):
        shoal.train.load(formats["npy"], where="there")  # type: ignore[arg-type]


def test_a_file_that_the_program_cannot_see(
    lease: shoal.Lease, formats: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the node has it: order, length and runs come from there."""
    wanted = list(shoal.train.load(formats["parquet"], 8, seed=4, where="program"))

    def gone(*_: Any, **__: Any) -> Any:
        raise shoal.train.DataError("it does not exist")

    monkeypatch.setattr("shoal.train.data.loading.open_source", gone)
    with pytest.raises(shoal.train.DataError, match="does not exist"):
        shoal.train.load(formats["parquet"], 8)
    loader = shoal.train.load(formats["parquet"], 8, seed=4, where="node")
    for got, expected in zip(loader, wanted, strict=True):
        assert equal(got.to_device(DEVICE), expected)
        assert equal(got.to_device(torch.device("cpu")), expected)
        assert equal(got.tensors(), expected)


def test_a_node_that_serves_nothing(formats: dict[str, Any], tmp_path: Path) -> None:
    with StandingPool(tmp_path, listen=True) as closed:
        identity = closed.join("me")
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("SHOAL_IDENTITY", str(identity.path))
            with shoal.connect(closed.network_url, memory="32MiB", transport="network") as one:
                with pytest.raises(shoal.train.DataError, match=r"serves no files.*--data DIR"):
                    next(iter(shoal.train.load(formats["npy"], where="node")))
                assert not isinstance(next(iter(shoal.train.load(formats["npy"]))), NodeBatch)
                attached = one.attached[0]
                assert attached is not None
                with pytest.raises(shoal.LeaseError, match="serves no files"):
                    attached.open_reader(one.number, one.epoch)


def test_without_a_lease_the_program_reads(formats: dict[str, Any], tmp_path: Path) -> None:
    current = leases.current()
    if current is not None:
        current.close()
    there, here = both(formats["npy"], batch_size=8)
    for got, wanted in zip(there, here, strict=True):
        assert equal(got, wanted)
    with pytest.raises(shoal.train.DataError, match="Lease one first"):
        shoal.train.load(tmp_path / "nothing.npy", where="node")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--data", "/"), "add --listen ADDRESS"),
        (
            ("--listen", "127.0.0.1:1", "--data", "/etc/passwd"),
            "--data /etc/passwd is not a folder",
        ),
    ],
)
def test_folders_that_cannot_be_served(tmp_path: Path, options: tuple[str, ...], told: str) -> None:
    done = subprocess.run(
        shoal_command("up", "--name", "none", *options),
        env=programs.environment(SHOAL_STATE=str(tmp_path)), capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode != 0
    assert told in done.stderr


# --- when something breaks ---


def test_a_killed_reader_is_an_error_or_the_program_reads(
    fresh: shoal.Lease, formats: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    there, here = both(formats["npy"], batch_size=8)
    auto = shoal.train.load(formats["npy"], 8)
    wanted = list(here)
    batches, by_itself = iter(there), iter(auto)
    next(batches).to_device(DEVICE)
    assert equal(next(by_itself).to_device(DEVICE), wanted[0])
    for pid in reader_pids(fresh):
        os.kill(pid, signal.SIGKILL)
    with pytest.raises(shoal.train.DataError, match=r"reader of device .* is lost"):
        next(batches).to_device(DEVICE)
    with caplog.at_level(logging.WARNING, "shoal.train"):
        for expected in wanted[1:]:
            assert equal(next(by_itself).to_device(DEVICE), expected)
    assert "the program reads" in caplog.text
    assert sorted(where.split(":")[0] for where in auto.places.values()) == ["node", "program"]
    # The session itself is well, and a new loader gets a new reader.
    again = shoal.train.load(formats["npy"], 8, where="node")
    for got, expected in zip(again, wanted, strict=True):
        assert equal(got.to_device(DEVICE), expected)


def test_a_stopped_reader_holds_nobody_up_for_ever(
    fresh: shoal.Lease, formats: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    there = shoal.train.load(formats["npy"], 8, where="node")
    batches = iter(there)
    next(batches).to_device(DEVICE)
    monkeypatch.setattr(reader_client, "ANSWER_S", 0.5)
    for pid in reader_pids(fresh):
        os.kill(pid, signal.SIGSTOP)
    with pytest.raises(shoal.train.DataError, match=r"waited 0\.5 s for the data reader of device"):
        next(batches).to_device(DEVICE)
    for pid in reader_pids(fresh):
        os.kill(pid, signal.SIGCONT)
    assert len(next(batches).to_device(DEVICE)[0]) == 8


def test_a_reader_ends_with_its_lease(pool: StandingPool, formats: dict[str, Any]) -> None:
    with shoal.connect(pool.network_url, devices=2, memory="64MiB", transport="network") as lease:
        loader = shoal.train.load(formats["npy"], 8, where="node")
        next(iter(loader)).to_device(DEVICE)
        readers = reader_pids(lease)
        assert len(readers) == 2
    wait_until(lambda: not any(map(processes.alive, readers)), 30, "the readers have ended")


def test_a_reader_ends_with_its_worker(fresh: shoal.Lease, formats: dict[str, Any]) -> None:
    loader = shoal.train.load(formats["npy"], 8, where="node")
    batches = iter(loader)
    next(batches).to_device(DEVICE)
    readers = reader_pids(fresh)
    os.kill(fresh.worker_pids[0], signal.SIGKILL)
    wait_until(lambda: sum(map(processes.alive, readers)) == 1, 30, "its reader has ended")
    with pytest.raises(shoal.DeviceLostError):
        next(batches).to_device(DEVICE)
    assert len(next(batches).to_device(torch.device("shoal", 2))[0]) == 8


def test_a_node_that_falls_silent_is_a_lost_device(
    fresh: shoal.Lease, formats: dict[str, Any]
) -> None:
    """Nobody waits for its reader longer than for the device itself."""
    batches = iter(shoal.train.load(formats["npy"], 8, where="node"))
    next(batches).to_device(DEVICE)
    silent = [fresh.worker_pids[0], *reader_pids(fresh)]
    for pid in silent:
        os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(shoal.DeviceLostError):
            next(batches).to_device(DEVICE)
    finally:
        for pid in silent:
            os.kill(pid, signal.SIGKILL)


def test_many_loaders_one_after_another(lease: shoal.Lease, formats: dict[str, Any]) -> None:
    """A loader that nobody has any more is closed at the reader, too."""
    for _ in range(limits.DATA_SOURCES_MAX + 8):
        loader = shoal.train.load(formats["npy"], 8, where="node")
        assert len(next(iter(loader)).to_device(DEVICE)[0]) == 8
        with pytest.raises(shoal.train.DataError):
            next(iter(shoal.train.load((*formats["npy"], formats["images"]), 8, where="node")))


def test_what_weighs_a_batch_may_look_into_it(lease: shoal.Lease, formats: dict[str, Any]) -> None:
    losses = []
    for where in ("node", "program"):
        loader = shoal.train.load(formats["npy"], 16, where=where)
        losses.append(train(loader, 2, 1, weigh=lambda batch: batch[1].sum() + 1))
    assert losses[0] == losses[1]


def test_a_lost_group_leaves_its_part_to_the_others(
    fresh: shoal.Lease, formats: dict[str, Any]
) -> None:
    """The batch is numbers: it is divided again, and read where the others are."""
    model, optimizer = made()
    losses = []
    with shoal.train.worker_groups(2) as groups:
        with shoal.train.Trainer(
            model, nn.functional.cross_entropy, optimizer, groups,
            balance=False, on_lost="continue",
        ) as trainer:  # fmt: skip
            loader = shoal.train.load(formats["npy"], 16, seed=5, where="node")
            for number, batch in enumerate(shoal.train.Feed(loader, trainer.prepare)):
                losses.append(trainer.step(batch).loss)
                if number == 0:
                    trainer.synchronize()
                    os.kill(fresh.worker_pids[1], signal.SIGKILL)
            assert len(trainer.lost) == 1
    model, optimizer = made()
    wanted = []
    for x, y in shoal.train.load(formats["npy"], 16, seed=5, where="program"):
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        wanted.append(loss.item())
    assert losses == pytest.approx(wanted, abs=1e-5)
