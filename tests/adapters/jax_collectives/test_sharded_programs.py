"""Programs that JAX itself distributes, unchanged, over multiring: against NumPy and one process."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.docs.blocks import python_of
from tests.support import Job, held_port, run_job, start_job

# What all programs begin with: nothing of multiring.
BEGIN = """
import os
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

jax.distributed.initialize()
RANK, SIZE = jax.process_index(), jax.process_count()
assert len(jax.devices()) == SIZE and len(jax.local_devices()) == 1


def shared(array, mesh, spec):
    return jax.make_array_from_callback(array.shape, NamedSharding(mesh, spec), lambda index: array[index])


def whole(array):
    return np.asarray(multihost_utils.process_allgather(array, tiled=True))
"""

COLLECTIVES = (
    BEGIN
    + """
import ml_dtypes

mesh = Mesh(np.array(jax.devices()), ("x",))
ring = [(i, (i + 1) % SIZE) for i in range(SIZE)]
chosen = np.random.default_rng(0)


def check(name, body, given, expected, spec=P("x")):
    run = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("x"), out_specs=spec, check_vma=False))
    result = run(shared(given, mesh, P("x")))
    mine = np.asarray(result.addressable_data(0))
    rows = len(expected) // SIZE
    wanted = expected if spec == P() else expected[RANK * rows : (RANK + 1) * rows]
    assert mine.dtype == wanted.dtype and np.array_equal(mine, wanted), (name, given.dtype, mine, wanted)


for dtype in "bool int8 uint8 int16 uint16 int32 uint32 bfloat16 float32 complex64".split():
    dtype = np.dtype(getattr(ml_dtypes, dtype, None) or dtype) if dtype == "bfloat16" else np.dtype(dtype)
    for width in (1, 3, 1001, 200_000) if dtype == np.float32 else (7,):
        given = chosen.integers(0, 2 if dtype == bool else 9, (SIZE * SIZE, width)).astype(dtype)
        parts = given.reshape(SIZE, SIZE, width)
        moved = np.concatenate([parts[:, j] for j in range(SIZE)])
        check("all_gather", lambda a: lax.all_gather(a, "x", tiled=True), given, given, P())
        check("ppermute", lambda a: lax.ppermute(a, "x", ring), given, np.roll(given, SIZE, axis=0))
        check("all_to_all", lambda a: lax.all_to_all(a, "x", 0, 0, tiled=True), given, moved)
        if dtype != bool:
            total = parts.sum(0).astype(dtype)
            check("psum", lambda a: lax.psum(a, "x"), given, total, P())
            check("psum_scatter", lambda a: lax.psum_scatter(a, "x", tiled=True), given, total)
        if dtype != np.complex64:
            check("pmax", lambda a: lax.pmax(a, "x"), given, parts.max(0), P())
            check("pmin", lambda a: lax.pmin(a, "x"), given, parts.min(0), P())
if SIZE > 1:  # from one rank alone
    given = np.arange(SIZE, dtype=np.float32)
    check("one pair", lambda a: lax.ppermute(a, "x", [(0, 1)]), given, np.eye(1, SIZE, 1, np.float32)[0] * 0)

assert (whole(shared(np.arange(2 * SIZE), mesh, P("x"))) == np.arange(2 * SIZE)).all()
assert multihost_utils.broadcast_one_to_all(np.float32(RANK + 3)) == 3
multihost_utils.assert_equal({"a": np.ones(3)})
multihost_utils.sync_global_devices("end")
print("checked")
"""
)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_collectives_give_what_numpy_gives(ranks: int) -> None:
    ran = run_job(ranks, COLLECTIVES, launcher_args=["--jax"], timeout=180, code=0)
    assert ran.stdout.count("checked") == ranks


MESHES = (
    BEGIN
    + """
devices = np.array(jax.devices())
# Rank 0 has index 0 in its row, its column and the whole mesh; the second mesh has the same groups in
# another order of ranks, and others.
for order in (range(4), (3, 1, 0, 2)):
    mesh = Mesh(devices[list(order)].reshape(2, 2), ("x", "y"))
    given = np.arange(16, dtype=np.float32).reshape(4, 4)

    def sums(a):
        return lax.psum(a, "x"), lax.psum(a, "y"), lax.psum(a, ("x", "y")), lax.psum(a, ("y", "x"))

    specs = P(None, "y"), P("x", None), P(), P()
    run = jax.jit(jax.shard_map(sums, mesh=mesh, in_specs=P("x", "y"), out_specs=specs, check_vma=False))
    found = [whole(array) for array in run(shared(given, mesh, P("x", "y")))]
    blocks = given.reshape(2, 2, 2, 2)
    over_x = blocks.sum(0).reshape(2, 4)
    over_y = blocks.sum(2).reshape(4, 2)
    for array, wanted in zip(found, (over_x, over_y, blocks.sum((0, 2)), blocks.sum((0, 2))), strict=True):
        assert np.array_equal(array, wanted), (order, array, wanted)

