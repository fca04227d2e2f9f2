"""Allreduces by NCCL, on stand-ins for it and for the driver: right sums, when it is taken and when not, and
how it fails."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.gpu import stand_in
from tests.support import run_job

HEAD = """
import os, signal
import numpy as np
import multiring
from tests.gpu import fake_arrays

comm = multiring.init()
COUNT = 100_000

def copies():
    return fake_arrays.driver().fake_cuda_calls(b"copy_to_host")

def device():
    return comm.rank % 2

fake_arrays.use_stream(fake_arrays.driver().fake_cuda_stream(device()))

def total(x, *, by_nccl, op="sum", order="any", out=None):
    '''The allreduce of an array, which has to run on the devices, or to pass through the host.'''
    before = copies()
    result = comm.allreduce(x, op, order=order, out=out)
    on_device = hasattr(x, "get")
    if by_nccl or on_device:
        assert (copies() == before) == by_nccl, (op, order, by_nccl)
    return result.get() if hasattr(result, "get") else result
"""

SUMS = """
def expected(op, dtype):
    parts = [values_of(rank, dtype) for rank in range(comm.size)]
    add = {"sum": np.add, "product": np.multiply, "min": np.minimum, "max": np.maximum, "average": np.add}[op]
    result = add.reduce(parts).astype(dtype)
    return result / np.dtype(dtype).type(comm.size) if op == "average" else result

def values_of(rank, dtype):
    return (np.arange(COUNT) % 7 + rank).astype(dtype)

