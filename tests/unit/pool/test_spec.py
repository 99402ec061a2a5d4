"""How devices are declared."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import DeviceSpecError, ShoalError
from shoal.pool.node import spec
from shoal.pool.node.spec import DeviceSpec, parse_device
from shoal.units import parse_bytes

NAMES = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", fullmatch=True)
UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "kB": 10**3, "MB": 10**6, "": 1}


def test_every_option_is_understood() -> None:
    device = parse_device("cpu,memory=160MiB,speed=0.5,threads=1,name=slow")
    assert device == DeviceSpec(
        device="cpu", name="slow", memory_bytes=160 * 2**20, speed=0.5, threads=1
    )


def test_without_options_everything_is_the_machines() -> None:
    assert parse_device("cuda:1") == DeviceSpec(device="cuda:1", name="cuda:1")
    assert parse_device("cpu", number=3).name == "cpu/3"


def test_an_accelerator_without_a_number_is_the_first() -> None:
    assert parse_device("cuda") == parse_device("cuda:0")
    assert parse_device("xpu,name=a").device == "xpu:0"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("mps", "a storage is an object without"),
        ("mps:0,memory=1GiB", "cannot be offered"),
        ("cuda:1,speed=0.5", "slows a CPU device down"),
        ("xpu,speed=0.5", "Leave it out"),
    ],
)
def test_what_an_accelerator_cannot_be_is_refused_with_the_reason(text: str, reason: str) -> None:
    with pytest.raises(DeviceSpecError, match=reason) as raised:
        parse_device(text)
    assert repr(text) in str(raised.value)


def test_blanks_around_parts_do_not_matter() -> None:
    assert parse_device(" cpu , threads=2 ").threads == 2


@given(
    amount=st.integers(1, 1023),
    unit=st.sampled_from(sorted(UNITS)),
    speed=st.floats(0.001, 1.0),
    threads=st.integers(1, 4096),
    name=NAMES,
)
def test_what_is_written_is_what_is_read(
    amount: int, unit: str, speed: float, threads: int, name: str
) -> None:
    text = f"cpu,memory={amount}{unit},speed={speed!r},threads={threads},name={name}"
    device = parse_device(text)
    assert device.memory_bytes == amount * UNITS[unit]
    assert (device.speed, device.threads, device.name) == (speed, threads, name)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "CPU",
        "cpu:",
        "cpu:x",
        "cpu,",
        "cpu,memory",
        "cpu,memory=",
        "cpu,memory=lots",
        "cpu,memory=-1",
        "cpu,memory=" + "9" * 400,
        "cpu,speed=0",
        "cpu,speed=1.5",
        "cpu,speed=nan",
        "cpu,speed=fast",
        "cpu,threads=0",
        "cpu,threads=2.5",
        "cpu,threads=²",
        "cpu,threads=9999",
        "cpu,name=a b",
        "cpu,name=" + "x" * 65,
        "cpu,colour=red",
        "cpu memory=1GiB",
    ],
)
def test_what_is_not_understood_is_refused_with_the_text(text: str) -> None:
    with pytest.raises(DeviceSpecError) as raised:
        parse_device(text)
    assert isinstance(raised.value, ShoalError)
    assert isinstance(raised.value, ValueError)
    assert repr(text) in str(raised.value) or repr(text.split("=")[-1]) in str(raised.value)


@given(st.text(max_size=40))
def test_any_text_is_a_device_or_a_clear_refusal(text: str) -> None:
    try:
        device = parse_device(text)
    except DeviceSpecError:
        return
    assert 0.001 <= device.speed <= 1.0
    assert device.memory_bytes is None or device.memory_bytes >= 0


@given(st.integers(0, 2**50))
def test_plain_bytes_are_exact(amount: int) -> None:
    assert parse_bytes(str(amount)) == amount


def test_fractions_of_a_unit() -> None:
    assert parse_bytes("1.5GB") == 1_500_000_000
    assert parse_bytes(" 2 gib ") == 2 * 2**30


def test_threads_follow_omp_num_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert spec.default_threads() == 3
    monkeypatch.setenv("OMP_NUM_THREADS", "2,4")  # OpenMP's nested form: the outer level counts
    assert spec.default_threads() == 2
    for useless in ("", "0", "many"):
        monkeypatch.setenv("OMP_NUM_THREADS", useless)
        assert spec.default_threads() >= 1
