"""Which processors and how many threads each rank gets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from multiring.errors import UsageError

__all__ = ["THREAD_VARIABLES", "shares", "thread_environment"]

# Read by OpenMP and what builds on it (Torch, OpenBLAS, MKL), by BLAS libraries on their own, by NumExpr and
# by TensorFlow, which does not look at the others.
THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "TF_NUM_INTRAOP_THREADS",
)


def shares(cpus: Sequence[int], ranks: int, bind: str | None) -> list[frozenset[int]] | None:
    """Equal contiguous shares of `cpus`, one per rank, or None where ranks are not to be bound.

    Args:
        cpus: The processors that may be used, neighbours next to each other.
        ranks: Number of ranks.
        bind: "core", "none", or None for "core" where there is at least one processor per rank.

    Raises:
        UsageError: "core" was asked for and there are more ranks than processors.
    """
    if bind == "none" or (bind is None and ranks > len(cpus)):
        return None
    if ranks > len(cpus):
        raise UsageError(
            f"--bind core needs a processor for each of {ranks} ranks and {len(cpus)} may be used: start "
            "fewer ranks, or use --bind none"
        )
    each = len(cpus) // ranks
    return [frozenset(cpus[rank * each : (rank + 1) * each]) for rank in range(ranks)]


def thread_environment(cores: int, ranks: int, environ: Mapping[str, str]) -> dict[str, str]:
    """Thread counts that give each rank its share of `cores`, without touching what the user has set.

    Libraries fall back on OMP_NUM_THREADS; so where the user has set that one, nothing else is set.
    """
    if "OMP_NUM_THREADS" in environ:
        return {}
    threads = str(max(1, cores // ranks))
    return {name: threads for name in THREAD_VARIABLES if name not in environ}
