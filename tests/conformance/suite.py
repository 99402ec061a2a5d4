"""All conformance checks under one roof: what they are called, and how each is run."""

from __future__ import annotations

import contextlib
import warnings
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

import shoal
from tests.conformance import modules, operators, optimizers
from tests.conformance.compare import Different

KINDS = ("operators", "modules", "optimizers")

#: Subjects that are about sparse layouts, which a shoal address cannot hold: they must be refused.
REFUSED = {"sparse.sampled_addmm", "sparse.mm.reduce", "to_sparse", "SparseAdam"}


@dataclass(frozen=True)
class Check:
    kind: str  # one of KINDS
    subject: str  # "nn.functional.relu", "nn.Linear", "Adam"
    variant: str  # "float32", "gradient", "train", "foreach"
    run: Callable[[], int]  # how many samples were compared

    @property
    def name(self) -> str:
        return f"{self.kind} {self.subject} {self.variant}"


@dataclass(frozen=True)
class Result:
    check: Check
    samples: int
    reason: str | None  # why it failed

    @property
    def passed(self) -> bool:
        return self.reason is None and self.samples > 0

    @property
    def failed(self) -> bool:
        return self.reason is not None

    @property
    def empty(self) -> bool:
        """Local torch accepts none of the samples: nothing was compared, so nothing was shown."""
        return self.reason is None and self.samples == 0


def all_checks() -> Iterator[Check]:
    for op in operators.database():
        for name, dtype, gradient in operators.checks(op):
            subject, variant = name.rsplit(" ", 1)
            yield Check(
                "operators",
                subject,
                variant,
                lambda op=op, d=dtype, g=gradient: operators.run_check(op, d, g),
            )
    for module in modules.database():
        for mode, training in modules.modes(module):
            yield Check(
                "modules",
                module.name,
                mode,
                lambda m=module, t=training: modules.run_check(m, t),
            )
    for optimizer in optimizers.database():
        for name, kwargs in optimizers.implementations(optimizer):
            yield Check(
                "optimizers",
                optimizer.name,
                name,
                lambda o=optimizer, k=kwargs: optimizers.run_check(o, k),
            )


def sample(checks: list[Check], one_in: dict[str, int]) -> list[Check]:
    """One subject in so many of each kind: the same ones on every machine and in every order."""
    return [c for c in checks if zlib.crc32(c.subject.encode()) % one_in[c.kind] == 0]


def run(check: Check) -> Result:
    """Runs one check. A lost worker is this check's failure and nobody else's."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            samples = check.run()
            torch.shoal.synchronize()  # an asynchronous error belongs to the check that caused it
    except Exception as error:
        reason = _reason(error)
        _settle()
        return Result(check, 0, reason)
    return Result(check, samples, None)


def _reason(error: Exception) -> str:
    """One line."""
    text = " ".join(str(error).split("\n[shoal]")[0].split())
    prefix = "" if isinstance(error, Different) else f"{type(error).__name__}: "
    return (prefix + text)[:240]


def _settle() -> None:
    """Leaves a device without pending errors, on a new lease if the old one is lost."""
    for _ in range(3):
        try:
            torch.shoal.synchronize()
            torch.ones(1, device="shoal").item()
            return
        except shoal.DeviceLostError:
            with contextlib.suppress(shoal.ShoalError):
                shoal.connect()
        except RuntimeError:
            continue
