"""What tensors on CUDA devices need where other threads than the caller's work for it, or later.

The core orders its copies after the stream that is current where it is given a tensor, and a result that it
has written is complete. What is left is here: a tensor that is given to it in another thread, and what is
copied by Torch itself when an operation has ended.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from multiring import errors

__all__ = ["CallerWork", "begin_copy_to_host", "used_here", "wait_for_stream"]

# Between looks at what a device has done, in seconds.
_PAUSE = 50e-6


@functools.cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class CallerWork:
    """The work that this thread's current stream of a device has been given until now."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._event = torch.cuda.current_stream(device).record_event()

    @contextmanager
    def before(self) -> Iterator[None]:
        """In any thread: the device is the current one, as Torch's export by DLPack needs it, and its current
        stream comes after that work."""
        with torch.cuda.device(self._device):
            torch.cuda.current_stream(self._device).wait_event(self._event)
            yield

    def is_done(self) -> bool:
        """Whether the device has done that work."""
        return bool(self._event.query())

    def wait(self, seconds: float) -> None:
        """Waits for the device to do that work.

        Raises:
            TimeoutError: It has not in so many seconds.
        """
        until = time.monotonic() + seconds
        while not self.is_done():
            if time.monotonic() >= until:
                raise errors.TimeoutError(
                    f"waited {seconds:.3g} s for {self._device} to finish what it was given before the "
                    "operation. Does a kernel of the program never end?"
                )
            time.sleep(_PAUSE)

    @contextmanager
    def copies(self) -> Iterator[None]:
        """In any thread, when that work is done: what is begun in here is complete at the end, for any
        stream. No tensor that is made in here may be used afterwards: its memory is that of a stream which
        does not wait for others."""
        stream = _copy_stream(self._device)
        with torch.cuda.stream(stream):
            yield
            stream.synchronize()


def begin_copy_to_host(tensor: torch.Tensor) -> tuple[torch.Tensor, CallerWork]:
    """A copy in pinned memory of a contiguous tensor on a device; it is there when the work is done."""
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
    copy.copy_(tensor, non_blocking=True)
    return copy, CallerWork(tensor.device)


def used_here(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, which may have been made on another stream than the current one: when it is let go of, its
    memory is not used again before the current stream has done what it has been given by then."""
    if tensor.is_cuda:
        tensor.record_stream(torch.cuda.current_stream(tensor.device))
    return tensor


def wait_for_stream(other: torch.cuda.Stream) -> None:
    """Later work of this thread's current stream on the same device comes after what the other has now."""
    current = torch.cuda.current_stream(other.device)
    if current.cuda_stream != other.cuda_stream:
        current.wait_stream(other)
