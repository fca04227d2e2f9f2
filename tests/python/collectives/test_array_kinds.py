"""Every collective over every registered kind of array and every dtype, and arrays that are refused."""

from __future__ import annotations

import ctypes
import itertools
from functools import partial
from typing import Any

import numpy as np
import pytest

import multiring.numpy
from multiring import Communicator, MismatchError, UsageError
from tests.on_ranks import on_ranks
from tests.python.collectives.array_kinds import KINDS, ArrayKind, assert_same_bits, bits_of, is_result_of
from tests.python.collectives.oracle import random_bits
from tests.python.collectives.registry import COLLECTIVES, Collective


@on_ranks(3)
@pytest.mark.parametrize("name", KINDS)
def test_kind(comm: Communicator, name: str) -> None:
    """With every dtype for the plain kind of each library, with the first and the last for others."""
    kind = KINDS[name]
    dtypes = kind.dtypes if name in ("numpy", "torch") else {kind.dtypes[0], kind.dtypes[-1]}
    for number, dtype in enumerate(sorted(dtypes)):
        for collective, asynchronous in itertools.product(COLLECTIVES.values(), (False, True)):
            check_collective(comm, kind, collective, dtype, asynchronous)
        if comm.size > 1:
            check_sent(comm, kind, number, dtype)


@on_ranks(1)
def test_kind_alone(comm: Communicator) -> None:
    test_kind(comm, "numpy F order")


def check_collective(
    comm: Communicator, kind: ArrayKind, collective: Collective, dtype: str, asynchronous: bool
) -> None:
    rows = [7 if collective.rows is None else collective.rows(rank) for rank in range(comm.size)]
    shapes = [(count,) if kind.flat else (count, 3) for count in rows]
    inputs = [random_bits(rank, shape, dtype) for rank, shape in enumerate(shapes)]
    wanted = collective.expected(inputs, comm.rank, dtype)
    x = kind.make(inputs[comm.rank], dtype)
    call = partial(collective.call, comm, x, asynchronous=asynchronous, **collective.options(dtype))
    result = call()
    if wanted is None:
        assert result is None
        return
    gives = not collective.only_root or comm.rank == comm.size - 1
    assert is_result_of(kind if gives else KINDS["numpy"], result), type(result)
    assert_same_bits(result, wanted)
    assert_same_bits(x, inputs[comm.rank])  # an input is not written
    if not (collective.takes_out and kind.writable):
        return
    out = kind.make(np.zeros_like(wanted), dtype)
    assert call(out=out) is out
    assert_same_bits(out, wanted)
    if bits_of(x).shape == wanted.shape:  # in place
        assert call(out=x) is x
        assert_same_bits(x, wanted)


def check_sent(comm: Communicator, kind: ArrayKind, number: int, dtype: str) -> None:
    bits = random_bits(number, (5,) if kind.flat else (5, 2), dtype)
    if comm.rank == 0:
        for _ in range(2):
            comm.send(kind.make(bits, dtype), 1, tag=number)
    elif comm.rank == 1:
        assert_same_bits(comm.recv(0, tag=number), bits)
        out = (kind if kind.writable else KINDS["numpy"]).make(np.zeros_like(bits), dtype)
        assert comm.recv(0, out=out, tag=number) is out
        assert_same_bits(out, bits)


@on_ranks(3)
def test_numbers_and_zero_dimensions(comm: Communicator) -> None:
    for x, dtype in ((3, "int64"), (2.5, "float64"), (True, "bool"), (np.float32(1.5), "float32")):
        result = comm.allreduce(x, "max")
        assert isinstance(result, np.ndarray)
        assert result.shape == ()
        assert result.dtype == dtype
        assert result == x
    assert comm.allreduce(1 + 2j) == 3 + 6j
    zero_dimensional = np.array(comm.rank, np.int32)
    assert_same_bits(comm.allgather(zero_dimensional), np.arange(comm.size, dtype=np.int32))
    assert_same_bits(comm.broadcast(zero_dimensional, 1), np.array(1, np.int32))
    assert_same_bits(comm.allreduce(zero_dimensional, out=zero_dimensional), np.array(3, np.int32))


