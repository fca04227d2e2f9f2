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
# of two are slow, thousands hold up the machine.
_RANKS_PER_PROCESSOR = 64
# What a rank of `bench allreduce` with all peers takes besides arrays: PyTorch has most.
_RANK_BYTES = 256 << 20
# What a rank of `bench gradients` has: the weights of a network, 102 MB, in each kind of reduction, most with
# buckets as large, and gradients.
_GRADIENTS_BYTES = 1 << 30


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
    arrays = _arrays(options) * max(sizes) if sizes else _GRADIENTS_BYTES
    why = why_too_many(emulation.size, arrays, machine.core_allowance(), machine.memory_available())
    if why:
        smaller = ", or measure smaller arrays (--sizes)" if sizes else ""
        raise UsageError(f"--emulate {emulation.hosts}x{emulation.ranks}: {why}; emulate fewer{smaller}")


def _arrays(options: argparse.Namespace) -> int:
    """How many arrays of the largest size a rank has: each contender its own, where not in place another one
    for the result, and copies of one of them."""
    each = 2 if hasattr(options, "collectives") else 1
    others = [getattr(options, name, None) for name in ("comm_dtype", "tcp_streams", "mpich")]
    peers = list(PEERS) if options.peers is None else options.peers
    contenders = 1 + len(peers) + len(getattr(options, "modes", [])) + sum(map(bool, others))
    return 1 + each * contenders