for dtype in ("int8", "uint8", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64"):
    floating = dtype.startswith("float")
    for op in ("sum", "product", *(("average",) if floating else ("min", "max"))):
        values = values_of(comm.rank, dtype)
        x = fake_arrays.array(values, device())
        got = total(x, op=op, by_nccl=True)
        assert np.allclose(got, expected(op, dtype), rtol=1e-2 if dtype == "float16" else 1e-6), (dtype, op)
        assert (x.get() == values).all()
        total(x, op=op, out=x, by_nccl=True)
        assert (x.get() == got).all()
    # What comes before in the array's stream counts, and what comes after sees the result.
with fake_arrays.stream(device()):
    x = fake_arrays.full(COUNT, comm.rank, device())
    fake_arrays.busy()
    x += 1
    works = [comm.allreduce_async(x * factor, order="any") for factor in (1, 2)]
    for factor, work in enumerate(works, 1):
        y = work.wait() + 1
        assert (y.get() == factor * sum(range(1, comm.size + 1)) + 1).all()
print("RIGHT", flush=True)
"""


@pytest.mark.parametrize(
    ("size", "shared"), [(2, "0"), (3, "1")], ids=["fake device each", "fake devices shared"]
)
@pytest.mark.parametrize("progress", ["late", "seeded seed=3", "threads"])
def test_sums(size: int, shared: str, progress: str, tmp_path: Path) -> None:
    env = stand_in.with_nccl(tmp_path)
    env |= {"NCCL_MULTI_RANK_GPU_ENABLE": shared, "FAKE_CUDA": f"progress={progress}"}
    ended = run_job(size, HEAD + SUMS, code=0, env=env)
    assert ended.stdout.count("RIGHT") == size


ORDERINGS = """
for ignored in (-1, 0, 1):
    comm.barrier()
    x, out = fake_arrays.full(COUNT, 5, device()), fake_arrays.full(COUNT, 0, device())
    assert (x.get() == 5).all() and not out.get().any()
    x *= 2
    fake_arrays.configure(f"ignore=record:{ignored}")
    comm.allreduce(x, order="any", out=out)
    fake_arrays.configure("ignore=record:-1")
    with fake_arrays.stream(device()):  # which waits for nothing
        assert (out.get() == 20).all() == (ignored < 0), ignored
print("RIGHT", flush=True)
"""


def test_fake_orderings(tmp_path: Path) -> None:
    """Of the two events, after the program's work and after NCCL's, leaving out one makes a result wrong."""
    assert run_job(2, HEAD + ORDERINGS, code=0, env=stand_in.with_nccl(tmp_path)).stdout.count("RIGHT") == 2


TRAINING = """
from tests.gpu import chainer_on_device

fake_arrays.use_stream(1)
chainer_on_device.train_as_the_host(comm, copies, rtol=1e-9, order="any")
print("RIGHT", flush=True)
"""


@pytest.mark.skipif(find_spec("chainer") is None, reason="Chainer needs Python 3.11 or older")
def test_gradients_on_fake_devices(tmp_path: Path) -> None:
    """Their buckets lie in pieces, with flags of the host: they train as the host's do."""
    assert run_job(3, HEAD + TRAINING, code=0, env=_shared(tmp_path)).stdout.count("RIGHT") == 3


OTHERS = """
x = fake_arrays.full(COUNT, 1, device())
assert (total(x, order="canonical", by_nccl=False) == 2).all()
assert (total(fake_arrays.full(100, 1, device()), by_nccl=False) == 2).all()
assert (total(x, op="max", by_nccl=False) == 1).all()
short = fake_arrays.array(np.ones(COUNT, np.int16), device())
assert (total(short, by_nccl=False) == 2).all()
on_host = np.ones(COUNT, np.float32)
assert (total(on_host if comm.rank else x, by_nccl=False) == 2).all()
assert (total(on_host, by_nccl=False) == 2).all()
for _ in range(2):
    with fake_arrays.stream(0):
        assert (total(fake_arrays.full(COUNT, 1, 0), by_nccl=False) == 2).all()
print("RIGHT", flush=True)
"""

WITHOUT = """
x = fake_arrays.full(COUNT, 1, device())
for _ in range(2):
    assert (total(x, by_nccl=False) == 2).all()
large = fake_arrays.full(3_000_000, 1, device())
assert (total(large, by_nccl=False) == 2).all()
print("RIGHT", flush=True)
"""


def test_what_fake_nccl_is_not_for(tmp_path: Path) -> None:
    """Canonical order, small arrays, dtypes and reductions that NCCL lacks, arrays on the host, one device
    for two ranks: they pass through the host, on all ranks."""
    ended = run_job(2, HEAD + OTHERS, code=0, env=stand_in.with_nccl(tmp_path))
    assert ended.stdout.count("RIGHT") == 2
    assert ended.stderr.count("not by NCCL: rank 0 and rank 1 have theirs on one device") == 1, ended.stderr


@pytest.mark.parametrize(
    ("without", "why"),
    [
        ('if comm.rank == 1: os.environ["FAKE_NCCL"] = "version=21000"', ""),
        (
            'os.environ["FAKE_NCCL"] = f"version={22700 + comm.rank}"',
            "rank 0 has NCCL 2.27.0, rank 1 has 2.27.1",
        ),
        ('if comm.rank == 1: os.environ["NCCL_COMM_BLOCKING"] = "1"', ""),
        (
            'if comm.rank == 1: os.environ["NCCL_COMM_ID"] = "10.0.0.1:5000"',
            "rank 1 has NCCL_COMM_ID set, and all of NCCL's communicators would meet at that one address",
        ),
        ('if comm.rank == 0: os.environ["FAKE_NCCL"] = "fail=id"', "ncclGetUniqueId on rank 0 failed (2)"),
    ],
    ids=[
        "fake too old on a rank",
        "fake versions that differ",
        "fake calls that block",
        "fake address",
        "fake without an id",
    ],
)
def test_ranks_without_nccl(without: str, why: str, tmp_path: Path) -> None:
    """Have all ranks do without. One says why, where it knows of all."""
    script = f"{HEAD}\n{without}\n{WITHOUT}"
    ended = run_job(2, script, code=0, env=stand_in.with_nccl(tmp_path))
    assert ended.stdout.count("RIGHT") == 2
    assert ended.stderr.count(f"not by NCCL: {why}") == bool(why), ended.stderr


def test_fake_wheel_in_a_folder_of_sys_path(tmp_path: Path) -> None:
    """Which is found where the process has not loaded another one."""
    env = stand_in.with_nccl(tmp_path) | {"LD_PRELOAD": str(stand_in.library())}
    folder = tmp_path / "caf\udce9" / "nvidia" / "nccl" / "lib"
    folder.mkdir(parents=True)
    (folder / "libnccl.so.2").symlink_to(stand_in.nccl())
    env["PYTHONPATH"] += f":{folder.parents[2]}"
    script = HEAD + "x = fake_arrays.full(COUNT, 1, device())\nassert (total(x, by_nccl=True) == 2).all()"
    run_job(2, script, code=0, env=env)


def test_a_fake_job_with_a_forced_mode(tmp_path: Path) -> None:
    """Does without, and so do its groups."""
    env = stand_in.with_nccl(tmp_path) | {"MULTIRING_MODE": "staged", "NCCL_MULTI_RANK_GPU_ENABLE": "1"}
    script = (
        HEAD + "comm = comm.split(0 if comm.rank < 2 else 1)\nif comm.size == 1: raise SystemExit\n" + WITHOUT
    )
    assert run_job(2, HEAD + WITHOUT, code=0, env=env).stdout.count("RIGHT") == 2
    assert run_job(3, script, code=0, env=env).stdout.count("RIGHT") == 2


FAILING = """
from tests.support import Stopwatch
x = fake_arrays.full(COUNT, 1, device())
if {first}:
    assert (total(x, by_nccl=True) == 2).all()
if comm.rank in {ranks}:
    {fault}
stopwatch = Stopwatch()
try:
    comm.allreduce(x, out=x, name="w", order="any")
except multiring.MultiringError as error:
    assert stopwatch.seconds() < 8, stopwatch.seconds()
    print("TOLD", comm.rank, type(error).__name__, error.peer, str(error).replace(chr(10), " "), flush=True)
    try:
        comm.barrier()
    except multiring.MultiringError:
        pass
    else:
        raise AssertionError("it goes on")
"""
_KILL = "os.kill(os.getpid(), signal.SIGKILL)"


@pytest.mark.parametrize(
    ("first", "ranks", "options", "kind", "texts"),
    [
        (False, (1,), "hang=init", "TimeoutError", ["NCCL to connect the ranks"]),
        (True, (0, 1), "hang=operation", "TimeoutError", ["the other ranks in NCCL's allreduce"]),
        (True, (1,), "hang=operation", "TimeoutError", []),
        (False, (1,), "fail=init", "InternalError", ["ncclCommInitRankConfig on device 1 failed", "rank 1"]),
        (
            True,
            (1,),
            "fail=operation",
            "InternalError",
            ["an operation of NCCL on device 1 failed", "rank 1"],
        ),
        # Longer than the peers' deadline: they are told before.
        (
            True,
            (1,),
            "fail=operation hang=abort",
            "InternalError",
            ["an operation of NCCL on device 1 failed", "rank 1"],
        ),
    ],
    ids=[
        "fake init",
        "fake allreduce",
        "fake allreduce on a rank",
        "fake init fails",
        "fake allreduce fails",
        "fake abort",
    ],
)
def test_failures(
    first: bool, ranks: tuple[int, ...], options: str, kind: str, texts: list[str], tmp_path: Path
) -> None:
    """End at the deadline, or at once, with the same kind of error on all ranks."""
    script = HEAD + FAILING.format(first=first, ranks=ranks, fault=f'os.environ["FAKE_NCCL"] = "{options}"')
    env = stand_in.with_nccl(tmp_path) | {"MULTIRING_TIMEOUT": "2"}
    ended = run_job(2, script, code=0, env=env)
    told = [line for line in ended.stdout.splitlines() if "TOLD" in line]
    assert len(told) == 2, ended.stdout + ended.stderr
    for line in told:
        assert kind in line
        assert "allreduce 'w'" in line
    for text in texts:
        assert text in "".join(told)


@pytest.mark.parametrize("first", [False, True], ids=["fake connecting", "fake adding"])
def test_a_killed_rank(first: bool, tmp_path: Path) -> None:
    """While others wait for it within NCCL: it has offered, or begun, its part."""
    fault = f"""os.environ["FAKE_NCCL"] = "hang=operation hang=init"
    import threading
    threading.Timer(1.0, lambda: {_KILL}).start()"""
    script = HEAD + FAILING.format(first=first, ranks=(1,), fault=fault)
    ended = run_job(3, script.replace("== 2).all()", "== 3).all()"), env=_shared(tmp_path))
    assert ended.returncode != 0
    told = [line.split("TOLD ")[1].split() for line in ended.stdout.splitlines() if "TOLD" in line]
    assert sorted(words[0] for words in told) == ["0", "2"], ended.stdout + ended.stderr
    assert {(words[1], words[2]) for words in told} == {("PeerLostError", "1")}


def _shared(folder: Path) -> dict[str, str]:
    return stand_in.with_nccl(folder) | {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}
