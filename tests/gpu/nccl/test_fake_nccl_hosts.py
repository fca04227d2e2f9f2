"""NCCL among the ranks of several hosts, or within each of them, on stand-ins for it and for the driver."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu import stand_in
from tests.gpu.nccl.test_fake_nccl import FAILING, HEAD
from tests.gpu.nccl.test_fake_nccl_collectives import CALLS
from tests.support import run_job

TWO_BY_TWO = [0, 0, 1, 1]


def _environment(folder: Path, nccl: str) -> dict[str, str]:
    env = stand_in.with_nccl(folder) | {"MULTIRING_ORDER": "any", "NCCL_MULTI_RANK_GPU_ENABLE": "1"}
    return env | {"MULTIRING_NCCL": nccl}


def _on_hosts(places: list[int], script: str = HEAD) -> str:
    return f"from tests.support import pretend_places\npretend_places({places})\n{script}"


AMONG_ALL = """
x = values_of(comm.rank, "float32")
assert copies() == 0
for root in range(comm.size):
    both("broadcast", x, root)
both("allgather", x)
both("allgather", values_of(comm.rank, "int16", 70_000 + 1000 * comm.rank))
both("alltoall", x)
both("reduce_scatter", x)
both("reduce_scatter", x[:-1])
both("allreduce", x)
small = x[:100]
both("allreduce", small, by_nccl=False)
before = copies()
odd = comm.size - 1
mixed = comm.allreduce(x if comm.rank == odd else fake_arrays.array(x, device()), name="mixed")
assert (copies() > before) == (comm.rank != odd)
assert ((mixed if comm.rank == odd else mixed.get()) == comm.allreduce(x)).all()
print("RIGHT", flush=True)
"""


@pytest.mark.parametrize("places", [[0, 1], TWO_BY_TWO, [0, 1, 2], [0, 0, 1]], ids="fake hosts {}".format)
def test_among_all_ranks(places: list[int], tmp_path: Path) -> None:
    ended = run_job(
        len(places),
        _on_hosts(places, HEAD + CALLS + AMONG_ALL),
        code=0,
        env=_environment(tmp_path, "all"),
    )
    assert ended.stdout.count("RIGHT") == len(places)


USES_NCCL = """
def uses_nccl():
    files = os.listdir(os.environ["TMPDIR"])
    return any("fake_nccl." in name and ".init." in name for name in files)
"""

HIERARCHICAL = """
for count in (COUNT, COUNT + 1):
    x = fake_arrays.array((np.arange(count) % 7 + comm.rank).astype("float32"), device())
    wanted = (np.arange(count) % 7 * comm.size + sum(range(comm.size))).astype("float32")
    got = comm.allreduce(x)
    assert (got.get() == wanted).all()
    assert (comm.allreduce(x, "average").get() == wanted / comm.size).all()
    assert (comm.allreduce(x, out=x).get() == wanted).all()
comm.barrier()
assert uses_nccl() == {by_nccl}
comm.barrier()
print("RIGHT", flush=True)
"""


@pytest.mark.parametrize(
    ("places", "nccl", "by_nccl"),
    [
        (TWO_BY_TWO, "hierarchical", True),
        ([0, 1, 0, 1], "hierarchical", True),
        ([0, 0, 1], "hierarchical", False),
        ([0, 1], "hierarchical", False),
        (TWO_BY_TWO, "host", False),
        (TWO_BY_TWO, "off", False),
        ([0, 0], "off", False),
        ([0, 0], "hierarchical", True),
    ],
    ids="fake {}".format,
)
def test_allreduces_within_hosts(places: list[int], nccl: str, by_nccl: bool, tmp_path: Path) -> None:
    """Where hosts have as many ranks each; elsewhere, and unless it is asked for, through the host."""
    script = _on_hosts(places, HEAD + USES_NCCL + HIERARCHICAL.format(by_nccl=by_nccl))
    ended = run_job(len(places), script, code=0, env=_environment(tmp_path, nccl))
    assert ended.stdout.count("RIGHT") == len(places)


@pytest.mark.parametrize(
    ("without", "why"),
    [
        (
            'os.environ["FAKE_NCCL"] = f"version={22700 + comm.cross_rank}"',
            "rank 0 has NCCL 2.27.0, rank 2 has 2.27.1",
        ),
        ('os.environ["NCCL_COMM_ID"] = "10.0.0.1:5000"', "rank 0 has NCCL_COMM_ID set"),
    ],
    ids=["fake version of a host", "fake address of all hosts"],
)
@pytest.mark.parametrize("nccl", ["all", "hierarchical"], ids="fake {}".format)
def test_hosts_that_nccl_cannot_serve(nccl: str, without: str, why: str, tmp_path: Path) -> None:
    """Pass through the host; rank 0 says why, once. Each host's ranks could be served by themselves."""
    script = f"{HEAD}{USES_NCCL}{without}\n{HIERARCHICAL.format(by_nccl=False)}"
    ended = run_job(4, _on_hosts(TWO_BY_TWO, script), code=0, env=_environment(tmp_path, nccl))
    assert ended.stdout.count("RIGHT") == 4
    assert ended.stderr.count(f"not by NCCL: {why}") == 1, ended.stderr


