"""Checks that this machine has the declared devices, before anything starts.

Only an accelerator needs torch for that, whose import takes two seconds.
"""

from __future__ import annotations

import difflib
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec

from shoal.errors import DeviceSpecError
from shoal.pool.base import limits
from shoal.pool.node.spec import DeviceSpec, host_memory_bytes
from shoal.units import show_bytes

KNOWN = ("cpu", "cuda", "xpu", "mtia")  # for those who mistype one
READABLE = {"cuda": "CUDA", "xpu": "XPU", "mtia": "MTIA"}


class Accelerator(msgspec.Struct, frozen=True):
    """What torch knows of a device type on this machine."""

    known: bool = False  # torch has a device type of this name
    usable: bool = False  # and a module for it: it computes
    built: bool = True  # this build of torch supports it
    count: int = 0
    torch: str = ""  # its version


def check(specs: Sequence[DeviceSpec]) -> list[str]:
    """Raise DeviceSpecError for a device that this machine cannot have; return warnings."""
    name, times = Counter(s.name for s in specs).most_common(1)[0] if specs else ("", 0)
    if times > 1:
        raise DeviceSpecError(f"{times} devices are named {name}; tell them apart with name=…")
    for spec in specs:
        if spec.device == "cpu":
            _check_memory(spec)
    kinds = {_kind(s) for s in specs} - {"cpu"}
    found = ask_torch(sorted(kinds)) if kinds else {}
    for spec in specs:
        if spec.device != "cpu":
            _check_accelerator(spec, found[_kind(spec)])
    return list(_warnings([s for s in specs if s.device == "cpu"]))


def ask_torch(kinds: Sequence[str]) -> dict[str, Accelerator]:
    """Return what torch knows of these device types. A child asks: counting devices may start a
    driver, and a process that did so cannot fork one that uses it.
    """
    source = f"from shoal.pool.node import machine; machine.print_answer({list(kinds)!r})"
    try:
        done = subprocess.run(
            [sys.executable, "-c", source],
            env={**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
            stdin=subprocess.DEVNULL, capture_output=True, timeout=limits.FIND_DEVICES_S, check=True,
        )  # fmt: skip
        return msgspec.json.decode(done.stdout, type=dict[str, Accelerator])
    except subprocess.CalledProcessError as error:
        last = error.stderr.decode(errors="replace").strip().splitlines()[-1:] or ["no reason"]
        raise DeviceSpecError(f"torch cannot be asked for its devices: {last[0]}") from None


def print_answer(kinds: Sequence[str]) -> None:
    import torch  # noqa: F401

    sys.stdout.write(msgspec.json.encode({kind: _ask_torch(kind) for kind in kinds}).decode())


def _ask_torch(kind: str) -> Accelerator:
    import torch

    version = str(torch.__version__)
    try:
        torch.device(kind)
    except RuntimeError:
        return Accelerator(torch=version)
    try:
        module = torch.get_device_module(kind)
        count = int(module.device_count()) if module.is_available() else 0
    except (RuntimeError, AttributeError):
        return Accelerator(known=True, torch=version)
    built = kind != "cuda" or bool(torch.version.cuda or torch.version.hip)
    return Accelerator(known=True, usable=True, built=built, count=count, torch=version)


def _kind(spec: DeviceSpec) -> str:
    return spec.device.partition(":")[0]


def _check_accelerator(spec: DeviceSpec, found: Accelerator) -> None:
    kind, _, index = spec.device.partition(":")
    shown = READABLE.get(kind, kind)
    if not found.known or not found.usable or kind == "shoal":
        near = difflib.get_close_matches(kind, KNOWN, n=1, cutoff=0.5)
        meant = f"Did you mean {near[0]}?" if near else "Write for example cpu or cuda:0."
        verb = "knows" if not found.known else "computes on"
        raise DeviceSpecError(f"{kind!r} is not a device that torch {verb}. {meant}")
    if not found.built:
        raise DeviceSpecError(
            f"this torch ({found.torch}) has no {shown}: {spec.device} cannot be offered. Install a "
            f"torch that is built with {shown}, or declare cpu"
        )
    if found.count == 0:
        list_with = " (nvidia-smi lists them)" if kind == "cuda" else ""
        raise DeviceSpecError(
            f"torch {found.torch} finds no {shown} device on this machine{list_with}: {spec.device} "
            "cannot be offered. Declare cpu instead"
        )
    if int(index or 0) >= found.count:
        there = f"{kind}:0" if found.count == 1 else f"{kind}:0 to {kind}:{found.count - 1}"
        raise DeviceSpecError(
            f"{spec.device} does not exist: this machine has {found.count} {shown} device(s), {there}"
        )


def _check_memory(spec: DeviceSpec) -> None:
    has = host_memory_bytes()
    if spec.memory_bytes is not None and spec.memory_bytes > has:
        raise DeviceSpecError(
            f"{spec.name}: memory={show_bytes(spec.memory_bytes).replace(' ', '')} is more than this "
            f"machine has, which is {show_bytes(has)}. Declare at most memory={has // 2**20}MiB"
        )


def _warnings(specs: Sequence[DeviceSpec]) -> Iterable[str]:
    cores = os.cpu_count() or 1
    for spec in specs:
        if spec.threads is not None and spec.threads > cores:
            yield (
                f"{spec.name}: threads={spec.threads} is more than this machine's {cores} core(s); "
                "they slow each other down"
            )
    together, has = sum(s.memory_bytes or 0 for s in specs), host_memory_bytes()
    if together > has:
        yield (
            f"the CPU devices together have {show_bytes(together)}, and this machine has "
            f"{show_bytes(has)}: sessions that use all of it may be killed"
        )
