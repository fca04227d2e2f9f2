"""Builds the wheel and checks what is promised: small, no framework linked or included, works with NumPy
alone and without a compiler, and with systems as old as its name says. Prints the times of the build, of the
installation and of the import.

The same for the small wheel multiring-horovod, which holds no library.

python ci/check_wheel.py [DIRECTORY]     builds them as a user would, in isolation; leaves them there
python ci/check_wheel.py --quick         of what `make develop` has compiled, which takes seconds
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MAX_BYTES = 5 * 1024 * 1024
LIBRARIES = {
    "libmultiring",
    "_core",
    "libmultiring_tensorflow",
    "libmultiring_jax",
    "libmultiring_jax_collectives",
    "libmultiring_mpi",
}
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
PROBE = ROOT / "ci" / "wheel_probe.py"


def build(source: Path, directory: Path, *, quick: bool) -> Path:
    start = time.perf_counter()
    how = ["--no-build-isolation"] if quick else [f"--config-settings=build-dir={directory / 'build'}"]
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(directory)]
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    subprocess.run([*command, *how, str(source)], check=True, env=environment)
    (wheel,) = directory.glob("*.whl")
    took = time.perf_counter() - start
    print(f"wheel: {wheel.name}, {wheel.stat().st_size / 1e6:.2f} MB, built in {took:.0f} s")
    return wheel


def name_platform(wheel: Path, directory: Path) -> Path:
    """The same wheel with the oldest platform in its name that it runs on, as package indexes ask for."""
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    # The library of the core is within the wheel, found by $ORIGIN.
    command = [
        "auditwheel",
        "repair",
        "--exclude",
        "libmultiring.so",
        "--wheel-dir",
        str(directory / "named"),
    ]
    done = subprocess.run([*command, str(wheel)], capture_output=True, text=True, env=environment)
    if done.returncode:
        sys.exit(f"auditwheel ended with {done.returncode}:\n{done.stderr}")
    (named,) = (directory / "named").glob("*.whl")
    print(f"wheel: {named.name}")
    return named


def needed_libraries(library: Path) -> set[str]:
    listing = subprocess.run(
        ["readelf", "-d", str(library)], check=True, capture_output=True, text=True
    ).stdout
    return {line.split("[")[1].rstrip("]") for line in listing.splitlines() if "(NEEDED)" in line}


def check(wheel: Path, directory: Path) -> list[str]:
    findings = []
    if wheel.stat().st_size > MAX_BYTES:
        findings.append(f"the wheel has {wheel.stat().st_size} bytes; at most {MAX_BYTES} are promised")
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
    missing = {"multiring.h", "py.typed", "_core.pyi", "caffe.proto", "shim"} - present
    return findings + [f"the wheel lacks {name}" for name in sorted(missing)]


def check_horovod(wheel: Path, of_multiring: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        modules = [name for name in archive.namelist() if not name.split("/")[0].endswith(".dist-info")]
        about = next(name for name in archive.namelist() if name.endswith("/METADATA"))
        needed = next(line for line in archive.read(about).decode().splitlines() if "Requires-Dist" in line)
    findings = []
    if modules != ["horovod/__init__.py"]:
        findings.append(f"{wheel.name} holds {modules}")
    version = of_multiring.name.split("-")[1]
    if wheel.name.split("-")[1] != version or not needed.endswith(f"=={version}"):
        findings.append(f"{wheel.name} needs {needed}, and multiring has the version {version}")
    return findings


def try_out(wheel: Path, horovod: Path, directory: Path) -> None:
    """Installs the wheels with NumPy alone and uses them, away from the sources and from compilers."""
    home = directory / "venv"
    venv.create(home, with_pip=True)
    python = home / "bin" / "python"
    constraints = ROOT / "ci" / "constraints.txt"
    environment = {"PATH": str(python.parent), "HOME": str(directory)}
    numpy = next(line for line in constraints.read_text().splitlines() if line.startswith("numpy=="))
    install = [str(python), "-m", "pip", "install", "--quiet"]
    subprocess.run([*install, numpy], check=True)
    start = time.perf_counter()
    subprocess.run([*install, "--no-index", str(wheel)], check=True, env=environment)
    print(f"wheel: installed beside NumPy in {time.perf_counter() - start:.1f} s")
    # Cloudpickle and PyYAML, which it asks for, are not needed by what is tried here.
    subprocess.run([*install, "--no-index", "--no-deps", str(horovod)], check=True, env=environment)
    command = str(python.parent / "multiring")
    for words in (
        [str(python), str(PROBE)],
        [command, "doctor"],
        [command, "run", "-np", "2", str(python), str(PROBE)],
        [str(python), "-c", "import horovod.common.util; print('wheel: horovod', horovod.__version__)"],
        [str(python.parent / "horovodrun"), "--check-build"],
    ):
        subprocess.run(words, check=True, cwd=directory, env=environment)


def main() -> int:
    quick = sys.argv[1:] == ["--quick"]
    with tempfile.TemporaryDirectory(prefix="multiring-wheel-") as name:
        directory = Path(name)
        wheel = name_platform(build(ROOT, directory, quick=quick), directory)
        horovod = build(ROOT / "integrations/horovod/shim", directory / "horovod", quick=quick)
        findings = check(wheel, directory) + check_horovod(horovod, wheel)
        if not findings:
            try_out(wheel, horovod, directory)
            if sys.argv[1:] and not quick:
                Path(sys.argv[1]).mkdir(parents=True, exist_ok=True)
                for each in (wheel, horovod):
                    shutil.copy(each, sys.argv[1])
    print("\n".join(findings) if findings else "wheel: small, links nothing foreign, works with NumPy alone")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