# A program of two of the ranks, which the others neither compile nor wait for; then one of all again.
half = Mesh(devices[:2], ("x",)) if RANK < 2 else Mesh(devices[2:], ("x",))
total = jax.jit(jnp.sum)(shared(np.arange(6, dtype=np.float32), half, P("x")))
assert float(total) == 15
if RANK in (1, 3):
    odd = Mesh(devices[[3, 1]], ("x",))
    assert float(jax.jit(jnp.sum)(shared(np.arange(4, dtype=np.float32), odd, P("x")))) == 6
compiled = jax.jit(jnp.max).lower(shared(np.arange(8.0), Mesh(devices, ("x",)), P("x"))).compile()
if RANK == 0:  # compiled by one rank alone, and never run
    jax.jit(jnp.prod).lower(shared(np.arange(8.0), Mesh(devices[::-1], ("x",)), P("x"))).compile()
assert float(compiled(shared(np.arange(8.0), Mesh(devices, ("x",)), P("x")))) == 7
print("checked")
"""
)


def test_groups_of_devices_are_told_apart() -> None:
    ran = run_job(4, MESHES, launcher_args=["--jax"], timeout=180, code=0)
    assert ran.stdout.count("checked") == 4


TRAINING = (
    BEGIN
    + """
mesh = Mesh(np.array(jax.devices()), ("data",))
chosen = np.random.default_rng(0)
x, y = chosen.standard_normal((48, 16)).astype("f"), chosen.standard_normal((48, 4)).astype("f")
shapes = {"w1": (16, 24), "w2": (24, 4)}
start = {name: chosen.standard_normal(shape).astype("f") for name, shape in shapes.items()}
specs = {"w1": P(None, "data"), "w2": P("data")}


def loss(params, x, y):
    return jnp.mean((jnp.tanh(x @ params["w1"]) @ params["w2"] - y) ** 2)


def step(params, x, y):
    value, grads = jax.value_and_grad(loss)(params, x, y)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def train(place):
    params = {name: place(array, specs[name]) for name, array in start.items()}
    losses = []
    for _ in range(10):
        params, value = jax.jit(step)(params, place(x, P("data")), place(y, P("data")))
        losses.append(float(value))
    return params, losses


sharded, losses = train(lambda array, spec: shared(array, mesh, spec))
alone, expected = train(lambda array, spec: jax.device_put(array, jax.local_devices()[0]))
np.testing.assert_allclose(losses, expected, rtol=1e-5)
assert len(sharded["w1"].addressable_shards[0].data[0]) == 24 // SIZE  # parameters are sharded (FSDP)
for name in start:
    np.testing.assert_allclose(whole(sharded[name]), np.asarray(alone[name]), rtol=1e-4, atol=1e-6)
print("checked")
"""
)


def test_a_sharded_training_is_that_of_one_process() -> None:
    ran = run_job(2, TRAINING, launcher_args=["--jax"], timeout=120, code=0)
    assert ran.stdout.count("checked") == 2


def test_a_killed_rank_is_named_by_the_others() -> None:
    script = (
        BEGIN
        + """
import signal
mesh = Mesh(np.array(jax.devices()), ("x",))
total = jax.jit(jnp.sum)
for step in range(1000):
    if step == 3 and RANK == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    total(shared(np.arange(4.0), mesh, P("x"))).block_until_ready()
"""
    )
    ran = start_job(2, script, launcher_args=["--jax"]).run(90, code=137)
    assert re.search(
        r"Error: UNKNOWN: MPI error: multiring: PeerLostError: rank 0 .* lost rank 1 ", ran.stderr
    )


def test_different_programs_are_an_error_on_both_ranks() -> None:
    script = (
        BEGIN
        + """
mesh = Mesh(np.array(jax.devices()), ("x",))
run = jax.jit(jax.shard_map(lambda a: lax.psum(a, "x"), mesh=mesh, in_specs=P("x"), out_specs=P()))
run(shared(np.ones(8 + 2 * RANK, np.float32), mesh, P("x"))).block_until_ready()
"""
    )
    ran = start_job(2, script, launcher_args=["--jax"]).run(90, code=1)
    assert "multiring: MismatchError: " in ran.stderr


def test_programs_in_flight_end_before_the_process() -> None:
    script = (
        BEGIN
        + """
