"""What `shoal up --engine` makes of its options."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.cli.engines.starting import EngineOptions, make_plan, start
from shoal.errors import PoolError
from shoal.pool.engines.engine import Plan


@pytest.fixture(autouse=True)
def _state(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SHOAL_STATE", str(tmp_path))


def plan(
    *devices: str, gpus: str = "", listen: str | None = None, select: tuple[str, ...] = ()
) -> Plan:
    chosen = EngineOptions("ray", "", gpus, select, "", False)
    return make_plan("p", chosen, devices, listen, "first-come", False)


def test_gpus_are_all_unless_cpu_devices_are_named() -> None:
    assert plan().per_node.gpus is None
    assert plan("cpu").per_node.gpus == 0
    assert plan("cpu", gpus="2").per_node.gpus == 2
    assert plan("cpu", gpus="all").per_node.gpus is None


def test_ports_and_labels() -> None:
    found = plan("cpu", listen="9000", select=("zone=a", "x=b=c"))
    assert (found.head.listen_port, found.agent.port) == (9000, 9001)
    assert found.per_node.select == {"zone": "a", "x": "b=c"}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"gpus": "some"}, "--gpus some: write all"),
        ({"gpus": "65"}, "0 to 64"),
        ({"listen": "10.0.0.1"}, "write a port alone"),
        ({"listen": "0"}, "write a port alone"),
        ({"select": ("zone",)}, "write LABEL=VALUE"),
    ],
)
def test_wrong_options_are_named(options: dict[str, str], said: str) -> None:
    with pytest.raises(PoolError, match=said):
        plan("cpu", **options)  # type: ignore[arg-type]


def test_gpus_are_asked_for_by_number() -> None:
    with pytest.raises(PoolError, match="--gpus N"):
        plan("cuda:0")


def test_options_for_one_machine_are_refused() -> None:
    chosen = EngineOptions("ray", "", "", (), "", False)
    with pytest.raises(PoolError, match="--metrics is for pools on one machine"):
        start("p", chosen, (), None, "first-come", False, metrics="9000")
