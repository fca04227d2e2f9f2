"""Reductions by Horovod's names, compared with NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import multiring.horovod.torch as hvd
from multiring import Communicator
from tests.adapters.horovod.support import with_hvd
from tests.on_ranks import on_ranks

DTYPES = ["int32", "float16"]
SHAPES = [(), (17,), (3, 5), (2, 3, 4), (0, 3)]


def given(rank: int, dtype: str, shape: tuple[int, ...]) -> Any:
    return np.random.default_rng(rank).integers(-50, 50, shape).astype(dtype)


def tensor(rank: int, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.from_numpy(np.asarray(given(rank, dtype, shape)))


@on_ranks(1, 3)
@pytest.mark.parametrize("dtype", DTYPES)
@with_hvd
def test_allreduce(comm: Communicator, dtype: str) -> None:
    """Every operation, every rank of tensor, in all forms."""
    ops = {hvd.Sum: np.sum, hvd.Min: np.min, hvd.Max: np.max}
    for shape in SHAPES:
        parts = np.stack([given(rank, dtype, shape) for rank in range(comm.size)])
        x = tensor(comm.rank, dtype, shape)
        before = x.clone()
        for op, reduce in ops.items():
            wanted = reduce(parts.astype("float64"), axis=0).astype(dtype)
            found = [
                hvd.allreduce(x, op=op),
                hvd.allreduce_(x.clone(), op=op),
                hvd.synchronize(hvd.allreduce_async(x, op=op, name=f"{op} {shape}")),
                hvd.synchronize(hvd.allreduce_async_(x.clone(), op=op)),
                *hvd.grouped_allreduce([x, x], op=op),
            ]
            for each in found:
                assert each.dtype == x.dtype
                np.testing.assert_array_equal(each.numpy(), wanted)
        assert torch.equal(x, before)
        mean = np.sum(parts.astype("float64"), axis=0) / comm.size
        wanted = np.trunc(mean).astype(dtype) if dtype[0] == "i" else mean
        tolerance = {"rtol": 1e-3 if dtype == "float16" else 1e-6, "atol": 1e-8}
        np.testing.assert_allclose(hvd.allreduce(x).numpy(), wanted, **tolerance)
        np.testing.assert_allclose(hvd.allreduce(x, average=True).numpy(), wanted, **tolerance)
        assert torch.equal(hvd.allreduce(x, average=False), hvd.allreduce(x, op=hvd.Sum))
    small = torch.full((4,), 2, dtype=x.dtype)
    assert hvd.allreduce(small, op=hvd.Product).tolist() == [2**comm.size] * 4


@on_ranks(3)
@pytest.mark.parametrize("dtype", DTYPES)
@with_hvd
def test_factors(comm: Communicator, dtype: str) -> None:
    """In float64 for integers, whose results are truncated toward zero."""
    x = tensor(comm.rank, dtype, (17,))
    parts = [given(rank, dtype, (17,)) for rank in range(comm.size)]
    for before, after in ((0.25, 1.0), (1.0, 0.3), (1.5, 2.0)):
        found = hvd.allreduce(x, op=hvd.Sum, prescale_factor=before, postscale_factor=after)
        if dtype[0] == "i":
            scaled = [np.trunc(part.astype("float64") * before).astype(dtype) for part in parts]
            wanted: Any = np.trunc(np.sum(scaled, axis=0).astype("float64") * after).astype(dtype)
            np.testing.assert_array_equal(found.numpy(), wanted)
        else:
            wanted = np.sum([part.astype("float64") * before for part in parts], axis=0) * after
            np.testing.assert_allclose(found.numpy(), wanted, rtol=2e-3 if dtype == "float16" else 1e-6)


@with_hvd
def test_handles(comm: Communicator) -> None:
    """Submitted in another order on every rank, polled, and synchronised in any order."""
    names = [f"tensor {k}" for k in range(20)]
    order = names if comm.rank == 0 else names[::-1]
    handles = {
        name: hvd.allreduce_async(torch.full((100,), len(name)), op=hvd.Sum, name=name) for name in order
    }
    for name in sorted(names):
        while not hvd.poll(handles[name]):
            pass
        assert hvd.poll(handles[name])
        assert hvd.synchronize(handles[name]).tolist() == [comm.size * len(name)] * 100
        assert hvd.synchronize(handles[name]) is None
    assert hvd.synchronize(10**9) is None


@with_hvd
def test_a_name_in_flight_is_refused(comm: Communicator) -> None:
    handle = hvd.allreduce_async(torch.ones(2), name="x", op=hvd.Sum) if comm.rank == 0 else None
    if handle is not None:
        with pytest.raises(ValueError, match="same name"):
            hvd.allreduce_async(torch.ones(2), name="x")
    comm.barrier()
    if handle is None:
        handle = hvd.allreduce_async(torch.ones(2), name="x", op=hvd.Sum)
    assert hvd.synchronize(handle).tolist() == [comm.size] * 2


@with_hvd
def test_what_is_refused(comm: Communicator) -> None:
    for bad in (
        torch.ones(3, 2).t(),
        torch.ones(2, dtype=torch.uint8),
        torch.ones(2, dtype=torch.complex64),
        torch.eye(2).to_sparse(),
    ):
        with pytest.raises(ValueError, match=r"contiguous|not supported"):
            hvd.allreduce(bad)
    with pytest.raises(ValueError, match="supersedes average"):
        hvd.allreduce(torch.ones(2), average=True, op=hvd.Sum)
    with pytest.raises(ValueError, match="op is 17"):
        hvd.allreduce(torch.ones(2), op=17)
    assert len({hvd.Average, hvd.Sum, hvd.Adasum, hvd.Min, hvd.Max, hvd.Product}) == 6
    assert hvd.allreduce(torch.ones(2)).tolist() == [1, 1]


@on_ranks(3)
@with_hvd
def test_gradients(comm: Communicator) -> None:
    """Backward is the same reduction of the gradients."""
    weight = [float(rank + 1) for rank in range(comm.size)]
    for op, wanted in ((hvd.Sum, sum(weight)), (hvd.Average, sum(weight) / comm.size)):
        x = torch.ones(3, dtype=torch.float64, requires_grad=True)
        hvd.allreduce(x, op=op).backward(torch.full((3,), weight[comm.rank], dtype=torch.float64))
        assert x.grad is not None
        torch.testing.assert_close(x.grad, torch.full((3,), wanted, dtype=torch.float64))
        xs = [torch.ones(2, k, dtype=torch.float64, requires_grad=True) for k in (1, 2)]
        outputs = hvd.grouped_allreduce(xs, op=op, prescale_factor=0.5)
        torch.autograd.backward(sum((weight[comm.rank] * each).sum() for each in outputs))
        for each in xs:
            torch.testing.assert_close(each.grad, torch.full_like(each, wanted / 2).detach())


@with_hvd
def test_compression(comm: Communicator) -> None:
    x = torch.tensor([1 + 2**-13, 3.0])
    assert hvd.allreduce(x, compression=hvd.Compression.fp16).tolist() == [1.0, 3.0]
    compressed, context = hvd.Compression.fp16.compress(x)
    assert compressed.dtype == torch.float16
    assert hvd.Compression.fp16.decompress(compressed, context).dtype == torch.float32
    whole = torch.tensor([70000])
    assert hvd.Compression.fp16.compress(whole)[0] is whole
    assert hvd.Compression.none.compress(x)[0] is x


@on_ranks(3)
@with_hvd
def test_reducescatter(comm: Communicator) -> None:
    """Uneven rows, averages, factors and gradients."""
    for rows in (comm.size, 2 * comm.size + 1, 1):
        parts = [given(rank, "float64", (rows, 2)) for rank in range(comm.size)]
        shares = np.array_split(np.sum(parts, axis=0), comm.size)
        counts = [rows // comm.size + (rank < rows % comm.size) for rank in range(comm.size)]
        assert [len(share) for share in shares] == counts
        x = torch.from_numpy(parts[comm.rank]).requires_grad_(True)
        found = hvd.reducescatter(x, op=hvd.Sum, prescale_factor=2.0, postscale_factor=0.25)
        np.testing.assert_array_equal(found.detach().numpy(), shares[comm.rank] / 2)
        found.backward(torch.full_like(found, comm.rank + 1))
        whose = np.repeat(np.arange(comm.size) + 1.0, counts)[:, None] * np.ones((1, 2))
        assert x.grad is not None
        np.testing.assert_allclose(x.grad.numpy(), whose * comm.size / 2)
        mean = hvd.grouped_reducescatter([x.detach(), x.detach() * 2])
        np.testing.assert_allclose(mean[0].numpy(), shares[comm.rank] / comm.size)
        np.testing.assert_allclose(mean[1].numpy(), 2 * shares[comm.rank] / comm.size)
    for tensor_, op in ((torch.tensor(1.0), hvd.Sum), (torch.ones(3), hvd.Adasum)):
        with pytest.raises(hvd.HorovodInternalError, match="Reducescatter"):
            hvd.reducescatter(tensor_, op=op)
