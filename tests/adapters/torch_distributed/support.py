"""Process groups of torch.distributed on the ranks of a pool."""

from __future__ import annotations

import contextlib
import functools
import shutil
import tempfile
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import multiring.torch_distributed  # noqa: F401  # registers the backend, which an installed package does itself
from multiring import Communicator
from tests.on_ranks import on_ranks

TIMEOUT = timedelta(seconds=30)


@contextlib.contextmanager
def fresh_directory(comm: Communicator) -> Iterator[Path]:
    """A directory that all ranks see, empty at first."""
    path = comm.broadcast_object(tempfile.mkdtemp(prefix="mrd-") if comm.rank == 0 else None)
    try:
        yield Path(path)
        comm.barrier()
    finally:
        if comm.rank == 0:
            shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def world(comm: Communicator, timeout: timedelta = TIMEOUT) -> Iterator[Any]:
    """The ranks of `comm` as torch.distributed's default group, of our backend."""
    with shared_store(comm) as store:
        dist.init_process_group(
            "multiring", store=store, rank=comm.rank, world_size=comm.size, timeout=timeout
        )
        try:
            yield dist.group.WORLD
        finally:
            dist.destroy_process_group()


def with_world(*sizes: int | tuple[int, int]) -> Callable[[Callable[..., Any]], Any]:
    """Runs a test on so many ranks, two where nothing is said, in such a `world`."""

    def decorated(test: Callable[..., Any]) -> Any:
        @functools.wraps(test)
        def within(comm: Communicator, *args: Any, **kwargs: Any) -> Any:
            with world(comm):
                return test(comm, *args, **kwargs)

        return on_ranks(*sizes)(within) if sizes else within

    return decorated


@contextlib.contextmanager
def shared_store(comm: Communicator) -> Iterator[dist.TCPStore]:
    """A store of torch that rank 0 serves; all have it, which may take torch a second, before any goes on."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if comm.rank == 0 else None
    port = comm.broadcast_object(store.port if store is not None else None)
    store = store or dist.TCPStore("127.0.0.1", port, is_master=False)
    comm.barrier()
    yield store
    comm.barrier()  # before its end


def numbers(shape: tuple[int, ...], rank: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Different small integers on every rank, which every dtype has exactly."""
    generator = torch.Generator().manual_seed(1000 + rank)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    low = 0 if not dtype.is_signed else -4
    values = torch.randint(low, 5, shape, generator=generator)
    if dtype.is_complex:
        return torch.complex(values.double(), (values + 1).double()).to(dtype)
    return values.to(dtype)
