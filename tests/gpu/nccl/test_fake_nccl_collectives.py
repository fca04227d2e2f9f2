"""Broadcasts, gathers, reduce-scatters and alltoalls by NCCL, on stand-ins for it and for the driver: the
bits that the host gives, without a copy to it, and how they fail."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu import stand_in
from tests.gpu.nccl.test_fake_nccl import HEAD
from tests.support import run_job


def _for_any_order(folder: Path) -> dict[str, str]:
    """The environment of a job that asks NCCL for all that these are about."""
    return stand_in.with_nccl(folder) | {"MULTIRING_ORDER": "any"}


CALLS = """
def copies():  # either way: of a broadcast the root alone has one to the host
    return sum(fake_arrays.driver().fake_cuda_calls(way) for way in (b"copy_to_host", b"copy_to_device"))

DTYPES = ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
          "float16", "float32", "float64")

def values_of(rank, dtype, rows=30_000):
    return ((np.arange(rows * 3) * 7 + rank) % 23).astype(dtype).reshape(rows, 3)

def both(what, x, *arguments, by_nccl=True, **keywords):
    '''The result of a collective on a device, and that of the same on the host.'''
    before = copies()
    result = getattr(comm, what)(fake_arrays.array(x, device()), *arguments, **keywords)
    assert (copies() == before) == by_nccl, (what, x.dtype, x.shape)
    later = getattr(comm, what + "_async")(fake_arrays.array(x, device()), *arguments, **keywords).wait()
    wanted = getattr(comm, what)(x, *arguments, **keywords)
    for each in (result, later):
        if wanted is None:  # of a gather the root alone has one
            assert each is None
            continue
        if isinstance(each, tuple):
            assert (each[1] == wanted[1]).all()
            each, bits = each[0].get(), wanted[0]
        else:
            each, bits = each.get(), wanted
        assert (each.dtype, each.shape) == (bits.dtype, bits.shape), (what, x.dtype)
        assert each.tobytes() == bits.tobytes(), (what, x.dtype)
"""

RIGHT = """
for dtype in DTYPES:
    x = values_of(comm.rank, dtype)
    for root in range(comm.size):
        both("broadcast", x, root)
    both("allgather", x)
    both("allgather", values_of(comm.rank, dtype, 70_000 + 1000 * comm.rank))
    both("gather", values_of(comm.rank, dtype, 70_000 + 1000 * comm.rank), comm.size - 1)
    both("alltoall", x)
    splits = [(comm.rank + peer) % 3 * 30_000 + peer for peer in range(comm.size)]
    both("alltoall", values_of(comm.rank, dtype, sum(splits)), splits)
    if dtype in ("bool", "int16", "uint16"):
        both("reduce_scatter", x, "max", order="any", by_nccl=False)
    else:
        both("reduce_scatter", x, order="any")
        both("reduce_scatter", x[:-1], "average" if dtype[0] == "f" else "max", order="any")

x = fake_arrays.array(values_of(comm.rank, "float32"), device())
before = copies()
assert comm.broadcast(x, comm.size - 1, out=x) is x
out = fake_arrays.array(np.zeros((30_000 * comm.size, 3), np.float32), device())
assert comm.allgather(x, out=out) is out
strided = comm.broadcast(fake_arrays.array(values_of(comm.rank, "float32"), device())[::2], 0)
queue = comm.named_queue("by nccl")
works = [queue.broadcast_async(x, 0, name="x"), queue.allgather_async(x, name="y")]
gathered = [work.wait() for work in works][1]
queue.close()
assert copies() == before
last = values_of(comm.size - 1, "float32")
assert (x.get() == last).all()
assert (out.get() == np.concatenate([last] * comm.size)).all()
assert (gathered.get() == out.get()).all()
assert (strided.get() == values_of(0, "float32")[::2]).all()

# What comes before in the array's stream counts, and what comes after sees the result.
with fake_arrays.stream(device()):
    x = fake_arrays.full(COUNT, comm.rank, device())
    fake_arrays.busy()
    x += 1
    works = [comm.allgather_async(x * factor) for factor in (1, 2)]
    for factor, work in enumerate(works, 1):
        gathered = work.wait()
        y = gathered + 1
        wanted = np.repeat(np.arange(1, comm.size + 1, dtype=np.float32) * factor + 1, COUNT)
        assert (y.get() == wanted).all()
print("RIGHT", flush=True)
"""


@pytest.mark.parametrize(
    ("size", "shared"), [(2, "0"), (3, "1")], ids=["fake device each", "fake devices shared"]
)
@pytest.mark.parametrize("progress", ["late", "seeded seed=3", "threads"])
def test_same_bits(size: int, shared: str, progress: str, tmp_path: Path) -> None:
    env = _for_any_order(tmp_path)
    env |= {"NCCL_MULTI_RANK_GPU_ENABLE": shared, "FAKE_CUDA": f"progress={progress}"}
    ended = run_job(size, HEAD + CALLS + RIGHT, code=0, env=env)
    assert ended.stdout.count("RIGHT") == size


OTHERS = """
x = values_of(comm.rank, "float32")
both("reduce_scatter", x, order="canonical", by_nccl=False)
both("reduce_scatter", x, "max", order="any", by_nccl=False)
both("broadcast", x[:100], 0, by_nccl=False)
both("allgather", x[:100], by_nccl=False)
both("alltoall", x[:100], by_nccl=False)
both("allgather", x[: 30_000 * comm.rank], by_nccl=False)  # of rank 0 nothing, which lies nowhere

