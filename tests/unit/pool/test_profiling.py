"""Which devices are measured when, and what is kept of it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest

from shoal.pool.node.measuring.profile_cache import VERSION, Link, ProfileCache
from shoal.pool.node.measuring.profiler import identity, plan
from shoal.pool.node.spec import DeviceSpec, parse_device
from shoal.pool.wire import node_messages
from shoal.pool.wire.channel import Channel
from shoal.schedule.model.device_profile import DeviceProfile, identity_of

PROFILE = DeviceProfile("cpu", "x", 2**30, {"float32": 1e9}, 1e9, 1e-6, {"host": 1e9})


@dataclass
class Fake:
    """A device server, as far as the plan looks at it."""

    index: int
    spec: DeviceSpec
    ready: node_messages.Ready | None
    address: str = ""
    channel: Channel | None = None
    ended: bool = False
    held: dict[int, node_messages.Grant] = field(default_factory=dict)

    def lease(self) -> None:
        self.held[1] = node_messages.Grant("token", 1, 1)


def _servers(*specs: str) -> list[Fake]:
    return [
        Fake(i, parse_device(text, i), node_messages.Ready(2**30, 1, "cpu", "a processor"))
        for i, text in enumerate(specs)
    ]


def _cache(servers: list[Fake], path: Path = Path("/nonexistent/profiles.json")) -> ProfileCache:
    """One that knows all of these."""
    cache = ProfileCache(path)
    for one in servers:
        mine = identity(one)
        cache.profiles[mine] = msgspec.structs.replace(PROFILE, identity=mine)
        for other in servers:
            link = Link(other.spec.name, one.spec.name, identity(other), mine, 1e9)
            cache.links[link.key] = link
    return cache


def test_equal_hardware_is_measured_once_and_links_each_way() -> None:
    servers = _servers("cpu", "cpu", "cpu,speed=0.5")
    found = plan(servers, ProfileCache(Path("x")), set())
    assert found is not None
    assert [found.servers[p].index for p in found.measure] == [0, 2]
    ends = {(found.servers[s].index, found.servers[t].index) for s, t in found.pairs}
    assert ends == {(0, 1), (1, 0), (0, 2), (2, 0), (1, 2), (2, 1)}


def test_nothing_is_measured_twice_unless_it_is_wanted() -> None:
    servers = _servers("cpu", "cpu,speed=0.5")
    cache = _cache(servers)
    assert plan(servers, cache, set()) is None
    again = plan(servers, cache, {identity(servers[1])})
    assert again is not None
    assert [again.servers[p].index for p in again.measure] == [1]


def test_a_leased_device_is_left_alone_and_so_are_those_on_its_cores() -> None:
    servers = _servers("cpu", "cpu,speed=0.5", "cuda:0", "cuda:1")
    servers[0].lease()
    servers[2].lease()
    found = plan(servers, ProfileCache(Path("x")), set())
    assert found is not None
    assert [s.index for s in found.servers] == [3]
    servers[3].ended = True
    assert plan(servers, ProfileCache(Path("x")), set()) is None
    servers[0].held.clear()
    servers[1].ready = None  # it is still starting
    found = plan(servers, ProfileCache(Path("x")), set())
    assert found is not None
    assert [s.index for s in found.servers] == [0]


def test_a_lease_is_no_larger_than_the_core_allows() -> None:
    servers = _servers(*(f"cpu,speed={0.1 + n / 100}" for n in range(40)))
    found = plan(servers, ProfileCache(Path("x")), set())
    assert found is not None
    assert len(found.servers) == 32
    assert max(found.measure) < 32


def test_identity_tells_apart_what_is_not_equally_fast() -> None:
    names = {
        identity_of("epyc", "cpu", 1, 1.0, "2"),
        identity_of("epyc", "cpu", 2, 1.0, "2"),
        identity_of("epyc", "cpu", 2, 0.5, "2"),
        identity_of("epyc", "cpu", 2, 0.5, "3"),
        identity_of("t4", "cuda:0", 2, 1.0, "2"),
    }
    assert len(names) == 5
    assert identity_of("t4", "cuda:0", 2, 1.0, "2") == identity_of("t4", "cuda:1", 8, 1.0, "2")


def test_the_cache_survives_its_process(tmp_path: Path) -> None:
    cache = _cache(_servers("cpu", "cpu,speed=0.5"), tmp_path / "profiles.json")
    cache.save()
    again = ProfileCache.open(tmp_path / "profiles.json")
    assert again.profiles == cache.profiles
    assert again.links == cache.links
    assert (tmp_path / "profiles.json").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    "change",
    [
        lambda raw: b"",
        lambda raw: raw[:-10],
        lambda raw: bytes(range(256)),
        lambda raw: raw.replace(b'"version":%d' % VERSION, b'"version":%d' % (VERSION + 1)),
        lambda raw: raw.replace(b'"memory_bytes":1073741824', b'"memory_bytes":-1'),
        lambda raw: raw.replace(b'"bytes_per_s":1000000000.0', b'"bytes_per_s":1e30'),
        lambda raw: raw + b" " * (5 * 2**20),
    ],
)
def test_a_cache_that_cannot_be_trusted_is_as_good_as_none(tmp_path: Path, change: object) -> None:
    path = tmp_path / "profiles.json"
    _cache(_servers("cpu"), path).save()
    raw = path.read_bytes()
    changed = change(raw)  # type: ignore[operator]
    assert changed != raw
    path.write_bytes(changed)
    assert ProfileCache.open(path).profiles == {}


@pytest.mark.parametrize("bad", [math.nan, math.inf, -1.0])
def test_profiles_from_a_wire_are_bounded(bad: float) -> None:
    raw = msgspec.msgpack.encode(msgspec.structs.replace(PROFILE, bytes_per_s=bad))
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(raw, type=DeviceProfile)
