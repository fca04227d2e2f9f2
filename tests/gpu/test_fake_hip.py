"""Arrays on devices of AMD: HIP and RCCL, by the tables of CUDA's driver and NCCL, on stand-ins for them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu import stand_in
from tests.gpu.nccl.test_fake_nccl import HEAD
from tests.python.commands.test_diagnostics import compiled
from tests.support import run_job, run_multiring

COLLECTIVES = """
import ctypes

hip, now = fake_arrays.driver(), ctypes.c_int()
assert hip.hipSetDevice(1 - device()) == 0  # the program works on another one meanwhile
rows = np.arange(30_000 * 3, dtype=np.float32).reshape(30_000, 3) % 7 + comm.rank
for take in (fake_arrays.array, lambda x, device: fake_arrays.DlpackArray(fake_arrays.array(x, device))):
    for what, arguments in (
        ("allreduce", ()), ("reduce_scatter", ()), ("allgather", ()), ("broadcast", (1,)), ("alltoall", ()),
    ):
        wanted = getattr(comm, what)(rows, *arguments)
        for order in ({"order": "canonical"}, {"order": "any"}) if "reduce" in what else ({},):
            for _ in range(2):
                seen = getattr(comm, what)(take(rows, device()), *arguments, **order)
                assert seen.get().tobytes() == wanted.tobytes(), what
assert hip.hipGetDevice(ctypes.byref(now)) == 0
assert now.value == 1 - device()
with fake_arrays.stream(device()):
    x = fake_arrays.full(COUNT, comm.rank, device())
    fake_arrays.busy()
    x += 1
    comm.allreduce(x, out=x)
    x *= 2
    assert (x.get() == comm.size * (comm.size + 1)).all()
print("RIGHT", fake_arrays.driver().fake_cuda_calls(b"copy_to_host"), flush=True)
"""


@pytest.mark.parametrize("order", ["canonical", "any"], ids="fake {}".format)
def test_fake_collectives(order: str, tmp_path: Path) -> None:
    """Have the bits of the host; in jobs for any order by RCCL, almost without copies."""
    env = stand_in.with_hip(tmp_path) | {"MULTIRING_ORDER": order}
    ended = run_job(2, HEAD + COLLECTIVES, code=0, env=env)
    copies = [int(line.split()[-1]) for line in ended.stdout.splitlines() if "RIGHT" in line]
    assert len(copies) == 2
    assert all((each < 10) == (order == "any") for each in copies), copies


@pytest.mark.parametrize("cuda", ["usable", "of no use"], ids="fake {}".format)
def test_beside_a_driver_of_cuda(cuda: str, tmp_path: Path) -> None:
    """HIP serves where the process has loaded it, and CUDA's driver not, or one that cannot be used."""
    env = stand_in.with_hip(tmp_path)
    if cuda == "usable":
        env["LD_LIBRARY_PATH"] = str(stand_in.library().parent)
    else:
        env["LD_PRELOAD"] += f" {compiled(tmp_path / 'of_no_use' / 'libcuda.so.1', 'int x;')}"
    ended = run_job(2, HEAD + COLLECTIVES, code=0, env=env)
    assert ended.stdout.count("RIGHT") == 2, ended.stdout + ended.stderr


OF_ANOTHER_KIND = """
class Other(fake_arrays.DlpackArray):
    def __dlpack_device__(self):
        return (2 if "FAKE_DRIVER" in os.environ else 10), 0

try:
    comm.allreduce(Other(fake_arrays.full(8, 1)))
except multiring.UsageError as error:
    print(error, flush=True)
"""


@pytest.mark.parametrize("hip", [True, False], ids=["fake hip", "fake cuda"])
def test_arrays_of_the_other_kind(hip: bool, tmp_path: Path) -> None:
    env = stand_in.with_hip(tmp_path) if hip else stand_in.environment()
    told = "it is CUDA's, and this process uses HIP" if hip else "it is ROCm's, and this process uses CUDA's"
    ended = run_job(2, HEAD + OF_ANOTHER_KIND, code=0, env=env)
    assert ended.stdout.count(told) == 2, ended.stdout + ended.stderr


