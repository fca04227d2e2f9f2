"""How many ranks of emulated hosts this machine carries, which all run on it."""

from __future__ import annotations

import argparse

from multiring import machine
from multiring.benchmarks.contenders import PEERS
from multiring.benchmarks.emulation.start import Emulation
from multiring.errors import UsageError
from multiring.units import size_text

__all__ = ["require_capacity", "why_too_many"]

# Ranks that share a processor take turns, and each step of an algorithm waits for the last of them: hundreds
# are slow, thousands hold up the machine.
_RANKS_PER_PROCESSOR = 64
# What a rank of `bench allreduce` with all peers takes besides arrays: PyTorch has most.
_RANK_BYTES = 256 << 20
_LARGEST = 128 << 20  # of benchmarks that are given no sizes: the gradients of a network


def why_too_many(ranks: int, arrays: int, processors: int, memory: int | None) -> str | None:
    """Why so many ranks do not start; None: they do.

    Args:
        ranks: On all hosts together.
        arrays: Bytes of the largest arrays that a rank has at once.
        processors: That can run at once.
        memory: Bytes that are free; None: unknown.
    """
    each = _RANK_BYTES + arrays
    by_processors = _RANKS_PER_PROCESSOR * processors
    by_memory = by_processors if memory is None else memory // each
    most = min(by_processors, by_memory)
    if ranks <= most:
        return None
    limits = f"{by_processors} on the processors that may be used ({_RANKS_PER_PROCESSOR} on each)"
    if memory is not None:
        limits += f", and {by_memory} in {size_text(memory)} of free memory ({size_text(each)} for each)"
    return f"{ranks} ranks are too many for this machine, which carries {most}: {limits}"


def require_capacity(emulation: Emulation, options: argparse.Namespace) -> None:
    """Raises UsageError unless this machine carries the ranks of a benchmark with these options."""
    sizes = getattr(options, "sizes", None)
    arrays = _arrays(options) * max(sizes or [_LARGEST])
    why = why_too_many(emulation.size, arrays, machine.core_allowance(), machine.memory_available())
    if why:
        smaller = ", or measure smaller arrays (--sizes)" if sizes else ""
        raise UsageError(f"--emulate {emulation.hosts}x{emulation.ranks}: {why}; emulate fewer{smaller}")


def _arrays(options: argparse.Namespace) -> int:
    """How many arrays of the largest size a rank has: each contender has its own, and the native one, as MPI,
    copies."""
    peers = options.peers if options.peers is not None else list(PEERS)
    others = len(peers) + ("mpi" in peers) + 2 * (options.mpich is not None)
    flags = ("comm_dtype", "tcp_streams")
    others += len(getattr(options, "modes", [])) + sum(bool(getattr(options, each, None)) for each in flags)
    return 2 + others
