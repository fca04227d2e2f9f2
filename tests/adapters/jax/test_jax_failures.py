"""What goes wrong in JAX: clear errors on every rank, no hang, and how to go on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import multiring
import multiring.jax as mj
from multiring import Communicator
from multiring.errors import AbortedError, MismatchError, UsageError
from multiring.jax.library import library, number_of
from multiring.jax.primitive import Bucket, Collective, run
from tests.adapters.jax.support import errors_break_the_queue
from tests.on_ranks import all_raise, check_fields
from tests.support import last_words, run_job


def test_a_program_of_another_process_is_refused(comm: Communicator) -> None:
    library()
    call = Collective("allreduce", 12345, comm.rank, comm.size, (Bucket("x", (0,), ("x",)),))
    with pytest.raises(UsageError, match="communicator 12345, which this process"), mj.raise_errors():
        jax.block_until_ready(run(call, [jnp.ones(2)]))
    np.testing.assert_array_equal(mj.allreduce(jnp.ones(2)), comm.size)


@all_raise(MismatchError, "loss")
def test_a_mismatch_is_an_error_of_jax_on_every_rank(comm: Communicator) -> None:
    """And every later call fails with the first error, of which no field is lost."""
    step = jax.jit(lambda x: mj.allreduce(x * 2, name="loss") + 1)
    with errors_break_the_queue(comm):
        with pytest.raises(jax.errors.JaxRuntimeError, match=r"multiring error \d+: MismatchError: .*'loss'"):
            jax.block_until_ready(step(jnp.ones(3 + comm.rank)))
        for call in (step, mj.allreduce):
            with pytest.raises(MismatchError) as raised, mj.raise_errors():
                jax.block_until_ready(call(jnp.ones(3 + comm.rank)))
            check_fields(raised.value, comm, "loss")
        jax.block_until_ready(step(jnp.ones(3 + comm.rank)))


@all_raise(MismatchError, "allreduce 'b' sum float", r"\[5\]")
def test_a_mismatch_in_a_tree_names_the_leaf(comm: Communicator) -> None:
    tree = {"a": jnp.ones(3), "b": jnp.ones((2, 2) if comm.rank else (5,))}
    try:
        with errors_break_the_queue(comm):
            jax.block_until_ready(mj.grouped_allreduce(tree, bucket_bytes=8))
    finally:
        assert library().multiring_jax_pending_calls() == 0


@pytest.mark.parametrize("partial", [False, True])
@all_raise(MismatchError, "rank 1 submitted it in step 2; rank 0 submitted it in step 3")
def test_a_step_that_failed_on_one_rank_is_a_mismatch(comm: Communicator, partial: bool) -> None:
    """Rank 0 submits a part of its first step only, as if that had failed in between; then it goes on."""
    like = {"a": jnp.ones(4), "b": jnp.ones(4)}
    sizes: Any = {"bucket_bytes": 16, "name": "gradients"}

    @jax.jit
    def step(gradients: dict[str, jax.Array]) -> Any:
        if partial:
            return mj.average_partial_gradients(gradients, like, **sizes, check_every=0)
        return mj.average_gradients(gradients, **sizes)

    jax.block_until_ready(step(like))
    with errors_break_the_queue(comm):
        if comm.rank == 0:
            name, array, op = "gradients[0]: b", jnp.ones(4), "average"
            if partial:
                name, array, op = "gradients: participation[0]: who has one", jnp.ones(4, jnp.int32), "sum"
            bucket = Bucket(name, (0,), (name.split(": ")[-1],))
            begun = Collective("allreduce", number_of(comm), 0, comm.size, (bucket,), op=op)
            jax.block_until_ready(run(begun, [array]))
        jax.block_until_ready(step(like))


@all_raise(MismatchError)
def test_rows_that_nobody_announced(comm: Communicator) -> None:
    with errors_break_the_queue(comm):
        jax.block_until_ready(mj.allgather(jnp.ones((2 + comm.rank, 3))))


def test_refused(comm: Communicator) -> None:
    x, traced = jnp.ones(4), jax.jit(lambda x: mj.broadcast_parameters({"a": x}))
    refused: dict[str, Callable[[], Any]] = {
        r"op is 'mean'; accepted: sum, average": lambda: mj.allreduce(x, "mean"),
        "gradients take 'average' or 'sum'": lambda: mj.average_gradients({"a": x}, op="max"),
        "float8_e5m2, which cannot travel": lambda: mj.allreduce(jnp.ones(2, jnp.float8_e5m2)),
        "root is 2; pass a rank from 0 to 1": lambda: mj.broadcast(x, 2),
        r"lengths are \(1, 1\)": lambda: mj.allgather(x, [1, 1]),
        "both splits and received": lambda: mj.alltoall(x, [2, 2]),
        "splits adding up to 4": lambda: mj.alltoall(x, [2, 1], [2, 2]),
        "reducescatter takes arrays of at least one dimension": lambda: mj.reducescatter({"x": 1.0}),
        "every_k is 0": lambda: mj.distribute(optax.sgd(0.1), every_k=0),
        "'a' is being traced": lambda: traced(x),
        "'a' is a object, neither an array nor a number": lambda: mj.broadcast_parameters({"a": object()}),
    }
    for text, call in refused.items():
        with pytest.raises(UsageError, match=text):
            call()
    np.testing.assert_array_equal(mj.allreduce(x), comm.size)  # nothing is broken


def test_a_compiled_function_outlives_the_world(comm: Communicator) -> None:
    step = jax.jit(lambda x: mj.allreduce(x) + 1)
    compiled = step.lower(jnp.ones(3)).compile()
    np.testing.assert_array_equal(step(jnp.ones(3)), comm.size + 1)
    np.testing.assert_array_equal(compiled(jnp.ones(3)), comm.size + 1)
    comm.barrier()
    multiring.shutdown()
    with pytest.raises(UsageError, match="not initialised"):
        step(jnp.ones(3))
    multiring.init()
    np.testing.assert_array_equal(step(jnp.ones(3)), comm.size + 1)
    with pytest.raises(AbortedError, match=r"closed|shutdown"), mj.raise_errors():
        jax.block_until_ready(compiled(jnp.ones(3)))
    np.testing.assert_array_equal(step(jnp.ones(3)), comm.size + 1)
    assert multiring.world().size == 2


ONE_THREAD = """
import os
os.environ["NPROC"] = "1"
os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false"
import jax, jax.numpy as jnp
import multiring, multiring.jax