HALF_PRECISION = """
from tests.python.collectives.oracle import narrowed, widened
hosts = {places}
for comm_dtype in ("bfloat16", "float16"):
    for count in (COUNT, COUNT + 1):
        values = [np.random.default_rng(rank).integers(-5000, 5001, count) for rank in range(comm.size)]
        sums = [sum(v for v, its in zip(values, hosts) if its == host) for host in sorted(set(hosts))]
        rounded = lambda x: widened(narrowed(np.asarray(x, "float32"), comm_dtype), comm_dtype)
        wanted = rounded(sum(rounded(each) for each in sums))
        assert (wanted != sum(values)).any() and (wanted != rounded(sum(values))).any()
        x = fake_arrays.array(values[comm.rank].astype("float32"), device())
        got = comm.allreduce(x, comm_dtype=comm_dtype)
        assert got.get().tobytes() == wanted.tobytes(), (comm_dtype, count)
assert uses_nccl()
comm.barrier()
print("RIGHT", flush=True)
"""


@pytest.mark.parametrize("places", [TWO_BY_TWO, [0, 1, 0, 1], [0, 0, 1, 1, 2, 2]], ids="fake hosts {}".format)
def test_half_precision_between_hosts(places: list[int], tmp_path: Path) -> None:
    """Each host's sums are rounded, these added as float32, and the result rounded, as NumPy does it; nothing
    is within a host. All ranks have the same bits."""
    script = _on_hosts(places, HEAD + USES_NCCL + HALF_PRECISION.format(places=places))
    ended = run_job(len(places), script, code=0, env=_environment(tmp_path, "hierarchical"))
    assert ended.stdout.count("RIGHT") == len(places)


ORDERINGS = """
for ignored in (-1, 0, 1, 2):
    comm.barrier()
    x, out = fake_arrays.full(COUNT, 5, device()), fake_arrays.full(COUNT, 0, device())
    assert (x.get() == 5).all() and not out.get().any()
    x *= 2
    fake_arrays.configure(f"ignore=record:{ignored}")
    comm.allreduce(x, out=out)
    fake_arrays.configure("ignore=record:-1")
    with fake_arrays.stream(device()):  # which waits for nothing
        assert (out.get() == 40).all() == (ignored < 0), ignored
print("RIGHT", flush=True)
"""


def test_fake_orderings_within_hosts(tmp_path: Path) -> None:
    """Of the three events, after the program's work, the copy of the share, and what NCCL returns, leaving
    out one makes a result wrong."""
    script = _on_hosts(TWO_BY_TWO, HEAD + ORDERINGS)
    ended = run_job(4, script, code=0, env=_environment(tmp_path, "hierarchical"))
    assert ended.stdout.count("RIGHT") == 4


@pytest.mark.parametrize("nccl", ["all", "hierarchical"], ids="fake {}".format)
@pytest.mark.parametrize("first", [False, True], ids=["fake connecting", "fake adding"])
def test_a_killed_rank(nccl: str, first: bool, tmp_path: Path) -> None:
    """While others wait for it within NCCL, or for those of its host."""
    fault = """os.environ["FAKE_NCCL"] = "hang=operation hang=init"
    import threading
    threading.Timer(1.0, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()"""
    script = HEAD + FAILING.format(first=first, ranks=(1,), fault=fault)
    by_nccl = nccl == "all"  # else shares are copied
    script = script.replace("by_nccl=True) == 2", f"by_nccl={by_nccl}) == 4")
    ended = run_job(4, _on_hosts(TWO_BY_TWO, script), env=_environment(tmp_path, nccl))
    assert ended.returncode != 0
    told = [line.split("TOLD ")[1].split() for line in ended.stdout.splitlines() if "TOLD" in line]
    assert sorted(words[0] for words in told) == ["0", "2", "3"], ended.stdout + ended.stderr
    assert {(words[1], words[2]) for words in told} == {("PeerLostError", "1")}


def test_fake_settings_that_differ(tmp_path: Path) -> None:
    """Are an error at the start, on several hosts."""
    script = 'import os\nos.environ["MULTIRING_NCCL"] = ("off", "host")[int(os.environ["MULTIRING_RANK"])]\n'
    ended = run_job(2, script + _on_hosts([0, 1]), env=_environment(tmp_path, "off"))
    assert ended.returncode != 0
    assert "MULTIRING_NCCL" in ended.stderr
