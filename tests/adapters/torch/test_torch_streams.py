"""What is asked of CUDA streams, as a stand-in for them records it. On real ones: tests/gpu."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch

from multiring.errors import AbortedError, TimeoutError, UsageError
from multiring.horovod.torch.checks import REDUCED, checked, ordered
from multiring.horovod.torch.functions import _on_host, _where
from multiring.horovod.torch.moves import _room_for_share, alltoall_async
from multiring.torch.streams import used_here, wait_for_stream
from multiring.torch_distributed import streams
from multiring.torch_distributed.messages import Messenger
from multiring.torch_distributed.operations import allgather, reduce_scatter_single
from multiring.torch_distributed.streams import CallerWork, why_captured
from multiring.torch_distributed.tensors import only_cuda_device, resolved
from multiring.torch_distributed.watchers import Watchers
from multiring.torch_distributed.work import GroupWork, Part

DEVICE = torch.device("cuda", 1)


class FakeStreams:
    """In the place of `torch.cuda`: one stream that is current, and new ones. Each thread has a current
    device of its own, none at first; what would make a context on another device fails."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.current = FakeStream("current", self)
        self.is_captured = False
        self._here = threading.local()

    @property
    def current_device(self) -> torch.device | None:
        return getattr(self._here, "device", None)

    def require_device(self) -> None:
        assert self.current_device == DEVICE, "asked while another device is the current one"

    def current_stream(self, device: torch.device) -> FakeStream:
        assert device == DEVICE
        return self.current

    def Stream(self, device: torch.device, priority: int = 0) -> FakeStream:  # noqa: N802
        assert device == DEVICE
        return FakeStream("own", self)

    def is_current_stream_capturing(self) -> bool:
        self.require_device()
        return self.is_captured

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        self.require_device()
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.require_device()
            self.current = before

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        before, self._here.device = self.current_device, device
        try:
            yield
        finally:
            self._here.device = before


class FakeEvent:
    looks = 2  # until it is there

    def __init__(self, cuda: FakeStreams) -> None:
        self.cuda = cuda

    def query(self) -> bool:
        self.cuda.require_device()
        self.looks -= 1
        return self.looks < 0


class FakeStream:
    device = DEVICE

    def __init__(self, name: str, cuda: FakeStreams) -> None:
        self.name, self.cuda, self.said = name, cuda, cuda.said
        self.cuda_stream = id(self)

    def record_event(self) -> FakeEvent:
        self.said.append(f"{self.name} records")
        return FakeEvent(self.cuda)

    def wait_event(self, event: FakeEvent) -> None:
        self.cuda.require_device()
        self.said.append(f"{self.name} waits for an event")

    def wait_stream(self, other: FakeStream) -> None:
        self.said.append(f"{self.name} waits for {other.name}")

    def synchronize(self) -> None:
        self.said.append(f"{self.name} is complete")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeStreams]:
    fake = FakeStreams()
    for name in ("current_stream", "Stream", "stream", "device", "is_current_stream_capturing"):
        monkeypatch.setattr(torch.cuda, name, getattr(fake, name))
    streams._copy_stream.cache_clear()
    yield fake
    streams._copy_stream.cache_clear()


def _group() -> Any:
    errors = {"explained": lambda error: error, "break_by": lambda error: error}
    return mock.Mock(comm=mock.Mock(rank=1, timeout=30.0), **errors)


def _work(said: list[str], *parts: Part) -> GroupWork:
    made = GroupWork(_group(), parts, [], devices=[DEVICE])
    said.append("submitted")
    return made


def test_copies_after_an_operation_are_complete_before_its_work_is(cuda: FakeStreams) -> None:
    pending = mock.Mock(wait=lambda timeout: 17, done=lambda: True)
    work = _work(cuda.said, Part(pending, lambda result: cuda.said.append(f"{cuda.current.name} {result}")))
    assert work.wait()
    assert cuda.said == ["current records", "submitted", "own 17", "own is complete"]
    assert cuda.current.name == "current"
    assert work.wait()
    assert len(cuda.said) == 4


