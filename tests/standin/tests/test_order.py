"""When streams run, and what the checker says of it."""

from __future__ import annotations

import pytest

from tests.standin.environment import MODES, Options
from tests.standin.tests.children import lines

#: A copy to the host on a stream that nobody waits for.
UNAWAITED = """
    driver = start()
    there, here, stream = driver.allocate(), driver.host(), driver.stream()
    driver.fill(there, 65, 8)
    driver("cuCtxSynchronize")
    driver.copy(here, there, 8, stream)
    time.sleep(0.3)
    print(here.value.decode() or "nothing")
    driver("cuStreamSynchronize", stream)
    print(here.value.decode())
    """


def test_late_is_late() -> None:
    child, _ = lines(Options("late"), UNAWAITED)
    assert child.output == ["nothing", "AAAAAAAA"], child.errors


@pytest.mark.parametrize("mode", ["now", "threads"])
def test_other_modes_run_what_nobody_waits_for(mode: str) -> None:
    child, _ = lines(Options(mode), UNAWAITED)
    assert child.output == ["AAAAAAAA", "AAAAAAAA"], child.errors


def test_unregistered_memory_is_copied_before_the_call_returns() -> None:
    child, _ = lines(
        Options("late"),
        """
        driver = start()
        there, here = driver.allocate(), ctypes.create_string_buffer(16)
        driver.fill(there, 65, 8)
        driver.copy(here, there, 8)
        print(here.value.decode())
        """,
    )
    assert child.output == ["AAAAAAAA"], child.errors


#: Two streams fill one block; {order} is what comes between.
TWO = """
    driver = start()
    there, here = driver.allocate(), driver.host()
    first, second, event = driver.stream(), driver.stream(), driver.event()
    driver.fill(there, 65, 8, first)
    {order}
    driver.fill(there, 66, 8, second)
    driver("cuCtxSynchronize")
    driver.copy(here, there, 8)
    driver("cuCtxSynchronize")
    print(here.value.decode())
    """
ORDERED = {
    "an event": 'driver("cuEventRecord", event, first); driver("cuStreamWaitEvent", second, event, 0)',
    "the host": 'driver("cuStreamSynchronize", first)',
    "an event that the host waits for": (
        'driver("cuEventRecord", event, first); driver("cuEventSynchronize", event)'
    ),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("order", ORDERED)
def test_ordered_accesses_are_silent_and_right(mode: str, order: str) -> None:
    child, counts = lines(Options(mode), TWO.format(order=ORDERED[order]))
    assert child.output == ["BBBBBBBB"], child.errors
    assert counts.races == 0, child.errors


@pytest.mark.parametrize("mode", ["late", "random"])
def test_an_unordered_access_is_named_with_both_lanes(mode: str) -> None:
    child, counts = lines(Options(mode), TWO.format(order=""))
    assert counts.races == 1
    assert (
        "cuMemsetD8Async on priority 0 (stream 2) of device 0 writes what is written by"
        in child.errors
    )
    assert "cuMemsetD8Async on priority 0 (stream 1) of device 0" in child.errors


def test_late_shows_a_missing_order_in_the_data() -> None:
    """The newer stream runs first, so the older fill wins."""
    child, _ = lines(Options("late"), TWO.format(order=""))
    assert child.output == ["AAAAAAAA"], child.errors


def test_reading_a_host_block_before_it_is_filled_is_an_unordered_access() -> None:
    child, counts = lines(
        Options("late"),
        """
        driver = start()
        there, other, here = driver.allocate(), driver.allocate(), driver.host()
        first, second = driver.stream(), driver.stream()
        driver.copy(here, there, 8, first)
        driver.copy(other, here, 8, second)
        driver("cuCtxSynchronize")
        """,
    )
    assert counts.races == 1, child.errors


def test_random_is_the_same_for_the_same_seed() -> None:
    program = """
        driver = start()
        there, here = driver.allocate(), driver.host()
        streams = [driver.stream() for _ in range(4)]
        for i in range(40):
            driver.fill(there, 65 + i % 26, 8, streams[i % 4])
        driver("cuCtxSynchronize")
        driver.copy(here, there, 8)
        driver("cuCtxSynchronize")
        print(here.value.decode())
        """
    seen = {}
    for seed in range(6):
        twice = [lines(Options("random", seed=seed), program)[0].output for _ in range(2)]
        assert twice[0] == twice[1]
        seen[seed] = twice[0][0]
    assert len(set(seen.values())) > 1


@pytest.mark.parametrize("mode", MODES)
def test_a_stream_waits_for_a_word_that_the_host_writes(mode: str) -> None:
    child, counts = lines(
        Options(mode),
        """
        driver = start()
        there, here, word = driver.allocate(), driver.host(), driver.host()
        at = ctypes.c_uint64(ctypes.addressof(word))
        stream = driver.stream()
        driver("cuStreamWaitValue64_v2", stream, at, ctypes.c_uint64(7), 0)
        driver.fill(there, 65, 8, stream)
        driver.copy(here, there, 8, stream)
        driver("cuStreamWriteValue64_v2", stream, ctypes.c_uint64(at.value + 8), ctypes.c_uint64(9), 0)
        time.sleep(0.1)
        print(here.value.decode() or "nothing")
        ctypes.c_uint64.from_buffer(word).value = 7
        written = ctypes.c_uint64.from_buffer(word, 8)
        while written.value != 9:  # whoever polls gets on, without asking the driver
            time.sleep(0.001)
        print(here.value.decode())
        """,
    )
    assert child.output == ["nothing", "AAAAAAAA"], child.errors
    assert counts.races == 0


def test_threads_take_the_declared_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STANDIN_COPY_BYTES_S", str(100 << 20))
    child, _ = lines(
        Options("threads"),
        """
        driver = start()
        there, here, stream = driver.allocate(4 << 20), driver.host(4 << 20), driver.stream()
        before, after = driver.event(), driver.event()
        driver("cuEventRecord", before, stream)
        driver.copy(there, here, 4 << 20, stream)
        driver("cuEventRecord", after, stream)
        driver("cuEventSynchronize", after)
        ms = ctypes.c_float()
        driver("cuEventElapsedTime_v2", ctypes.byref(ms), before, after)
        print(ms.value >= 39)
        """,
    )
    assert child.output == ["True"], child.errors
