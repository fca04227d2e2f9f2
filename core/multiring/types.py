"""What the public functions take and return."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias, TypedDict

__all__ = ["Array", "BufferMode", "CommDtypeName", "OrderName", "QueueKeywords", "ReduceOpName"]

Array: TypeAlias = Any
"""An array: anything with the buffer protocol or DLPack in host memory (NumPy arrays, Torch CPU tensors that
do not require a gradient, `array.array`), of dtype bool, (u)int8 to (u)int64, float16, bfloat16, float32,
float64, complex64 or complex128. Python numbers and lists of them go in as NumPy arrays."""

ReduceOpName: TypeAlias = Literal[
    "sum", "average", "min", "max", "product", "bitwise_and", "bitwise_or", "bitwise_xor"
]
"""A reduction. The bitwise ones are those of integers and bool, without scale factors."""

CommDtypeName: TypeAlias = Literal["float32", "float16", "bfloat16"]
"""As what float32 crosses from host to host."""

OrderName: TypeAlias = Literal["canonical", "any"]
"""In which order an allreduce or a reduce_scatter adds."""

BufferMode: TypeAlias = Literal["broadcast", "average", "local"]
"""What happens, after each reduction of gradients, to the buffers of a model: what it holds beside its
parameters, such as the running statistics of batch normalisation. "broadcast": every rank takes over those of
the first rank that has data; "average": floating-point buffers are averaged over the ranks that have data,
others are broadcast, and so is what shares memory with them; "local": nothing."""


class QueueKeywords(TypedDict, total=False):
    """When an asynchronous operation runs, and how long it waits for other ranks; see `allreduce_async`."""

    priority: int
    timeout: float | None