def test_work_before_that_never_ends(cuda: FakeStreams, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before copies into a tensor that the core does not know."""
    monkeypatch.setattr(FakeEvent, "query", lambda event: False)
    work = _work(cuda.said, Part(mock.Mock(), lambda result: cuda.said.append("copied")))
    with pytest.raises(TimeoutError, match="Does a kernel of the program never end"):
        work.wait(timedelta(seconds=0.01))
    work._group.comm.timeout = 0.01
    with pytest.raises(TimeoutError, match="Does a kernel of the program never end"):
        work.wait()
    assert work.is_completed()
    assert "copied" not in cuda.said


def test_what_the_core_has_written_needs_no_stream(cuda: FakeStreams) -> None:
    assert _work(cuda.said, Part(mock.Mock())).wait()
    assert cuda.said == ["submitted"]


def test_futures_know_the_device(cuda: FakeStreams) -> None:
    with mock.patch.object(torch.futures, "Future") as future:
        future().set_result = lambda value: cuda.require_device()
        future.reset_mock()
        work = _work(cuda.said, Part(mock.Mock(done=lambda: True)))
        work.get_future()
        GroupWork.joined(mock.Mock(), [work]).get_future()
    assert [call.kwargs for call in future.call_args_list] == [{"devices": [DEVICE]}] * 2


def test_horovod_submits_after_the_work_of_the_caller_each_time(cuda: FakeStreams) -> None:
    tensor: Any = mock.Mock(is_cuda=True, device=DEVICE)
    start = ordered(tensor, lambda queue: cuda.said.append(f"{queue} on {cuda.current_device}"))  # type: ignore[arg-type,func-returns-value]
    for queue in ("first", "second"):
        start(queue)  # type: ignore[arg-type]
    waits = "current waits for an event"
    assert cuda.said == ["current records", waits, "first on cuda:1", waits, "second on cuda:1"]
    assert cuda.current_device is None
    on_host = mock.Mock()
    assert ordered(torch.ones(1), on_host) is on_host


def test_a_stream_does_not_wait_for_itself(cuda: FakeStreams) -> None:
    wait_for_stream(cuda.current)  # type: ignore[arg-type]
    wait_for_stream(cuda.Stream(DEVICE))  # type: ignore[arg-type]
    assert cuda.said == ["current waits for own"]
    CallerWork(DEVICE)
    tensor = torch.ones(1)
    assert used_here(tensor) is tensor


def test_outputs_with_gaps_are_copied_on_devices_alone() -> None:
    """There the core would copy into them, on a stream that nobody waits for."""
    answers = {"is_neg": False, "is_conj": False, "is_contiguous": False}
    there: Any = mock.Mock(
        is_cuda=True,
        layout=torch.strided,
        **{f"{name}.return_value": answer for name, answer in answers.items()},
    )
    assert resolved(there) is there.detach().contiguous()
    here = torch.empty(4, 6).t()
    assert resolved(here) is here
    assert only_cuda_device([here, there], "it") is there.device
    assert only_cuda_device([here], "it") is None


def test_what_a_thread_does_when_an_operation_has_ended(cuda: FakeStreams) -> None:
    """A watcher completes the future; a thread that waits copies."""
    ended, completed = threading.Event(), threading.Event()
    said: list[str] = []

    def set_result(value: None) -> None:
        said.append(f"completed on {cuda.current_device}")
        completed.set()

    def wait(timeout: float | None) -> None:
        ended.wait(30)
        said.append(f"taken on {cuda.current_device}")

    def finish(result: object) -> None:
        said.append(f"copied on {cuda.current_device}")

    pending = mock.Mock(wait=wait, done=ended.is_set)
    with mock.patch.object(torch.futures, "Future") as future:
        future().set_result = set_result
        work = _work(cuda.said, Part(pending, finish))
        work._group.watchers = watchers = Watchers("test")
        work.get_future()
        ended.set()
        assert completed.wait(30)
    watchers.close()
    assert said == ["taken on cuda:1", "copied on cuda:1", "completed on cuda:1"]
    late = _work(cuda.said, Part(pending, finish))
    thread = threading.Thread(target=late.wait)
    thread.start()
    thread.join()
    assert late.is_success()
    assert said[3:] == ["taken on cuda:1", "copied on cuda:1"]


def test_a_work_that_has_ended_holds_no_copies(cuda: FakeStreams) -> None:
    pending = mock.Mock(source=2)
    work = _work(cuda.said, Part(pending, lambda result: None))
    assert work.source_rank() == 2
    assert work._parts == []


def on_device(count: int, where: torch.device = DEVICE) -> torch.Tensor:
    """A tensor of the host that says that it lies on a device."""

    class OnDevice(torch.Tensor):
        is_cuda = True
        device = where

    return torch.ones(count).as_subclass(OnDevice)


def test_horovod_refuses_while_the_stream_is_captured(cuda: FakeStreams) -> None:
    assert why_captured(DEVICE) is None
    assert checked(on_device(2), REDUCED).is_cuda
    cuda.is_captured = True
    with pytest.raises(ValueError, match="the current stream of cuda:1 is being captured into a graph"):
        checked(on_device(2), REDUCED)
    assert cuda.said == []


def test_tensors_on_several_devices() -> None:
    elsewhere: Any = mock.Mock(is_cuda=True, device=torch.device("cuda", 0))
    with pytest.raises(UsageError, match="it: tensors on cuda:0 and cuda:1; .* one device"):
        only_cuda_device([on_device(1), elsewhere], "it")


def test_a_closed_group_waits_for_no_copy_to_the_host(cuda: FakeStreams) -> None:
    """A group that has ended ends the thread that waits to send."""
    comm = mock.Mock(rank=0, size=2, timeout=300.0)
    watchers = Watchers("test")
    messenger = Messenger(comm, watchers)
    looked = threading.Event()

    def never_done(event: FakeEvent) -> bool:
        looked.set()
        return False

    with mock.patch.object(FakeEvent, "query", never_done):
        message = messenger.send(torch.ones(1), CallerWork(DEVICE), 1, 0)
        assert looked.wait(30)
        messenger.close(AbortedError("left"))
        watchers.close()
        with pytest.raises(AbortedError, match="left"):
            message.wait(5.0)
        assert not any(thread.is_alive() for thread in watchers._threads)
    assert not comm.send.called


def test_results_of_known_size_are_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the core takes memory beside Torch's pool."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: True))
    comm: Any = mock.Mock(rank=0, size=2)
    allgather(comm, [torch.empty(1), torch.empty(2)], torch.ones(1))
    assert comm.arrays_async.call_args.args[1].outputs[0].shape == (3,)
    rows = torch.ones(4)
    reduce_scatter_single(comm, rows[:2], rows, torch.distributed.ReduceOp.SUM)
    arrays = comm.arrays_async.call_args.args[1]
    assert arrays.outputs[0].data_ptr() == rows.data_ptr()
    assert arrays.inputs[0].shape == (2, 2)
    assert arrays.inputs[0].data_ptr() != rows.data_ptr()  # a copy: the output lies in the input
    assert not arrays.is_copied
    for rank, expected in enumerate([3, 2]):
        room = _room_for_share(torch.ones(5, 7), mock.Mock(rank=rank, size=2))
        assert room is not None
        assert room.shape == (expected, 7)


def test_the_modules_of_streams_bring_no_adapter() -> None:
    script = "import multiring.torch_distributed.group, sys; print('multiring.torch' in sys.modules)"
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ended.stdout.split() == ["False"]


def test_options_of_an_optimizer_leave_their_devices_and_come_back() -> None:
    """Also in tuples, as the `betas` of Adam."""
    given = torch.ones(1, device="meta")
    on_host = torch.zeros(1)
    with mock.patch.object(torch.Tensor, "cpu", return_value=on_host):
        state = _on_host({"betas": (given, 0.5), "groups": [(given,)]})
    assert state == {"betas": (on_host, 0.5), "groups": [(on_host,)]}
    first, second = _where((given, 0.9), state["betas"])
    assert first.device.type == "meta"
    assert second == 0.5
    assert _where(None, state["betas"]) is state["betas"]


def test_splits_on_a_device_are_read_at_once() -> None:
    """Each element by itself would be a synchronisation."""
    splits = torch.tensor([1, 2])
    operations: Any = mock.Mock(rank=0, size=2)
    process_set: Any = mock.Mock(operations=lambda: operations)
    with mock.patch.object(torch.Tensor, "__index__", side_effect=AssertionError):
        alltoall_async(torch.ones(3), splits, "x", process_set)
    assert operations.submit.called
