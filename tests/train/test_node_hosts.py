"""Data on other hosts: network namespaces, and a node that sees files of its own where the program sees
others (a mount namespace).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.cluster import Cluster
from tests.support.namespaces import Hosts

SAMPLES, WIDTH = 256, 4096  # 16 KiB a sample, 4 MiB of data

# Runs a command with folder $1 mounted over folder $2.
OWN_VIEW = ("unshare", "-m", "sh", "-c", 'mount --bind "$1" "$2" && shift 2 && exec "$@"', "sh")


def write(folder: Path, seed: int = 0) -> None:
    rng = np.random.default_rng(seed)
    folder.mkdir(exist_ok=True)
    np.save(folder / "x.npy", rng.standard_normal((SAMPLES, WIDTH)).astype(np.float32))
    np.save(folder / "y.npy", rng.integers(0, 3, SAMPLES))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Cluster, Path]]:
    """`same` is the same everywhere; `own` has other bytes at the node, and a file that only it has;
    `private` is not served."""
    directory = tmp_path_factory.mktemp("cluster")
    for name in ("same", "own", "private"):
        write(directory / name)
    write(directory / "view", seed=1)
    np.save(directory / "view" / "only.npy", np.arange(60, dtype=np.float32).reshape(30, 2))
    # Nothing else should run beside what is tested, nor be there still when the hosts go.
    served = ("--no-profile", "--data", f"{directory}/same", "--data", f"{directory}/own")
    wrap = (*OWN_VIEW, str(directory / "view"), str(directory / "own"))
    with Hosts(3) as hosts:
        made = Cluster(hosts, directory, memory="192MiB", options=served, node_wrap=wrap)
        try:
            made.desk.shoal(*made.join_line.split()[1:])
            yield made, directory
        finally:
            made.close()


def at_desk(cluster: tuple[Cluster, Path], source: str) -> Any:
    """What a program at the desk prints as its last line, which is JSON."""
    made, directory = cluster
    done = made.desk.python(f"FOLDER = {str(directory)!r}\n" + PRELUDE + source)
    assert done.code == 0, done.out + done.err
    return json.loads(done.out.splitlines()[-1])


PRELUDE = """
import json, logging, torch, shoal, shoal.train
from pathlib import Path
from torch import nn

FOLDER = Path(FOLDER)

