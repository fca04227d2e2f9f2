"""Chainer in jobs of its own processes: with a current NumPy, with MPI and without it, forked, at its end."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support import run_job

MPIRUN = shutil.which("mpirun", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")


WITHOUT_MPI = """
import sys
sys.modules["mpi4py"] = None  # as if it were not installed
import multiring.chainer
import chainer, chainermn, numpy as np

comm = multiring.chainer.create_communicator()
layer = chainermn.links.MultiNodeBatchNormalization(3, comm)
layer(np.ones((2, 3), np.float32))
optimizer = chainermn.create_multi_node_optimizer(chainer.optimizers.SGD(), comm)
try:
    chainermn.create_multi_node_optimizer(optimizer, comm, double_buffering=True)
except ValueError as error:
    assert "does not support double buffering" in str(error)
for name in ("pure_nccl", "naive"):
    try:
        chainermn.create_communicator(name, mpi_comm="any")
    except ImportError as error:
        assert "mpi4py" in str(error), error
    else:
        raise AssertionError(f"{name} was made without MPI")
assert not any(name.startswith("mpi4py.") for name in sys.modules)
print("done")
"""


def test_mpi_is_not_needed() -> None:
    assert run_job(2, WITHOUT_MPI, code=0).stdout.count("done") == 2


BESIDE_MPI = """
import sys
import multiring.chainer
import chainermn, numpy as np

comm = multiring.chainer.create_communicator()
layer = chainermn.links.MultiNodeBatchNormalization(3, comm)
assert "mpi4py.MPI" not in sys.modules
theirs = chainermn.create_communicator("naive")
np.testing.assert_array_equal(theirs.allreduce(np.ones(3)), comm.allreduce(np.ones(3)))
chainermn.links.MultiNodeBatchNormalization(3, theirs)(np.ones((2, 3), np.float32))
from mpi4py import MPI

both = multiring.chainer.create_communicator(mpi_comm=MPI.COMM_WORLD)
child = both.split(0, -both.rank)
assert child.mpi_comm.rank == child.rank == both.size - 1 - both.rank
assert (both.split(None if both.rank else 0, 0) is None) == bool(both.rank)
try:
    chainermn.create_communicator("pure_nccl")
except RuntimeError as error:
    assert "NCCL" in str(error)
print("done")
"""


@pytest.mark.skipif(MPIRUN is None or find_spec("mpi4py") is None, reason="mpirun or mpi4py is missing")
def test_beside_chainermns_own_communicators(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(BESIDE_MPI)
    variables = {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    }
    command = [str(MPIRUN), "-np", "2", sys.executable, "-W", "ignore", str(script)]
    done = subprocess.run(
        command, env={**os.environ, **variables}, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("done") == 2


EXCEPT_HOOK = """
import multiring.chainer
import chainermn

comm = multiring.chainer.create_communicator()
chainermn.global_except_hook.add_hook()
if comm.rank == 1:
    raise ArithmeticError("the loss has exploded")
comm.recv_obj(1)
"""


def test_the_global_except_hook_ends_the_job() -> None:
    job = run_job(2, EXCEPT_HOOK)
    assert job.returncode != 0
    assert "ArithmeticError: the loss has exploded" in job.stderr


ALONE = """
import multiring.chainer
import chainermn
chainermn.create_communicator("naive")
"""


def test_a_communicator_of_mpi_under_multiring_run() -> None:
    job = run_job(2, ALONE)
    assert job.returncode != 0
    assert "'multiring run' has started 2, each of which would train alone" in job.stderr


LAST_STEP = """
import sys, time
import numpy as np
import multiring.chainer
import chainer
from chainer import functions, links

def train():
    comm = multiring.chainer.create_communicator()
    model = chainer.Sequential(*[links.Linear(64, 64) for _ in range(8)])
    optimizer = multiring.chainer.create_multi_node_optimizer(
        chainer.optimizers.SGD(), comm, double_buffering=True, bucket_bytes=16384, first_bucket_bytes=4096
    )
    optimizer.setup(model)
    for step in range(4):
        if step == 3 and comm.rank == 1:
            comm.plain.recv(0)
            time.sleep(0.5)  # rank 0 is at its end by then; were it not, there would be less to see
        optimizer.update(lambda: functions.sum(model(np.ones((8, 64), np.float32))))
    if comm.rank == 0:
        comm.plain.send(np.zeros(1), 1)
    return optimizer

multiring.init()
{ending}
"""


@pytest.mark.parametrize("ending", ["train()", "kept = train(); multiring.shutdown()"])
def test_gradients_of_the_last_step_are_let_arrive(ending: str) -> None:
    """With double buffering nobody waits for them, but others may still be sending theirs."""
    run_job(2, LAST_STEP.format(ending=ending), code=0)


FORKED = """
import os, sys
import numpy as np
import multiring.chainer
import chainer
from chainer import functions, links

