"""Chainer in jobs of its own processes: with a current NumPy, with MPI and without it, forked, at its end."""

from __future__ import annotations

import os
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from multiring.chainer import compatibility
from tests.support import Job, last_words, run_job, run_python

MPIRUN = shutil.which("mpirun", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")


WITHOUT_MPI = """
import sys
sys.modules["mpi4py"] = None  # as if it were not installed
import multiring.chainer
import chainer, chainermn, numpy as np, pytest

comm = multiring.chainer.create_communicator()
chainermn.links.MultiNodeBatchNormalization(3, comm)(np.ones((2, 3), np.float32))
optimizer = chainermn.create_multi_node_optimizer(chainer.optimizers.SGD(), comm)
with pytest.raises(ValueError, match="does not support double buffering"):
    chainermn.create_multi_node_optimizer(optimizer, comm, double_buffering=True)
for name in ("pure_nccl", "naive"):
    with pytest.raises(ImportError, match="mpi4py"):
        chainermn.create_communicator(name, mpi_comm="any")
assert not any(name.startswith("mpi4py.") for name in sys.modules)
"""


def test_mpi_is_not_needed() -> None:
    run_job(2, WITHOUT_MPI, code=0)


BESIDE_MPI = """
import sys
import multiring.chainer
import chainermn, numpy as np, pytest

comm = multiring.chainer.create_communicator()
layer = chainermn.links.MultiNodeBatchNormalization(3, comm)
assert "mpi4py.MPI" not in sys.modules
theirs = chainermn.create_communicator("naive")
np.testing.assert_array_equal(theirs.allreduce(np.ones(3)), comm.allreduce(np.ones(3)))
chainermn.links.MultiNodeBatchNormalization(3, theirs)(np.ones((2, 3), np.float32))
from mpi4py import MPI

both = multiring.chainer.create_communicator(mpi_comm=MPI.COMM_WORLD)
assert both.size == 2
child = both.split(0, -both.rank)
assert child.mpi_comm.rank == child.rank == both.size - 1 - both.rank
assert (both.split(None if both.rank else 0, 0) is None) == bool(both.rank)
with pytest.raises(RuntimeError, match="NCCL"):
    chainermn.create_communicator("pure_nccl")
"""


@pytest.mark.skipif(MPIRUN is None or find_spec("mpi4py") is None, reason="mpirun or mpi4py is missing")
def test_beside_chainermns_own_communicators() -> None:
    variables = {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    }
    Job([str(MPIRUN), "-np", "2", sys.executable, "-c", BESIDE_MPI], variables).run(120.0, code=0)


EXCEPT_HOOK = """
import multiring.chainer
import chainermn

comm = multiring.chainer.create_communicator()
chainermn.global_except_hook.add_hook()
if comm.rank == 1:
    raise ArithmeticError("the loss has exploded")
comm.recv_obj(1)
"""
ABORT = """
import multiring.chainer

comm = multiring.chainer.create_communicator()
if comm.rank == 1:
    comm.mpi_comm.Abort(3)
comm.recv_obj(1)
"""
ALONE = """
import multiring.chainer
import chainermn
chainermn.create_communicator("naive")
"""


@pytest.mark.parametrize(
    ("script", "text"),
    [
        (EXCEPT_HOOK, "ArithmeticError: the loss has exploded"),
        (ABORT, "failed with exit code 3"),
        (ALONE, "'multiring run' has started 2, each of which would train alone"),
    ],
    ids=["the global except hook", "mpi_comm.Abort", "a communicator of MPI"],
)
def test_an_error_ends_the_job(script: str, text: str) -> None:
    job = run_job(2, script)
    assert job.returncode != 0
    assert text in job.stderr


DOUBLE_BUFFERING = """
import os, time
import numpy as np
import multiring.chainer
import chainer
from chainer import functions, links

comm = multiring.chainer.create_communicator()

def make(extents, **options):
    model = chainer.Sequential(*[links.Linear(*one) for one in extents])
    create = multiring.chainer.create_multi_node_optimizer
    return model, create(chainer.optimizers.SGD(0.01), comm, double_buffering=True, **options).setup(model)
"""
LAST_STEP = """
def train():
    model, optimizer = make([(64, 64)] * 8, bucket_bytes=16384)
    for step in range(4):
        if step == 3 and comm.rank == 1:
            comm.plain.recv(0)
            time.sleep(0.5)  # rank 0 is at its end by then; were it not, there would be less to see
        optimizer.update(lambda: functions.sum(model(np.ones((8, 64), np.float32))))
    if comm.rank == 0:
        comm.plain.send(np.zeros(1), 1)
    return optimizer

"""


@pytest.mark.parametrize("ending", ["train()", "kept = train(); multiring.shutdown()"])
def test_gradients_of_the_last_step_are_let_arrive(ending: str) -> None:
    """With double buffering nobody waits for them, but others may still be sending theirs."""
    run_job(2, DOUBLE_BUFFERING + LAST_STEP + ending, code=0)


FORKED = """
# One layer in the middle of the bucket has no gradient, so they arrive in another order than was expected.
np.random.seed(0)
model, optimizer = make([(8, 8), (24, 24), (8, 16), (16, 4)])
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
    found = []
    for forks, ending in ((False, "pass"), (True, "del optimizer"), (True, "optimizer.close()")):
        guarded = f"try: {ending}\n            except Exception: pass"
        script = DOUBLE_BUFFERING + FORKED.format(forks=forks, ending=guarded)
        found.append(sorted(run_job(2, script, code=0).stdout.splitlines()))
    assert found[0] == found[1] == found[2]


AFTER_THE_ADAPTER = """
import multiring, sys
assert 'chainer' not in sys.modules
import numpy, numpy as np
import numpy.distutils.system_info, numpy.testing  # what Chainer imports of NumPy itself
before = dict(vars(np))
import multiring.chainer
import chainer, chainermn
changed = {n for n, v in vars(np).items() if n not in before or before[n] is not v}
assert changed - {n for n in changed if 'numpy.' + n in sys.modules} == {'sctypes', 'float'}, changed
assert np.float is float and np.float64 in np.sctypes['float']
assert np.int64 in np.sctypes['int']
x = chainer.Variable(np.ones((1, 1, 4, 4), 'f'))
chainer.functions.sum(chainer.functions.resize_images(x, (2, 2))).backward()
"""


def test_chainer_works_after_the_adapter() -> None:
    """And NumPy has got those two names back, and nothing else."""
    done = run_python(AFTER_THE_ADAPTER)
    assert done.returncode == 0, done.stderr


def test_names_that_exist_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(np, "sctypes", "theirs")
    monkeypatch.setattr(np, "float", "too")
    compatibility.restore_numpy_names()
    assert (np.sctypes, np.float) == ("theirs", "too")


@pytest.mark.parametrize(
    ("missing", "text"),
    [
        ("chainer", "chainer is not installed"),
        ("numpy.distutils.system_info", "chainer cannot be imported"),
    ],
)
def test_what_is_missing_is_said(missing: str, text: str) -> None:
    said = last_words(f"import sys\nsys.modules[{missing!r}] = None\nimport multiring.chainer")
    assert said.startswith(f"ImportError: {text}")
    for word in ("--no-build-isolation", "setuptools<82", "numpy<2.4", "multiring[chainer]", "Python 3.11"):
        assert word in said


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
    done = Job([sys.executable, str(script)]).run(90.0, code=0)
    assert done.stdout == "child\nloader\n[[0, 1, 2], [3, 4, 5]]\n", done.stderr
