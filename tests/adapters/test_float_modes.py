"""A rank whose program flushes denormals has the bits of the others, and those that it has without."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

import multiring.torch
from multiring import Communicator, TopK
from multiring.numpy import GradientBuckets
from multiring.state.batch_moments import combine_moments
from tests.on_ranks import on_ranks

# One round, several segments.
COUNTS = (5, 300_001)
OPTIONS = ({}, {"prescale": 0.3}, {"op": "average", "postscale": 0.7}, {"comm_dtype": "bfloat16"})


def tiny(seed: int, count: int) -> Any:
    """Float32 around the least normal number, most of them below it, of both signs."""
    generator = np.random.default_rng(seed)
    bits = generator.integers(0, 3 << 23, count, np.uint32) | generator.integers(0, 2, count, np.uint32) << 31
    return bits.view(np.float32)


@contextmanager
def flushed(wanted: bool) -> Iterator[None]:
    assert torch.set_flush_denormal(wanted)
    try:
        assert (np.float32(1e-39) * np.ones(1, np.float32) == 0)[0] == wanted
        yield
    finally:
        torch.set_flush_denormal(False)


def collectives(comm: Communicator, flushing: bool) -> list[bytes]:
    found = []
    for count in COUNTS:
        x, symmetric = tiny(comm.rank, count), comm.symmetric_empty((count,), np.float32)
        symmetric[:] = x
        with flushed(flushing):
            for options in OPTIONS:
                found.append(comm.allreduce(x, **options).tobytes())
                found.append(comm.allreduce_async(x, **options).wait().tobytes())
            comm.allreduce(symmetric, "average", out=symmetric)
            found.append(symmetric.tobytes())
            found.append(comm.reduce_scatter(np.resize(x, (comm.size, count)), "average").tobytes())
    return found


def gradients(comm: Communicator, flushing: bool, compression: TopK | None) -> list[bytes]:
    """Three rounds, in the last of which one rank has no data any more."""
    parameters = {"a": np.zeros(3000, np.float32), "b": np.zeros(70, np.float32)}
    buckets = GradientBuckets(
        parameters, comm, bucket_bytes=8000, prescale=0.9, postscale=1.7, compression=compression
    )
    found = []
    steps = 2 if comm.rank == 0 else 3
    with flushed(flushing), buckets.join(parameters):
        for step in range(steps):
            buckets.zero()
            for name, parameter in parameters.items():
                buckets.ready(name, tiny(10 * step + comm.rank, parameter.size))
            found.append(b"".join(gradient.tobytes() for gradient in buckets.synchronize().values()))
            kept = buckets._reducer.residuals()
        found += [kept[name].tobytes() for name in sorted(kept)]
    buckets.close()
    return found


def hooks(comm: Communicator, flushing: bool) -> list[bytes]:
    """Tensors that are large enough for several threads, with a factor after the reduction."""
    weight = torch.nn.Parameter(torch.zeros(100_000))
    handle = multiring.torch.register_gradient_hooks(torch.nn.ParameterList([weight]), comm)
    found = []
    with flushed(flushing), handle.join():
        for step in range(1 if comm.rank == 0 else 2):
            weight.grad = torch.from_numpy(tiny(step + 10 * comm.rank, 100_000))
            handle.synchronize()
            found.append(weight.grad.numpy().tobytes())
    handle.remove()
    return found


def moments(comm: Communicator, flushing: bool) -> list[bytes]:
    rows = np.abs(tiny(0, 3 * 21)).reshape(3, 21).astype(np.float64) * 2.0**-900
    rows[:, 0] = (4, 5, 3)
    with flushed(flushing):
        count, mean, variance = combine_moments(rows)
    return [np.float64(count).tobytes(), mean.tobytes(), variance.tobytes()]


@on_ranks(3)
def test_a_rank_that_flushes_denormals_has_the_same_bits(comm: Communicator) -> None:
    compressed = [(gradients, (compression,)) for compression in (None, TopK(0.1), TopK(1.0))]
    for compute, args in ((collectives, ()), *compressed, (hooks, ()), (moments, ())):
        plain = compute(comm, False, *args)
        assert any(any(np.frombuffer(each[:20], np.uint32)) for each in plain if each)
        assert compute(comm, comm.rank == 1, *args) == plain, (compute.__name__, args)


@on_ranks((3, 2))
def test_across_hosts(comm: Communicator) -> None:
    assert collectives(comm, comm.rank == 1) == collectives(comm, False)
