"""Recognising launchers by what they put into the environment."""

from __future__ import annotations

import contextlib
import re
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest

from multiring.errors import UsageError
from multiring.rendezvous import slurm
from multiring.rendezvous.joined import HOSTS_KEY
from multiring.store import TcpStoreServer
from multiring.store.file import job_directory_prefix
from tests.python.rendezvous.detected import detect, numbers
from tests.support import executable, last_words, wait_until


def variables(text: str) -> dict[str, str]:
    return dict(word.split("=", 1) for word in text.split())


MULTIRING = variables("""
    MULTIRING_RANK=1 MULTIRING_SIZE=2 MULTIRING_LOCAL_RANK=1 MULTIRING_LOCAL_SIZE=2
    MULTIRING_CROSS_RANK=0 MULTIRING_CROSS_SIZE=1 MULTIRING_STORE=file:///tmp/x MULTIRING_JOB_ID=job
""")
MULTIRING["MULTIRING_SECRET"] = "ab" * 16
TORCHRUN = variables("""
    RANK=1 WORLD_SIZE=2 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 GROUP_RANK=0 GROUP_WORLD_SIZE=1
    MASTER_ADDR=localhost MASTER_PORT=35957 TORCHELASTIC_RUN_ID=none TORCHELASTIC_RESTART_COUNT=0
    TORCHELASTIC_ERROR_FILE=/tmp/torchelastic_a1/none_b2/attempt_0/1/error
""")
OPENMPI = variables("""
    OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=2
    PMIX_NAMESPACE=prterun-host-4487@1 PMIX_SERVER_TMPDIR=/tmp/ompi.4487
    PMIX_SERVER_URI2=prterun-host-4487@0.0;tcp4://127.0.0.1:48629
""")
MPICH = variables("PMI_RANK=1 PMI_SIZE=2 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2 PMI_FD=11")
SLURM = variables("""
    SLURM_PROCID=1 SLURM_LOCALID=1 SLURM_NODEID=0 SLURM_NTASKS=2 SLURM_NNODES=1 SLURM_JOB_ID=77
    SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=2 SLURM_STEP_NUM_NODES=1 SLURM_STEP_TASKS_PER_NODE=2
""")
SLURM_ON_TWO_HOSTS = SLURM | variables("""
    SLURM_STEP_NUM_TASKS=4 SLURM_STEP_NUM_NODES=2 SLURM_STEP_TASKS_PER_NODE=2(x2)
""")
MVAPICH = variables("""
    MV2_COMM_WORLD_RANK=1 MV2_COMM_WORLD_SIZE=2 MV2_COMM_WORLD_LOCAL_RANK=1 MV2_COMM_WORLD_LOCAL_SIZE=2
    MPIRUN_ID=4711
""")
JSRUN = variables("""
    JSM_NAMESPACE_RANK=1 JSM_NAMESPACE_SIZE=2 JSM_NAMESPACE_LOCAL_RANK=1 JSM_NAMESPACE_LOCAL_SIZE=2
    PMIX_RANK=1 PMIX_NAMESPACE=8 LSB_JOBID=5
""")
PALS = variables("""
    PALS_RANKID=1 PALS_LOCAL_RANKID=1 PALS_NODEID=0 PALS_LOCAL_SIZE=2 PALS_APID=ab-12 PMI_RANK=1 PMI_SIZE=2
""")
FLUX = variables("""
    FLUX_TASK_RANK=1 FLUX_TASK_LOCAL_ID=1 FLUX_JOB_SIZE=2 FLUX_JOB_NNODES=1 FLUX_JOB_ID=f2Ab FLUX_URI=local:///x
""")
HOROVODRUN = variables("""
    HOROVOD_RANK=1 HOROVOD_SIZE=2 HOROVOD_LOCAL_RANK=1 HOROVOD_LOCAL_SIZE=2 HOROVOD_CROSS_RANK=0
    HOROVOD_CROSS_SIZE=1 HOROVOD_GLOO_RENDEZVOUS_ADDR=10.0.0.1 HOROVOD_GLOO_RENDEZVOUS_PORT=4001
""")
FOREIGN = {
    "torchrun": TORCHRUN,
    "openmpi": OPENMPI,
    "mpich": MPICH,
    "mvapich": MVAPICH,
    "jsrun": JSRUN,
    "pals": PALS,
    "flux": FLUX,
    "slurm": SLURM,
    "horovodrun": HOROVODRUN,
}
EVERY = {"multiring": MULTIRING, **FOREIGN}
# What another rank of the job has instead, and what the job is called.
OTHERS = {
    "torchrun": "RANK=0 LOCAL_RANK=0 TORCHELASTIC_ERROR_FILE=/tmp/torchelastic_a1/none_b2/attempt_0/0/error",
    "openmpi": "OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_LOCAL_RANK=0",
    "mpich": "PMI_RANK=0 MPI_LOCALRANKID=0 PMI_FD=12",
    "slurm": "SLURM_PROCID=0 SLURM_LOCALID=0",
    "mvapich": "MV2_COMM_WORLD_RANK=0 MV2_COMM_WORLD_LOCAL_RANK=0",
    "jsrun": "JSM_NAMESPACE_RANK=0 JSM_NAMESPACE_LOCAL_RANK=0 PMIX_RANK=0",
    "pals": "PALS_RANKID=0 PALS_LOCAL_RANKID=0 PMI_RANK=0",
    "flux": "FLUX_TASK_RANK=0 FLUX_TASK_LOCAL_ID=0",
    "horovodrun": "HOROVOD_RANK=0 HOROVOD_LOCAL_RANK=0",
}
NAMES = {
    "torchrun": "torchrun none localhost 35957",
    "openmpi": "openmpi prterun-host-4487@1",
    "mpich": "",  # it has none that is the same on all hosts
    "slurm": "slurm 77.0",
    "mvapich": "",
    "jsrun": "jsrun 5.8",
    "pals": "pals ab-12",
    "flux": "flux f2Ab",
    "horovodrun": "horovodrun 10.0.0.1:4001",
}