@on_ranks(3)
def test_out_of_another_kind(comm: Communicator) -> None:
    out = bytearray(12)
    comm.allreduce([1.0, 2.0, comm.rank], out=np.empty(3))
    comm.allreduce(np.ones(12, np.uint8), out=out)
    assert bytes(out) == bytes([comm.size] * 12)
    wide = np.zeros((4, 6), np.float32)
    comm.allgather(np.full((1, 3), comm.rank + 1, np.float32), out=wide[: comm.size, ::2])
    assert wide[:3, ::2].tolist() == [[1.0] * 3, [2.0] * 3, [3.0] * 3]
    assert not wide[:, 1::2].any()
    assert not wide[3].any()


class OnDevice:
    """Something that says it lies on a GPU."""

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0

    def __dlpack__(self, **_: Any) -> Any:
        raise AssertionError("not to be called")


class OnAnotherDevice(OnDevice):
    def __dlpack_device__(self) -> tuple[int, int]:
        return 8, 0


class OnDeviceByInterface:
    __cuda_array_interface__ = {"shape": (1,), "typestr": "<f4", "data": (0, False), "version": 3}


REFUSED: list[tuple[Any, str]] = [
    (np.ones(3, ">f4"), r"dtype >f4.*native byte order"),
    (np.ones(3, ">c8"), "dtype >c8"),
    (np.ones(3, np.clongdouble), "dtype complex256"),
    (np.ones(3, np.longdouble), "dtype float128"),
    (np.zeros(3, "M8[s]"), "dtype datetime64"),
    (np.zeros(3, [("a", "i4"), ("b", "f4")]), "supported are"),
    (np.array([None]), "dtype object"),
    (["a", "b"], "dtype <U1"),
    ([[1], [1, 2]], "list does not make an array"),
    (object(), "expected an array .* got object"),
    (None, "got NoneType|has to give an array"),
    (np.ones((1,) * 9), "more than 8 dimensions"),
    (OnAnotherDevice(), "OnAnotherDevice lies in device memory.*DLPack device type is 8"),
]


def _refusals(comm: Communicator, x: Any, pattern: str) -> None:
    peer = (comm.rank + 1) % comm.size
    with pytest.raises(UsageError):
        comm.recv(peer, out=object() if x is None else x)
    calls = [partial(comm.send, x, peer)]
    for collective in COLLECTIVES.values():
        if not collective.only_root or comm.rank == comm.size - 1:
            calls += [partial(collective.call, comm, x, asynchronous=later) for later in (False, True)]
    for call in calls:
        with pytest.raises(UsageError, match=pattern):
            call()


@on_ranks(3)
def test_refused(comm: Communicator) -> None:
    for x, pattern in REFUSED:
        _refusals(comm, x, f"(?s){pattern}")
    assert not comm.is_broken
    comm.barrier()


def _has_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


@on_ranks(3)
@pytest.mark.skipif(_has_driver(), reason="libcuda.so.1 can be loaded here: tests/gpu has the tests with it")
def test_refused_without_a_driver(comm: Communicator) -> None:
    without = r"(?s)an array of type {} lies in device memory.*libcuda\.so\.1.*copy it to the host"
    _refusals(comm, OnDevice(), without.format("OnDevice"))
    x = OnDeviceByInterface()
    with pytest.raises(UsageError, match=without.format("OnDeviceByInterface")):
        comm.send(x, (comm.rank + 1) % comm.size)
    for collective, asynchronous in itertools.product(COLLECTIVES.values(), (False, True)):
        if collective.only_root and comm.rank != comm.size - 1:
            continue
        # The synchronous allreduce makes the array for its result first.
        makes = collective.name == "allreduce" and not asynchronous
        text = r"no function that makes a new OnDeviceByInterface; pass out=" if makes else without
        with pytest.raises(UsageError, match=text.format("OnDeviceByInterface")):
            collective.call(comm, x, asynchronous=asynchronous)
        if collective.takes_out:
            with pytest.raises(UsageError, match=without.format("OnDeviceByInterface")):
                collective.call(comm, x, asynchronous=asynchronous, out=np.zeros(1, np.float32))
    assert not comm.is_broken
    comm.barrier()


