"""CONTRIBUTING.md is right about what a new collective and a new algorithm take: both are added to a copy of
the tree, and run."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import REPOSITORY

ROTATE = """#include <vector>

#include "collective/collectives.h"
#include "collective/staged/staged_copy.h"

namespace multiring {

void rotate(Exchange& exchange, const OperationCall& call, Operation& operation) {
  const auto size = static_cast<std::size_t>(exchange.size());
  const std::size_t bytes = operation.descriptor.bytes;
  const StagedCopy::Outgoing outgoing[] = {{operation.input, bytes}};
  StagedCopy copy(exchange, call, outgoing, bytes);
  exchange.match(call, operation.descriptor, [&] { copy.stage_first(); });
  std::vector<StagedCopy::Incoming> incoming(size);
  incoming[(static_cast<std::size_t>(exchange.rank()) + size - 1) % size] = {operation.output, bytes};
  copy.run(incoming);
}

}  // namespace multiring
"""
ROW = """    {.name = "rotate",
     .run = rotate,
     .compared = Compared::kElements,
     .output = Output::kSame,
     .overlap = Overlap::kDisjoint,
     .needs_input = true},
"""
DECLARATION = (
    "MULTIRING_API void rotate(Exchange& exchange, const OperationCall& call, Operation& operation);\n"
)
METHOD = '''    def rotate(self, x: Array, timeout: float | None = None) -> Array:
        """Gives every rank the array of the rank before it."""
        operation = self._operation("ROTATE", None)
        return self._run(operation, set_arrays(operation, x, None), timeout)

'''
ALGORITHMS = "core/topology/algorithms"
LIST = f"{ALGORITHMS}/algorithms.inc"
# By file: what an edit stands in front of, and what it adds. All files without which it does not run.
EDITS = {
    "core/collective/descriptor.h": ("  kCount,", "  kRotate,\n"),
    "core/collective/kinds.cpp": ("};\nstatic_assert(std::size(kTraits)", ROW),
    "core/collective/collectives.h": ("MULTIRING_API void barrier(", DECLARATION),
    "core/base/protocol.h": ("inline constexpr std::uint32_t kProtocol", "// rotate\n"),
    "core/multiring/collectives.py": ("    # Shared by the collectives.", METHOD),
    LIST: ("#undef MULTIRING_ALGORITHM", "MULTIRING_ALGORITHM(Copied)\n"),
}
# What of the file of another one becomes its own.
COPIED = {
    "kPairwiseTraits": "kCopiedTraits",
    "pairwise_transfers": "copied_transfers",
    "pairwise exchange": "copied exchange",
    "'p'": "'q'",
}
PROGRAM = """
import numpy as np, multiring
comm = multiring.init()
for count in (0, 1, 300_001):
    found = comm.rotate(np.full(count, comm.rank))
    assert (found == (comm.rank - 1) % comm.size).all() and len(found) == count, found
try:
    comm.rotate(np.zeros(1 + comm.rank))
except multiring.MismatchError as error:
    print("mismatch", error.operation)
"""
SUMS = """
import numpy as np, multiring
from tests.support import pretend_places
pretend_places(range(4))
comm = multiring.init()
for count in (1, 300_001):
    assert (comm.allreduce(np.full(count, comm.rank, np.float32), op="sum") == 6).all()
print("summed")
"""
# The copy is to be found in place of what is installed in editable mode.
SITE = """
import sys
sys.meta_path[:] = [each for each in sys.meta_path if "_editable_" not in type(each).__module__]
"""


def run(*command: str, **environ: str) -> str:
    done = subprocess.run(command, env={**os.environ, **environ}, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def launched(prefix: Path, program: str, *options: str) -> str:
    """What ranks print that run a program with the copy."""
    (prefix / "program.py").write_text(program)
    command = (sys.executable, "-m", "multiring", "run", *options, sys.executable, str(prefix / "program.py"))
    return run(*command, PYTHONPATH=f"{prefix}{os.pathsep}{REPOSITORY}")


def described(what: str) -> str:
    """The paragraphs of CONTRIBUTING.md on how to add something."""
    return (REPOSITORY / "CONTRIBUTING.md").read_text().partition(f"*{what}*")[2].partition("\n*A")[0]


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the copy is installed, with a collective and an algorithm that the tree does not have."""
    folder = tmp_path_factory.mktemp("contributing")
    copy, prefix = folder / "copy", folder / "prefix"
    for name in ("CMakeLists.txt", "cmake", "core", "adapters/CMakeLists.txt", "integrations/CMakeLists.txt"):
        if (source := REPOSITORY / name).is_dir():
            shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        elif source.exists():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, copy / name)
    for name, (before, added) in EDITS.items():
        text = (copy / name).read_text()
        assert text.count(before) == 1, (name, before)
        (copy / name).write_text(text.replace(before, added + before))
    (copy / "core/collective/rotate.cpp").write_text(ROTATE)
    text = (copy / ALGORITHMS / "pairwise.cpp").read_text()
    for before, after in COPIED.items():
        assert before in text
        text = text.replace(before, after)
    (copy / ALGORITHMS / "copied.cpp").write_text(text)

    pybind11 = run(sys.executable, "-m", "pybind11", "--cmakedir").strip()
    options = "-DMULTIRING_BUILD_PYTHON=ON", "-DCMAKE_BUILD_TYPE=Debug", "-DCMAKE_CXX_FLAGS_DEBUG=-O0"
    python = f"-DPython_EXECUTABLE={sys.executable}"
    build = str(folder / "build")
    run("cmake", "-S", str(copy), "-B", build, "-G", "Ninja", *options, python, f"-Dpybind11_DIR={pybind11}")
    run("cmake", "--build", build, "--target", "_core")
    run("cmake", "--install", build, "--component", "multiring", "--prefix", str(prefix))
    shutil.copytree(copy / "core/multiring", prefix / "multiring", dirs_exist_ok=True)
    (prefix / "sitecustomize.py").write_text(SITE)
    return prefix


@pytest.mark.full
def test_a_collective_that_is_added_as_described_runs(prefix: Path) -> None:
    for name in EDITS.keys() - {LIST}:
        assert name in described("A collective") or Path(name).name in described("A collective"), name
    assert len(re.findall("mismatch rotate", launched(prefix, PROGRAM, "-np", "3"))) == 3


@pytest.mark.full
def test_an_algorithm_is_a_file_and_a_line(prefix: Path) -> None:
    assert ALGORITHMS in described("An algorithm")
    assert Path(LIST).name in described("An algorithm")
    assert launched(prefix, SUMS, "-np", "4", "--mode", "1x4q").count("summed") == 4
    plan = (sys.executable, "-m", "multiring", "plan", "--hosts", "4x2", "--bytes", "1M")
    assert "copied exchange" in run(*plan, "--mode", "2x4q", PYTHONPATH=str(prefix))
    for collective in ("allreduce", "reduce_scatter"):
        assert "2px4q" in run(*plan, "--collective", collective, "--explain", PYTHONPATH=str(prefix))
