"""Tensors of Torch that a program's own stream makes late: what does not wait for it sees other values. And a
net with its batches.

The same on the CPU, where nothing is late: tests that compare with that run there as well, so that what they
ask for is right before they see a device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from multiring import Communicator
from tests.adapters.torch_distributed.support import numbers

# Some milliseconds on a processor of 1 to 2 GHz.
_BUSY_CYCLES = 10_000_000


def on_devices(*sizes: int) -> pytest.MarkDecorator:
    """Runs a test of `device` on so many ranks with "cuda", and on the most of them with "cpu"."""
    rows = [("cpu", max(sizes)), *(("cuda", size) for size in sizes)]
    return pytest.mark.parametrize(("device", "comm"), rows, indirect=["comm"])


class Place:
    """Makes tensors on "cpu" or "cuda"."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.is_cuda = device == "cuda"

    @contextmanager
    def own_stream(self) -> Iterator[None]:
        """A stream that waits for no other one."""
        if not self.is_cuda:
            yield
            return
        with torch.cuda.stream(torch.cuda.Stream()):
            yield

    def settle(self) -> None:
        """Waits for all streams: what is made on one can be used on another then."""
        if self.is_cuda:
            torch.cuda.synchronize()

    def busy(self) -> None:
        """Gives the current stream work that takes a while."""
        if self.is_cuda:
            torch.cuda._sleep(_BUSY_CYCLES)

    def late(self, values: torch.Tensor) -> torch.Tensor:
        """A tensor that has these values when the current stream has come so far, and zeros until then."""
        if not (self.is_cuda and values.numel()):
            return values.to(self.device, copy=True)
        # From pinned memory: the host would wait for a copy from other memory, and with it for what is late.
        source = values.pin_memory().to(self.device, non_blocking=True)
        there = torch.zeros_like(source)
        self.busy()
        return there.copy_(source)

    def given(self, shape: Sequence[int], rank: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Small integers that differ from rank to rank."""
        kind = torch.float32 if dtype == torch.float8_e5m2 else dtype
        return self.late(numbers(tuple(shape), rank, kind).to(dtype))

    def room(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """A tensor for a result, to which the current stream writes late."""
        return self.late(torch.ones(shape, dtype=torch.float32).to(dtype))


def assert_same(found: torch.Tensor, expected: torch.Tensor, place: Place, what: object = "") -> None:
    """Fails unless `found`, read on the current stream, is on that place and has the bits of `expected`."""
    assert found.device.type == place.device, what
    read, expected = (each.detach().cpu().resolve_conj().resolve_neg() for each in (found, expected))
    assert read.dtype == expected.dtype, what
    if read.dtype == torch.float8_e5m2:
        read, expected = read.view(torch.uint8), expected.view(torch.uint8)
    assert torch.equal(read, expected), f"{what}: {read} is not {expected}"


def make_net(device: str, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(5)
    net = nn.Sequential(nn.Linear(6, 300), nn.Tanh(), nn.Linear(300, 40), nn.Tanh(), nn.Linear(40, 3))
    return net.to(device, dtype)


def make_batch(rank: int, step: int, device: str, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(4, 6, generator=generator, dtype=torch.float64).to(device, dtype)


def loss_of(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    squared: torch.Tensor = (net(x) ** 2).mean()
    return squared


def expect_normalised_together(comm: Communicator, layer: nn.Module, device: str) -> None:
    """Expects that a layer of 6 features normalises as one process over the whole batch does, on a device and
    the current stream."""
    whole = nn.BatchNorm1d(6).double()
    every = torch.cat([make_batch(rank, 0, "cpu") for rank in range(comm.size)]).requires_grad_()
    x = make_batch(comm.rank, 0, device).requires_grad_()
    (layer(x) ** 3).sum().backward()
    (whole(every) ** 3).sum().backward()
    assert x.grad is not None
    assert every.grad is not None
    mine = slice(4 * comm.rank, 4 * (comm.rank + 1))
    torch.testing.assert_close(x.grad.cpu(), every.grad[mine], rtol=1e-6, atol=1e-9)
    assert isinstance(layer.running_var, torch.Tensor)
    assert whole.running_var is not None
    torch.testing.assert_close(layer.running_var.cpu(), whole.running_var)
