"""Ray Jobs and Slurm beside the queue: each at the rate of submissions that it sustains."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

SECONDS = 20.0

_RAY = """
import json, os, statistics, sys, time
import ray
from ray.job_submission import JobSubmissionClient
address = ray.init(num_cpus=1, include_dashboard=True, dashboard_port=0, log_to_driver=False)
client = JobSubmissionClient("http://" + address.address_info["webui_url"])
def memory():
    found = 0
    for entry in filter(str.isdecimal, os.listdir("/proc")):
        try:
            words = open(f"/proc/{entry}/cmdline", "rb").read()
            if b"ray" in words and b"queue_peers" not in words:
                found += int(open(f"/proc/{entry}/statm").read().split()[1]) * 4096
        except OSError:
            pass
    return found
before, took, begin = memory(), [], time.monotonic()
while time.monotonic() - begin < float(sys.argv[1]):
    one = time.monotonic()
    client.submit_job(entrypoint="sleep 600", entrypoint_num_cpus=1)
    took.append(time.monotonic() - one)
lasted = time.monotonic() - begin
one = time.monotonic()
listed = len(client.list_jobs())
print("RESULT" + json.dumps({
    "jobs": len(took), "per_s": round(len(took) / lasted, 2),
    "p50_ms": round(1000 * statistics.median(took), 1), "most_ms": round(1000 * max(took), 1),
    "MiB_a_job": round((memory() - before) / len(took) / 2**20, 1),
    "list_ms": round(1000 * (time.monotonic() - one), 1), "listed": listed,
}))
"""


def ray(python: str) -> dict[str, object]:
    """Submit jobs to Ray that wait, one after the other, as quickly as it takes them."""
    done = subprocess.run(
        [python, "-c", _RAY, str(SECONDS)], capture_output=True, text=True, timeout=300,
        env={**os.environ, "RAY_USAGE_STATS_ENABLED": "0"},
    )  # fmt: skip
    for line in done.stdout.splitlines():
        if line.startswith("RESULT"):
            found: dict[str, object] = json.loads(line.removeprefix("RESULT"))
            return found
    return {"failed": (done.stderr.strip().splitlines() or ["no reason"])[-1][:300]}


_SLURM = """
ClusterName=bench
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={root}/munge.socket
CredType=cred/munge
SlurmctldPort={port}
SlurmdPort={next_port}
PluginDir={plugins}
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd.pid
SlurmctldLogFile={root}/slurmctld.log
SlurmdLogFile={root}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
MaxJobCount=200000
NodeName={host} NodeAddr=127.0.0.1 CPUs=1 RealMemory=100 State=UNKNOWN
PartitionName=main Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""


def slurm() -> dict[str, object]:
    """Submit batch jobs to a Slurm of our own that wait, as quickly as `sbatch` takes them."""
    missing = [n for n in ("slurmctld", "sbatch", "squeue", "munged") if shutil.which(n) is None]
    if missing:
        return {"failed": f"{', '.join(missing)}: apt install slurmctld slurm-client munge"}
    with ExitStack() as stack:
        root = stack.enter_context(tempfile.TemporaryDirectory(prefix="shoal-slurm-", dir="/tmp"))
        try:
            return _slurm(Path(root), stack)
        except (OSError, subprocess.SubprocessError, RuntimeError) as error:
            return {"failed": str(error)[:300]}


def _slurm(root: Path, stack: ExitStack) -> dict[str, object]:
    host = socket.gethostname().split(".")[0]
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    (root / "state").mkdir()
    (root / "spool").mkdir()
    root.chmod(0o755)
    config = root / "slurm.conf"
    # Debian's packages may be installed, or unpacked below a folder: beside the programs is usr/lib.
    program = Path(shutil.which("slurmctld") or "").resolve()
    plugins = next(program.parents[1].glob("lib/*/slurm-wlm"), Path("/usr/lib/slurm"))
    config.write_text(
        _SLURM.format(host=host, root=root, port=port, next_port=port + 1, plugins=plugins)
    )
    (root / "munge.key").write_bytes(os.urandom(128))
    (root / "munge.key").chmod(0o400)
    munge = ["munged", "--foreground", "--force", f"--socket={root}/munge.socket",
             f"--key-file={root}/munge.key", f"--pid-file={root}/munge.pid",
             f"--log-file={root}/munge.log", f"--seed-file={root}/munge.seed"]  # fmt: skip
    environment = {**os.environ, "SLURM_CONF": str(config)}
    control = ["slurmctld", "-D", "-f", str(config)]
    for command in (munge, control):
        stack.callback(_end, subprocess.Popen(
            command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ))  # fmt: skip
    deadline = time.monotonic() + 30
    while subprocess.run(["squeue"], env=environment, capture_output=True).returncode:
        if time.monotonic() > deadline:
            raise RuntimeError("slurmctld does not answer: " + _tail(root / "slurmctld.log"))
        time.sleep(0.2)
    took, begin = [], time.monotonic()
    while time.monotonic() - begin < SECONDS:
        one = time.monotonic()
        done = subprocess.run(
            ["sbatch", "--output=/dev/null", "--wrap=sleep 600"], env=environment, cwd=root,
            capture_output=True, text=True,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(done.stderr)
        took.append(time.monotonic() - one)
    lasted_s = time.monotonic() - begin
    one = time.monotonic()
    listed = subprocess.run(["squeue", "-h"], env=environment, capture_output=True, text=True)
    return {
        "jobs": len(took),
        "per_s": round(len(took) / lasted_s, 2),
        "p50_ms": round(1000 * statistics.median(took), 1),
        "most_ms": round(1000 * max(took), 1),
        "list_ms": round(1000 * (time.monotonic() - one), 1),
        "listed": len(listed.stdout.splitlines()),
    }


def _tail(path: Path) -> str:
    return path.read_text()[-200:] if path.exists() else "no log"


def _end(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
