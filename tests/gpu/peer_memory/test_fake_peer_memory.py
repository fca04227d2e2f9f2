"""Collectives in peer memory, on stand-ins for the driver and for NVRTC: ranks are processes, which have one
another's buffers by IPC handles."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.gpu import stand_in
from tests.support import run_job

HEAD = """
import os
import numpy as np
import multiring
from tests.gpu import fake_arrays

comm = multiring.init()
COUNT = 100_003

def device():
    return comm.rank % 2

def calls(name):
    return fake_arrays.driver().fake_cuda_calls(name)

def in_peer_memory(x, op="sum", out=None, **options):
    before = calls(b"copy_to_host"), calls(b"launch_kernel")
    result = comm.allreduce(x, op, out=out, **options)
    assert calls(b"copy_to_host") == before[0]
    assert calls(b"launch_kernel") > before[1]
    return result

fake_arrays.use_stream(fake_arrays.driver().fake_cuda_stream(device()))
"""

SUMS = """
def values_of(dtype):
    values = np.random.default_rng(comm.rank).normal(size=COUNT) * 100
    if dtype.startswith("float"):
        values[:6] = 0.0, -0.0, np.inf, np.nan, 1e-310, -np.inf
    with np.errstate(all="ignore"):
        return values.astype(dtype)

for dtype in ("bool", "int8", "uint16", "int32", "uint64", "float16", "float32", "float64"):
    sums = [] if dtype == "bool" else ["sum", "average"] if dtype.startswith("float") else ["sum"]
    for op in ("product", "min", "max", *sums):
        values = values_of(dtype)
        wanted = comm.allreduce(values, op)  # by the host, of the same bits
        x = fake_arrays.array(values, device())
        assert in_peer_memory(x, op).get().tobytes() == wanted.tobytes(), (dtype, op)
        assert x.get().tobytes() == values.tobytes()
        assert in_peer_memory(x, op, out=x).get().tobytes() == wanted.tobytes(), (dtype, op)
# What comes before in the array's stream counts, and what comes after sees the result.
with fake_arrays.stream(device()):
    x = fake_arrays.full(COUNT, comm.rank, device())
    fake_arrays.busy()
    x += 1
    works = [comm.allreduce_async(x * factor) for factor in (1, 2)]
    for factor, work in enumerate(works, 1):
        y = work.wait() + 1
        assert (y.get() == factor * sum(range(1, comm.size + 1)) + 1).all()
# A larger buffer, and a group of some ranks.
large = fake_arrays.full(1_000_001, 1, device())
assert (in_peer_memory(large, out=large).get() == comm.size).all()
part = comm.split(0 if comm.rank < 2 else 1)
if comm.rank < 2:
    comm = part
    assert (in_peer_memory(fake_arrays.full(COUNT, 1, device())).get() == 2).all()
print("RIGHT", flush=True)
"""


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("progress", ["late", "seeded seed=3", "seeded seed=4", "threads"])
def test_fake_sums(size: int, progress: str) -> None:
    """Have the bits of the host, with a device for each rank or for two."""
    env = stand_in.with_nvrtc(f"progress={progress}")
    assert run_job(size, HEAD + SUMS, code=0, env=env).stdout.count("RIGHT") == size


PIECES = """
from multiring.arrays import Pieces

class Bucket:
    '''Values in hundreds of pieces on the device, of which some are not aligned, and flags on the host.'''

    LENGTHS = [3, 20_000, 0, 1, *(i * 7 % 401 for i in range(200)), 30_000]
    COUNT = sum(LENGTHS) + 5

    def __init__(self, values):
        self.dtype, self.flags = values.dtype, values[-5:].copy()
        self.arrays, begin = [], 0
        for number, length in enumerate(self.LENGTHS):
            raw = values[begin : begin + length].view(np.uint8)
            self.arrays.append(fake_arrays.array(np.append(np.zeros(number % 2, np.uint8), raw), device()))
            begin += length

    def reduce(self, op="sum", name="w"):
        memory = [(x.address + i % 2, length * self.dtype.itemsize, device(), fake_arrays.current_stream())
                  for i, (x, length) in enumerate(zip(self.arrays, self.LENGTHS))]
        memory.append((self.flags.ctypes.data, self.flags.nbytes, -1, 0))
        addresses, lengths, devices, streams = zip(*memory)
        pieces = Pieces(self.dtype.name, addresses, lengths, self, devices, streams)
        comm.allreduce_pieces_async(pieces, op, name, 1.0, 1.0).wait()

    def get(self):
        raw = [x.get()[i % 2 :] for i, x in enumerate(self.arrays)]
        return np.append(np.concatenate(raw).view(self.dtype), self.flags)
