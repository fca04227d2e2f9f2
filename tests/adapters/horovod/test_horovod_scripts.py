"""Scripts that import horovod, unchanged: by launchers, with the wheel multiring-horovod, the examples."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import pytest

from tests.support import REPOSITORY, Job, last_words, run_job

EXAMPLES = REPOSITORY / "examples" / "horovod"

IMPORTS = """
import importlib.util
import os
import sys

import horovod
import horovod.torch as hvd
from horovod import torch as other
from horovod.common.elastic import run_fn
from horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt
from horovod.common.process_sets import process_set_by_id, process_sets
from horovod.common.basics import HorovodBasics
from horovod.common.exceptions import HorovodVersionMismatchError
from horovod.common.util import _cache
from horovod.common.util import env, gloo_built, nccl_built, num_rank_is_power_2, split_list
from horovod.torch.elastic.sampler import ElasticSampler
from horovod.torch.elastic.state import ModelStateHandler, OptimizerStateHandler, SamplerStateHandler
from horovod.torch.elastic.state import StateHandler, TorchState, get_handler_registry, set_handler_registry
from horovod.torch.functions import broadcast_object
from horovod.torch.compression import Compression, FP16Compressor, NoneCompressor
from horovod.torch.mpi_ops import allreduce, rank
import multiring.horovod.torch

assert hvd is other is multiring.horovod.torch is horovod.torch
assert Compression is hvd.Compression and allreduce is hvd.allreduce
assert hvd.mpi_ops.Sum == hvd.Sum
assert Compression.fp16 is FP16Compressor and Compression.none is NoneCompressor
assert multiring.horovod.torch.__spec__.name == "multiring.horovod.torch"
assert horovod.__version__ == "0.28.1"
try:
    import horovod.spark
    raise AssertionError("there is a horovod.spark")
except ImportError as error:
    assert "there is no multiring.horovod.spark" in str(error), error
# What Python finds for these names; importing TensorFlow takes long.
for name in ("horovod.keras", "horovod.tensorflow", "horovod.tensorflow.keras", "horovod.tensorflow.util"):
    assert importlib.util.find_spec(name).name == name
with env(HOROVOD_HERE="1"):
    assert os.environ["HOROVOD_HERE"] == "1"
assert "HOROVOD_HERE" not in os.environ and not gloo_built() and not nccl_built(verbose=True)
assert split_list([1, 2, 3], 2) == [[1, 2], [3]] and num_rank_is_power_2(4) and not num_rank_is_power_2(6)
hvd.init()
assert process_set_by_id(0) is process_sets()[0] is hvd.global_process_set
for name in ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size"):
    assert getattr(hvd, name)() == int(os.environ.get("HOROVOD_" + name.upper(), "size" in name)), name
assert hvd.mpi_ops._basics._get_process_set_ids_and_ranks() == {0: list(range(hvd.size()))}
assert hvd.mpi_ops._basics.size() == HorovodBasics(__file__, "mpi_lib").size() == hvd.size()
assert not hasattr(HorovodBasics(), "no_such_function")
everyone = hvd.allgather_object(hvd.rank())
if hvd.rank() == hvd.size() - 1:
    print("all of", hvd.size(), sys.argv[1:], everyone)
