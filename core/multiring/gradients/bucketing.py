"""Which gradient lies in which bucket, and where: pure functions from sizes to offsets.

Nouns. A *slot* is the place of one gradient; a *bucket* is a run of slots of one dtype that one allreduce
carries; the *arena* is the memory that holds all buckets of a model. Behind its slots a bucket carries
*flags*, one element each: one per slot ("a rank produced this gradient"), then one per rank ("this rank has
data"). The flags are added up along with the gradients, so that learning who took part costs no collective
of its own.

    arena   | bucket 0                                | bucket 1 ...
            | slot | slot | slot | flags: slots, ranks | slot ...        everything starts at a multiple of 64
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from multiring.errors import UsageError

__all__ = [
    "ALIGNMENT",
    "BUCKET_BYTES",
    "FIRST_BUCKET_BYTES",
    "Bucket",
    "ParameterSpec",
    "Plan",
    "Slot",
    "capacity",
    "first_and_more",
    "flag_bits",
    "itemsize",
    "plan_buckets",
]

ALIGNMENT = 64  # a cache line; also what the widest vector loads want
BUCKET_BYTES = 25 << 20
# The first bucket is small, so that communication starts early in the backward pass.
FIRST_BUCKET_BYTES = 1 << 20


@dataclass(frozen=True)
class _Float:
    """A floating dtype: bytes per element, bits behind the exponent, and the exponents of normal numbers."""

    itemsize: int
    mantissa: int
    bias: int


_FLOATS = {
    "float16": _Float(2, 10, 15),
    "bfloat16": _Float(2, 7, 127),
    "float32": _Float(4, 23, 127),
    "float64": _Float(8, 52, 1023),
}


@dataclass(frozen=True)
class ParameterSpec:
    """What the ranks have to agree on for one parameter.

    Attributes:
        name: Unique name, the same on every rank.
        shape: Shape of the gradient.
        dtype: "float16", "bfloat16", "float32" or "float64".
        layout: Anything else that fixes the order of the elements in memory, for example strides.
        sparse: The gradient comes as rows and values; it takes part in the flags but occupies no bytes.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    layout: str = ""
    sparse: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of the slot."""
        return 0 if self.sparse else math.prod(self.shape) * itemsize(self.dtype)

    def describe(self) -> str:
        """The specification as error messages show it."""
        parts = [self.dtype, str(self.shape), self.layout, "sparse" if self.sparse else ""]
        return " ".join(part for part in parts if part)


@dataclass(frozen=True, slots=True)
class Slot:
    """The place of gradient `index`: `nbytes` bytes at `offset` of the arena."""

    index: int
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """One allreduce: `nbytes` bytes at `offset` of the arena; those from `flags_offset` on are flags."""

    dtype: str
    offset: int
    nbytes: int
    slots: tuple[Slot, ...]
    flags_offset: int


@dataclass(frozen=True)
class Plan:
    """All buckets in the order in which they leave, and the bytes of the arena."""

    buckets: tuple[Bucket, ...]
    nbytes: int


def itemsize(dtype: str) -> int:
    """Bytes of one element.

    Raises:
        UsageError: Gradients of this dtype cannot be reduced.
    """
    if dtype not in _FLOATS:
        raise UsageError(f"gradients of dtype {dtype} cannot be reduced; use one of {', '.join(_FLOATS)}")
    return _FLOATS[dtype].itemsize


def flag_bits(dtype: str, scale: float, size: int) -> int:
    """Bit pattern of a raised flag: a power of two that stays above zero when multiplied by `scale`/`size`.

    Args:
        dtype: Element type of the bucket.
        scale: Product of pre- and postscale, which the flags go through as the gradients do.
        size: Number of ranks.

    Raises:
        UsageError: The scale is so large or small that numbers of this dtype do not survive it.
    """
    kind = _FLOATS[dtype]
    if not (math.isfinite(scale) and scale != 0.0):
        raise UsageError(f"prescale * postscale is {scale}; it has to be finite and not zero")
    smallest = 1 - kind.bias
    exponent = min(max(-round(math.log2(abs(scale))), smallest), kind.bias)
    result = exponent + math.log2(abs(scale)) - math.log2(size)
    if not smallest - kind.mantissa < result < kind.bias:
        raise UsageError(
            f"prescale * postscale is {scale:g}, which {dtype} gradients on {size} ranks do not survive"
        )
    return (exponent + kind.bias) << kind.mantissa


def capacity(specs: Sequence[ParameterSpec], size: int) -> int:
    """Bytes that suffice for the arena of any plan, whatever the order of the gradients and the limits."""
    flags = _aligned((1 + size) * max(kind.itemsize for kind in _FLOATS.values()))
    return sum(_aligned(spec.nbytes) + flags for spec in specs)


def first_and_more(names: Sequence[str]) -> str:
    """What messages call several arrays that travel together: "weight and 2 more"."""
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def plan_buckets(
    specs: Sequence[ParameterSpec],
    order: Sequence[int],
    *,
    size: int,
    bucket_bytes: int = BUCKET_BYTES,
    first_bucket_bytes: int = FIRST_BUCKET_BYTES,
) -> Plan:
    """Distribute gradients over buckets.

    Gradients are taken in `order`, the order in which they are expected to be ready. Per dtype a bucket is
    filled up to its limit (a gradient larger than the limit gets a bucket for itself), then the next is
    begun. Buckets leave in the order in which their last gradient is expected.

    Args:
        specs: The parameters.
        order: A permutation of the indices of `specs`.
        size: Number of ranks, each of which has a flag in every bucket.
        bucket_bytes: Limit of a bucket, in bytes, flags and padding not counted.
        first_bucket_bytes: Limit of the first bucket of each dtype.
    """
    groups = sorted(_group(specs, order, bucket_bytes, first_bucket_bytes), key=lambda group: group[-1])
    members = [[order[position] for position in group] for group in groups]
    sparse = [index for index in order if specs[index].sparse]
    if sparse or not members:
        # They occupy no bytes; in the last bucket, the arrival of none of them holds up another gradient.
        members = [*members[:-1], [*(members[-1] if members else []), *sparse]]
    buckets: list[Bucket] = []
    offset = 0
    for indices in members:
        buckets.append(_lay_out(specs, indices, offset, size))
        offset = _aligned(buckets[-1].offset + buckets[-1].nbytes)
    return Plan(tuple(buckets), offset)


def _group(
    specs: Sequence[ParameterSpec], order: Sequence[int], limit: int, first_limit: int
) -> Iterator[list[int]]:
    """Positions in `order`, grouped by dtype and size; every group is ascending."""
    filling: dict[str, list[int]] = {}
    filled: dict[str, int] = {}
    limits: dict[str, int] = {}
    for position, index in enumerate(order):
        spec = specs[index]
        if spec.sparse:
            continue
        group = filling.setdefault(spec.dtype, [])
        nbytes = filled.get(spec.dtype, 0) + spec.nbytes
        if group and nbytes > limits.setdefault(spec.dtype, first_limit):
            yield group
            filling[spec.dtype] = group = []
            limits[spec.dtype] = limit
            nbytes = spec.nbytes
        group.append(position)
        filled[spec.dtype] = nbytes
    yield from filling.values()


def _lay_out(specs: Sequence[ParameterSpec], indices: Sequence[int], start: int, size: int) -> Bucket:
    dtype = next((specs[index].dtype for index in indices if not specs[index].sparse), "float32")
    slots = []
    offset = start
    for index in indices:
        slots.append(Slot(index, offset, specs[index].nbytes))
        offset = _aligned(offset + specs[index].nbytes)
    flags = (len(slots) + size) * itemsize(dtype)
    return Bucket(dtype, start, offset + flags - start, tuple(slots), offset)


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT
