"""`multiring horovodrun`, `multiring.horovod.run`, and scripts that import horovod, unchanged."""

from __future__ import annotations

import os
import re
import shutil
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

import multiring.horovod
from multiring import RankError, UsageError, cli
from multiring.commands.launcher.foreign_variables import horovod_environment
from multiring.commands.launcher.options import add_arguments as add_run_arguments
from multiring.commands.launcher.remote_ranks import SSH
from multiring.horovod.runner import options
from tests.support import REPOSITORY, Job, last_words, parsed, refused, run_job, run_multiring

# Of horovodrun 0.28.1, with a value where it takes one.
_TEXT = """
    --disable-cache --start-timeout=30 --fusion-threshold-mb=64 --cycle-time-ms=1.5 --cache-capacity=9
    --hierarchical-allgather --no-hierarchical-allgather
    --torus-allreduce --no-torus-allreduce --autotune --no-autotune --autotune-log-file=f
    --autotune-warmup-samples=1 --autotune-steps-per-sample=1 --autotune-bayes-opt-max-samples=1
    --autotune-gaussian-process-noise=0.1 --slots-per-host=2 --elastic-timeout=9 --reset-limit=1
    --mpi-threads-disable --no-mpi-threads-disable --mpi-args=--x --tcp --binding-args=--x --gloo --mpi
    --num-nccl-streams=1 --thread-affinity=1 --gloo-timeout-seconds=30 --log-with-timestamp --jsrun
    --log-without-timestamp --log-hide-timestamp --no-log-hide-timestamp --prefix-output-with-timestamp
    -prefix-timestamp
"""
WITHOUT_EFFECT = _TEXT.split()


def run_words(*words: str) -> list[str]:
    return options.run_arguments(parsed(options.add_arguments, *words))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--num-proc", "4", "-H", "a:2,b:2"], ["-np", "4", "--hosts", "a:2,b:2"]),
        (["-np", "2", "-hostfile", "f"], ["-np", "2", "--hostfile", "f"]),
        (["--hostfile", "f", "-p", "22"], ["--hostfile", "f", "--ssh", f"{SSH} -p 22"]),
        (["-H", "a", "-p", "22", "-i", "a b"], ["--hosts", "a", "--ssh", f"{SSH} -p 22 -i 'a b'"]),
        (["--network-interfaces", "eth0,eth1"], ["--interfaces", "eth0,eth1"]),
        (["--network-interface", "a", "--network-interface", "b"], ["--interfaces", "a,b"]),
        (["--output-filename", "logs"], ["--output-dir", "logs"]),
        (["--verbose"], ["--env", "MULTIRING_LOG_LEVEL=info"]),
        (["--verbose", "--log-level", "FATAL"], ["--env", "MULTIRING_LOG_LEVEL=error"]),
        (["--stall-check"], []),
        (["--timeline-filename", "t", "--no-timeline-mark-cycles"], ["--env", "HOROVOD_TIMELINE=t"]),
        (["--timeline-mark-cycles"], ["--env", "HOROVOD_TIMELINE_MARK_CYCLES=1"]),
        (["--no-stall-check"], ["--env", "MULTIRING_STALL_WARNING=0"]),
        (["--hierarchical-allreduce"], ["--env", "MULTIRING_NCCL=hierarchical"]),
        (["--no-hierarchical-allreduce"], ["--env", "HOROVOD_HIERARCHICAL_ALLREDUCE=0"]),
        (
            ["--stall-check-warning-time-seconds", "9", "--stall-check-shutdown-time-seconds", "60"],
            ["--env", "MULTIRING_STALL_WARNING=9", "--env", "MULTIRING_TIMEOUT=60"],
        ),
        (["--stall-check-shutdown-time-seconds", "0"], []),
        ([*WITHOUT_EFFECT, "--blacklist-cooldown-range", "1", "2"], []),
    ],
)
def test_options_are_those_of_multiring_run(words: list[str], expected: list[str]) -> None:
    found = run_words(*words, "python", "train.py", "-np", "9")
    assert found == ["--horovod", *expected, "--", "python", "train.py", "-np", "9"]
    parsed(add_run_arguments, *found)  # understands it
    assert run_words(*words, "--", "a.sh")[-2:] == ["--", "a.sh"]


def test_options_without_effect_are_noted() -> None:
    names = [word.partition("=")[0] for word in WITHOUT_EFFECT]
    assert parsed(options.add_arguments, *WITHOUT_EFFECT, "true").without_effect == names


@pytest.mark.parametrize(
    ("words", "text"),
    [
        *(
            (["-np", "2", name, "3", "true"], f"horovodrun {name}: elastic jobs")
            for name in ("--min-np", "--min-num-proc", "--max-np", "--host-discovery-script")
        ),
        (["-np", "2"], "name the program"),
        (["true"], "say how many ranks"),
    ],
)
def test_what_is_refused(words: list[str], text: str) -> None:
    assert text in refused("horovodrun", *words)


def test_version_and_build(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["horovodrun", "-v"]) == 0
    assert capsys.readouterr().out == f"{multiring.horovod.__version__}\n"
    assert cli.main(["horovodrun", "--check-build"]) == 0
    assert "[X] PyTorch" in capsys.readouterr().out