def without(environ: Mapping[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name not in names}


def test_without_a_launcher_there_is_one_rank() -> None:
    place = detect({"PATH": "/bin", "MULTIRING_TIMEOUT": "5"})
    assert numbers(place) == (0, 1, 0, 1, 0, 1)
    assert (place.launcher, place.store_url, place.secret) == ("none", "", None)


@pytest.mark.parametrize("launcher", EVERY)
def test_each_launcher_is_recognised(launcher: str) -> None:
    place = detect(EVERY[launcher])
    assert place.launcher == launcher
    assert numbers(place) == (1, 2, 1, 2, 0, 1)


def test_the_nearest_launcher_wins() -> None:
    environ: dict[str, str] = {}
    order = ("horovodrun", "slurm", "flux", "pals", "jsrun", "mvapich", "mpich", "openmpi", "torchrun")
    for launcher in (*order, "multiring"):
        environ |= EVERY[launcher]
        assert detect(environ).launcher == launcher
    # Slurm's own process management is not taken for MPICH's.
    assert detect(SLURM | {"PMI_RANK": "1", "PMI_SIZE": "2"}).launcher == "slurm"


@pytest.mark.parametrize("launcher", FOREIGN)
def test_all_ranks_of_a_job_meet_in_one_private_directory(launcher: str) -> None:
    environ = FOREIGN[launcher]
    first, second = detect(environ), detect(environ | variables(OTHERS[launcher]))
    assert (first.rank, second.rank) == (1, 0)
    assert (first.store_url, first.job_id) == (second.store_url, second.job_id)
    assert first.launcher_job == second.launcher_job == NAMES[launcher]
    assert job_directory_prefix() in first.store_url
    assert first.secret is None


@pytest.mark.parametrize(
    ("launcher", "other"),
    [
        ("torchrun", "MASTER_PORT=35958"),
        ("torchrun", "TORCHELASTIC_RESTART_COUNT=1"),
        ("torchrun", "TORCHELASTIC_ERROR_FILE=/tmp/torchelastic_a1/none_b2/attempt_1/1/error"),
        ("openmpi", "PMIX_NAMESPACE=prterun-host-4488@1"),
        ("openmpi", "PMIX_SERVER_URI2=prterun-host-4487@0.0;tcp4://127.0.0.1:48630"),
        ("slurm", "SLURM_STEP_ID=1"),
        ("slurm", "SLURM_RESTART_COUNT=1"),
        ("jsrun", "PMIX_NAMESPACE=9"),
        ("pals", "PALS_APID=ab-13"),
        ("flux", "FLUX_JOB_ID=f2Ac"),
        ("horovodrun", "HOROVOD_GLOO_RENDEZVOUS_PORT=4002"),
    ],
)
def test_another_job_meets_elsewhere(launcher: str, other: str) -> None:
    environ = FOREIGN[launcher]
    assert detect(environ).store_url != detect(environ | variables(other)).store_url


def test_a_launcher_without_names_is_told_apart_by_its_process() -> None:
    nameless = without(OPENMPI, "PMIX_NAMESPACE", "PMIX_SERVER_URI2", "PMIX_SERVER_TMPDIR")
    for environ in (MPICH, nameless):
        assert detect(environ, "boot 1 2").store_url == detect(environ, "boot 1 2").store_url
        assert detect(environ, "boot 1 2").store_url != detect(environ, "boot 1 3").store_url


def test_our_store_and_one_of_the_users_own_are_taken() -> None:
    place = detect(MULTIRING)
    assert (place.store_url, place.secret, place.job_id) == ("file:///tmp/x", bytes.fromhex("ab" * 16), "job")
    place = detect(OPENMPI | {"MULTIRING_STORE": "tcp://h:1", "MULTIRING_SECRET": "cd" * 16})
    assert (place.store_url, place.secret) == ("tcp://h:1", bytes.fromhex("cd" * 16))


@pytest.mark.parametrize("step", [None, "4294967290", "4294967294"])
def test_a_batch_script_or_shell_of_slurm_is_no_rank(step: str | None) -> None:
    environ = SLURM | {"SLURM_PROCID": "0", "SLURM_STEP_ID": step or ""}
    assert detect(environ if step else without(environ, "SLURM_STEP_ID")).launcher == "none"
    allocation = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_NNODES": "1", "SLURM_TASKS_PER_NODE": "8"}
    assert detect(allocation).launcher == "none"


def test_one_task_of_a_larger_allocation_is_alone() -> None:
    step = {"SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1"}
    assert numbers(detect(SLURM | step | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0"})) == (0, 1, 0, 1, 0, 1)


@pytest.mark.parametrize(
    "environ",
    [
        TORCHRUN | {"WORLD_SIZE": "4", "GROUP_WORLD_SIZE": "2"},
        OPENMPI | {"OMPI_COMM_WORLD_SIZE": "4"},
        MPICH | {"PMI_SIZE": "4"},
        SLURM_ON_TWO_HOSTS,
    ],
)
def test_several_hosts_need_a_store_or_mpi(
    environ: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    bridge = tmp_path / "lib" / "multiring" / "mpi_bridge.so"
    bridge.parent.mkdir(parents=True)
    needs_store = r"2 of them on this host.*set MULTIRING_STORE and MULTIRING_SECRET"
    with pytest.raises(UsageError, match=needs_store):
        detect(environ)
    place = detect(environ | {"MULTIRING_STORE": "tcp://node0:29400"})
    assert place.is_spread
    assert (place.size, place.local_size, place.store_url) == (4, 2, "tcp://node0:29400")
    bridge.touch()
    if place.launcher == "torchrun":
        with pytest.raises(UsageError, match=needs_store):
            detect(environ)
    else:
        by_mpi = environ | ({"PMI_RANK": "0"} if place.launcher == "slurm" else {})
        assert detect(by_mpi).size == 4
        with pytest.raises(UsageError, match=needs_store):
            detect(by_mpi | {"MULTIRING_TRANSPORT": "tcp"})
        with pytest.raises(UsageError, match="MULTIRING_MPI_BRIDGE names bridge.so, which is no file on"):
            detect(by_mpi | {"MULTIRING_MPI_BRIDGE": "bridge.so"})


def test_ranks_of_srun_meet_on_the_first_host_by_a_secret_of_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    environ = SLURM_ON_TWO_HOSTS | {"SLURM_STEP_NODELIST": "node[07-08]"}
    first = detect(environ)
    other = detect(environ | {"SLURM_PROCID": "2", "SLURM_NODEID": "1", "SLURM_LOCALID": "0"})
    assert re.fullmatch(r"tcp://node07:\d{5}", first.store_url)
    assert (first.store_url, first.secret) == (other.store_url, other.secret)
    assert numbers(other) == (2, 4, 0, 2, 1, 2)
    given = detect(environ | {"MULTIRING_SECRET": "cd" * 16})
    assert (given.secret, given.store_url) == (bytes.fromhex("cd" * 16), first.store_url)
    # Another job is elsewhere, even if the user gives both the same name.
    for name in ({}, {"MULTIRING_JOB_ID": "nightly"}):
        one, another = detect(environ | name), detect(environ | name | {"SLURM_JOB_ID": "78"})
        assert (one.store_url, one.secret) == (first.store_url, first.secret)
        assert one.store_url != another.store_url
        assert one.secret != another.secret
        assert one.job_id != another.job_id
    assert one.job_id.startswith("nightly-")


@pytest.fixture
def first_of_two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The environment of rank 0 under srun, on two hosts of which the first one is this."""
    monkeypatch.setenv("HOME", str(tmp_path))
    return SLURM_ON_TWO_HOSTS | variables("""
        SLURM_STEP_NODELIST=localhost,other SLURM_PROCID=0 SLURM_LOCALID=0
        MULTIRING_TRANSPORT=tcp MULTIRING_TIMEOUT=30
    """)


def serve_where_rank_0_would(environ: dict[str, str]) -> TcpStoreServer:
    """Another job's store, at the port that follows from the name of this one; gives it a name to suit."""
    for job in range(1000, 1100):
        environ["SLURM_JOB_ID"] = str(job)
        port = int(detect(environ).store_url.rpartition(":")[2])
        with contextlib.suppress(UsageError):  # in use
            return TcpStoreServer("127.0.0.1", port, b"a secret of another job")
    raise AssertionError("no port of a hundred is free")


def end_of_init(environ: dict[str, str]) -> str:
    """The last line of the error of a process with that environment that joins its job."""
    return last_words("import multiring; multiring.init()", environ)


def test_rank_0_takes_nobody_elses_store_for_its_own(first_of_two: dict[str, str]) -> None:
    with serve_where_rank_0_would(first_of_two) as server:
        # Though it would be let in.
        given = first_of_two | {"MULTIRING_SECRET": b"a secret of another job".hex()}
        for environ in (first_of_two, given):
            told = end_of_init(environ)
            assert f"UsageError: rank 0 cannot serve the store tcp://localhost:{server.port}" in told
            assert "Address already in use" in told
            assert ". Set MULTIRING_STORE to a port that is free there" in told


def test_a_home_that_is_not_that_of_rank_0_is_told(first_of_two: dict[str, str]) -> None:
    with serve_where_rank_0_would(first_of_two):
        told = end_of_init(first_of_two | {"SLURM_PROCID": "2", "SLURM_NODEID": "1"})
    assert "this host does not see the same ~/.config/multiring/secret as the host of rank 0" in told
    assert "differs between ranks" not in told


def test_a_store_that_vanishes_while_hosts_are_asked_for_is_not_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = TcpStoreServer("127.0.0.1", 0, bytes.fromhex(MULTIRING["MULTIRING_SECRET"]))
    answer = server._answer
    closing = threading.Thread(target=server.close)

    def vanish(request: bytes) -> bytes:
        if HOSTS_KEY.encode() in request:
            closing.start()  # which waits for the thread that answers here
            wait_until(lambda: server._closed, "the end of the store")
            raise EOFError
        return answer(request)

    monkeypatch.setattr(server, "_answer", vanish)
    store = {"MULTIRING_STORE": f"tcp://127.0.0.1:{server.port}", "MULTIRING_TIMEOUT": "20"}
    with server:
        told = end_of_init(MULTIRING | store | {"MULTIRING_CROSS_RANK": "1", "MULTIRING_CROSS_SIZE": "2"})
        closing.join()
    assert "PeerLostError: the store tcp://127.0.0.1" in told
    assert "rank 0 or the launcher, has ended, or the network to it is cut" in told


def test_rank_0_tells_why_it_does_not_serve_the_store_that_the_user_has_named() -> None:
    with TcpStoreServer("127.0.0.1", 0, b"a secret of another job") as server:
        url = f"tcp://127.0.0.1:{server.port}"
        first = OPENMPI | {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
        told = end_of_init(first | {"MULTIRING_STORE": url, "MULTIRING_SECRET": "cd" * 16})
    assert f"UsageError: the store {url} does not know this job's secret: MULTIRING_SECRET differs" in told
    assert "Rank 0 does not serve it either, since the store cannot listen on 127.0.0.1" in told
    assert "Address already in use" in told


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        *((without(MULTIRING, name), f"{name}.* is not") for name in [*MULTIRING][:7]),
        (MULTIRING | {"MULTIRING_LOCAL_RANK": "5"}, "local rank 5 of 2"),
        (MULTIRING | {"MULTIRING_SIZE": "many"}, "MULTIRING_SIZE"),
        ({"OMPI_COMM_WORLD_RANK": "0"}, "OMPI_COMM_WORLD_SIZE"),
        (TORCHRUN | {"RANK": "-1"}, "rank -1 of 2"),
    ],
)
def test_what_is_missing_or_cannot_be_is_refused_with_the_variable(
    environ: dict[str, str], words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        detect(environ)


def test_tasks_per_node() -> None:
    expected = {"4": [4], "2(x3),1": [2, 2, 2, 1], "": [], "two": [], "2(x3": []}
    assert {text: slurm.tasks_per_node(text) for text in expected} == expected


def test_first_host() -> None:
    expected = {"node1,node2": "node1", "node[08-11,14],big1": "node08", "node[3,5]": "node3"}
    expected |= {"rack[2-3]node[01-16]": "rack2node01", "a[1-2]-ib,b": "a1-ib", "": ""}
    assert {text: slurm.first_host(text) for text in expected} == expected


@pytest.fixture
def scontrol(tmp_path: Path) -> dict[str, str]:
    """An environment with a `scontrol` that gives two hosts."""
    executable(tmp_path / "scontrol", '[ "$*" = "show hostnames n[1-2]" ] && printf "n1\\nn2\\n"')
    return {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]"}


def test_the_hosts_of_an_allocation(scontrol: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", scontrol["PATH"])
    assert slurm.allocated_hosts(scontrol | {"SLURM_TASKS_PER_NODE": "4,1"}) == [("n1", 4), ("n2", 1)]
    assert slurm.allocated_hosts(scontrol) == [("n1", 1), ("n2", 1)]
    assert slurm.allocated_hosts({"PATH": scontrol["PATH"]}) is None
    task = {"SLURM_PROCID": "0", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"}
    assert slurm.allocated_hosts(scontrol | task) is None
    shell = task | {"SLURM_STEP_ID": "4294967290"}
    assert slurm.allocated_hosts(scontrol | shell) is not None
    with pytest.raises(UsageError, match="2 hosts, and tasks for 3; name them by -H"):
        slurm.allocated_hosts(scontrol | {"SLURM_TASKS_PER_NODE": "4(x3)"})
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(UsageError, match=r"n\[1-2\], are not known: .*scontrol.*name them by -H"):
        slurm.allocated_hosts(scontrol | {"PATH": "/nonexistent"})
