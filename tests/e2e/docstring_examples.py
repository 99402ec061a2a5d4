"""Runs the example of every public name, in one program with a pool of two devices.

Prints each name whose example ran, and fails with all that raised or printed something else than
they say. Where an example shows no output, any output is right.
"""

from __future__ import annotations

import contextlib
import doctest
import io
import os
import traceback
from typing import Any

import numpy as np
import torch

import shoal
import shoal.memory
import shoal.train

#: What an example uses without making it: it says what matters, and its reader has the rest.
BEFORE = {
    "shoal.PeerLostError": "left = right = x",
    "shoal.DeviceLostError": "loss = (x * w.requires_grad_()).sum()",
    "shoal.open": "os.environ['TABLE'] = shoal.share(torch.ones(3, 4, device='shoal'))",
    "shoal.acquire": "weights = torch.ones(3, device='shoal'); update = weights.clone(); "
    "shoal.share(weights, mode='exclusive')",
    "shoal.release": "weights = torch.ones(3, device='shoal')",
    "shoal.unshare": "handle = shoal.share(torch.ones(3, device='shoal'))",
    "shoal.ShareRevokedError": "table = x.clone()",
    "shoal.memory.record": "step = lambda batch: x @ x",
    "shoal.memory.watch": "train = lambda model, batches: x @ x; batches = []",
    "torch.shoal.empty_cache": "y = x @ x",
    "shoal.train.Prepared": "trainer = new_trainer()",
    "shoal.train.Step": "trainer = new_trainer()",
    "shoal.train.TrainError": "trainer = new_trainer()",
    "shoal.train.BatchError": "trainer = new_trainer()",
    "shoal.train.GroupError": "trainer = new_trainer()",
    "shoal.train.GroupLostError": "trainer = new_trainer()",
    "shoal.train.NotFiniteError": "trainer = new_trainer()",
    "shoal.train.Loader": "trainer = new_trainer()",
    "shoal.train.CannotCut": "groups = shoal.train.worker_groups(1)",
    "shoal.train.WorkerGroup": "groups = shoal.train.worker_groups(1)",
    "shoal.train.Checkpoints": "snapshot = shoal.train.snapshot; step = 3",
    "shoal.train.snapshot": "snapshot = shoal.train.snapshot",
    "shoal.train.Feed": "Feed = shoal.train.Feed; prepare = lambda batch: batch",
    "shoal.memory.replay": "replay, Trace = shoal.memory.replay, shoal.memory.Trace",
    "shoal.train.StreamLoader": "dataset = torch.utils.data.TensorDataset(*batch)",
}
#: Examples that need more than a pool. Other tests run what they show.
ELSEWHERE = {
    "shoal.Handle",  # a second program: tests/pool/memory
    "shoal.Task",  # a standing pool with a runner: tests/pool/test_tasks.py
    "shoal.submit",
    "shoal.connect",  # a device with 1 GiB
    "shoal.train.worker_groups",  # four devices
}


def new_trainer(model: torch.nn.Module, groups: Any) -> shoal.train.Trainer:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return shoal.train.Trainer(model, torch.nn.functional.cross_entropy, optimizer, groups)


def names() -> dict[str, Any]:
    """Return what every example may use."""
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = (torch.randn(16, 4), torch.zeros(16, dtype=torch.int64))
    made: dict[str, Any] = {
        "os": os, "torch": torch, "shoal": shoal, "F": torch.nn.functional, "model": model,
        "optimizer": optimizer, "loss": torch.nn.functional.cross_entropy, "batch": batch,
        "loader": [batch], "x": torch.ones(4, 4, device="shoal"), "w": torch.ones(4, device="shoal"),
    }  # fmt: skip
    made["new_trainer"] = lambda: new_trainer(
        torch.nn.Linear(4, 2), shoal.train.worker_groups(groups=1)
    )
    return made


def run(name: str, example: doctest.DocTest, pool: shoal.Pool) -> str:
    """Run an example like doctest. Return what went wrong."""
    if torch.shoal.device_count() != 3:  # two devices and the whole; the one before took its own
        shoal.connect(pool.url, devices=2)
    torch.shoal.set_device(0)
    example.globs = names()
    exec(BEFORE.get(name, ""), example.globs)
    for part in example.examples:
        part.options[doctest.IGNORE_EXCEPTION_DETAIL] = True
    said = io.StringIO()
    runner = doctest.DocTestRunner(checker=Checker(), verbose=False, optionflags=doctest.ELLIPSIS)
    runner.run(example, out=said.write, clear_globs=True)
    return said.getvalue()


class Checker(doctest.OutputChecker):
    """Accepts any output where the example shows none."""

    def check_output(self, want: str, got: str, optionflags: int) -> bool:
        return not want or "…" in want or super().check_output(want, got, optionflags)


def main() -> None:
    np.save("x.npy", np.random.default_rng(0).standard_normal((64, 4)).astype("float32"))
    np.save("y.npy", np.zeros(64, dtype="int64"))
    for name in ("tokens.npy", "labels.npy"):
        np.save(name, np.zeros((64, 8), dtype="int64"))
    wrong: list[str] = []
    with shoal.up(["cpu,memory=64MiB,threads=1"] * 2) as pool:
        os.environ["SHOAL_POOL"] = pool.url
        shoal.connect(pool.url, devices=2)
        for module in (torch.shoal, shoal.memory, shoal, shoal.train):
            label = module.__name__.replace("shoal.device.module", "torch.shoal")
            for short in module.__all__:
                full = f"{label}.{short}"
                text = getattr(module, short).__doc__ or ""
                if full in ELSEWHERE or full == "shoal.memory":
                    continue
                parsed = doctest.DocTestParser().get_doctest(text, {}, full, None, None)
                assert parsed.examples, f"{full} shows no example"
                try:
                    with contextlib.redirect_stderr(io.StringIO()):
                        said = run(full, parsed, pool)
                except Exception:
                    said = f"{full}:\n{traceback.format_exc()}"
                if said:
                    wrong.append(said)
                else:
                    print(full, flush=True)
    if wrong:
        raise SystemExit("\n".join(wrong))


if __name__ == "__main__":
    main()
