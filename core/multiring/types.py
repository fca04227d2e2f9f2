"""What the public functions take and return."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

__all__ = ["Array", "BufferMode", "CommDtypeName", "OrderName", "ReduceOpName"]

Array: TypeAlias = Any
"""An array: anything with the buffer protocol or DLPack in host memory (NumPy arrays, Torch CPU tensors that
do not require a gradient, `array.array`), of dtype bool, (u)int8 to (u)int64, float16, bfloat16, float32 or
float64. Python numbers and lists of them go in as NumPy arrays."""

ReduceOpName: TypeAlias = Literal["sum", "average", "min", "max", "product"]

CommDtypeName: TypeAlias = Literal["float32", "float16", "bfloat16"]
"""As what float32 crosses from host to host."""

OrderName: TypeAlias = Literal["canonical", "any"]
"""In which order an allreduce or a reduce_scatter adds."""

BufferMode: TypeAlias = Literal["broadcast", "average", "local"]
"""What happens, after each reduction of gradients, to the buffers of a model: what it holds beside its
parameters, such as the running statistics of batch normalisation. "broadcast": every rank takes over those of
the first rank that has data; "average": floating-point buffers are averaged over the ranks that have data,
others are broadcast; "local": nothing."""
