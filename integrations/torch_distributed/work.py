"""The handle of an operation of a process group, as torch.distributed knows it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from multiring import errors
from multiring.errors import MultiringError
from multiring.torch_distributed import old_torch
from multiring.torch_distributed.streams import CallerWork

if TYPE_CHECKING:
    from multiring.torch_distributed.group_base import GroupBase

__all__ = ["GroupWork", "Part", "Pending"]

_NO_TIMEOUT = timedelta(0)


class Pending(Protocol):
    """What is on its way: `multiring.Work`, or a message."""

    def done(self) -> bool: ...

    def wait(self, timeout: float | None = None) -> Any: ...


class Part(NamedTuple):
    """An operation under way.

    Attributes:
        pending: It.
        finish: Takes what it returns, and brings it to the tensors that it is for; None: it is there.
    """

    pending: Pending
    finish: Callable[[Any], object] | None = None

    def followed_by(self, function: Callable[[], object]) -> Part:
        """The same, with something to be done after `finish`."""

        def finish(result: Any) -> None:
            if self.finish is not None:
                self.finish(result)
            function()

        return Part(self.pending, finish)


class GroupWork(dist.Work):
    """An operation of a process group, made of one or several of the communicator.

    Args:
        group: The group.
        parts: The operations, which have been submitted.
        outputs: What `result` and the future give.
        timeout: Seconds after which waiting fails and breaks the group; None: the group's own timeout, which
            the operations have themselves.
        devices: Those of CUDA that its tensors lie on; of an operation one at most. It is ordered after what
            the current stream has now.
    """

    def __init__(
        self,
        group: GroupBase,
        parts: Sequence[Part],
        outputs: Sequence[torch.Tensor],
        timeout: float | None = None,
        devices: Sequence[torch.device] = (),
    ) -> None:
        super().__init__()
        self._group = group
        self._parts = list(parts)
        self._outputs = list(outputs)
        self._devices = list(devices)
        # What the core writes is complete when it says so; what is copied afterwards has to be made so.
        is_copied = bool(devices) and any(part.finish is not None for part in parts)
        self._caller = CallerWork(devices[0]) if is_copied else None
        self._deadline = None if timeout is None else time.monotonic() + timeout
        self._lock = threading.Lock()
        self._ended = False
        self._error: BaseException | None = None
        self._source = -1
        self._future: Any = None
        if old_torch.WORK_IS_COLLECTED:
            group.kept.add(self)

    @classmethod
    def joined(
        cls, group: GroupBase, works: Iterable[GroupWork], outputs: Sequence[torch.Tensor] = ()
    ) -> GroupWork:
        """Return several works as one, with outputs of its own, if they are given."""
        works = list(works)
        devices = {device for work in works for device in work._devices}
        return cls(group, [Part(_WorkAsPending(work)) for work in works], outputs, devices=list(devices))

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """Waits until the outputs are there.

        Args:
            timeout: How long; zero or less: as long as the operation takes.

        Raises:
            TimeoutError, MismatchError, PeerLostError, AbortedError: The operation failed; all are
                `torch.distributed.DistBackendError` too.
        """
        seconds = timeout.total_seconds()
        self._wait(time.monotonic() + seconds if seconds > 0 else None)
        self._group.kept.discard(self)
        if self._error is not None:
            raise self._error
        return True

    @property
    def has_ended(self) -> bool:
        """Whether the outputs are there, or have been found to fail."""
        return self._ended

    def synchronize(self) -> None:
        """`wait`, which leaves nothing for a stream to wait for."""
        self.wait()

    block_current_stream = synchronize

    def is_completed(self) -> bool:
        """Whether the operation has ended, with success or not."""
        if not self._ended and self._are_done():
            self._wait(None)
        return self._ended

    def is_success(self) -> bool:
        """Whether it has ended with success."""
        return self.is_completed() and self._error is None

    def exception(self) -> BaseException | None:
        """Why it failed; None: it has not."""
        return self._error if self.is_completed() else None

    def result(self) -> list[torch.Tensor]:
        """The outputs, once it has ended."""
        self.wait()
        return list(self._outputs)

    def source_rank(self) -> int:
        """For a message that was received: the rank that has sent it."""
        self.wait()
        return self._source

    _source_rank = source_rank

    def get_future(self) -> Any:
        """A future with the list of the outputs, done if the operation is. Its `wait` raises what went wrong,
        as a RuntimeError."""
        with self._lock:
            is_new = self._future is None
            if is_new:
                # With the devices, what follows on the future is ordered on streams as well.
                self._future = torch.futures.Future(devices=list(self._devices))
            future = self._future
        if is_new:
            if self.is_completed():
                self._complete(future)
            else:
                self._group.watchers.run(lambda: self._complete(future))  # which holds this work
            self._group.kept.discard(self)
        # An exception that is set is a result for C++, which would take it for tensors; one that is raised
        # by what follows is an error there too.
        return future.then(self._value)

    def _complete(self, future: Any) -> None:
        self._wait(None)
        with self._on_device():  # which is the current one of what follows on the future, too
            future.set_result(None)

    def _on_device(self) -> AbstractContextManager[object]:
        """Makes the device the current one; in a thread that is new that is 0, whichever the rank uses."""
        return torch.cuda.device(self._devices[0]) if self._devices else nullcontext()

    def _value(self, _: Any) -> list[torch.Tensor]:
        if self._error is not None:
            raise self._error
        return self._outputs

    def _are_done(self) -> bool:
        is_ready = self._caller is None or self._caller.is_done()
        return is_ready and all(part.pending.done() for part in self._parts)

    def _wait(self, until: float | None) -> None:
        """Waits, and keeps what goes wrong; raises only if the caller's own time is up."""
        if self._ended:
            return
        limit = min((each for each in (until, self._deadline) if each is not None), default=None)
        try:
            with self._on_device():
                results = [_result_of(part.pending, limit) for part in self._parts]
            if self._caller is not None:
                self._await(self._caller, limit)
            with self._lock:
                if not self._ended:
                    with self._while_copying():
                        for part, result in zip(self._parts, results, strict=True):
                            if part.finish is not None:
                                part.finish(result)
                    if self._parts:
                        self._source = getattr(self._parts[0].pending, "source", -1)
                    self._parts = []  # and with them copies of inputs and outputs
                    self._ended = True
        except _StillPendingError as late:
            if limit != self._deadline:
                raise self._group.explained(late.error) from late.error
            self._end(self._group.explained(self._group.break_by(late.error)))
        except MultiringError as error:
            self._end(self._group.explained(error))
        except Exception as error:  # what an operation's `finish` raises, such as a failed copy
            self._end(error)

    def _while_copying(self) -> AbstractContextManager[object]:
        """Return the context in which results are copied into outputs: on the caller's stream, and whatever
        the mode of this thread is, in inference mode where an output was made in it."""
        context = ExitStack()
        if any(output.is_inference() for output in self._outputs):
            context.enter_context(torch.inference_mode())
        if self._caller is not None:
            context.enter_context(self._caller.copies())
        return context

    def _await(self, caller: CallerWork, limit: float | None) -> None:
        """Waits for what the caller's stream had before the operation; the core has where it copied from the
        device."""
        try:
            left = self._group.comm.timeout if limit is None else limit - time.monotonic()
            caller.wait(max(0.0, left))
        except errors.TimeoutError as late:
            raise _StillPendingError(late) from late

    def _end(self, error: BaseException) -> None:
        with self._lock:
            if not self._ended:
                self._error, self._ended = error, True


class _WorkAsPending:
    """A work of a process group as part of another one."""

    def __init__(self, work: GroupWork) -> None:
        self._work = work
        self.done = work.is_completed

    def wait(self, timeout: float | None = None) -> None:
        """Waits for it; raises what went wrong."""
        self._work.wait(_NO_TIMEOUT if timeout is None else timedelta(seconds=max(timeout, 1e-6)))


class _StillPendingError(Exception):
    """The time to wait is up, and the operation has not ended; `error` says so."""

    def __init__(self, error: errors.TimeoutError) -> None:
        super().__init__(str(error))
        self.error = error


def _result_of(pending: Pending, limit: float | None) -> Any:
    """What it returns or raises, or `_StillPendingError` if it has not ended at `limit`."""
    try:
        return pending.wait(None if limit is None else max(0.0, limit - time.monotonic()))
    except errors.TimeoutError as error:
        # An operation may as well fail because its own time is up, at the same moment even.
        if limit is None or time.monotonic() < limit:
            raise
        if not pending.done():
            raise _StillPendingError(error) from error
        return pending.wait()
