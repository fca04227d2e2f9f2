"""Ranks that ask for different things: every rank raises an error that says who asked for what."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import multiring
from multiring import AbortedError, Communicator, MismatchError
from tests.rank_pool import RankPool

Pools = Callable[[int], RankPool]
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
    "roots of a scatter": (
        lambda comm: comm.scatter(None if comm.rank else X, 0),
        lambda comm: comm.scatter(X, 1),
        "scatter root 0",
        "scatter root 1 float32[4, 3]",
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
        "allgather 'allgather_object.lengths' int64[1]",
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
    try:
        return (other if comm.rank == 1 else most)(comm)
    except MismatchError as error:
        with pytest.raises(AbortedError, match="broken on rank . by its first error .mismatch.") as caught:
            comm.allreduce(X)
        assert str(error) in str(caught.value)
        raise


@pytest.mark.parametrize("case", CASES)
def test_mismatch(ranks: Pools, case: str) -> None:
    _, _, most, other = CASES[case]
    for rank, error in enumerate(ranks(3).run_expecting_errors(ask, case)):
        assert isinstance(error, MismatchError), error
        text = str(error)
        assert "the ranks of communicator 'world' asked for different operations: " in text
        assert most in text
        assert other in text
        assert f"raised on rank {rank} on " in text
        assert "Every rank has to issue the same operations in the same order" in text
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


def wrong_message(comm: Communicator) -> None:
    if comm.rank == 0:
        comm.send(X, 1, tag=5)
    else:
        comm.recv(0, out=X[:2].astype(np.int32), tag=6)
    comm.barrier()


def test_messages(ranks: Pools) -> None:
    receiver = ranks(2).run_expecting_errors(wrong_message)[1]
    assert isinstance(receiver, MismatchError)
    sent = "rank 0 sent tag 5 send root 1 float32[4, 3] where rank 1 expects tag 6 recv root 0 int32[2, 3]"
    assert sent in str(receiver)
    assert (receiver.rank, receiver.peer) == (1, 0)


def bad_out(comm: Communicator) -> None:
    out = np.empty(5 if comm.rank == 0 else 6)
    comm.allgather(np.ones(2), out=out)


def test_an_out_that_does_not_fit_what_the_others_send(ranks: Pools) -> None:
    """Known only when all have come, so the others are in the operation already."""
    errors = ranks(3).run_expecting_errors(bad_out)
    assert isinstance(errors[0], multiring.MultiringError)
    assert "has 40 bytes where the ranks send 48 together" in str(errors[0])
