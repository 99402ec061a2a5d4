"""Checkpoints: whole or not there, whatever happens while they are written."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from shoal.train.group.errors import CheckpointError
from shoal.train.run.checkpoint import (
    STATE,
    Checkpoints,
    Snapshot,
    all_steps,
    latest,
    read,
    restore,
    snapshot,
    write,
)
from tests.support.programs import start


def tied() -> nn.Module:
    model = nn.Sequential(nn.Embedding(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 5, bias=False))
    model[2].weight = model[0].weight
    return model


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.arange(5)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.AdamW(p, lr=0.1),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.Adagrad(p),
        lambda p: torch.optim.SGD(p, lr=0.1),
    ],
)
def test_training_goes_on_as_if_it_had_not_stopped(tmp_path: Path, make: object) -> None:
    model, other = tied(), tied()
    ours, theirs = make(model.parameters()), make(other.parameters())  # type: ignore[operator]
    step(model, ours)
    write(tmp_path, snapshot(model, ours, 1, {"note": [1, "x"]}))
    saved = latest(tmp_path)
    assert saved is not None
    assert saved.extra == {"note": [1, "x"]}
    restore(saved, other, theirs)
    for _ in range(2):
        step(model, ours)
        step(other, theirs)
    for a, b in zip(model.state_dict().values(), other.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    assert other[0].weight is other[2].weight  # type: ignore[index]


def test_a_snapshot_does_not_change_with_the_training() -> None:
    model = nn.Linear(2, 2)
    losses = [1.0]
    taken = snapshot(model, None, 0, {"losses": losses})
    before = taken.model["weight"].clone()
    with torch.no_grad():
        model.weight.add_(1)
    losses.append(2.0)  # while the snapshot is being written
    assert torch.equal(taken.model["weight"], before)
    assert taken.extra == {"losses": [1.0]}


def test_the_newest_are_kept(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    for number in range(5):
        checkpoints.save(Snapshot(number, {"x": torch.full((3,), float(number))}))
    checkpoints.wait()
    assert [number for number, _ in all_steps(tmp_path)] == [3, 4]
    saved = checkpoints.latest()
    assert saved is not None
    assert saved.model["x"].tolist() == [4, 4, 4]


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "state.json"])
@pytest.mark.parametrize("damage", ["cut", "flip", "remove", "empty"])
def test_a_damaged_one_is_passed_over(tmp_path: Path, name: str, damage: str) -> None:
    model = nn.Linear(3, 3)
    optimizer = torch.optim.Adam(model.parameters())
    step_model = model(torch.ones(1, 3)).sum()
    step_model.backward()
    optimizer.step()
    for number in (1, 2):
        write(tmp_path, snapshot(model, optimizer, number))
    path = all_steps(tmp_path)[-1][1] / name
    data = bytearray(path.read_bytes())
    if damage == "remove":
        path.unlink()
    elif damage == "flip":
        data[len(data) // 2 if name != "state.json" else 0] ^= 0xFF
        path.write_bytes(data)
    else:
        path.write_bytes(data[: len(data) - 7] if damage == "cut" else b"")
    saved = latest(tmp_path)
    assert saved is not None
    assert saved.step == 1
    with pytest.raises(CheckpointError, match="step-000000002"):
        read(path.parent)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint as training writes it."""
    model = nn.Linear(3, 3)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    extra = {"losses": [0.5, 0.25], "loader": {"epoch": 1, "batches": 2}, "scheduler": None}
    return write(tmp_path_factory.mktemp("whole"), snapshot(model, optimizer, 3, extra))


@given(st.data())
def test_cut_or_changed_at_any_byte_it_is_never_taken(whole: Path, data: st.DataObject) -> None:
    """Whatever a crash or a bad disk leaves of one of the files; the others are as they were."""
    path = whole / data.draw(st.sampled_from(["model.safetensors", "optimizer.safetensors", STATE]))
    good = path.read_bytes()
    at = data.draw(st.integers(0, len(good) - 1))
    if data.draw(st.booleans()):
        bad = good[:at]
    else:
        bad = good[:at] + bytes([good[at] ^ data.draw(st.integers(1, 255))]) + good[at + 1 :]
    path.write_bytes(bad)
    try:
        with pytest.raises(CheckpointError):
            read(whole)
        assert latest(whole.parent) is None
    finally:
        path.write_bytes(good)
    assert read(whole).step == 3


@pytest.fixture
def full_disk() -> Iterator[None]:
    """No file of this process may grow beyond 64 KiB: writing fails as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, old)


@pytest.mark.usefixtures("full_disk")
def test_a_full_disk_is_an_error_and_leaves_nothing_behind(tmp_path: Path) -> None:
    small, large = {"x": torch.zeros(10)}, {"x": torch.zeros(100_000)}
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(Snapshot(1, small))
    checkpoints.save(Snapshot(2, large))
    with pytest.raises(CheckpointError, match=r"step-000000002 could not be written"):
        checkpoints.wait()
    assert [p.name for p in tmp_path.iterdir()] == ["step-000000001"]
    saved = checkpoints.latest()
    assert saved is not None
    assert saved.step == 1
    checkpoints.save(Snapshot(3, small))  # and the next one is tried again
    checkpoints.wait()


def test_a_program_that_is_killed_leaves_a_whole_one(tmp_path: Path) -> None:
    program = start(
        """
        import sys, torch
        from pathlib import Path
        from shoal.train.run.checkpoint import Snapshot, write
        for step in range(1, 10**6):
            write(Path(sys.argv[1]), Snapshot(step, {"x": torch.full((300_000,), float(step))}))
            print(step, flush=True)
        """,
        str(tmp_path),
        PYTHONPATH=os.pathsep.join(sys.path),
    )
    try:
        assert program.stdout is not None
        while int(program.stdout.readline()) < 3:
            pass
    finally:
        os.kill(program.pid, signal.SIGKILL)
        program.communicate()
    saved = latest(tmp_path)
    assert saved is not None
    assert saved.step >= 3
    assert saved.model["x"].eq(saved.step).all()
    Checkpoints(tmp_path)
    assert not list(tmp_path.glob(".writing-*"))


def test_what_does_not_belong_is_explained(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(CheckpointError, match=r"does not match the model.*'weight'"):
        restore(Snapshot(0, {"other": torch.ones(1)}), model)
    saved = snapshot(model, torch.optim.SGD([model.weight], lr=1), 0)
    with pytest.raises(CheckpointError, match="does not match the optimizer"):
        restore(saved, model, torch.optim.SGD(model.parameters(), lr=1))
    with pytest.raises(CheckpointError, match="JSON"):
        write(tmp_path, Snapshot(0, {}, extra={"f": object()}))
    with pytest.raises(CheckpointError, match="at least 1"):
        Checkpoints(tmp_path, keep=0)
    path = write(tmp_path, saved)
    state = json.loads((path / "state.json").read_text())
    (path / "state.json").write_text(json.dumps({**state, "format": 99}))
    with pytest.raises(CheckpointError, match="format 99"):
        read(path)
    assert latest(tmp_path) is None
    assert latest(tmp_path / "nowhere") is None
    shutil.rmtree(path)
