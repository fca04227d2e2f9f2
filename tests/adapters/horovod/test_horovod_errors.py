"""What the ranks do not agree on fails on all of them, and nothing else does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import multiring.horovod.torch as hvd
from multiring import Communicator
from tests.adapters.horovod.support import with_hvd
from tests.on_ranks import on_ranks

Call = Callable[[int], Any]


def kinds(rank: int) -> Any:
    x = torch.ones(4)
    return hvd.allreduce(x, name="a") if rank == 0 else hvd.allgather(x, name="a")


MISMATCHES: dict[str, tuple[Call, str]] = {
    "dtype": (
        lambda rank: hvd.allreduce(torch.ones(3, dtype=torch.int32 if rank else torch.float32), name="a"),
        "Mismatched data types: One rank had type float32, but another rank had type int32",
    ),
    "shape": (
        lambda rank: hvd.allreduce(torch.ones((2, 3) if rank else (3, 2)), name="a"),
        r"Mismatched allreduce tensor shapes: .*shape \[3, 2\].*shape \[2, 3\]",
    ),
    "kind": (kinds, "Mismatched collective operations: One rank did an allreduce"),
    "op": (
        lambda rank: hvd.allreduce(torch.ones(3), op=hvd.Sum if rank else hvd.Max),
        "Mismatched allreduce operations: One rank had op max",
    ),
    "scale": (
        lambda rank: hvd.allreduce(torch.ones(3), prescale_factor=1.0 + rank),
        "Mismatched prescale and/or postscale factors",
    ),
    "root": (
        lambda rank: hvd.broadcast(torch.ones(3), min(rank, 1)),
        "Mismatched broadcast root ranks: One rank specified root rank 0",
    ),
    "broadcast": (
        lambda rank: hvd.broadcast(torch.ones(3 + rank), 0),
        r"Mismatched broadcast tensor shapes: .*\[3\].*\[4\]",
    ),
    "allgather": (
        lambda rank: hvd.allgather(torch.ones(2, 3 + rank)),
        "Mismatched allgather tensor shapes: .*dimension 1 equal to 3",
    ),
    "dimensions": (
        lambda rank: hvd.allgather(torch.ones((2, 3) if rank else (2,))),
        "Mismatched allgather tensor shapes: .*rank 1, .*rank 2",
    ),
    "scalars": (lambda _: hvd.allgather(torch.tensor(1.0)), "rank-zero tensor"),
    "alltoall": (
        lambda rank: hvd.alltoall(torch.ones(6, 3 + rank)),
        "Mismatched alltoall tensor shapes: .*dimension 1 equal to 3",
    ),
    "reducescatter": (
        lambda rank: hvd.reducescatter(torch.ones(6, 3 + rank)),
        r"Mismatched reducescatter tensor shapes: .*\[6, 3\]",
    ),
    "group": (
        lambda rank: hvd.grouped_allreduce([torch.ones(3), torch.ones(3 + rank)]),
        "Mismatched",
    ),
}


@on_ranks(3)
@pytest.mark.parametrize("what", MISMATCHES)
@with_hvd
def test_a_mismatch_fails_on_all_ranks_and_the_job_goes_on(comm: Communicator, what: str) -> None:
    call, text = MISMATCHES[what]
    for _ in range(2):
        with pytest.raises(hvd.HorovodInternalError, match=text):
            call(comm.rank)
        x = torch.full((5,), float(comm.rank))
        assert hvd.allreduce(x, op=hvd.Sum, name="a").tolist() == [sum(range(comm.size))] * 5


@on_ranks(3)
@with_hvd
def test_what_is_in_flight_beside_a_mismatch_is_done(comm: Communicator) -> None:
    """Twenty operations in another order on every rank, a few of which do not match; one in place, and one
    that a rank submits only after the others have met. All others have their result, once."""
    for turn in range(3):
        handles: dict[str, int] = {}
        names = [f"t{k}" for k in range(20)]
        for k in torch.randperm(20, generator=torch.Generator().manual_seed(100 * turn + comm.rank)).tolist():
            shape = 7 + comm.rank if k % 3 == 1 else 7
            handles[names[k]] = hvd.allreduce_async_(
                torch.full((shape,), float(k)), name=names[k], op=hvd.Sum
            )
        if comm.rank != 0:
            handles["late"] = hvd.allreduce_async(torch.ones(2), name="late", op=hvd.Sum)
        for k, name in enumerate(names):
            if k % 3 == 1:
                with pytest.raises(hvd.HorovodInternalError, match=f"shapes: .*'{name}'"):
                    hvd.synchronize(handles[name])
            else:
                assert hvd.synchronize(handles[name]).tolist() == [k * comm.size] * 7
        if comm.rank == 0:
            handles["late"] = hvd.allreduce_async(torch.ones(2), name="late", op=hvd.Sum)
        assert hvd.synchronize(handles["late"]).tolist() == [comm.size] * 2


@with_hvd
def test_a_mismatch_that_nobody_waits_for(comm: Communicator) -> None:
    """It is found by the next submission or wait; its handle still raises."""
    bad = hvd.allreduce_async(torch.ones(2 + comm.rank), name="bad")
    for _ in range(10):
        assert hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [comm.size] * 2
    with pytest.raises(hvd.HorovodInternalError, match="Mismatched"):
        hvd.synchronize(bad)


def test_a_rank_that_leaves(comm: Communicator) -> None:
    """Before what the others wait for."""
    hvd.init()
    if comm.rank == 1:
        hvd.shutdown()
        return
    with pytest.raises(hvd.HorovodInternalError, match="rank 1"):
        hvd.allreduce(torch.ones(2))
    hvd.shutdown()
