"""How many ranks of emulated hosts this machine carries, which all run on it."""

from __future__ import annotations

import argparse

from multiring import machine
from multiring.benchmarks.emulation.start import Emulation
from multiring.errors import UsageError
from multiring.units import size_text

__all__ = ["require_capacity", "why_too_many"]

# Ranks that share a processor take turns, and each step of an algorithm waits for the last of them.
_RANKS_PER_PROCESSOR = 16
# What a rank of `bench allreduce` with all peers takes: 250 MiB, of which PyTorch has most, and of arrays of
# the largest size up to four, as Open MPI has copies of its own.
_RANK_BYTES, _ARRAYS = 256 << 20, 4
_LARGEST = 128 << 20  # of benchmarks that are given no sizes: the gradients of a network


def why_too_many(ranks: int, largest: int, processors: int, memory: int | None) -> str | None:
    """Why so many ranks do not start; None: they do.

    Args:
        ranks: On all hosts together.
        largest: Bytes of the largest array.
        processors: That can run at once.
        memory: Bytes that are free; None: unknown.
    """
    each = _RANK_BYTES + _ARRAYS * largest
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
    largest = max(getattr(options, "sizes", None) or [_LARGEST])
    why = why_too_many(emulation.size, largest, machine.core_allowance(), machine.memory_available())
    if why:
        raise UsageError(
            f"--emulate {emulation.hosts}x{emulation.ranks}: {why}; emulate fewer, or measure smaller arrays"
        )
