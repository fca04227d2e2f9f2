"""What goes wrong: an error on every rank that names rank, operation and group."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import multiring
from multiring import Communicator
from tests.adapters.torch_distributed.support import TIMEOUT, world
from tests.nursery import Nursery


def test_shapes_that_differ(comm: Communicator) -> None:
    with world(comm):
        with pytest.raises(multiring.MismatchError, match=r"rank 1 asked for.*float32\[3\]") as caught:
            dist.all_reduce(torch.ones(2 + comm.rank))
        assert f"[process group '0', rank {comm.rank}]" in str(caught.value)
        assert isinstance(caught.value, dist.DistBackendError)
        with pytest.raises(multiring.AbortedError, match="first error"):
            dist.barrier()


def test_operations_and_lists_that_differ(comm: Communicator) -> None:
    with (
        world(comm),
        pytest.raises(multiring.MismatchError, match="broadcast.*allreduce|allreduce.*broadcast"),
    ):
        dist.barrier()
        if comm.rank == 0:
            dist.broadcast(torch.ones(2), 0)
        else:
            dist.all_reduce(torch.ones(2))
    with world(comm), pytest.raises(multiring.MismatchError, match="elements of the ranks"):
        counts = [1, 2] if comm.rank == 0 else [3, 2]
        dist.all_gather([torch.empty(count) for count in counts], torch.ones(counts[comm.rank]))


def test_a_message_of_another_size(comm: Communicator) -> None:
    with world(comm):
        if comm.rank == 0:
            dist.send(torch.ones(2), 1)
            comm.barrier()
        else:
            with pytest.raises(RuntimeError, match="rank 0 .*float32"):
                dist.recv(torch.ones(3), 0)
            comm.barrier()


def test_an_error_reaches_futures_and_backward(comm: Communicator) -> None:
    with world(comm):
        work = dist.all_reduce(torch.ones(2 + comm.rank), async_op=True)
        with pytest.raises(RuntimeError, match="asked for"):
            work.get_future().wait()
        assert isinstance(work.exception(), multiring.MismatchError)
        assert not work.is_success()
    with world(comm) as group:
        model = DistributedDataParallel(torch.nn.Linear(3, 2))
        loss = model(torch.ones(2, 3)).sum()
        group.comm.abort("a test ends the group")  # type: ignore[attr-defined]
        with pytest.raises(RuntimeError, match="a test ends the group"):
            loss.backward()


def test_a_rank_that_does_not_come(comm: Communicator) -> None:
    short = timedelta(seconds=1)
    cases: list[tuple[timedelta, str, Callable[[], object]]] = [
        (short, "rank 1.*process group '0'", lambda: dist.all_reduce(torch.ones(2))),
        (short, "recv with tag 3 on rank 0.*rank 1", lambda: dist.recv(torch.ones(2), 1, tag=3)),
        (TIMEOUT, r"barrier.*broken on all ranks.*rank 0\]", lambda: dist.barrier(timeout=short / 5)),
    ]
    for timeout, text, call in cases:
        with world(comm, timeout):
            if comm.rank == 0:
                with pytest.raises(multiring.TimeoutError, match=text):
                    call()
            comm.barrier()


def _killed(comm: Communicator) -> str:
    message = "no error"
    with contextlib.suppress(multiring.MultiringError), world(comm):
        dist.barrier()
        if comm.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            if comm.rank == 0:
                dist.all_reduce(torch.ones(2))
            else:
                dist.recv(torch.ones(2), 1)
        except multiring.PeerLostError as error:
            message = str(error)
    return message


def test_a_killed_rank(nursery: Nursery) -> None:
    outcomes = nursery.run(3, _killed)
    for rank, operation in ((0, "allreduce"), (2, "recv")):
        told = str(outcomes[rank].value)
        assert "lost rank 1" in told
        assert operation in told
        assert f"[process group '0', rank {rank}]" in told