def test_a_file_of_options(tmp_path: Path) -> None:
    """What the command line says goes before it."""
    path = tmp_path / "options.yaml"
    path.write_text(
        "params:\n  cycle_time_ms: 5\ntimeline:\n  filename: t\n  mark_cycles: true\n"
        "logging:\n  level: DEBUG\nstall_check:\n  enabled: false\n  shutdown_time_seconds: 9\n"
    )
    args = parsed(options.add_arguments, "--config-file", str(path), "--log-level", "ERROR", "true")
    words = options.run_arguments(args)
    variables = ["HOROVOD_TIMELINE=t", "HOROVOD_TIMELINE_MARK_CYCLES=1", "MULTIRING_LOG_LEVEL=error"]
    variables += ["MULTIRING_STALL_WARNING=0", "MULTIRING_TIMEOUT=9"]
    assert words == ["--horovod", *(word for each in variables for word in ("--env", each)), "--", "true"]
    assert args.without_effect == [f"params.cycle_time_ms in {path}"]
    args = parsed(
        *(options.add_arguments, "--config-file", str(path), "--verbose", "--stall-check"),
        *("--stall-check-shutdown-time-seconds", "0", "--no-timeline-mark-cycles", "true"),
    )
    variables = ["HOROVOD_TIMELINE=t", "MULTIRING_LOG_LEVEL=info"]
    words = ["--horovod", *(word for each in variables for word in ("--env", each)), "--", "true"]
    assert options.run_arguments(args) == words
    for bad in ("/none", str(tmp_path)):
        assert f"--config-file {bad}" in refused("horovodrun", "--config-file", bad, "true")


@pytest.mark.parametrize(
    ("value", "inherited", "given", "wanted"),
    [
        ("1", None, {}, "hierarchical"),
        ("0", None, {}, None),
        ("1", None, {"MULTIRING_NCCL": "all"}, "all"),
        ("1", "off", {}, None),  # ranks inherit it
        ("1", None, {"HOROVOD_HIERARCHICAL_ALLREDUCE": "0"}, None),
    ],
    ids=["", "not", "given", "inherited", "not given"],
)
def test_the_variable_for_hierarchical_allreduces(
    value: str,
    inherited: str | None,
    given: dict[str, str],
    wanted: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It sets multiring's own, unless that is set."""
    monkeypatch.setenv("HOROVOD_HIERARCHICAL_ALLREDUCE", value)
    monkeypatch.delenv("MULTIRING_NCCL", raising=False)
    if inherited is not None:
        monkeypatch.setenv("MULTIRING_NCCL", inherited)
    assert horovod_environment(given).get("MULTIRING_NCCL") == wanted


def test_a_job() -> None:
    words = ["-np", "2", "--gloo", "--autotune", "sh", "-c", "echo $HOROVOD_RANK of $HOROVOD_SIZE; exit 3"]
    result = run_multiring("horovodrun", *words)
    assert result.returncode == 3
    assert sorted(result.stdout.splitlines()) == ["[0] 0 of 2", "[1] 1 of 2"]
    assert "multiring: horovodrun: these have no effect here: --gloo, --autotune\n" in result.stderr
    shown = Job([sys.executable, "-m", "multiring.horovod.runner", "-v"]).run(code=0)
    assert shown.stdout == f"{multiring.horovod.__version__}\n"


def place(base: int, *, fails: bool = False) -> tuple[int, str, str | None]:
    """What a rank of `run` sees."""
    import horovod

    if fails:
        raise ValueError("an odd number")
    rank = base + int(os.environ["HOROVOD_RANK"])
    return rank, horovod.__name__, os.environ.get("MULTIRING_INTERFACES")


def test_results_by_rank(tmp_path: Path) -> None:
    given: dict[str, Any] = {"network_interface": "lo", "output_filename": tmp_path, "num_proc": 2}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = multiring.horovod.run(place, (10,), hosts="localhost:1,127.0.0.1:1", **given)
    assert found == [(10, "horovod", "lo"), (11, "horovod", "lo")]
    assert {path.name for path in tmp_path.iterdir()} >= {"rank.0.stdout", "rank.1.stderr"}


def test_arguments_that_are_warned_of() -> None:
    """Those without effect are named once; `np` was the name of `num_proc`."""
    with pytest.warns(UserWarning, match="no effect here: ssh_port, verbose, use_gloo$") as seen:
        ((rank, *_),) = multiring.horovod.run(place, (0,), ssh_port=22, use_gloo=True, verbose=True)
    assert (rank, len(seen)) == (0, 1)
    failed = pytest.raises(RankError, match="raised ValueError: an odd number")
    with pytest.warns(DeprecationWarning, match="use num_proc instead"), failed as got:
        multiring.horovod.run(place, (0,), {"fails": True}, np=2)
    assert isinstance(got.value.__cause__, ValueError)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"hosts": "localhost:1,192.0.2.1:1"}, "192.0.2.1: a function runs on this host only"),
        ({"hosts": "localhost:1", "num_proc": 2}, "2 ranks, and 1 slots"),
        ({"hosts": "a", "hostfile": "b"}, "not both"),
        ({"hostfile": "/none"}, "/none"),
        ({"use_gloo": True, "use_mpi": True}, "not both"),
        ({"min_num_proc": 1}, "min_num_proc=1: elastic jobs"),
        ({"max_np": 1}, "max_np=1: elastic jobs"),
        ({"executable": "/usr/bin/none"}, "executable=/usr/bin/none: ranks run /"),
        ({"num_proc": 0}, "np=0"),
    ],
)
def test_wrong_arguments(given: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        multiring.horovod.run(place, **given)


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
