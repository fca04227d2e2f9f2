"""Tensors on devices, with none: what is refused before anything is asked for, and what the lines for them do
with tensors of the CPU. On real ones: tests/gpu."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

import torch
import torch.distributed as dist

from multiring import Communicator
from multiring.errors import UsageError
from tests.adapters.torch.test_torch_streams import FakeStreams, on_device
from tests.adapters.torch_distributed.support import TIMEOUT, shared_store, with_world
from tests.gpu import stand_in
from tests.on_ranks import on_ranks, refuses
from tests.support import run_job

PRETENDED = """
from tests.gpu.pretended_device import main
main()
"""


@contextlib.contextmanager
def _captured() -> Iterator[FakeStreams]:
    """A stream that is being captured."""
    cuda = FakeStreams()
    cuda.is_captured = True
    fakes = {"device": cuda.device, "is_current_stream_capturing": cuda.is_current_stream_capturing}
    with mock.patch.multiple(torch.cuda, **fakes):
        yield cuda


@with_world(1)
def test_while_the_stream_is_captured(comm: Communicator) -> None:
    """Nothing is exported or submitted: the capture goes on, and so does the group."""
    calls = [
        lambda: dist.all_reduce(on_device(2)),
        lambda: dist.all_gather([torch.ones(2)], on_device(2)),
        lambda: dist.all_to_all_single(torch.ones(2), on_device(2)),
        lambda: dist.reduce_scatter(torch.ones(2), [on_device(2)]),
        lambda: dist.gather(on_device(2), [torch.ones(2)]),
        lambda: dist.scatter(torch.ones(2), [on_device(2)]),
        lambda: dist.isend(on_device(2), 0),
        lambda: dist.irecv(on_device(2), 0),
    ]
    with _captured() as cuda, mock.patch.object(torch.Tensor, "__dlpack__", side_effect=AssertionError):
        for call in calls:
            refuses(UsageError, "stream of cuda:1 is being captured into a graph, .* outside of the", call)
    assert cuda.said == []
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    sent = dist.isend(tensor, 0)
    assert sent is not None
    dist.recv(torch.empty(2), 0)
    sent.wait()


@on_ranks(1)
def test_devices_that_were_given_to_another_backend(comm: Communicator) -> None:
    """Torch gives their tensors to this one, up to 2.13."""
    with shared_store(comm) as store:
        dist.init_process_group(
            "cpu:multiring,cuda:nccl", store=store, rank=comm.rank, world_size=comm.size, timeout=TIMEOUT
        )
        try:
            text = r"on cuda:1: this group was made as 'cpu:multiring,cuda:nccl'.*new_group\(backend='nccl'\)"
            refuses(UsageError, text, dist.all_reduce, on_device(2))
            refuses(UsageError, text, dist.isend, on_device(2), 0)
            tensor = torch.ones(2)
            dist.all_reduce(tensor)
            assert tensor.tolist() == [comm.size] * 2
        finally:
            dist.destroy_process_group()


@with_world(1)
def test_tensors_on_two_devices(comm: Communicator) -> None:
    """None of them is reduced."""
    group = dist.group.WORLD
    assert group is not None
    given = [torch.ones(2), on_device(2), on_device(2, torch.device("cuda", 0))]
    with mock.patch.object(group.comm, "allreduce_async") as submitted:  # type: ignore[attr-defined]
        refuses(UsageError, "tensors on cuda:0 and cuda:1", group.allreduce_coalesced, given)  # type: ignore[arg-type]
    assert not submitted.called


def test_the_lines_for_devices_with_tensors_of_the_cpu() -> None:
    """Of Horovod's functions, too."""
    ended = run_job(3, PRETENDED, env={"PYTHONPATH": stand_in.python_path()})
    told = [line.split("SAME ")[1] for line in ended.stdout.splitlines() if "SAME" in line]
    assert sorted(told) == ["0 True", "1 True", "2 True"], ended.stdout + ended.stderr
