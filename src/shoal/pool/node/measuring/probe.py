"""Measures devices of a node through their own workers: a process that the agent starts.

It is a client like any other, so what it measures is what clients get: the declared speed, the op
stream and the transfers are all in it. It says what it found line by line, so that what was measured
before it had to make way for a lease is kept.
"""

from __future__ import annotations

import sys
import time

import msgspec

import shoal
from shoal.pool.base import limits, process
from shoal.pool.node.measuring.profiler import Found, Job

# shoal.schedule.model.measure loads torch, which takes seconds: only once this process ends with
# its agent.
#: For each figure; a device has eight of them.


def run(job: Job) -> None:
    """Measure what the job asks for."""
    with shoal.connect(job.url, devices=job.devices) as lease:
        for position in job.measure:
            _say(_device(lease, position))
        for source, target in job.pairs:
            _say(Found(target=target, source=source, bytes_per_s=_link(lease, source, target)))


def _device(lease: shoal.Lease, position: int) -> Found:
    from shoal.schedule.model import measure

    info = lease.granted[position].info
    profile = measure.measure_device(
        lease.devices[position],
        "",
        memory_bytes=info.memory_bytes,
        effort=measure.Effort(limits.PROBE_FIGURE_S, average=info.speed < 1),
        scratch_bytes=min(measure.SCRATCH_BYTES, info.memory_bytes),
    )
    return Found(target=position, profile=msgspec.structs.replace(profile, measured_at=time.time()))


def _link(lease: shoal.Lease, source: int, target: int) -> float:
    from shoal.schedule.model import measure

    least = min(lease.granted[p].info.memory_bytes for p in (source, target))
    copy_bytes = max(1, min(measure.COPY_BYTES, 3 * least // 8))
    ends = (lease.devices[source], lease.devices[target])
    average = lease.granted[target].info.speed < 1
    effort = measure.Effort(limits.PROBE_FIGURE_S / 2, average)
    return measure.measure_link(*ends, effort=effort, copy_bytes=copy_bytes)


def _say(found: Found) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(found) + b"\n")
    sys.stdout.buffer.flush()


def main() -> None:
    """`python -m shoal.pool.node.measuring.probe JOB_JSON`."""
    process.die_with_parent_thread()
    try:
        run(msgspec.json.decode(sys.argv[1], type=Job))
    except (shoal.ShoalError, RuntimeError) as error:
        _say(Found(target=0, problem=f"{type(error).__name__}: {error}"[:500]))
        sys.exit(1)


if __name__ == "__main__":
    main()