OF_THE_THREAD = """
from multiring import _core

hip = fake_arrays.driver()
x = fake_arrays.full(COUNT, 1, device())
hip.hipGetLastError()
host = np.zeros(3)
assert _core.device_of(host.ctypes.data) == -1
assert _core.device_of(x.address) == device()
assert hip.hipGetLastError() == 0
fake_arrays.configure("fail=host_alloc:2:1")  # out of memory, once
assert (comm.allreduce(x).get() == comm.size).all()
assert hip.hipGetLastError() == 0
# A stream of another device: the caller's mistake, after which all goes on.
elsewhere = fake_arrays.driver().fake_cuda_stream(1 - device())
for stream, mine in ((elsewhere, False), (fake_arrays.current_stream(), True)):
    before = fake_arrays.use_stream(stream)
    try:
        comm.allreduce(x, out=x, name="of another")
        assert mine
    except multiring.UsageError as error:
        assert not mine
        assert "names a stream of another device" in str(error), error
    fake_arrays.use_stream(before)
assert hip.hipGetLastError() == 0
# The program captures its stream while an operation waits for what it had before.
with fake_arrays.stream(device()) as stream:
    x = fake_arrays.full(COUNT, comm.rank, device())
    fake_arrays.busy(0.2)
    work = comm.allreduce_async(x, out=x)
    hip.fake_cuda_capture(stream, 1)
    work.wait()
    hip.fake_cuda_capture(stream, 0)
    assert (x.get() == comm.size * (comm.size - 1) / 2).all()
print("RIGHT", flush=True)
"""


@pytest.mark.parametrize("order", ["canonical", "any"], ids="fake {}".format)
def test_what_the_program_sees_of_calls(order: str, tmp_path: Path) -> None:
    """Neither an error of its thread that is none of its own, nor a capture that is lost."""
    env = stand_in.with_hip(tmp_path) | {"MULTIRING_ORDER": order}
    ended = run_job(2, HEAD + OF_THE_THREAD, code=0, env=env)
    assert ended.stdout.count("RIGHT") == 2, ended.stdout + ended.stderr


ON_TWO_HOSTS = """
x = fake_arrays.full(COUNT, comm.rank, 0)
before = copies()
assert (comm.allreduce(x).get() == 1).all()
assert copies() == before
print("RIGHT", flush=True)
"""


def test_fake_devices_of_two_hosts_at_one_address(tmp_path: Path) -> None:
    """On the bus: they are two devices."""
    env = stand_in.with_hip(tmp_path) | {"MULTIRING_ORDER": "any", "MULTIRING_NCCL": "all"}
    env["FAKE_NCCL"] = "devices=apart"
    script = "from tests.support import pretend_places\npretend_places([0, 1])\n" + HEAD
    script = script.replace("comm.rank % 2", "0") + ON_TWO_HOSTS
    ended = run_job(2, script, code=0, env=env)
    assert ended.stdout.count("RIGHT") == 2, ended.stdout + ended.stderr


FAILING = """
fake_arrays.configure("fail=event_record:700:3")
x = fake_arrays.full(1000, 1, device())
try:
    for _ in range(9):
        comm.allreduce(x, out=x, name="w")
except multiring.MultiringError as error:
    print(f"{type(error).__name__}: {error}", flush=True)
"""


def test_fake_failures_name_functions_of_hip(tmp_path: Path) -> None:
    ended = run_job(2, HEAD + FAILING, code=0, env=stand_in.with_hip(tmp_path))
    for text in (
        "hipEventRecord on device ",
        " failed: hipErrorOther (700: ",
        "HIP 6.4",
        "AMD_SERIALIZE_KERNEL=3",
    ):
        assert text in ended.stdout, ended.stdout + ended.stderr


def test_fake_libraries_are_shown(tmp_path: Path) -> None:
    env = stand_in.with_hip(tmp_path)
    shown = run_multiring("env", env=env, code=0).stdout
    assert "6.4, 2 devices, loaded by the process: " in shown
    assert "CUDA driver  none" in shown
    assert "2 devices of AMD, HIP 6.4; " in run_multiring("doctor", env=env).stdout


def test_fake_peer_memory_is_refused(tmp_path: Path) -> None:
    """Each rank says so once; arrays pass through the host."""
    env = stand_in.with_hip(tmp_path) | {"MULTIRING_PEER_MEMORY": "1"}
    ended = run_job(2, HEAD + COLLECTIVES, code=0, env=env)
    assert ended.stderr.count("devices of AMD have none") == 2, ended.stderr
