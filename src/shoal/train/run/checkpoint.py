"""Checkpoints: safetensors and JSON in a folder that appears whole or not at all.

Shoal writes a checkpoint into a hidden folder, flushes every file and the folder to the disk, and then
renames the folder. `state.json` holds the size and checksum of each file and of itself. A checkpoint
whose files do not match is ignored.
"""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
import threading
import zlib
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from torch.optim import Optimizer

from shoal.train.group.errors import CheckpointError

FORMAT = 2
STATE = "state.json"
MODEL, OPTIMIZER = "model.safetensors", "optimizer.safetensors"
_NAME = re.compile(r"step-(\d{9})")


@dataclass(slots=True)
class Snapshot:
    """The state of a training after one step, in host memory.

    >>> saved = shoal.train.snapshot(model, optimizer, step=100)
    >>> print(saved.step, list(saved.model))
    """

    step: int
    model: dict[str, torch.Tensor]
    optimizer: dict[str, torch.Tensor] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)  # the optimizer's numbers
    extra: dict[str, Any] = field(default_factory=dict)  # what JSON can hold


def snapshot(
    model: nn.Module, optimizer: Optimizer | None, step: int, extra: dict[str, Any] | None = None
) -> Snapshot:
    """Copy weights and state to the host; the training may go on meanwhile.

    >>> saved = snapshot(model, optimizer, step=100)
    """
    # A list that grows while it is written would not match its own checksum.
    taken = Snapshot(step, _host(model.state_dict()), extra=copy.deepcopy(extra or {}))
    if optimizer is not None:
        state = optimizer.state_dict()
        taken.settings = {"param_groups": copy.deepcopy(state["param_groups"]), "state": {}}
        for index, values in state["state"].items():
            for key, value in values.items():
                if isinstance(value, torch.Tensor):
                    taken.optimizer[f"{index}.{key}"] = _own(value)
                else:
                    taken.settings["state"][f"{index}.{key}"] = value
    return taken


