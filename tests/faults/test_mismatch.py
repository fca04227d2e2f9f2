"""Ranks that ask for different things: every rank raises an error that says who asked for what."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from multiring import Communicator, MismatchError
from tests.on_ranks import Pool, all_raise

Call = Callable[[Communicator], Any]

X = np.ones((4, 3), np.float32)


# What ranks 0 and 2 ask for, what rank 1 asks for, and how each is described: one for each way in which
# Python describes an operation. Every kind of difference is in tests/cpp/collective/mismatch_test.cpp.
CASES: dict[str, tuple[Call, Call, str, str]] = {
    "names": (
        lambda comm: comm.allreduce(X, name="é" * 100),
        lambda comm: comm.allreduce(X, name="conv2"),
        "allreduce 'éé",
        "rank 1 asked for allreduce 'conv2' sum float32[4, 3]",
    ),
    "kinds, dtypes and shapes": (
        lambda comm: comm.allreduce(X),
        lambda comm: comm.allgather(X.T.astype(np.float64)),
        "allreduce sum float32[4, 3]",
        "allgather float64[3, 4]",
    ),
    "a split and symmetric memory": (
        lambda comm: comm.split(0),
        lambda comm: comm.symmetric_empty(3, np.int8),
        "split",
        "symmetric_empty uint8[3]",
    ),
    "process sets": (
        lambda comm: comm.process_set([0, 1, 2]),
        lambda comm: comm.process_set([2, 1, 0]),
        "barrier 'process_set [0, 1, 2]'",
        "barrier 'process_set [2, 1, 0]'",
    ),
    "objects": (
        lambda comm: comm.broadcast_object(1),
        lambda comm: comm.allgather_object(1),
        "broadcast 'broadcast_object.length' root 0 int64[1]",
        "allgather 'allgather_object' int64[1]",
    ),
    # On one host they give the same bits: on several they would not.
    "orders of additions": (
        lambda comm: comm.allreduce(X),
        lambda comm: comm.allreduce(X, order="any"),
        "allreduce sum float32[4, 3]",
        "rank 1 asked for allreduce sum in any order float32[4, 3]",
    ),
    "orders of asynchronous ones": (
        lambda comm: [work.wait() for work in [comm.allreduce_async(X) for _ in range(3)]],
        lambda comm: [work.wait() for work in [comm.allreduce_async(X, order="any") for _ in range(3)]],
        "allreduce sum float32[4, 3] (asynchronous operation ",
        "rank 1 asked for allreduce sum in any order float32[4, 3]",
    ),
    "orders of a reduce-scatter": (
        lambda comm: comm.reduce_scatter(X),
        lambda comm: comm.reduce_scatter(X, order="any"),
        "reduce_scatter sum float32[4, 3]",
        "rank 1 asked for reduce_scatter sum in any order float32[4, 3]",
    ),
    "asynchronous and synchronous": (
        lambda comm: comm.allreduce_async(X).wait(),
        lambda comm: comm.allreduce(X),
        "allreduce sum float32[4, 3] (asynchronous operation ",
        "rank 1 asked for allreduce sum float32[4, 3]",
    ),
}


def ask(comm: Communicator, case: str) -> Any:
    most, other, _, _ = CASES[case]
    return (other if comm.rank == 1 else most)(comm)


@pytest.mark.parametrize("case", CASES)
def test_mismatch(ranks: Pool, case: str) -> None:
    _, _, most, other = CASES[case]
    for rank, error in enumerate(ranks(3).run_expecting_errors(ask, case)):
        assert isinstance(error, MismatchError), error
        text = str(error)
        assert "the ranks of communicator 'world' asked for different operations: " in text
        assert most in text
        assert other in text
        assert f"raised on rank {rank} on " in text
        is_order_alone = case.startswith("orders of")
        assert ("compare MULTIRING_ORDER and the arguments `order`" in text) == is_order_alone
        assert ("Every rank has to issue the same operations in the same order" in text) != is_order_alone
        assert (error.rank, error.peer) == (rank, 0 if rank == 1 else 1)
        assert error.host is not None
        assert error.operation is not None
        assert error.elapsed >= 0
        if case == "names" and rank == 1:
            assert (error.tensor, error.nbytes) == ("conv2", X.nbytes)


def test_the_others_need_not_look_at_data(comm: Communicator) -> None:
    """What the ranks would have received is not touched."""
    out = np.full(3 + comm.rank, 7.0)
    with pytest.raises(MismatchError):
        comm.allreduce(np.ones(3 + comm.rank), out=out)
    assert (out == 7).all()


@all_raise(
    MismatchError, r"sent tag 5 send to rank 1 float32\[4, 3\] where .* tag 6 recv from rank 0 int32\[2, 3\]"
)
def test_messages(comm: Communicator) -> None:
    try:
        if comm.rank == 0:
            comm.send(X, 1, tag=5)
        else:
            comm.recv(0, out=X[:2].astype(np.int32), tag=6)
        comm.barrier()
    except MismatchError as error:
        assert comm.rank == 0 or (error.rank, error.peer) == (1, 0)
        raise
