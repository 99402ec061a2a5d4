"""`python -m tests.standin.cuda_headers`: do Shoal and the stand-in declare the driver as NVIDIA does?

It gets cuda.h from the package index, and compares the functions that csrc/worker/accelerator and the
stand-in's driver name with those of the header: how many arguments, and of what size each is.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.standin.build import compiler

HEADERS = "nvidia-cuda-runtime==13.0.*"
ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build" / "cuda-headers"
SHOAL = ROOT / "csrc" / "worker" / "accelerator" / "cuda_driver.h"
#: It has another number of arguments since CUDA 12, under the name of its second version.
OLD = {"cuGetProcAddress"}

# Prints each function's arguments: p for a pointer, else the bytes of a number.
_PROGRAM = """
#include <cstdint>
#include <cstdio>
#include <type_traits>
{include}
template <typename T>
void kind() {{
  if constexpr (std::is_pointer_v<T>) std::printf(" p");
  else std::printf(" %zu", sizeof(T));
}}
template <typename R, typename... A>
void show(const char* name, R (*)(A...)) {{
  std::printf("%s", name);
  kind<R>();
  (kind<A>(), ...);
  std::printf("\\n");
}}
int main() {{
{shows}
}}
"""


def _signatures(include: str, names: list[str], prefix: str, *flags: str) -> dict[str, str]:
    shows = "\n".join(f'  show("{n}", static_cast<decltype({prefix}{n})>(nullptr));' for n in names)
    if not prefix:
        shows = "\n".join(f'  show("{n}", static_cast<decltype(&{n})>(nullptr));' for n in names)
    with tempfile.TemporaryDirectory() as folder:
        source, program = Path(folder) / "show.cpp", Path(folder) / "show"
        source.write_text(_PROGRAM.format(include=include, shows=shows))
        subprocess.run([compiler(), "-std=c++20", *flags, source, "-o", program], check=True)
        shown = subprocess.run([program], check=True, capture_output=True, text=True).stdout
    return {name: kinds for name, _, kinds in (line.partition(" ") for line in shown.splitlines())}


def _standins() -> str:
    """Return declarations of all functions of the stand-in's driver."""
    found = []
    for path in sorted((ROOT / "tests" / "standin" / "driver").glob("api_*.cpp")):
        found += re.findall(r"^STANDIN_API (CUresult cu\w+\([^{]*\)) \{", path.read_text(), re.M)
    return "\n".join(f"{one};" for one in found)


def _header() -> Path:
    """Return the folder of cuda.h."""
    folder = FOLDER / HEADERS / "nvidia" / "cu13" / "include"
    if not (folder / "cuda.h").exists():
        subprocess.run(
            [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check",
             "--no-deps", "--target", FOLDER / HEADERS, HEADERS],
            check=True,
        )  # fmt: skip
    return folder


def main() -> int:
    """Compare, and name what differs."""
    header = ["-isystem", str(_header())]
    shoals = re.findall(r"\(\*(cu\w+)\)", SHOAL.read_text())
    declared = _standins()
    names = [n for n in re.findall(r"CUresult (cu\w+)\(", declared) if n not in OLD]
    real = _signatures("#include <cuda.h>", sorted({*shoals, *names}), "", *header)
    prefix = "shoal::worker::CudaDriver::"
    found = {
        "Shoal": _signatures(
            f'#include "{SHOAL}"', shoals, prefix, "-I", str(ROOT / "csrc")
        ),
        "the stand-in": _signatures(
            '#include "cuda_types.h"\n' + f'extern "C" {{\n{declared}\n}}', names, "",
            "-I", str(ROOT / "tests" / "standin" / "driver"),
        ),
    }  # fmt: skip
    wrong = 0
    for who, signatures in found.items():
        for name, kinds in signatures.items():
            if kinds != real[name]:
                wrong += 1
                print(f"{name}: {who} says ({kinds}), cuda.h says ({real[name]})", file=sys.stderr)
    print(f"{len(shoals)} functions of Shoal, {len(names)} of the stand-in: {wrong} differ")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