@on_ranks(3)
def test_refused_tensors(comm: Communicator) -> None:
    import torch

    in_one_line = r"\Athe array, a Tensor, requires a gradient[^\n]*tensor\.detach\(\)[^\n]*\Z"
    _refusals(comm, torch.ones(3, requires_grad=True), in_one_line)
    _refusals(comm, torch.ones(3, 2, requires_grad=True).T, in_one_line)
    _refusals(comm, torch.ones(3, dtype=torch.complex32), "dtype torch.complex32")
    _refusals(comm, torch.ones(3, device="meta"), "Tensor")
    _refusals(comm, torch.ones(3).to_sparse(), "Tensor")
    with pytest.raises(UsageError, match=in_one_line):
        comm.allreduce(torch.ones(3), out=torch.ones(3, requires_grad=True))
    if comm.rank == 0:
        comm.send(np.ones(4, np.float32), 1)
    elif comm.rank == 1:  # an empty tensor expects an empty message
        with pytest.raises(MismatchError, match=r"expects tag 0 recv from rank 0 float32\[0\]"):
            comm.recv(0, out=torch.empty(0))


def _bad_outs(x: np.ndarray[Any, Any]) -> list[tuple[Any, str]]:
    read_only = x.copy()
    read_only.flags.writeable = False
    strided = np.zeros((*x.shape[:-1], 2 * x.shape[-1]), x.dtype)[..., ::2]
    strided.flags.writeable = False
    return [
        (read_only, "read-only"),
        (strided, "read-only"),
        (memoryview(read_only), "read-only"),
        (x.tobytes(), "read-only|dtype"),
        (x.astype(np.float64), "out has dtype float64, the input float32"),
        (np.zeros((*x.shape[:-1], x.shape[-1] + 1), x.dtype), "elements|bytes"),
        (np.zeros(x.shape, ">f4"), "native byte order"),
        (x.tolist(), "expected an array"),
    ]


@on_ranks(3)
def test_refused_outs(comm: Communicator) -> None:
    x = np.ones((6, 4), np.float32)
    for name, source, like in (
        ("allreduce", x, x),
        ("broadcast", x, x),
        ("reduce_scatter", x, x[:2]),
        ("allgather", x[:2], x),
    ):
        for asynchronous, (out, pattern) in itertools.product((False, True), _bad_outs(like)):
            if (name, pattern) != ("allgather", "elements|bytes"):  # known when all ranks have come
                with pytest.raises(UsageError, match=pattern):
                    COLLECTIVES[name].call(comm, source, asynchronous=asynchronous, out=out)
    x = np.zeros(100, np.float32)
    for asynchronous in (False, True):
        for name, source, out in (
            ("allreduce", x[1:], x[:-1]),
            ("broadcast", x[1:], x[:-1]),
            ("allgather", x[:20], x[10:70]),
        ):
            with pytest.raises(UsageError, match="overlaps the input"):
                COLLECTIVES[name].call(comm, source, asynchronous=asynchronous, out=out)
    comm.allreduce(x[50:], out=x[:50])  # side by side
    x.flags.writeable = False
    with pytest.raises(UsageError, match="read-only"):
        comm.allreduce(x, out=x)
    assert not comm.is_broken
    comm.barrier()


@on_ranks(1, 2)
def test_masked_arrays_are_refused(comm: Communicator) -> None:
    """By every collective, as input and as output: NumPy would hand over the values under the mask."""

    def masked(rows: int = 4) -> Any:
        return np.ma.MaskedArray(np.arange(float(rows)), mask=[True] * rows)

    calls = [
        partial(collective.call, comm, x, asynchronous=asynchronous)
        for collective in COLLECTIVES.values()
        for asynchronous in (False, True)
        for x in (masked(), [masked(2), (masked(2),)], np.ma.masked)
        if not collective.only_root or comm.rank == comm.size - 1
    ]
    calls += [
        partial(collective.call, comm, np.ones(4), asynchronous=asynchronous, out=out)
        for collective in COLLECTIVES.values()
        for asynchronous in (False, True)
        for out in (masked(), masked(8)[::2])
        if collective.takes_out
    ]
    calls += [
        partial(comm.allreduce, masked(), out=np.empty(4)),
        partial(comm.send, masked(), comm.rank),
        partial(comm.recv, comm.rank, out=masked()),
        partial(multiring.numpy.broadcast_parameters, {"a": masked(), "b": np.ones(2)}, comm=comm),
        *(partial(multiring.numpy.sync_buffers, {"a": masked()}, m, comm) for m in ("average", "broadcast")),
        partial(multiring.numpy.average_metrics, {"loss": np.ma.masked}, 1, comm),
    ]
    for call in calls:
        with pytest.raises(UsageError, match=r"is masked.*pass x.filled\(value\)"):
            call()
    assert not comm.is_broken
    found = comm.broadcast_object(masked(), 0)
    assert found.mask.all()
