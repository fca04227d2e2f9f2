"""What an adapter and the gradient reducer tell each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from multiring.errors import UsageError
from multiring.gradients.bucketing import BUCKET_BYTES, FIRST_BUCKET_BYTES, ParameterSpec, itemsize
from multiring.gradients.compression import COMPRESSED_DTYPES, TopK
from multiring.reductions import native_comm_dtype
from multiring.types import CommDtypeName

__all__ = ["GradientSource", "InPlace", "ReducerOptions", "RoundResult", "check_arguments"]


@dataclass(frozen=True)
class ReducerOptions:
    """How gradients are reduced; has to be the same on every rank.

    Attributes:
        op: "average" divides by the number of ranks that have data, "sum" does not.
        bucket_bytes: Limit of a bucket, in bytes.
        first_bucket_bytes: Limit of the first bucket of each dtype, in bytes.
        prescale: Factor applied before the reduction.
        postscale: Factor applied after it.
        name: What error messages call the buckets.
        comm_dtype: See `Communicator.allreduce`; None: as MULTIRING_COMM_DTYPE says.
        compression: Sends part of the gradients only; None: all.
        check_every: Steps between two comparisons of the training state, see `StateCheck`; 0: never; None: as
            MULTIRING_CHECK_EVERY says.
    """

    op: Literal["average", "sum"] = "average"
    bucket_bytes: int = BUCKET_BYTES
    first_bucket_bytes: int = FIRST_BUCKET_BYTES
    prescale: float = 1.0
    postscale: float = 1.0
    name: str = "gradients"
    comm_dtype: CommDtypeName | None = None
    compression: TopK | None = None
    check_every: int | None = None

    @property
    def scale(self) -> float:
        """Product of both factors."""
        return self.prescale * self.postscale


class InPlace(NamedTuple):
    """A gradient in memory of the framework's own, which is reduced there instead of in its slot.

    Nobody else may read or write the memory until the round has ended.

    Attributes:
        address: Of the first element; the elements lie in the order of the slot, without holes.
        owner: An object that keeps the memory alive.
    """

    address: int
    owner: object


class GradientSource(Protocol):
    """What the reducer asks an adapter for when a round ends. Parameters are given by their index."""

    def store(self, index: int) -> InPlace | bool:
        """Put this rank's gradient in its slot, or tell where else it is; False if there is none."""

    def publish(self, index: int) -> None:
        """Show the slot as the gradient: another rank had one where this rank had none."""


@dataclass(frozen=True)
class RoundResult:
    """Who took part in a round; the same on every rank.

    Attributes:
        produced: Per parameter, whether any rank had a new gradient. Shape (parameters,).
        active: Per rank, whether it had data (see `GradientReducer.join`). Shape (ranks,).
    """

    produced: NDArray[np.bool_]
    active: NDArray[np.bool_]


def check_arguments(rank: int, specs: Sequence[ParameterSpec], options: ReducerOptions) -> None:
    """Raise UsageError unless gradients of these parameters can be reduced in this way."""
    names = [spec.name for spec in specs]
    if not names:
        raise UsageError(f"rank {rank}: there are no parameters to reduce gradients of")
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise UsageError(f"rank {rank}: parameter name '{twice}' occurs twice; names have to be unique")
    if options.op not in ("average", "sum"):
        raise UsageError(f"rank {rank}: op is '{options.op}'; gradients take 'average' or 'sum'")
    native_comm_dtype(options.comm_dtype)
    if options.check_every is not None and options.check_every < 0:
        raise UsageError(f"rank {rank}: check_every is {options.check_every}; pass 0 (never) or more")
    if options.compression is not None and options.comm_dtype not in (None, "float32"):
        raise UsageError(
            f"rank {rank}: comm_dtype is '{options.comm_dtype}' and compression is {options.compression}; "
            "gradients take one of them"
        )
    for spec in specs:
        itemsize(spec.dtype)
        if options.compression is not None and spec.dtype not in COMPRESSED_DTYPES:
            raise UsageError(
                f"rank {rank}: gradients of '{spec.name}' are {spec.dtype}; TopK takes "
                f"{' and '.join(COMPRESSED_DTYPES)}",
                rank=rank,
                tensor=spec.name,
            )
