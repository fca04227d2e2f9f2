"""A process of JAX that `multiring bench sharding` measures: python -m multiring.benchmarks.sharding_worker
COLLECTIVES ADDRESS SIZE RANK HOST.

Each line of its input names a step, "psum 65536 4": an operation, the bytes of each rank's input, and how
often. The answer is a line of JSON: when each of them began and ended, in nanoseconds of the host's clock.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

__all__ = ["main"]

# A transformer of this many layers, as wide, over sequences as long; each rank has as many of them.
_LAYERS, _WIDTH, _LENGTH, _SEQUENCES = 4, 256, 64, 4


def main(address: str, size: int, rank: int) -> None:
    """Run steps until the input ends."""
    import jax

    jax.distributed.initialize(address, size, rank, cluster_detection_method="deactivate")
    devices = jax.devices()
    print("ready", flush=True)
    for line in sys.stdin:
        name, count, times = line.split()
        where = [jax.local_devices()[0]] if name.endswith("/alone") else devices
        step = _step(name.removesuffix("/alone"), int(count), tuple(where))
        print(json.dumps([step() for _ in range(int(times))]), flush=True)


def _reach_gloo_at(host: str) -> None:
    """Let Gloo listen at the address of this host: the name by which JAX has it look that up is not known on
    emulated ones."""
    made_by: Any = importlib.import_module("jax._src.xla_bridge")._jax
    made_by.make_gloo_tcp_collectives = functools.partial(made_by.make_gloo_tcp_collectives, hostname=host)


@functools.cache
def _step(name: str, count: int, devices: tuple[Any, ...]) -> Callable[[], tuple[int, int]]:
    """Return what runs one step, and says when it began and ended."""
    make = _training if name == "train" else functools.partial(_collective, name, count)
    run, renew = make(devices)
    run().block_until_ready()  # compiled

    def timed() -> tuple[int, int]:
        renew()
        begin = time.perf_counter_ns()
        run().block_until_ready()
        return begin, time.perf_counter_ns()

    return timed


def _collective(
    name: str, count: int, devices: tuple[Any, ...]
) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Return what runs a collective, and what writes its input anew."""
    import jax
    from jax import lax
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    mesh = Mesh(np.array(devices), ("x",))
    body, out = {
        "psum": (lambda a: lax.psum(a, "x"), P()),
        "all_gather": (lambda a: lax.all_gather(a, "x", tiled=True), P()),
        "psum_scatter": (lambda a: lax.psum_scatter(a, "x", tiled=True), P("x")),
    }[name]
    elements = max(count // 4, len(devices))
    shape = (elements * len(devices),)
    run = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("x"), out_specs=out, check_vma=False))
    add = jax.jit(lambda a: a + 1)
    held = [
        jax.make_array_from_callback(
            shape, NamedSharding(mesh, P("x")), lambda index: np.zeros(shape, np.float32)[index]
        )
    ]

    def renew() -> None:
        held[0] = add(held[0]).block_until_ready()

    return lambda: run(held[0]), renew


def _training(devices: tuple[Any, ...]) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Return what runs a step of a transformer whose parameters are sharded (FSDP), and nothing."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    mesh = Mesh(np.array(devices), ("data",))
    sharded = NamedSharding(mesh, P("data"))
    chosen = np.random.default_rng(0)

    def place(*shape: int) -> Any:
        array = (chosen.standard_normal(shape) * shape[-2] ** -0.5).astype(np.float32)
        return jax.make_array_from_callback(shape, sharded, lambda index: array[index])

    layers = [
        {"qkv": place(_WIDTH, 3 * _WIDTH), "out": place(_WIDTH, _WIDTH), "up": place(_WIDTH, 4 * _WIDTH),
         "down": place(4 * _WIDTH, _WIDTH)}
        for _ in range(_LAYERS)
    ]  # fmt: skip
    x = place(_SEQUENCES * len(devices), _LENGTH, _WIDTH)

    def loss(params: Any, x: Any) -> Any:
        h = x
        for layer in params:
            q, k, v = jnp.split(h @ layer["qkv"], 3, axis=-1)
            h = h + jax.nn.softmax(q @ k.swapaxes(1, 2) * _WIDTH**-0.5) @ v @ layer["out"]
            h = h + jax.nn.gelu(h @ layer["up"]) @ layer["down"]
            h = h / jnp.sqrt(jnp.mean(h**2, axis=-1, keepdims=True) + 1e-6)
        return jnp.mean((h - x) ** 2)

    @jax.jit
    def step(params: Any, x: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, x)
        new = jax.tree.map(
            lambda p, g: jax.lax.with_sharding_constraint(p - 1e-3 * g, sharded), params, grads
        )
        return new, value

    held = [layers]

    def run() -> Any:
        held[0], value = step(held[0], x)
        return jax.block_until_ready((held[0], value))[1]

    return run, lambda: None


if __name__ == "__main__":
    if sys.argv[1] == "multiring":
        import multiring.jax_collectives  # noqa: F401
    else:
        os.environ["JAX_CPU_COLLECTIVES_IMPLEMENTATION"] = sys.argv[1]
        _reach_gloo_at(sys.argv[5])
    main(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