multiring.init()
comm = multiring.chainer.create_communicator()
# One layer in the middle of the bucket has no gradient, so they arrive in another order than was expected.
np.random.seed(0)
model = chainer.Sequential(*[links.Linear(*extents) for extents in ((8, 8), (24, 24), (8, 16), (16, 4))])
optimizer = multiring.chainer.create_multi_node_optimizer(
    chainer.optimizers.SGD(0.01), comm, double_buffering=True
)
optimizer.setup(model)
for step in range(6):
    x = np.random.default_rng(10 * step + comm.rank).standard_normal((4, 8)).astype(np.float32)
    optimizer.update(lambda: functions.sum(model[3](model[2](model[0](x))) ** 2))
    if step == 1:  # what is on its way is the first round of its buckets
        optimizer._sent.reducer.await_sent(60.0)
        if {forks} and os.fork() == 0:
            {ending}
            os._exit(0)
        if {forks}:
            os.wait()
print(comm.rank, [float(each.array.sum()) for each in model.params()])
"""


def test_a_forked_child_leaves_the_gradients_of_its_parent_alone() -> None:
    """Though they have arrived when it is forked."""
    alone = run_job(2, FORKED.format(forks=False, ending="pass"), code=0)
    for ending in ("del optimizer", "optimizer.close()"):
        guarded = f"try: {ending}\n            except Exception: pass"
        forked = run_job(2, FORKED.format(forks=True, ending=guarded), code=0)
        assert sorted(alone.stdout.splitlines()) == sorted(forked.stdout.splitlines())


def run(*words: str) -> subprocess.CompletedProcess[str]:
    """A Python of its own."""
    command = [sys.executable, "-W", "ignore", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)


def test_chainer_works_after_the_adapter() -> None:
    """And NumPy has got those two names back, and nothing else."""
    done = run(
        "-c",
        "import multiring, sys\n"
        "assert 'chainer' not in sys.modules\n"
        "import numpy, numpy as np\n"
        "import numpy.distutils.system_info, numpy.testing\n"  # what Chainer imports of NumPy itself
        "before = dict(vars(np))\n"
        "from multiring.chainer import compatibility\n"
        "import chainer, chainermn\n"
        "changed = {n for n, v in vars(np).items() if n not in before or before[n] is not v}\n"
        "modules = {n for n in changed if 'numpy.' + n in sys.modules}\n"
        "assert changed - modules == {'sctypes', 'float'}, changed\n"
        "assert np.float is float and np.float64 in np.sctypes['float']\n"
        "assert np.int64 in np.sctypes['int']\n"
        "compatibility.restore_numpy_names()\n"
        "x = chainer.Variable(np.ones((1, 1, 4, 4), 'f'))\n"
        "chainer.functions.sum(chainer.functions.resize_images(x, (2, 2))).backward()\n"
        "print('done')",
    )
    assert done.stdout == "done\n", done.stderr


def test_names_that_exist_are_left_alone() -> None:
    done = run(
        "-c",
        "import numpy as np\n"
        "np.sctypes, np.float = 'theirs', 'too'\n"
        "import importlib.util\n"
        "import multiring\n"
        "path = importlib.util.find_spec('multiring').submodule_search_locations\n"
        "spec = importlib.util.find_spec('multiring.chainer')\n"
        "module = importlib.util.spec_from_file_location(\n"
        "    'compatibility', spec.origin.replace('__init__', 'compatibility'))\n"
        "loaded = importlib.util.module_from_spec(module)\n"
        "module.loader.exec_module(loaded)\n"
        "loaded.restore_numpy_names()\n"
        "assert (np.sctypes, np.float) == ('theirs', 'too')\n"
        "print('done')",
    )
    assert done.stdout == "done\n", done.stderr


@pytest.mark.parametrize(
    ("missing", "text"),
    [
        ("chainer", "chainer is not installed"),
        ("numpy.distutils.system_info", "chainer cannot be imported"),
    ],
)
def test_what_is_missing_is_said(missing: str, text: str) -> None:
    done = run(
        "-c",
        f"import sys\nsys.modules[{missing!r}] = None\n"
        "try:\n"
        "    import multiring.chainer\n"
        "except ImportError as error:\n"
        "    print(error)",
    )
    assert text in done.stdout, done.stderr
    for word in ("--no-build-isolation", "setuptools<82", "numpy<2.4", "multiring[chainer]", "Python 3.11"):
        assert word in done.stdout


# It imports the adapter where a child process, which imports this module too, does not.
ITERATOR = """
import multiprocessing
import sys


def modules():
    assert "chainer" not in sys.modules
    print("child", flush=True)


if __name__ == "__main__":
    multiprocessing.set_start_method("spawn")
    import multiring.chainer
    import chainer
    import loader

    for child in (multiprocessing.Process(target=modules), loader.Loader()):
        child.start()
        child.join()
        assert child.exitcode == 0
    batches = chainer.iterators.MultiprocessIterator(range(6), 3, repeat=False, shuffle=False, n_processes=1)
    print(list(batches), flush=True)
    batches.finalize()
"""


LOADER = """
import multiprocessing
import chainer


class Loader(multiprocessing.Process):
    def run(self):
        print("loader", flush=True)
"""


def test_child_processes_have_the_names_of_numpy(tmp_path: Path) -> None:
    """Those of "forkserver" are prepared by the same function."""
    (tmp_path / "loader.py").write_text(LOADER)
    script = tmp_path / "script.py"
    script.write_text(ITERATOR)
    done = run(str(script))
    assert done.returncode == 0, done.stderr
    assert done.stdout == "child\nloader\n[[0, 1, 2], [3, 4, 5]]\n", done.stderr
