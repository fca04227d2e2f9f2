"""Scripts that import horovod, unchanged, under the launcher and by `python -m multiring.horovod`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import REPOSITORY, run_job

EXAMPLES = REPOSITORY / "examples" / "horovod"

IMPORTS = """
import importlib.util
import os
import sys

import horovod
import horovod.torch as hvd
from horovod import torch as other
from horovod.torch.compression import Compression
from horovod.torch.mpi_ops import allreduce, rank
import multiring.horovod.torch

assert hvd is other is multiring.horovod.torch is horovod.torch
assert Compression is hvd.Compression and allreduce is hvd.allreduce
assert multiring.horovod.torch.__spec__.name == "multiring.horovod.torch"
assert horovod.__version__ == "0.28.1"
try:
    import horovod.spark
except ImportError as error:
    assert "there is no multiring.horovod.spark" in str(error), error
else:
    raise AssertionError("there is a horovod.spark")
# What Python finds for these names; importing TensorFlow takes long.
for name in ("horovod.keras", "horovod.tensorflow", "horovod.tensorflow.keras"):
    assert importlib.util.find_spec(name).name == name
hvd.init()
for name in ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size"):
    assert getattr(hvd, name)() == int(os.environ.get("HOROVOD_" + name.upper(), "size" in name)), name
if hvd.rank() == hvd.size() - 1:
    print("all of", hvd.size(), sys.argv[1:], hvd.allgather_object(hvd.rank()))
else:
    hvd.allgather_object(hvd.rank())
"""


def write(directory: Path, text: str = IMPORTS) -> Path:
    path = directory / "script.py"
    path.write_text(text)
    return path


def test_what_is_imported(tmp_path: Path) -> None:
    result = run_job(2, write(tmp_path), launcher_args=["--horovod"])
    assert result.returncode == 0, result.stderr
    assert "all of 2 [] [0, 1]" in result.stdout
    assert "not the Horovod" not in result.stderr


def test_without_the_launcher(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "multiring.horovod", str(write(tmp_path)), "--epochs", "3"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    assert "all of 1 ['--epochs', '3'] [0]" in result.stdout
    usage = subprocess.run(command[:3], capture_output=True, text=True, timeout=60, check=False)
    assert usage.returncode == 2
    assert "usage: python -m multiring.horovod" in usage.stderr


def test_a_horovod_that_is_installed_is_not_shadowed_silently(tmp_path: Path) -> None:
    """With --horovod a line says so; without it, nothing of ours is found."""
    package = tmp_path / "site" / "horovod"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("WHOSE = 'theirs'")
    given = f"import sys; sys.path.append({str(tmp_path / 'site')!r})\n"
    script = write(tmp_path, given + "import horovod\nprint(getattr(horovod, 'WHOSE', 'ours'))")
    ours = run_job(2, script, launcher_args=["--horovod"])
    assert ours.stdout.count("ours") == 2, ours.stderr
    assert ours.stderr.count(f"not the Horovod that is at {package / '__init__.py'}") == 1
    assert run_job(2, script).stdout.count("theirs") == 2


@pytest.mark.full
@pytest.mark.parametrize(
    ("script", "options"),
    [
        ("torch_digits.py", ["--fp16-allreduce", "--gradient-predivide-factor", "2"]),
        ("keras_digits.py", []),
    ],
)
def test_the_examples_learn_the_digits(script: str, options: list[str]) -> None:
    result = run_job(2, EXAMPLES / script, *options, launcher_args=["--horovod"], timeout=240.0)
    assert result.returncode == 0, result.stderr
    line = next(line for line in result.stdout.splitlines() if "test accuracy" in line)
    assert "2 ranks" in line
    assert float(line.split()[-1]) > 0.95
