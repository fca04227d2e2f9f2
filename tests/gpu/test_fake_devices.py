"""What no GPU does when it is asked to, so that the stand-in for the driver has to: failures of calls and of
kernels, several devices, kinds of memory, work that is done in every order."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest

from multiring import Communicator, MultiringError
from tests.gpu import fake_arrays, stand_in
from tests.on_ranks import on_ranks
from tests.support import run_job, run_multiring


@on_ranks(3)
def test_fake_kernel_that_fails(comm: Communicator) -> None:
    """Is an error of every rank that names the rank, its device, the operation and the tensor."""
    group = comm.split(0)
    assert group is not None
    device = 1 if comm.rank == 1 else 0
    with fake_arrays.stream(device):
        x = fake_arrays.full(1000, 1, device)
        if comm.rank == 1:
            fake_arrays.fail(700)
        try:
            with pytest.raises(MultiringError) as caught:
                group.allreduce(x, out=x, name="weights")
        finally:
            fake_arrays.configure("recover")
        assert (caught.value.operation, caught.value.tensor) == ("allreduce", "weights")
        for text in ("rank 1", "on device 1", "CUDA_ERROR_ILLEGAL_ADDRESS (700", "CUDA_LAUNCH_BLOCKING=1"):
            assert text in str(caught.value)
        assert group.is_broken
        assert comm.allreduce(fake_arrays.full(8, 1, device)).get().tolist() == [3.0] * 8


SCRIPT = """
import multiring
from tests.gpu import fake_arrays

comm = multiring.init()
x = fake_arrays.full(1000, 1)
try:
    comm.allreduce(x, out=x, name="w")
    comm.allreduce(x, out=x, name="w")
except multiring.MultiringError as error:
    print(f"{type(error).__name__}: {error}", flush=True)
