"""Builds the wheel as a user would, in isolation, and checks what is promised: small, no framework linked or
included, works with NumPy alone. Prints the time of the build and of the import."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MOST_BYTES = 5 * 1024 * 1024
LIBRARIES = {"libmultiring", "_core", "libmultiring_tensorflow", "libmultiring_jax"}
ALLOWED_LIBRARIES = {
    "libmultiring.so",
    "libstdc++.so.6",
    "libgcc_s.so.1",
    "libc.so.6",
    "libm.so.6",
    "libpthread.so.0",
    "ld-linux-x86-64.so.2",
    "ld-linux-aarch64.so.1",
}
PROBE = """
import sys, time
import numpy
start = time.perf_counter()
import multiring
took = time.perf_counter() - start
frameworks = {"torch", "tensorflow", "jax", "chainer", "pytensor", "ray"} & set(sys.modules)
assert not frameworks, f"import multiring imports {frameworks}"
comm = multiring.init()
assert comm.size == 1 and comm.allreduce(numpy.ones(3)).tolist() == [1.0, 1.0, 1.0]
print(f"import multiring: {took * 1000:.0f} ms beyond NumPy")
"""


def build(directory: Path) -> Path:
    start = time.perf_counter()
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "wheel",
            "--quiet",
            "--no-deps",
            "--wheel-dir",
            str(directory),
            "--config-settings=build-dir=" + str(directory / "build"),
            str(ROOT),
        ],
        check=True,
    )
    (wheel,) = directory.glob("*.whl")
    took = time.perf_counter() - start
    print(f"wheel: {wheel.name}, {wheel.stat().st_size / 1e6:.2f} MB, built in {took:.0f} s")
    return wheel


def needed_libraries(library: Path) -> set[str]:
    listing = subprocess.run(
        ["readelf", "-d", str(library)], check=True, capture_output=True, text=True
    ).stdout
    return {line.split("[")[1].rstrip("]") for line in listing.splitlines() if "(NEEDED)" in line}


def check(wheel: Path, directory: Path) -> list[str]:
    findings = []
    if wheel.stat().st_size > MOST_BYTES:
        findings.append(f"the wheel has {wheel.stat().st_size} bytes; at most {MOST_BYTES} are promised")
    unpacked = directory / "unpacked"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(unpacked)
    libraries = list(unpacked.rglob("*.so"))
    names = {library.name.split(".")[0] for library in libraries}
    if names != LIBRARIES:
        findings.append(f"the wheel holds the libraries {sorted(names)}; expected {sorted(LIBRARIES)}")
    for library in libraries:
        others = needed_libraries(library) - ALLOWED_LIBRARIES
        if others:
            findings.append(f"{library.name} links {sorted(others)}")
    present = {path.name for path in unpacked.rglob("*")}
    missing = {"multiring.h", "py.typed", "_core.pyi", "caffe.proto"} - present
    return findings + [f"the wheel lacks {name}" for name in sorted(missing)]


def try_out(wheel: Path, directory: Path) -> None:
    """Installs the wheel with NumPy alone and uses it, away from the sources."""
    home = directory / "venv"
    venv.create(home, with_pip=True)
    python = home / "bin" / "python"
    constraints = ROOT / "ci" / "constraints.txt"
    subprocess.run(
        [str(python), "-m", "pip", "install", "--quiet", "-c", str(constraints), str(wheel)], check=True
    )
    subprocess.run([str(python), "-c", PROBE], check=True, cwd=directory)
    subprocess.run(
        [
            str(home / "bin" / "multiring"),
            "run",
            "-np",
            "2",
            str(python),
            "-c",
            PROBE.replace("comm.size == 1 and", "comm.size == 2 and").replace(
                "[1.0, 1.0, 1.0]", "[2.0, 2.0, 2.0]"
            ),
        ],
        check=True,
        cwd=directory,
    )


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="multiring-wheel-") as name:
        directory = Path(name)
        wheel = build(directory)
        findings = check(wheel, directory)
        if not findings:
            try_out(wheel, directory)
    print("\n".join(findings) if findings else "wheel: small, links nothing foreign, works with NumPy alone")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
