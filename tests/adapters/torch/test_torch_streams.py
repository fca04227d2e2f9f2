"""What is asked of CUDA streams, as a stand-in for them records it. On real ones: tests/gpu."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch

from multiring.errors import TimeoutError
from multiring.horovod.torch.checks import ordered
from multiring.torch import streams
from multiring.torch.streams import CallerWork, used_here, wait_for_stream
from multiring.torch_distributed.tensors import cuda_device, resolved
from multiring.torch_distributed.work import GroupWork, Part

DEVICE = torch.device("cuda", 1)


class FakeStreams:
    """In the place of `torch.cuda`: one stream that is current, and new ones."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.current = FakeStream("current", self.said)

    def current_stream(self, device: torch.device) -> FakeStream:
        assert device == DEVICE
        return self.current

    def Stream(self, device: torch.device) -> FakeStream:  # noqa: N802
        assert device == DEVICE
        return FakeStream("own", self.said)

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        self.said.append(f"to {device}")
        yield
        self.said.append(f"from {device}")


class FakeEvent:
    looks = 2  # until it is there

    def query(self) -> bool:
        self.looks -= 1
        return self.looks < 0


class FakeStream:
    device = DEVICE

    def __init__(self, name: str, said: list[str]) -> None:
        self.name, self.said = name, said
        self.cuda_stream = id(self)

    def record_event(self) -> FakeEvent:
        self.said.append(f"{self.name} records")
        return FakeEvent()

    def wait_event(self, event: FakeEvent) -> None:
        self.said.append(f"{self.name} waits for an event")

    def wait_stream(self, other: FakeStream) -> None:
        self.said.append(f"{self.name} waits for {other.name}")

    def synchronize(self) -> None:
        self.said.append(f"{self.name} is complete")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeStreams]:
    fake = FakeStreams()
    for name in ("current_stream", "Stream", "stream", "device"):
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
        work = _work(cuda.said, Part(mock.Mock(done=lambda: True)))
        work.get_future()
        GroupWork.joined(mock.Mock(), [work]).get_future()
    assert [call.kwargs for call in future.call_args_list] == [{"devices": [DEVICE]}] * 2


def test_horovod_submits_after_the_work_of_the_caller_each_time(cuda: FakeStreams) -> None:
    tensor: Any = mock.Mock(is_cuda=True, device=DEVICE)
    start = ordered(tensor, lambda queue: cuda.said.append(str(queue)))  # type: ignore[arg-type,func-returns-value]
    for queue in ("first", "second"):
        start(queue)  # type: ignore[arg-type]
    once = ["to cuda:1", "current waits for an event"]
    assert cuda.said == ["current records", *once, "first", "from cuda:1", *once, "second", "from cuda:1"]
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
    assert cuda_device([here, there]) is there.device
    assert cuda_device([here]) is None