"""

PIECES_SUMS = """
for dtype in ("int16", "float16", "float32", "float64"):
    values = (np.random.default_rng(comm.rank).normal(size=Bucket.COUNT) * 100).astype(dtype)
    for op in ("sum", "max", *(["average"] if dtype.startswith("float") else [])):
        wanted = comm.allreduce(values, op)  # by the host, of the same bits
        with fake_arrays.stream(device()):
            fake_arrays.busy()
            bucket = Bucket(values)
            before = calls(b"copy_to_host"), calls(b"launch_kernel")
            bucket.reduce(op)
            assert (calls(b"copy_to_host"), calls(b"launch_kernel")) == (before[0], before[1] + 1)
            assert bucket.get().tobytes() == wanted.tobytes(), (dtype, op)
print("RIGHT", flush=True)
"""


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("progress", ["late", "seeded seed=3", "threads"])
def test_fake_pieces(size: int, progress: str) -> None:
    """Arrays in pieces have the bits of the host too, of which those on the host are reduced there."""
    env = stand_in.with_nvrtc(f"progress={progress}")
    done = run_job(size, HEAD + PIECES + PIECES_SUMS, code=0, env=env, timeout=240.0)  # compiles for a minute
    assert done.stdout.count("RIGHT") == size


TRAINING = """
from tests.gpu import chainer_on_device

fake_arrays.use_stream(1)
before = calls(b"launch_kernel")
chainer_on_device.train_as_the_host(comm, lambda: calls(b"copy_to_host"))
assert calls(b"launch_kernel") == before + 5
print("RIGHT", flush=True)
"""


@pytest.mark.skipif(importlib.util.find_spec("chainer") is None, reason="Chainer needs Python 3.11 or older")
def test_gradients_on_fake_devices() -> None:
    """Their buckets lie in pieces, with flags of the host: they train to the host's bits."""
    assert run_job(3, HEAD + TRAINING, code=0, env=stand_in.with_nvrtc()).stdout.count("RIGHT") == 3


OTHERS = """
def same(name, values, *arguments):
    '''The result of a collective on the devices is that of the host; what it allocates, and in place.'''
    on_host = getattr(comm, name)(values.copy(), *arguments)
    x = fake_arrays.array(values, device())
    before = calls(b"copy_to_host")
    results = [getattr(comm, name)(x, *arguments) for _ in range(2)]
    assert calls(b"copy_to_host") == before, name
    if arguments and isinstance(arguments[0], list):  # of an alltoall: with how many rows came
        on_host, received = on_host
        assert all((each[1] == received).all() for each in results)
        results = [each[0] for each in results]
    for result in results:
        if on_host is None:  # of a gather the root alone has one
            assert result is None
            continue
        assert result.get().tobytes() == on_host.tobytes(), name

for count in (20_001, 700_001):
    values = np.random.default_rng(comm.rank).normal(size=count).astype(np.float32)
    for op in ("sum", "average"):
        same("reduce_scatter", values, op)
    same("reduce_scatter", values[:20_000].reshape(4, 5000))
    same("broadcast", values, comm.size - 1)
    same("allgather", values)
    same("allgather", values[: count - 100 * comm.rank])
    same("gather", values[: count - 100 * comm.rank], 1)
    same("alltoall", values, [count - (comm.size - 1) * 300, *[300] * (comm.size - 1)])
print("RIGHT", flush=True)
"""


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("progress", ["late", "seeded seed=3", "threads"])
def test_fake_collectives(size: int, progress: str) -> None:
    """Other collectives have the bits of the host."""
    env = stand_in.with_nvrtc(f"progress={progress}")
    assert run_job(size, HEAD + OTHERS, code=0, env=env).stdout.count("RIGHT") == size


ORDERINGS = """
kept = []  # what is still to come uses it
for ignored in (-1, *range(4)):
    comm.barrier()
    x, out = fake_arrays.full(COUNT, 5 + ignored, device()), fake_arrays.full(COUNT, 0, device())
    assert (x.get() == 5 + ignored).all() and not out.get().any()
    x *= 2
    kept += [x, out]
    # Its device is far behind the other one.
    if comm.rank == 0:
        fake_arrays.configure(f"lateness=2000 ignore=record:{ignored}")
    comm.allreduce(x, out=out)
    fake_arrays.configure("ignore=record:-1")
    with fake_arrays.stream(device()):  # which waits for nothing
        is_right = (out.get() == 4 * (5 + ignored)).all()
    everywhere = bool(comm.allreduce(np.array([is_right]), "min")[0])
    assert everywhere == (ignored < 0), ignored
print("RIGHT", flush=True)
"""


def test_fake_orderings() -> None:
    """Of the events (after the program's work, the copies to the buffer, the kernel, and the copies back)
    leaving out one makes a result wrong."""
    assert run_job(2, HEAD + ORDERINGS, code=0, env=stand_in.with_nvrtc()).stdout.count("RIGHT") == 2


BESIDE_NCCL = """
def way_of(x, op):
    before = calls(b"copy_to_host"), calls(b"launch_kernel")
    result = comm.allreduce(x, op)
    assert (result.get() == x.get() * (1 if op == "max" else comm.size)).all()
    copied, launched = calls(b"copy_to_host") > before[0], calls(b"launch_kernel") > before[1]
    return (("nccl", "peers"), ("host", "both"))[copied][launched]

{without}
with fake_arrays.stream({device}):
    found = [
        way_of(fake_arrays.array(np.ones(COUNT, dtype), {device}), op)
        for dtype, op in (("float32", "sum"),) * 3 + (("int16", "sum"), ("float32", "max"))
    ]
assert found == {wanted}, found
print("RIGHT", flush=True)
"""


@pytest.mark.parametrize(
    ("nccl", "without", "device", "wanted"),
    [
        ("host", "", "device()", ["nccl"] * 3 + ["peers"] * 2),
        ("off", "", "device()", ["peers"] * 5),
        # An offer that has come to nothing has the next one's array copied besides.
        ("host", "", "0", ["host", "both"] + ["peers"] * 3),
        (
            "host",
            'if comm.rank == 1: os.environ["FAKE_NCCL"] = "version=21000"',
            "device()",
            ["host", "both"] + ["peers"] * 3,
        ),
    ],
    ids=["fake devices", "fake NCCL is off", "fake device for both", "fake rank without NCCL"],
)
def test_what_nccl_does_not_take(
    nccl: str, without: str, device: str, wanted: list[str], tmp_path: Path
) -> None:
    """A dtype, a reduction, any where it is off, and devices that it has not served before."""
    env = stand_in.with_nccl(tmp_path) | {"MULTIRING_PEER_MEMORY": "1", "MULTIRING_ORDER": "any"}
    env |= {"LD_PRELOAD": f"{env['LD_PRELOAD']} {stand_in.nvrtc()}", "MULTIRING_NCCL": nccl}
    script = HEAD + BESIDE_NCCL.format(without=without, device=device, wanted=wanted)
    assert run_job(2, script, code=0, env=env).stdout.count("RIGHT") == 2


WITHOUT = """
x = fake_arrays.full(COUNT, 1, device())
for _ in range(2):
    before = calls(b"copy_to_host")
    assert (comm.allreduce(x).get() == 2).all()
    assert calls(b"copy_to_host") > before
print("RIGHT", flush=True)
"""


@pytest.mark.parametrize(
    ("without", "why"),
    [
        (
            'if comm.rank == 1: os.environ["FAKE_NVRTC"] = "fail=compile"',
            "rank 1: nvrtcCompileProgram failed",
        ),
        ('if comm.rank == 1: fake_arrays.configure("fail=ipc_import:201")', "rank 1: cuIpcOpenMemHandle on"),
        ('if comm.rank == 0: fake_arrays.configure("fail=memory_alloc:2")', "rank 0: cuMemAlloc on device 0"),
    ],
    ids=["fake compiler fails", "fake import fails", "fake memory is full"],
)
def test_ranks_that_cannot(without: str, why: str) -> None:
    """Have all ranks pass through the host; rank 0 says why, once."""
    ended = run_job(2, f"{HEAD}\n{without}\n{WITHOUT}", code=0, env=stand_in.with_nvrtc())
    assert ended.stdout.count("RIGHT") == 2
    assert ended.stderr.count(f"not through peer memory: {why}") == 1, ended.stderr


def test_fake_ranks_without_nvrtc() -> None:
    """Say so, and pass through the host."""
    if importlib.util.find_spec("nvidia") is not None and importlib.util.find_spec("nvidia.cuda_nvrtc"):
        pytest.skip("there is a wheel with NVRTC")
    env = stand_in.with_nvrtc() | {"LD_PRELOAD": str(stand_in.library())}
    ended = run_job(2, HEAD + WITHOUT, code=0, env=env)
    assert ended.stdout.count("RIGHT") == 2
    assert ended.stderr.count("not through peer memory: there is no NVRTC") == 2, ended.stderr


@pytest.mark.parametrize("setting", ["0", "1"], ids=["fake setting 0", "fake setting 1"])
def test_what_is_not_asked_for(setting: str) -> None:
    """Without the setting, or with a forced mode, arrays pass through the host."""
    env = stand_in.with_nvrtc() | {"MULTIRING_PEER_MEMORY": setting}
    if setting == "1":
        env["MULTIRING_MODE"] = "staged"
    assert run_job(2, HEAD + WITHOUT, code=0, env=env).stdout.count("RIGHT") == 2


FAILING = """
from tests.support import Stopwatch
x = fake_arrays.full(COUNT, 1, device())
in_peer_memory(x)
reduce = {call}
comm.barrier()
{fault}
stopwatch = Stopwatch()
try:
    reduce()
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


WHOLE = 'lambda: comm.allreduce(x, out=x, name="w")'
SCATTERED = 'lambda: comm.reduce_scatter(x, name="w")'
MOVED = 'lambda: comm.broadcast(x, 1, name="w")'
IN_PIECES = "Bucket(np.ones(Bucket.COUNT, np.float32)).reduce"


def _told(stdout: str) -> dict[int, list[str]]:
    lines = [line.split("TOLD ")[1].split() for line in stdout.splitlines() if "TOLD" in line]
    return {int(words[0]): words[1:] for words in lines}


@pytest.mark.parametrize("function", ["launch_kernel", "copy_on_device", "event_query"])
def test_fake_failures(function: str) -> None:
    """End as the same error on all ranks."""
    fault = f'if comm.rank == 1: fake_arrays.configure("fail={function}:1")'
    ended = run_job(3, HEAD + FAILING.format(fault=fault, call=WHOLE), code=0, env=stand_in.with_nvrtc())
    told = _told(ended.stdout)
    assert sorted(told) == [0, 1, 2], ended.stdout + ended.stderr
    for words in told.values():
        text = " ".join(words)
        assert words[0] == "InternalError"
        assert "on device 1 failed" in text
        assert "allreduce 'w'" in text


def test_a_fake_kernel_that_never_ends() -> None:
    """Is waited for until the deadline."""
    fault = "if comm.rank == 1: fake_arrays.busy(-1)"
    env = stand_in.with_nvrtc() | {"MULTIRING_TIMEOUT": "2"}
    told = _told(run_job(2, HEAD + FAILING.format(fault=fault, call=WHOLE), code=0, env=env).stdout)
    assert sorted(told) == [0, 1]
    assert {words[0] for words in told.values()} == {"TimeoutError"}
    # Told by that rank itself, or by the one that waits for it.
    causes = "the work that makes the input", "for rank 1"
    assert any(cause in " ".join(words) for words in told.values() for cause in causes), told


@pytest.mark.parametrize(
    ("moment", "call"),
    [
        ("launch_kernel", WHOLE),
        ("copy_on_device", WHOLE),
        ("launch_kernel", IN_PIECES),
        ("copy_on_device", IN_PIECES),
        ("launch_kernel", SCATTERED),
        ("copy_on_device", MOVED),
    ],
    ids=["kernel whole", "copy whole", "kernel pieces", "copy pieces", "reduce_scatter", "broadcast"],
)
def test_a_fake_rank_that_is_killed(moment: str, call: str) -> None:
    """In the middle of an operation: the others, which wait for it, are told."""
    fault = f'if comm.rank == 1: fake_arrays.configure("fail={moment}:-9")'
    ended = run_job(3, HEAD + PIECES + FAILING.format(fault=fault, call=call), env=stand_in.with_nvrtc())
    assert ended.returncode != 0
    told = _told(ended.stdout)
    assert sorted(told) == [0, 2], ended.stdout + ended.stderr
    assert {tuple(words[:2]) for words in told.values()} == {("PeerLostError", "1")}