mesh = Mesh(np.array(jax.devices()), ("x",))
run = jax.jit(lambda a: a * 0.5 + jnp.sum(a))
array = shared(np.ones((SIZE, 1_000_000), np.float32), mesh, P("x"))
for _ in range(20):
    array = run(array)
"""
    )
    run_job(2, script, launcher_args=["--jax"], timeout=60, code=0)


def test_a_rank_that_does_not_come_is_named_and_the_job_ends() -> None:
    script = (
        BEGIN
        + """
import time
mesh = Mesh(np.array(jax.devices()), ("x",))
array = shared(np.arange(4.0), mesh, P("x"))
jax.jit(jnp.sum)(array).block_until_ready()
if RANK == 1:
    time.sleep(1000)
jax.jit(jnp.max)(array).block_until_ready()
"""
    )
    ran = start_job(2, script, launcher_args=["--jax", "--env", "MULTIRING_TIMEOUT=5"]).run(60, code=1)
    assert re.search(r"MPI error: multiring: TimeoutError: rank 0 .* waited 5.0 s for rank 1", ran.stderr)
    assert "multiring: rank 0 (process" in ran.stderr


def test_the_program_of_the_page() -> None:
    (program,) = python_of("docs/jax-sharding.md")
    alone, together = (
        re.findall(r"epoch \d: loss \S+", run_job(ranks, program, launcher_args=["--jax"], code=0).stdout)
        for ranks in (1, 2)
    )
    assert len(alone) == 3
    assert together == alone


def test_the_distributed_runtime_can_start_again() -> None:
    script = (
        BEGIN
        + """
import jax.extend

for _ in range(2):
    mesh = Mesh(np.array(jax.devices()), ("x",))
    array = shared(np.arange(4.0, dtype=np.float32), mesh, P("x"))
    assert float(jax.jit(jnp.sum)(array)) == 6
    jax.distributed.shutdown()
    assert float(jax.jit(jnp.max)(array)) == 3  # peers may leave later
    jax.extend.backend.clear_backends()
    jax.distributed.initialize()
print("checked")
"""
    )
    ran = run_job(2, script, launcher_args=["--jax"], timeout=60, code=0)
    assert ran.stdout.count("checked") == 2


IMPORTING = """
import sys
import multiring.jax_collectives
{begin}
mesh = Mesh(np.array(jax.devices()), ("x",))
found = jax.jit(jnp.sum)(shared(np.arange(4), mesh, P("x")))
print(f"sum {found}")  # One string, since torchrun's ranks share a pipe.
"""


def test_ranks_that_torchrun_has_started(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(IMPORTING.replace("{begin}", BEGIN))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    assert Job([*torchrun, str(program)]).run(90, code=0).stdout.count("sum 6") == 2


def test_ranks_that_are_started_by_hand(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    by_hand = BEGIN.replace("initialize()", "initialize(sys.argv[1], 2, int(sys.argv[2]))")
    program.write_text(IMPORTING.replace("{begin}", by_hand))
    with held_port() as port, Job([sys.executable, str(program), f"127.0.0.1:{port}", "1"]) as second:
        first = Job([sys.executable, str(program), f"127.0.0.1:{port}", "0"]).run(90, code=0)
        assert "sum 6" in first.stdout
        assert "sum 6" in second.finish(90).stdout


def test_a_program_that_does_not_join_is_told_what_to_call() -> None:
    ran = run_job(2, "import jax\nprint(jax.process_count())", launcher_args=["--jax"], timeout=60, code=0)
    assert "none of the 2 ranks called jax.distributed.initialize()" in ran.stderr


def test_two_devices_a_process_are_refused() -> None:
    script = BEGIN.replace("and len(jax.local_devices()) == 1", "or True") + (
        """
mesh = Mesh(np.array(jax.devices()), ("x",))
jax.jit(jnp.sum)(shared(np.arange(8.0), mesh, P("x")))
"""
    )
    flags = "XLA_FLAGS=--xla_force_host_platform_device_count=2"
    job = start_job(2, script, launcher_args=["--jax", "--env", flags])
    assert "take one device a process" in job.run(90, code=1).stderr


def test_imports_in_the_wrong_order_are_refused() -> None:
    ran = start_job(1, "import jax\nimport multiring.jax_collectives").run(60, code=1)
    assert "import multiring.jax_collectives comes after import jax" in ran.stderr
