"""Runs what is written for CUDA tensors with tensors of the CPU that say that they lie on a device, and with
nothing in the place of streams: that each line runs and gives the right results, and that Torch copies
nothing after an operation of a process group but on a stream that is waited for. Real orders are for a GPU.

Patches Torch for good: a process of its own runs it.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

import multiring
import multiring.arrays
import multiring.collectives
from multiring.horovod import basics as hvd
from tests.adapters.torch_distributed.support import world
from tests.gpu.frameworks import test_horovod_torch, test_torch_distributed
from tests.gpu.late_tensors import Place, assert_same

_copy = torch.Tensor.copy_
_copied = 0


class _Thread(threading.local):
    """What a thread is in, and whether its stream has copies that were not waited for."""

    is_on_device = is_on_stream = is_behind = False


_here = _Thread()


class _Stream:
    cuda_stream = 1

    def __init__(self, device: object, priority: int = 0) -> None:
        self.device = device

    def record_event(self) -> _Stream:
        return self

    def query(self) -> bool:
        assert _here.is_on_device, "asks while another device may be the current one"
        return True

    def wait_event(self, event: object) -> None:
        pass

    def synchronize(self) -> None:
        _here.is_behind = False


@contextmanager
def _on_stream(stream: object) -> Iterator[None]:
    before, _here.is_on_stream = _here.is_on_stream, True
    try:
        yield
        assert not _here.is_behind, "copies that nothing waits for"
    finally:
        _here.is_on_stream = before


@contextmanager
def _on_device(device: object) -> Iterator[None]:
    before, _here.is_on_device = _here.is_on_device, True
    try:
        yield
    finally:
        _here.is_on_device = before


def _checked_copy(tensor: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
    global _copied
    if any(each.name == "_wait" and each.filename.endswith("work.py") for each in traceback.extract_stack()):
        _copied += 1
        assert _here.is_on_stream, "a copy on whatever stream is current"
        assert _here.is_on_device, "a stream of a device that may not be the current one"
        _here.is_behind = True
    return _copy(tensor, *args, **options)


def _refuse(*arrays: object) -> None:
    raise AssertionError("the core copies on whatever stream is current")


def _pretend() -> None:
    replaced: Any = torch
    replaced.Tensor.is_cuda = property(lambda tensor: True)
    replaced.Tensor.record_stream = lambda tensor, stream: None
    replaced.Tensor.copy_ = _checked_copy
    replaced.cuda.Stream = _Stream
    replaced.cuda.current_stream = _Stream
    replaced.cuda.stream, replaced.cuda.device = _on_stream, _on_device
    replaced.cuda.is_current_stream_capturing = lambda: False
    replaced.cuda.get_device_capability = lambda device: (9, 0)
    empty, future = torch.empty, torch.futures.Future
    replaced.empty = lambda *shape, pin_memory=False, **options: empty(*shape, **options)
    replaced.futures.Future = lambda devices: future()
    modules: Any = (multiring.arrays, multiring.collectives)
    for module in modules:
        module.copy_into = _refuse


def main() -> None:
    """Compares all cases with what they give without this."""
    comm, place = multiring.init(), Place("cpu")
    cases: dict[str, Any] = test_torch_distributed.CASES
    for pretends in (False, True):
        found = []
        if pretends:
            _pretend()
        with world(comm):
            found += [each for case in cases.values() for each in case(comm, place)]
        hvd.init(process_sets="dynamic")
        found += [each for case in test_horovod_torch.CASES.values() for each in case(comm, place)]
        hvd.shutdown()
        if not pretends:
            expected = found
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert_same(one, other, place, number)
    print("SAME", comm.rank, _copied > 10, flush=True)
