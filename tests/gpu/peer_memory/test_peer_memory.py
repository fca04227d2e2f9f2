"""Allreduces of arrays on devices in peer memory: the bits of the host. What of it is in peer memory, the
tests on stand-ins tell (test_fake_peer_memory.py)."""

from __future__ import annotations

import pytest

from tests.gpu import stand_in
from tests.support import run_job

SCRIPT = """
import numpy as np
import multiring
from tests.gpu.devices import library

comm = multiring.init()
on = library(NAME)
if NAME == "torch":
    import torch
    torch.cuda.set_device(comm.rank % torch.cuda.device_count())
    place = lambda values: torch.from_numpy(values.copy()).cuda()
elif NAME == "cupy":
    import cupy
    cupy.cuda.Device(comm.rank % cupy.cuda.runtime.getDeviceCount()).use()
    place = cupy.array
else:
    from tests.gpu import fake_arrays
    place = fake_arrays.array

def values_of(dtype, count):
    values = np.random.default_rng(comm.rank).normal(size=count) * 100
    if dtype.startswith("float"):
        values[:6] = 0.0, -0.0, np.inf, np.nan, 1e-310, -np.inf
    with np.errstate(all="ignore"):
        return values.astype(dtype)

for dtype in ("bool", "int8", "uint8", "int16", "int32", "int64", "float16", "float32", "float64"):
    sums = [] if dtype == "bool" else ["sum", "average"] if dtype.startswith("float") else ["sum"]
    for op in ("product", "min", "max", *sums):
        values = values_of(dtype, 100_003)
        wanted = comm.allreduce(values, op).tobytes()
        x = place(values)
        assert on.copy_to_host(comm.allreduce(x, op)).tobytes() == wanted, (dtype, op)
        assert on.copy_to_host(x).tobytes() == values.tobytes(), (dtype, op)
        comm.allreduce(x, op, out=x)
        assert on.copy_to_host(x).tobytes() == wanted, (dtype, op)
for count in (16_384, 1_000_003, LARGE):  # a larger buffer, and segments
    values = values_of("float32", count)
    assert on.copy_to_host(comm.allreduce(place(values))).tobytes() == comm.allreduce(values).tobytes(), count
with on.stream():
    for repeat in range(3):
        x = on.full(100_003, 0)
        on.busy()
        x += comm.rank + repeat
        y = comm.allreduce(x)
        wanted = sum(range(comm.size)) + repeat * comm.size
        assert (on.copy_to_host(y) == wanted).all(), repeat
print("RIGHT", flush=True)
"""


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", ["cupy", "fake", "torch"])
def test_bits_of_the_host(name: str, size: int) -> None:
    fake = name == "fake"
    env = {"PYTHONPATH": stand_in.python_path(), "MULTIRING_PEER_MEMORY": "1"}
    if fake:
        env = stand_in.with_nvrtc()
    script = f"NAME, LARGE = {name!r}, {2_000_003 if fake else 40_000_003}\n{SCRIPT}"
    ended = run_job(size, script, code=0, env=env, timeout=120)
    assert ended.stdout.count("RIGHT") == size
    if not fake and "there is no NVRTC" in ended.stderr:
        pytest.skip("results are right, but there is no NVRTC")
    assert "not through peer memory" not in ended.stderr, ended.stderr
