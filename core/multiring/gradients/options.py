"""How gradients are reduced: one object, and the keyword arguments from which every adapter makes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

from multiring import config
from multiring.errors import UsageError
from multiring.gradients.bucketing import (
    BUCKET_BYTES,
    FIRST_BUCKET_BYTES,
    ParameterSpec,
    Plan,
    itemsize,
    plan_buckets,
)
from multiring.gradients.compression import COMPRESSED_DTYPES, TopK
from multiring.reductions import CrossingKeywords, ScaleKeywords, native_crossing
from multiring.types import CommDtypeName, OrderName, ReduceOpName

__all__ = [
    "BucketKeywords",
    "ReducerKeywords",
    "ReducerOptions",
    "SizeKeywords",
    "check_interval",
    "check_options",
    "check_parameters",
]


class SizeKeywords(ScaleKeywords, total=False):
    """Keyword arguments for fields of `ReducerOptions` that any reduction in buckets takes."""

    bucket_bytes: int


class BucketKeywords(SizeKeywords, total=False):
    """Keyword arguments for fields of `ReducerOptions` that every adapter takes."""

    op: Literal["average", "sum"]
    average: bool
    """False is op="sum"."""


class ReducerKeywords(BucketKeywords, total=False):
    """Keyword arguments for all fields of `ReducerOptions` that a program sets."""

    comm_dtype: CommDtypeName | None
    order: OrderName | None
    compression: TopK | None
    check_every: int | None


@dataclass(frozen=True, kw_only=True)
class ReducerOptions:
    """How gradients are reduced; the same on every rank.

    Optimizers, hooks and callbacks take these fields, but for `name`, as keyword arguments:
    `DistributedOptimizer(optimizer, prescale=0.5, bucket_bytes=1 << 20)`. `average=False` is op="sum".
    TensorFlow and JAX have no `comm_dtype`, `order` and `compression`.

    Attributes:
        op: "average" divides by the number of ranks that have data, "sum" does not.
        bucket_bytes: Limit of a bucket, in bytes; a larger gradient gets one for itself. The first bucket of
            each dtype has at most 1 MiB, to leave early.
        prescale: Factor applied before the reduction.
        postscale: Factor applied after it.
        name: What error messages call the buckets.
        comm_dtype: The dtype in which gradients of float32 cross from host to host: "bfloat16" and "float16"
            round them, "float32" does not (docs/compression.md). MULTIRING_COMM_DTYPE if None.
        order: "any" lets rings run, and gives up bits that are the same wherever ranks are
            (docs/tuning.md). MULTIRING_ORDER if None.
        compression: `multiring.TopK(ratio)` sends only the largest entries of each bucket and keeps the
            others for the next step (docs/compression.md). Of gradients of float32 and float64. None: all
            are sent.
        check_every: Compare checksums of the training state over ranks every so many steps, and in steps 2,
            4, 8, ... before that, so that ranks that drift apart are a `MismatchError`; 0: never; None: as
            MULTIRING_CHECK_EVERY says (100).
    """

    op: ReduceOpName = "average"
    bucket_bytes: int = BUCKET_BYTES
    prescale: float = 1.0
    postscale: float = 1.0
    name: str = "gradients"
    comm_dtype: CommDtypeName | None = None
    order: OrderName | None = None
    compression: TopK | None = None
    check_every: int | None = None

    @classmethod
    def of(cls, keywords: SizeKeywords, **others: Any) -> Self:
        """Made of the keyword arguments of a function (`explain_arguments` has refused unknown ones).

        Args:
            keywords: What the program has passed.
            others: Fields that the function sets itself.

        Raises:
            UsageError: Both `op` and `average` are given.
        """
        fields: dict[str, Any] = {**keywords, **others}
        if "average" in fields:
            if "op" in fields:
                raise UsageError("op and average are given, which say the same; pass one of them")
            fields["op"] = "average" if fields.pop("average") else "sum"
        fields.update((name, float(fields[name])) for name in ("prescale", "postscale") if name in fields)
        return cls(**fields)

    def plan(self, specs: Sequence[ParameterSpec], order: Sequence[int], size: int) -> Plan:
        """The buckets; see `plan_buckets`."""
        first = min(self.bucket_bytes, FIRST_BUCKET_BYTES)
        return plan_buckets(specs, order, size=size, bucket_bytes=self.bucket_bytes, first_bucket_bytes=first)

    def is_repeatable(self, size: int) -> bool:
        """Whether to reduce a gradient again that is the same on all of `size` ranks changes nothing."""
        return self.scale * (size if self.op == "sum" else 1) == 1.0

    def reduced_twice(self, rank: int, name: str, todo: str) -> UsageError:
        """What to raise where that changes something and a gradient is to be reduced again."""
        return UsageError(
            f"rank {rank}: the gradient of '{name}' was reduced before, and would be once more with "
            f"op='{self.op}', prescale={self.prescale}, postscale={self.postscale}; {todo}",
            rank=rank,
            tensor=name,
        )

    def crossing(self, narrow: bool) -> CrossingKeywords:
        """How gradients cross from host to host; `narrow`: they are float32, which `comm_dtype` is for."""
        return {"comm_dtype": self.comm_dtype if narrow else None, "order": self.order}

    @property
    def scale(self) -> float:
        """Product of both factors."""
        return self.prescale * self.postscale


def check_interval(rank: int, every: int | None) -> int:
    """Steps between two comparisons, 0 for never; None stands for what MULTIRING_CHECK_EVERY says.

    Raises:
        UsageError: A negative number.
    """
    interval = config.load().check_every if every is None else every
    if interval < 0:
        raise UsageError(f"rank {rank}: check_every is {interval}; pass 0 (never) or more")
    return interval


def check_options(rank: int, options: ReducerOptions) -> None:
    """Raise UsageError unless gradients can be reduced in this way."""
    if options.op not in ("average", "sum"):
        raise UsageError(f"rank {rank}: op is '{options.op}'; gradients take 'average' or 'sum'")
    native_crossing(options.comm_dtype, options.order)
    check_interval(rank, options.check_every)
    if options.compression is not None and options.comm_dtype not in (None, "float32"):
        raise UsageError(
            f"rank {rank}: comm_dtype is '{options.comm_dtype}' and compression is {options.compression}; "
            "gradients take one of them"
        )
    if options.compression is not None and options.order == "any":
        raise UsageError(f"rank {rank}: compression is {options.compression}, which adds in one order only")


def check_parameters(rank: int, specs: Sequence[ParameterSpec], options: ReducerOptions) -> None:
    """Raise UsageError unless gradients of these parameters can be reduced in this way."""
    names = [spec.name for spec in specs]
    if not names:
        raise UsageError(f"rank {rank}: there are no parameters to reduce gradients of")
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise UsageError(f"rank {rank}: parameter name '{twice}' occurs twice; names have to be unique")
    check_options(rank, options)
    for spec in specs:
        itemsize(spec.dtype)
        if options.compression is not None and spec.dtype not in COMPRESSED_DTYPES:
            raise UsageError(
                f"rank {rank}: gradients of '{spec.name}' are {spec.dtype}; TopK takes "
                f"{' and '.join(COMPRESSED_DTYPES)}",
                rank=rank,
                tensor=spec.name,
            )
