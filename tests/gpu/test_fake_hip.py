"""Arrays on devices of AMD: HIP and RCCL, by the tables of CUDA's driver and NCCL, on stand-ins for them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu import stand_in
from tests.gpu.nccl.test_fake_nccl import HEAD
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
