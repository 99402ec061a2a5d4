"""Where PyTorch's tests come from: Debian's source package, unpacked below build/."""

from __future__ import annotations

import subprocess
import tarfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
HOME = ROOT / "build" / "pytorch-tests"
#: The release whose tests are used. They are older than the installed torch: what they import from
#: torch.testing and no longer find does not count.
RELEASE = "2.6.0"
SUITE = "trixie"  # Debian's release that has it
KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")

MISSING = f"""PyTorch's tests are not in {HOME}.
They come from Debian's source package pytorch {RELEASE} ({SUITE}), about 27 MB. Type one of:
  .venv/bin/python -m tests.ecosystem.pytorch_suite --fetch    where apt-get exists; needs no root
  cp pytorch_{RELEASE}+dfsg.orig.tar.xz {HOME}/    from pool/main/p/pytorch/ of a Debian mirror"""


class SourcesMissing(Exception):
    """The tests are not on this machine. The text says how to get them."""


def find() -> Path:
    """Return the directory `test` of the sources. Unpack the archive first if only that is there."""
    directory = HOME / RELEASE / "test"
    if not (directory / "test_torch.py").exists():
        archives = sorted(HOME.glob(f"pytorch_{RELEASE}*.orig.tar.xz"))
        if not archives:
            raise SourcesMissing(MISSING)
        unpack(archives[-1], HOME / RELEASE)
    return directory


def unpack(archive: Path, target: Path) -> None:
    """Unpack the archive's directory `test`, and nothing else, into target."""
    with tarfile.open(archive) as files:
        for member in files:
            _, _, path = member.name.partition("/")
            if path.startswith("test/"):
                member.name = path
                files.extract(member, target, filter="data")


def mirror() -> str:
    """Return the address of the Debian archive that this machine's apt uses."""
    command = ["apt-get", "indextargets", "--format", "$(REPO_URI)", "Created-By: Packages"]
    listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    found = [address for address in listed if address.rstrip("/").endswith("/debian")]
    if not found:
        raise SourcesMissing(f"apt's sources name no Debian archive.\n{MISSING}")
    return found[0]


def fetch() -> None:
    """Download the source package with apt, which checks its signature.

    All of apt's state is below build/, so the machine's package sources stay as they are.
    """
    if not KEYRING.exists():
        raise SourcesMissing(
            f"{KEYRING} is missing, so apt cannot check the download's signature. "
            "Type: apt-get install debian-archive-keyring"
        )
    apt = HOME / "apt"
    for name in ("lists/partial", "cache/archives/partial", "empty"):
        (apt / name).mkdir(parents=True, exist_ok=True)
    listed = apt / "sources.list"
    options = {
        "Dir::Etc::SourceList": listed,
        "Dir::Etc::SourceParts": apt / "empty",
        "Dir::State::Lists": apt / "lists",
        "Dir::Cache": apt / "cache",
        "APT::Sandbox::User": "",  # its own user cannot write below build/
    }
    command = ["apt-get", "-q", *(f"-o{name}={value}" for name, value in options.items())]
    try:
        listed.write_text(f"deb-src [signed-by={KEYRING}] {mirror()} {SUITE} main\n")
        subprocess.run([*command, "update"], cwd=HOME, check=True)
        subprocess.run([*command, "source", "--download-only", "pytorch"], cwd=HOME, check=True)
    except FileNotFoundError as error:
        raise SourcesMissing(f"apt-get is not on this machine.\n{MISSING}") from error
    except subprocess.CalledProcessError as error:
        raise SourcesMissing(f"apt-get failed, see above: {error}\n{MISSING}") from error