"""


@pytest.mark.full
def test_what_is_imported() -> None:
    result = run_job(2, IMPORTS, launcher_args=["--horovod"], code=0)
    assert "all of 2 [] [0, 1]" in result.stdout
    assert "not the Horovod" not in result.stderr


@pytest.mark.full
def test_without_the_launcher(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(IMPORTS)
    command = [sys.executable, "-m", "multiring.horovod"]
    result = Job([*command, str(script), "--epochs", "3"]).run(code=0)
    assert "all of 1 ['--epochs', '3'] [0]" in result.stdout
    assert "usage: python -m multiring.horovod" in Job(command).run(code=2).stderr
    script.write_text("import multiring.horovod\nmultiring.horovod.install()\n" * 2 + IMPORTS)
    assert "all of 1 [] [0]" in Job([sys.executable, str(script)]).run(code=0).stdout
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    result = Job([*torchrun, "--module", "multiring.horovod", str(script)]).run(240.0, code=0)
    assert "all of 2 [] [0, 1]" in result.stdout


@pytest.mark.full
def test_a_horovod_that_is_installed_is_not_shadowed_silently(tmp_path: Path) -> None:
    """With --horovod a line says so; without it, nothing of ours is found."""
    package = tmp_path / "horovod"
    package.mkdir()
    (package / "__init__.py").write_text("WHOSE = 'theirs'")
    script = f"import sys; sys.path.append({str(tmp_path)!r})\n"
    script += "import horovod\nprint(getattr(horovod, 'WHOSE', 'ours'))"
    ours = run_job(2, script, launcher_args=["--horovod"])
    assert ours.stdout.count("ours") == 2, ours.stderr
    assert ours.stderr.count(f"not the Horovod that is at {package / '__init__.py'}") == 1
    assert run_job(2, script).stdout.count("theirs") == 2
    path = tmp_path / "elsewhere" / "script.py"
    path.parent.mkdir()
    path.write_text(script)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    foreign = Job([*torchrun, "--module", "multiring.horovod", str(path)]).run(240.0, code=0)
    assert foreign.stderr.count(f"not the Horovod that is at {package / '__init__.py'}") == 1


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder into which the wheel multiring-horovod is installed."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    source = str(REPOSITORY / "integrations" / "horovod" / "shim")
    offline = ["--no-index", "--no-deps", "--no-build-isolation"]
    Job([*pip, "wheel", *offline, "--wheel-dir", str(folder), source]).run(code=0)
    (built,) = folder.glob("*.whl")
    Job([*pip, "install", *offline[:2], "--target", str(folder / "site"), str(built)]).run(code=0)
    return folder / "site"


@pytest.mark.full
def test_the_wheel_of_horovod(wheel: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(IMPORTS + "import multiring.horovod\nmultiring.horovod.install()\n")
    found = {"PYTHONPATH": str(wheel)}
    alone = Job([sys.executable, str(script)], found).run(code=0)
    assert "all of 1 [] [0]" in alone.stdout
    command = [sys.executable, str(wheel / "bin" / "horovodrun"), "-np", "2"]
    together = Job([*command, sys.executable, str(script)], found).run(code=0)
    assert "all of 2 [] [0, 1]" in together.stdout
    assert "not the Horovod" not in together.stderr


@pytest.mark.full
def test_the_wheel_beside_a_horovod(wheel: Path, tmp_path: Path) -> None:
    """Both in one place have overwritten files of one another."""
    site = tmp_path / "site"
    shutil.copytree(wheel, site)
    about = site / "horovod-0.28.1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: horovod\nVersion: 0.28.1\n")
    said = last_words("import horovod.torch", {"PYTHONPATH": str(site)})
    assert said.startswith("ImportError: Horovod and multiring-horovod are both installed"), said


@pytest.mark.full
@pytest.mark.parametrize(
    ("script", "options"),
    [
        ("torch_digits.py", ["--fp16-allreduce", "--gradient-predivide-factor", "2"]),
        ("keras_digits.py", []),
    ],
)
def test_the_examples_learn_the_digits(script: str, options: list[str]) -> None:
    result = run_job(2, EXAMPLES / script, *options, launcher_args=["--horovod"], timeout=240.0, code=0)
    line = next(line for line in result.stdout.splitlines() if "test accuracy" in line)
    assert "2 ranks" in line
    assert float(line.split()[-1]) > 0.95


@pytest.mark.full
@pytest.mark.parametrize("option", ["--fp16-allreduce", "--use-adasum"])
def test_the_synthetic_benchmark(option: str) -> None:
    small = ["--model", "resnet50", "--batch-size", "2", "--image-size", "32", "--num-warmup-batches", "1"]
    small += ["--num-batches-per-iter", "1", "--num-iters", "2", option]
    script = EXAMPLES / "torch_synthetic.py"
    result = run_job(2, script, *small, launcher_args=["--horovod"], timeout=240.0, code=0)
    assert result.stdout.count("img/sec per CPU") == 2
    assert re.search(r"Total img/sec on 2 CPU\(s\): [\d.]+ \+-[\d.]+", result.stdout)


ELASTIC = """
import horovod.torch as hvd
import torch

hvd.init()
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())

@hvd.elastic.run
def train(state):
    for state.batch in range(state.batch, 6):
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        if state.batch in (2, 4) and state.failed < state.batch:
            state.failed = state.batch
            state.commit()
            hvd.allreduce(torch.ones(1 + hvd.rank()))
        optimizer.step()
    return state.failed

state = hvd.elastic.TorchState(model, optimizer, batch=0, failed=0)
found = train(state), model.weight.tolist()
print("the same" if hvd.allgather_object(found) == [found] * 2 else "not", found[0], flush=True)
hvd.shutdown()
for _ in range(100):
    hvd.init()
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 2
    hvd.shutdown()
print("a hundred times")
"""


@pytest.mark.full
def test_elastic_training_and_joining_a_hundred_times() -> None:
    result = run_job(2, ELASTIC, launcher_args=["--horovod"], timeout=240.0, code=0)
    assert result.stdout.count("the same 4") == result.stdout.count("a hundred times") == 2
