"""What tensors on CUDA devices need where other threads than the caller's work for it, or later.

The core orders its copies after the stream that is current where it is given a tensor, and a result that it
has written is complete. What is left is here: a tensor that is given to it in another thread, and what is
copied by Torch itself when an operation has ended.

A thread that begins has device 0 as its current one, whichever device the rank uses. What is asked of CUDA
here makes the tensor's device the current one first: else each rank would get a context on device 0.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from multiring import errors

__all__ = ["CallerWork", "begin_copy_to_host", "why_captured"]

# Between looks at what a device has done, in seconds.
_PAUSE = 50e-6


@functools.cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    # Of another pool than those that programs make: Torch hands out the streams of a pool again.
    return torch.cuda.Stream(device, priority=-1)


class CallerWork:
    """The work that this thread's current stream of a device has been given until now."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._event = torch.cuda.current_stream(device).record_event()
        self._since = time.monotonic()

    @contextmanager
    def before(self) -> Iterator[None]:
        """In any thread: the device is the current one, as Torch's export by DLPack needs it, and its current
        stream comes after that work."""
        with torch.cuda.device(self._device):
            torch.cuda.current_stream(self._device).wait_event(self._event)
            yield

    def is_done(self) -> bool:
        """Whether the device has done that work; in any thread."""
        with torch.cuda.device(self._device):
            return bool(self._event.query())

    def wait(self, seconds: float, check: Callable[[], None] = lambda: None) -> None:
        """Waits for the device to do that work, in any thread.

        Args:
            seconds: How long.
            check: Called between looks; what it raises ends the wait.

        Raises:
            TimeoutError: It has not in so many seconds.
        """
        until = time.monotonic() + seconds
        while not self.is_done():
            check()
            if (now := time.monotonic()) >= until:
                raise errors.TimeoutError(
                    f"{self._device} has not finished what it was given before the operation, "
                    f"{now - self._since:.3g} s after that. Does a kernel of the program never end?"
                )
            time.sleep(_PAUSE)

    @contextmanager
    def copies(self) -> Iterator[None]:
        """In any thread, when that work is done: what is begun in here is complete at the end, for any
        stream. No tensor that is made in here may be used afterwards: its memory is that of a stream which
        does not wait for others."""
        stream = _copy_stream(self._device)
        with torch.cuda.device(self._device), torch.cuda.stream(stream):
            yield
            stream.synchronize()


def begin_copy_to_host(tensor: torch.Tensor) -> tuple[torch.Tensor, CallerWork]:
    """A copy in pinned memory of a contiguous tensor on a device; it is there when the work is done."""
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
    copy.copy_(tensor, non_blocking=True)
    return copy, CallerWork(tensor.device)


def why_captured(device: torch.device) -> str | None:
    """Why an operation of tensors on a device cannot begin, before Torch is asked for anything that would
    end a capture; None: this thread's current stream there is not being captured."""
    with torch.cuda.device(device):
        if not torch.cuda.is_current_stream_capturing():
            return None
    return (
        f"the current stream of {device} is being captured into a graph, which an operation that needs the "
        "host cannot be part of; call it outside of the capture"
    )