comm = multiring.init()

@jax.jit
def step(x):
    # Each rank multiplies another number of matrices between its collectives.
    found = []
    for k in range(12):
        y = x + k
        for _ in range((comm.rank + k) % 3):
            y = jnp.tanh(y @ y)
        found.append(multiring.jax.allreduce(y * 0 + k, name=f"part {k}"))
    return found

for _ in range(3):
    assert [float(y[0, 0]) for y in step(jnp.ones((100, 100)))] == [k * comm.size for k in range(12)]
print("done")
"""


@pytest.mark.full
def test_one_thread_of_xla_is_enough() -> None:
    assert run_job(3, ONE_THREAD, code=0).stdout.count("done") == 3


SHARDED = """
import os
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
import jax, jax.numpy as jnp, pytest
from jax.sharding import NamedSharding, PartitionSpec
import multiring, multiring.jax

comm = multiring.init()
mesh = jax.make_mesh((2,), ("x",))
x = jax.device_put(jnp.ones(4), NamedSharding(mesh, PartitionSpec("x")))
with pytest.raises(multiring.UsageError, match="'allreduce' is spread over 2 devices of this process"):
    multiring.jax.allreduce(x)
for call in multiring.jax.allreduce, multiring.jax.check_state:
    with pytest.raises(ValueError, match="more than 1 device.*start more processes instead, or move"):
        jax.jit(call)(x)
# What a program has put on a device stays there.
second = jax.devices()[1]
y = jax.device_put(jnp.full(3, comm.rank), second)
there = {"y": y, "key": jax.device_put(jax.random.key(1), second)}
found = [multiring.jax.broadcast_parameters(there, 1), jax.jit(multiring.jax.allreduce)(y)]
for leaf in jax.tree.leaves([found, multiring.jax.allreduce(y)]):
    assert leaf.devices() == {second}
assert multiring.jax.allreduce(jnp.ones(2)).tolist() == [2.0, 2.0]
"""


@pytest.mark.full
def test_arrays_over_several_devices_are_refused() -> None:
    run_job(2, SHARDED, code=0)


WITHOUT_OPTAX = """
import sys
sys.modules["optax"] = None
import multiring, multiring.jax, jax.numpy as jnp
multiring.init()
assert multiring.jax.allreduce(jnp.ones(2)).tolist() == [1.0, 1.0]
multiring.jax.distribute(None)
"""


@pytest.mark.full
def test_everything_but_distribute_works_without_optax() -> None:
    assert "pip install 'multiring[jax]'" in last_words(WITHOUT_OPTAX)
