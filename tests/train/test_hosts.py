"""Groups on devices of two hosts: the same losses, and no gradient comes through the client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.cluster import Cluster
from tests.support.namespaces import Hosts


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A client at a desk, one device at the head's host and one at another."""
    with Hosts(3) as hosts:
        made = Cluster(hosts, tmp_path_factory.mktemp("cluster"), memory="192MiB")
        try:
            made.desk.shoal(*made.join_line.split()[1:])
            yield made
        finally:
            made.close()


def at_desk(cluster: Cluster, source: str) -> Any:
    """What a program at the desk prints as its last line, which is JSON."""
    done = cluster.desk.python(PRELUDE + source)
    assert done.code == 0, done.out + done.err
    return json.loads(done.out.splitlines()[-1])


PRELUDE = """
import json, logging, os, signal, torch, shoal, shoal.train
from tests.train.models import Gpt, token_loss, tokens

STEPS, SAMPLES = 4, 8

def made():
    torch.manual_seed(0)
    return Gpt(width=64)

def train(layout, after_first=lambda: None, **options):
    model = made()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    with shoal.train.worker_groups(**layout) as groups:
        with shoal.train.Trainer(
            model, token_loss, optimizer, groups, micro_batches=2, balance=False, **options
        ) as trainer:
            losses = []
            for step in range(STEPS):
                losses.append(trainer.step(tokens(step, SAMPLES)).loss)
                if step == 0:
                    trainer.synchronize()
                    after_first()
            trainer.synchronize()
            used = trainer.layout
            counted = [torch.shoal.traffic(d) for d in range(1, 3)]
    return losses, used, counted

"""

TRAINING = """
def counted():
    global before
    before = [torch.shoal.traffic(d) for d in range(1, 3)]

found = {}
with shoal.connect(devices=2, memory="128MiB") as lease:
    assert all(lease.by_network) and {d.info.name for d in lease.granted} == {"near", "far"}
    found["one"] = train({"groups": 1})[0]
    for name, layout in (("data", {"groups": 2}), ("stages", {"groups": 1, "devices": 2})):
        losses, used, after = train(layout, counted)
        moved = {
            key: sum(a[key] - b[key] for a, b in zip(after, before))
            for key in ("bytes_in", "bytes_out", "bytes_peer")
        }
        found[name] = {"losses": losses, "layout": used, **moved}
model = made()
optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
found["local"] = []
for step in range(STEPS):
    x, y = tokens(step, SAMPLES)
    loss = token_loss(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    found["local"].append(loss.item())
found["weights_bytes"] = sum(p.nbytes for p in model.parameters())
print(json.dumps(found))
"""


def test_two_hosts_train_as_one_device(cluster: Cluster) -> None:
    found = at_desk(cluster, TRAINING)
    assert found["one"] == pytest.approx(found["local"], abs=1e-5)
    weights, steps = found["weights_bytes"], 3
    for name in ("data", "stages"):
        ran = found[name]
        assert ran["losses"] == pytest.approx(found["local"], abs=1e-5)
        assert sorted(name for group in ran["layout"] for name in group) == ["far", "near"]
        through_client = ran["bytes_in"] + ran["bytes_out"]
        assert 0 < through_client < weights / 10, ran  # batches and losses, never gradients
    # Each gradient goes to its owner, and each owner's weights go back: half of them each way.
    assert found["data"]["bytes_peer"] >= steps * weights
    assert found["stages"]["bytes_peer"] > 0


STALL = """
told = []

class Kept(logging.Handler):
    def emit(self, record):
        told.append(record.getMessage())

logging.getLogger("shoal.train").addHandler(Kept())
shoal.connect(devices=2, memory="128MiB")
lease = shoal.device.leases.current()
victim = lease.worker_pids[1]
try:
    train({"groups": 2}, lambda: os.kill(victim, signal.SIGSTOP))
except shoal.train.GroupLostError as error:
    found = {"group": error.group, "devices": error.devices, "step": error.step}
finally:
    os.kill(victim, signal.SIGKILL)
found["name"] = lease.granted[1].info.name
found["told"] = told
print(json.dumps(found))
"""


def test_a_host_that_falls_silent_is_named(cluster: Cluster) -> None:
    """First that nothing is heard of it, then that it is lost: with group, device and step."""
    found = at_desk(cluster, STALL)
    device = f"{found['name']} (shoal:2)"
    assert (found["group"], found["devices"]) == (1, [device])
    assert found["step"] >= 1
    assert found["told"]
    text = found["told"][0]
    assert f"group 1 ({device}), step " in text
    assert "no heartbeat for" in text