def _host(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copy tensors to the host; tied weights once, under their first name."""
    found: dict[str, torch.Tensor] = {}
    seen: set[tuple[torch.device, int]] = set()
    for name, tensor in tensors.items():
        key = (tensor.device, tensor.data_ptr())
        if tensor.numel() and key in seen:
            continue
        seen.add(key)
        found[name] = _own(tensor)
    return found


def _own(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor to host memory that no one else changes."""
    host = tensor.detach().to("cpu")
    return host.clone() if host.data_ptr() == tensor.data_ptr() else host.contiguous()


def restore(saved: Snapshot, model: nn.Module, optimizer: Optimizer | None = None) -> None:
    """Load a snapshot into a model and an optimizer, on any device.

    >>> saved = shoal.train.latest("runs/gpt")
    >>> if saved is not None:
    ...     shoal.train.restore(saved, model, optimizer)
    """
    missing, unexpected = model.load_state_dict(saved.model, strict=False)
    tied = _host(model.state_dict()).keys()
    lacking = [name for name in missing if name in tied]
    if lacking or unexpected:
        raise CheckpointError(
            f"the checkpoint does not match the model. Missing keys: {lacking[:3]}. Unexpected keys: "
            f"{unexpected[:3]}. Load it into the model that wrote it."
        )
    if optimizer is None:
        return
    state: dict[int, dict[str, Any]] = {}
    for name, value in [*saved.optimizer.items(), *saved.settings["state"].items()]:
        index, _, key = name.partition(".")
        state.setdefault(int(index), {})[key] = value
    try:
        groups = copy.deepcopy(saved.settings["param_groups"])
        optimizer.load_state_dict({"state": state, "param_groups": groups})
    except (ValueError, KeyError) as error:
        raise CheckpointError(f"the checkpoint does not match the optimizer: {error}") from None


def write(folder: Path, saved: Snapshot) -> Path:
    """Write a checkpoint. When this returns, it is on the disk under its name."""
    final = folder / f"step-{saved.step:09d}"
    hidden = folder / f".writing-{saved.step:09d}-{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(hidden, ignore_errors=True)
        hidden.mkdir()
        save_file(saved.model, hidden / MODEL)
        save_file(saved.optimizer, hidden / OPTIMIZER)
        state = {
            "format": FORMAT,
            "step": saved.step,
            "files": {name: _measure(hidden / name) for name in (MODEL, OPTIMIZER)},
            "settings": saved.settings,
            "extra": saved.extra,
        }
        (hidden / STATE).write_text(json.dumps({**state, "checksum": _checksum(state)}))
        for name in (MODEL, OPTIMIZER, STATE):
            _flush(hidden / name)
        _flush(hidden)
        shutil.rmtree(final, ignore_errors=True)
        hidden.rename(final)
        _flush(folder)
    except TypeError as error:
        shutil.rmtree(hidden, ignore_errors=True)
        raise CheckpointError(f"{final}: {error}; checkpoints hold tensors and JSON") from None
    except (OSError, SafetensorError) as error:
        shutil.rmtree(hidden, ignore_errors=True)
        raise CheckpointError(f"{final} could not be written: {error}") from error
    return final


def read(path: Path) -> Snapshot:
    """Read a checkpoint. Raise if it is incomplete or damaged."""
    try:
        state = json.loads((path / STATE).read_text())
        if state["format"] != FORMAT:
            raise CheckpointError(
                f"{path} has format {state['format']}; this version of Shoal reads format {FORMAT}"
            )
        if state.pop("checksum") != _checksum(state):
            raise CheckpointError(f"{path / STATE} is damaged")
        for name in (MODEL, OPTIMIZER):
            if _measure(path / name) != state["files"][name]:
                raise CheckpointError(f"{path / name} is damaged")
        model, optimizer = load_file(path / MODEL), load_file(path / OPTIMIZER)
        return Snapshot(int(state["step"]), model, optimizer, state["settings"], state["extra"])
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise CheckpointError(f"{path} is not a complete checkpoint: {error}") from None


def all_steps(folder: Path) -> list[tuple[int, Path]]:
    """Return the checkpoints of a folder, oldest first, without those still being written."""
    if not folder.is_dir():
        return []
    found = [(_NAME.fullmatch(p.name), p) for p in folder.iterdir() if p.is_dir()]
    return sorted((int(match.group(1)), path) for match, path in found if match)


def latest(folder: str | Path) -> Snapshot | None:
    """Read the newest complete checkpoint; skip damaged ones.

    >>> saved = shoal.train.latest("runs/gpt")
    """
    for _, path in reversed(all_steps(Path(folder))):
        try:
            return read(path)
        except CheckpointError:
            continue
    return None


def _checksum(state: dict[str, Any]) -> int:
    """Compute a checksum of the JSON value, not of its bytes: the file holds its own checksum."""
    return zlib.crc32(json.dumps(state, sort_keys=True).encode())


def _measure(path: Path) -> list[int]:
    """Return size and checksum."""
    size = checksum = 0
    with path.open("rb") as file:
        while chunk := file.read(2**22):
            size += len(chunk)
            checksum = zlib.crc32(chunk, checksum)
    return [size, checksum]


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Checkpoints:
    """A folder of checkpoints, written in the background; the newest `keep` stay.

    >>> checkpoints = shoal.train.Checkpoints("runs/gpt", keep=3)
    >>> checkpoints.save(snapshot(model, optimizer, step))
    >>> checkpoints.wait()
    """

    def __init__(self, folder: str | Path, keep: int = 3) -> None:
        if keep < 1:
            raise CheckpointError(f"keep must be at least 1 (got {keep})")
        self.folder = Path(folder)
        self.keep = keep
        self._writing: Future[Path] | None = None
        self._lock = threading.Lock()
        self._remove_unfinished()

    def save(self, saved: Snapshot) -> None:
        """Start to write. Wait for the previous one, and raise if it failed."""
        with self._lock:
            self._finish()
            self._writing = writing = Future[Path]()
            threading.Thread(
                target=self._write, args=(saved, writing), name="shoal-checkpoint", daemon=True
            ).start()

    def wait(self) -> None:
        """Wait until the last one is on the disk. Raise `CheckpointError` if it failed."""
        with self._lock:
            self._finish()

    def latest(self) -> Snapshot | None:
        """Read the newest complete checkpoint."""
        self.wait()
        return latest(self.folder)

    def _finish(self) -> None:
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def _write(self, saved: Snapshot, writing: Future[Path]) -> None:
        try:
            path = write(self.folder, saved)
            for _, old in _too_many(all_steps(self.folder), self.keep):
                shutil.rmtree(old, ignore_errors=True)
        except BaseException as error:  # the next save() or wait() raises it
            writing.set_exception(error)
        else:
            writing.set_result(path)

    def _remove_unfinished(self) -> None:
        """Remove what a program left behind that ended while writing."""
        if self.folder.is_dir():
            for path in self.folder.glob(".writing-*"):
                pid = path.name.rpartition("-")[2]
                if not pid.isdecimal() or not Path(f"/proc/{pid}").exists():
                    shutil.rmtree(path, ignore_errors=True)


def _too_many(steps: Sequence[tuple[int, Path]], keep: int) -> Sequence[tuple[int, Path]]:
    return steps[: max(0, len(steps) - keep)]