# On the host of one rank: all pass through it, and the next ones do not.
for what, arguments in (("broadcast", (0,)), ("allgather", ()), ("alltoall", ())):
    call = getattr(comm, what)
    wanted = call(x, *arguments)
    for odd in range(comm.size):
        before = copies()
        name = f"{what}{odd}"
        mixed = call(x if comm.rank == odd else fake_arrays.array(x, device()), *arguments, name=name)
        if comm.rank != odd:
            assert copies() > before, (what, odd)
        assert ((mixed if comm.rank == odd else mixed.get()) == wanted).all(), (what, odd)
        call(fake_arrays.array(x, device()), *arguments, name=name)
        before = copies()
        after = call(fake_arrays.array(x, device()), *arguments, name=name)
        assert copies() == before, (what, odd)
        assert (after.get() == wanted).all(), (what, odd)
print("RIGHT", flush=True)
"""


def test_what_fake_nccl_is_not_for(tmp_path: Path) -> None:
    """Canonical order, few bytes, no rows, an array on the host of a rank: all ranks pass
    through the host."""
    ended = run_job(2, HEAD + CALLS + OTHERS, code=0, env=_for_any_order(tmp_path))
    assert ended.stdout.count("RIGHT") == 2


def test_a_fake_job_with_a_forced_mode(tmp_path: Path) -> None:
    env = _for_any_order(tmp_path) | {"MULTIRING_MODE": "staged"}
    script = HEAD + CALLS + 'both("alltoall", values_of(comm.rank, "float32"), by_nccl=False); print("RIGHT")'
    assert run_job(2, script, code=0, env=env).stdout.count("RIGHT") == 2


ORDERINGS = """
for what, arguments, factor in (("broadcast", (1,), 1), ("allgather", (), comm.size)):
    for ignored in (-1, 0, 1):
        comm.barrier()
        x, out = fake_arrays.full(COUNT, 5, device()), fake_arrays.full(factor * COUNT, 0, device())
        assert (x.get() == 5).all() and not out.get().any()
        x *= 2
        fake_arrays.configure(f"ignore=record:{ignored}")
        getattr(comm, what)(x, *arguments, out=out)
        fake_arrays.configure("ignore=record:-1")
        with fake_arrays.stream(device()):  # which waits for nothing
            assert (out.get() == 10).all() == (ignored < 0), (what, ignored)
print("RIGHT", flush=True)
"""


def test_fake_orderings(tmp_path: Path) -> None:
    """Of the two events, after the program's work and after NCCL's, leaving out one makes a result wrong."""
    assert run_job(2, HEAD + ORDERINGS, code=0, env=_for_any_order(tmp_path)).stdout.count("RIGHT") == 2


FAILING = """
import threading
from tests.support import Stopwatch
x = fake_arrays.full(COUNT, 1, device())
comm.{what}(x)
if comm.rank in {ranks}:
    {fault}
stopwatch = Stopwatch()
try:
    comm.{what}(x, name="w")
except multiring.MultiringError as error:
    assert stopwatch.seconds() < 8, stopwatch.seconds()
    print("TOLD", comm.rank, type(error).__name__, error.peer, str(error).replace(chr(10), " "), flush=True)
"""
KINDS = pytest.mark.parametrize("what", ["broadcast", "allgather", "alltoall"], ids="fake {}".format)


@KINDS
@pytest.mark.parametrize(
    ("options", "ranks", "kind", "text"),
    [
        ("fail=operation", (1,), "InternalError", "an operation of NCCL on device 1 failed"),
        (
            "hang=operation",
            (0, 1),
            "TimeoutError",
            "the other ranks in NCCL's {what}. Is one of them stopped?",
        ),
        ("hang=operation", (1,), "TimeoutError", "waited"),
    ],
    ids=["fails", "hangs", "hangs on a rank"],
)
def test_failures(
    what: str, options: str, ranks: tuple[int, ...], kind: str, text: str, tmp_path: Path
) -> None:
    """End at once, or at the deadline, with the same kind of error on all ranks."""
    script = HEAD + FAILING.format(what=what, ranks=ranks, fault=f'os.environ["FAKE_NCCL"] = "{options}"')
    ended = run_job(2, script, code=0, env=_for_any_order(tmp_path) | {"MULTIRING_TIMEOUT": "2"})
    told = [line for line in ended.stdout.splitlines() if "TOLD" in line]
    assert len(told) == 2, ended.stdout + ended.stderr
    for line in told:
        assert kind in line
        assert f"{what} 'w'" in line
    assert text.format(what=what) in "".join(told)


@KINDS
def test_a_killed_rank(what: str, tmp_path: Path) -> None:
    """While others wait for it within NCCL."""
    fault = """os.environ["FAKE_NCCL"] = "hang=operation"
    threading.Timer(1.0, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()"""
    env = _for_any_order(tmp_path) | {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}
    ended = run_job(3, HEAD + FAILING.format(what=what, ranks=(1,), fault=fault), env=env)
    assert ended.returncode != 0
    told = [line.split("TOLD ")[1].split() for line in ended.stdout.splitlines() if "TOLD" in line]
    assert sorted(words[0] for words in told) == ["0", "2"], ended.stdout + ended.stderr
    assert {(words[1], words[2]) for words in told} == {("PeerLostError", "1")}