"""


@pytest.mark.parametrize(
    ("options", "kind", "ranks", "texts"),
    [
        (
            "fail=init:100",
            "UsageError",
            2,
            [
                "Array lies in device memory, which cannot be read: ",
                "cuInit failed: CUDA_ERROR_NO_DEVICE (100",
            ],
        ),
        (
            "fail=copy_to_device:700:1",
            "InternalError",
            1,
            [
                "allreduce 'w'",
                "cuMemcpyHtoDAsync on device 0 of 4000 bytes failed: CUDA_ERROR_ILLEGAL_ADDRESS",
            ],
        ),
    ],
    ids=["fake without a device", "fake copy that fails"],
)
def test_a_driver_that_fails_from_the_start(options: str, kind: str, ranks: int, texts: list[str]) -> None:
    """As variables of the environment tell it to, at the first or the second call: an error of every rank, of
    at least so many the one of the driver."""
    ended = run_job(2, SCRIPT, code=0, env=stand_in.environment(options))
    assert ended.stdout.count("Error: ") == 2, ended.stdout + ended.stderr
    assert ended.stdout.count(f"{kind}: ") >= ranks, ended.stdout + ended.stderr
    for text in texts:
        assert text in ended.stdout


@pytest.mark.parametrize("command", ["env", "doctor"], ids=["fake in env", "fake in doctor"])
def test_the_driver_is_shown(command: str) -> None:
    shown = run_multiring(command, env=stand_in.environment(), code=0).stdout
    devices = {"env": "13.0, 2 devices, loaded by the process: ", "doctor": "2 devices, CUDA driver 13.0"}
    assert devices[command] in shown


BETWEEN_DEVICES = {
    "": (
        "ok       peer access          each of 2 devices reaches the memory of each other one",
        "ok       device IPC           on device 1 a process reads what another one has on device 0",
    ),
    "no_access=1:0": (
        "warning  peer access          none between devices 0 and 1 (of 2 devices)",
        "ok       device IPC           on device 0 a process reads what another one has on device 0",
    ),
    "fail=can_access_peer:3": (
        "warning  peer access          none between devices 0 and 1 (of 2 devices)",
        "ok       device IPC           on device 0 a process",
    ),
    "fail=ipc_export:801": (
        "ok       peer access  ",
        "warning  device IPC           cuIpcGetMemHandle on device 0 failed: CUDA_ERROR_OTHER (801",
    ),
    "fail=ipc_import:801": (
        "ok       peer access  ",
        "warning  device IPC           cuIpcOpenMemHandle on device 1 failed: CUDA_ERROR_OTHER (801",
    ),
    "fail=ipc_import:-11": (
        "ok       peer access  ",
        "warning  device IPC           reading it ends the process with SIGSEGV",
    ),
    "fail=copy_to_host:700": (
        "ok       peer access  ",
        "warning  device IPC           cuMemcpyDtoHAsync on device 1 of 63 bytes failed",
    ),
}


@pytest.mark.parametrize("options", BETWEEN_DEVICES, ids=lambda options: f"fake {options}")
def test_doctor_says_what_devices_have_of_one_another(options: str) -> None:
    shown = run_multiring("doctor", env=stand_in.environment(options), code=0).stdout
    for told in BETWEEN_DEVICES[options]:
        assert f"\n{told}" in shown, shown
    assert shown.count("\nwarning") == shown.count("\n" + " " * 30 + "-> "), "what to do about each"


def test_doctor_says_what_fake_devices_of_amd_reach() -> None:
    """No memory is shared there, so that is not tried."""
    env = stand_in.with_hip(Path(tempfile.gettempdir())) | {"FAKE_CUDA": "no_access=0:1"}
    shown = run_multiring("doctor", env=env, code=0).stdout
    assert "\nwarning  peer access          none between devices 0 and 1 (of 2 devices)\n" in shown, shown
    assert "device IPC" not in shown


@on_ranks(2)
def test_fake_device_for_each_rank(comm: Communicator) -> None:
    with fake_arrays.stream(comm.rank):
        x = fake_arrays.full(1000, comm.rank, comm.rank)
        assert (comm.allreduce(x).get() == 1).all()
        gathered = comm.allgather(x[:1])
        assert gathered.get().tolist() == [0, 1]


@on_ranks(2)
def test_fake_array_without_elements_on_a_device_of_its_own(comm: Communicator) -> None:
    """Its address tells no device, and its stream is of another one than the first."""
    device = comm.rank
    with fake_arrays.stream(device):
        for order in ("canonical", "any"):
            x = fake_arrays.full(0, 1, device)
            assert comm.allreduce(x, order=order).shape == (0,)
            comm.allreduce(x, order=order, out=x)


@on_ranks(2)
def test_fake_memory_that_is_managed(comm: Communicator) -> None:
    x = fake_arrays.array(np.full(1000, comm.rank + 1.0, np.float32), managed=True)
    before = fake_arrays.driver().fake_cuda_calls(b"copy_to_host")
    assert (comm.allreduce(x).get() == 3).all()
    assert fake_arrays.driver().fake_cuda_calls(b"copy_to_host") == before + 1


@on_ranks(2)
def test_fake_memory_of_another_process(comm: Communicator) -> None:
    """Two ranks have one array: what one of them writes the other one sees."""
    x = fake_arrays.full(1000, 5)
    x.get()
    handle = comm.broadcast_object(fake_arrays.export(x), 0)
    if comm.rank == 1:
        x = fake_arrays.import_array(handle, (1000,), np.float32)
    assert (comm.allreduce(x).get() == 10).all()
    comm.broadcast(x * (comm.rank + 1), 1, out=x if comm.rank == 1 else fake_arrays.empty_like(x))
    comm.barrier()
    assert (x.get() == 10).all()
    comm.barrier()


def _steps(comm: Communicator, value: float) -> None:
    """Kernels, collectives and kernels on two streams, with nothing between them but what a program gives."""
    with fake_arrays.stream():
        x = fake_arrays.full(3000, 0)
        x += value + comm.rank
        work = comm.allreduce_async(x, out=x)
        with fake_arrays.stream():
            y = fake_arrays.full(300, value)
            y *= 2
            gathered = comm.allgather(fake_arrays.DlpackArray(y) if value % 2 else y)
            z = gathered * 3
            assert (z.get() == 6 * value).all()
        work.wait()
        x += 1
        assert (x.get() == 2 * value + 2).all()


@on_ranks(2)
@pytest.mark.parametrize("progress", ["late", "seeded", "threads"])
def test_fake_orders(comm: Communicator, progress: str) -> None:
    """Whatever streams do first, of what the program leaves open."""
    try:
        for seed in range(20):
            fake_arrays.configure(f"progress={progress} seed={seed + 100 * comm.rank}")
            _steps(comm, seed)
    finally:
        fake_arrays.configure("progress=late")