def train(where, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4096, 8), nn.ReLU(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    loader = shoal.train.load(
        (FOLDER / "same/x.npy", FOLDER / "same/y.npy"), 32, seed=7, where=where
    )
    losses = []
    with shoal.train.worker_groups(2) as groups:
        with shoal.train.Trainer(
            model, nn.functional.cross_entropy, optimizer, groups, balance=False
        ) as trainer:
            for batch in shoal.train.Feed(loader, trainer.prepare):
                losses.append(trainer.step(batch).loss)
                if len(losses) == 1:
                    trainer.synchronize()
                    before = [torch.shoal.traffic(d) for d in (1, 2)]
            trainer.synchronize()
            after = [torch.shoal.traffic(d) for d in (1, 2)]
    keys = ("bytes_in", "bytes_node", "stream_bytes")
    moved = {k: sum(a[k] - b[k] for a, b in zip(after, before)) for k in keys}
    return {"losses": losses, "places": loader.places, **moved}

def sent():
    # What has left this host, as its only network card counts it.
    return int(Path("/proc/net/dev").read_text().split("eth0:")[1].split()[8])
"""

SAME = """
found = {}
with shoal.connect(devices=2, memory="128MiB") as lease:
    assert all(lease.by_network)
    train("program")
    for where in ("program", "auto", "node"):
        start = sent()
        found[where] = train(where)
        found[where]["sent"] = sent() - start
print(json.dumps(found))
"""


def test_two_hosts_read_for_themselves(cluster: tuple[Cluster, Path]) -> None:
    found = at_desk(cluster, SAME)
    program = found["program"]
    data_bytes = SAMPLES * WIDTH * 4
    assert program["bytes_in"] > data_bytes / 2
    assert program["sent"] > data_bytes
    for where in ("auto", "node"):
        ran = found[where]
        assert ran["places"] == {"near": "node", "far": "node"}
        assert ran["losses"] == program["losses"]
        assert ran["bytes_in"] < data_bytes / 100
        assert ran["bytes_node"] > data_bytes / 2
        # Weights and operators go either way; what the card counts less is the data.
        assert program["sent"] - ran["sent"] > data_bytes * 0.7


DIFFERENT = """
told = []

class Kept(logging.Handler):
    def emit(self, record):
        told.append(record.getMessage())

logging.getLogger("shoal.train").addHandler(Kept())
found = {}
with shoal.connect(devices=2, memory="64MiB"):
    own = (FOLDER / "own/x.npy", FOLDER / "own/y.npy")
    loader = shoal.train.load(own, 32)
    found["places"] = loader.places
    found["told"] = told
    for name in ("own/x.npy", "private/x.npy"):
        try:
            next(iter(shoal.train.load(FOLDER / name, 32, where="node")))
        except shoal.train.DataError as error:
            found[name] = str(error)
    # One group reads at its node, the other's part comes from the program.
    batch = next(iter(loader))
    wanted = next(iter(shoal.train.load(own, 32, where="program")))
    places = {d.info.name: i for i, d in enumerate(shoal.device.leases.current().granted, 1)}
    found["mixed"] = []
    for name, part, x in zip(("near", "far"), batch.split([16, 16]), wanted[0].split(16)):
        device = torch.device("shoal", places[name])
        got = part.to_device(device)[0]
        found["mixed"].append(torch.equal(got.cpu(), x))
    found["traffic"] = {n: torch.shoal.traffic(i)["bytes_node"] for n, i in places.items()}
print(json.dumps(found))
"""


def test_a_file_that_differs_at_a_node_is_not_read_there(cluster: tuple[Cluster, Path]) -> None:
    found = at_desk(cluster, DIFFERENT)
    assert found["places"]["near"] == "node"
    assert (
        "is not the same file at the node of far: the same size, but different bytes"
        in (found["places"]["far"])
    )
    assert any("not the same file" in text for text in found["told"])
    assert "not the same file" in found["own/x.npy"]
    assert "not below a folder" in found["private/x.npy"]
    assert "--data" in found["private/x.npy"]
    assert found["mixed"] == [True, True]
    assert found["traffic"]["near"] > 0
    assert found["traffic"]["far"] == 0


HALF_HERE = """
import torch, shoal
found = {}
with shoal.connect(devices=2, memory="128MiB") as lease:
    assert sorted(lease.by_network) == [False, True]
    far = lease.by_network.index(True) + 1
    for where in ("program", "auto", "node"):
        before = [torch.shoal.traffic(d)["bytes_node"] for d in (far, 3 - far)]
        found[where] = train(where)
        after = [torch.shoal.traffic(d)["bytes_node"] for d in (far, 3 - far)]
        found[where]["read"] = [b - a for a, b in zip(before, after)]
print(json.dumps(found))
"""


def test_a_group_here_and_one_elsewhere(cluster: tuple[Cluster, Path]) -> None:
    """The program is on the head's machine: it reads for the device there, the node for its own."""
    made, directory = cluster
    code = json.loads(made.head.shoal("code", "--json"))["command"]
    made.head.shoal(*code.split()[1:])
    done = made.head.python(f"FOLDER = {str(directory)!r}\n" + PRELUDE + HALF_HERE)
    assert done.code == 0, done.out + done.err
    found = json.loads(done.out.splitlines()[-1])
    half = SAMPLES * WIDTH * 4 // 2
    for where in ("auto", "node"):
        assert found[where]["losses"] == found["program"]["losses"]
        assert found[where]["places"]["far"] == "node"
        assert found[where]["places"]["near"] == "program: the device is on this machine"
        far, near = found[where]["read"]
        assert far > half * 0.8
        assert near == 0


ONLY = """
path = FOLDER / "own/only.npy"
assert not path.exists()
with shoal.connect(devices=1, kind="far", memory="64MiB"):
    try:
        shoal.train.load(path, 4)
    except shoal.train.DataError as error:
        told = str(error)
    loader = shoal.train.load(path, 4, shuffle=False, where="node")
    rows = [batch.to_device(torch.device("shoal", 1)).cpu().tolist() for batch in loader]
print(json.dumps({"told": told, "rows": sum(rows, [])}))
"""


def test_a_file_that_only_the_node_has(cluster: tuple[Cluster, Path]) -> None:
    found = at_desk(cluster, ONLY)
    assert "does not exist" in found["told"]
    assert found["rows"] == np.arange(60, dtype=np.float32).reshape(30, 2).tolist()


def test_the_pool_shows_what_its_nodes_serve(cluster: tuple[Cluster, Path]) -> None:
    made, directory = cluster
    folders = sorted([str(directory / "same"), str(directory / "own")])
    nodes = json.loads(made.head.shoal("status", "--json"))["nodes"]
    assert [sorted(node["folders"]) for node in nodes] == [folders, folders]
    findings = json.loads(made.desk.shoal("doctor", "--json"))
    told = [f["text"] for f in findings if f["what"] == "data"]
    assert any("faraway" in text and folders[0] in text for text in told)
