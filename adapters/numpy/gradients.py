"""Explicit gradient arrays in symmetric buckets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

from multiring.derived import resolve
from multiring.errors import UsageError
from multiring.gradients.bucketing import BUCKET_BYTES, FIRST_BUCKET_BYTES, ParameterSpec
from multiring.gradients.compression import TopK
from multiring.gradients.reducer import GradientReducer
from multiring.gradients.source import ReducerOptions
from multiring.numpy.state import broadcast_parameters
from multiring.reductions import explain_arguments
from multiring.state.check import StateCheck
from multiring.types import CommDtypeName
from numpy.typing import NDArray

if TYPE_CHECKING:
    from multiring import Communicator

__all__ = ["GradientBuckets"]

Array = NDArray[Any]


class GradientBuckets:
    """The gradients of one model, reduced while others are still computed. Creation is collective."""

    @explain_arguments
    def __init__(
        self,
        parameters: Mapping[str, Array],
        comm: Communicator | None = None,
        *,
        average: bool = True,
        bucket_bytes: int = BUCKET_BYTES,
        first_bucket_bytes: int = FIRST_BUCKET_BYTES,
        prescale: float = 1.0,
        postscale: float = 1.0,
        comm_dtype: CommDtypeName | None = None,
        compression: TopK | None = None,
        check_every: int | None = None,
    ) -> None:
        """Allocate the buckets.

        Args:
            parameters: Arrays of dtype float16, float32 or float64 by name, in the same order on every rank.
                What the mapping holds is compared over ranks, see `check_every`: put new arrays in it, or
                update those that are there.
            comm: Ranks that train together; the world by default.
            average: Divide by the number of ranks that have data; otherwise gradients are added.
            bucket_bytes: Limit of a bucket, in bytes.
            first_bucket_bytes: Limit of the first bucket of each dtype, in bytes.
            prescale: Factor applied before the reduction.
            postscale: Factor applied after it.
            comm_dtype: The dtype in which gradients of float32 cross from host to host: "bfloat16" and
                "float16" round them, "float32" does not (docs/compression.md). MULTIRING_COMM_DTYPE if None.
            compression: `multiring.TopK(ratio)` sends only the largest entries of each bucket and keeps the
                others for the next step (docs/tuning.md). Of gradients of float32 and float64.
            check_every: Compare checksums of the parameters over ranks in the second step and every so many
                steps, so that ranks that drift apart are an error; 0: never; None: as MULTIRING_CHECK_EVERY
                says (100).

        Raises:
            UsageError: No parameters, or a dtype that cannot be reduced.
            MismatchError: The ranks pass different names, shapes, dtypes or options.
        """
        self._comm = resolve(comm)
        specs = [ParameterSpec(name, a.shape, a.dtype.name) for name, a in parameters.items()]
        op: Literal["average", "sum"] = "average" if average else "sum"
        options = ReducerOptions(
            *(op, bucket_bytes, first_bucket_bytes, prescale, postscale),
            comm_dtype=comm_dtype,
            compression=compression,
            check_every=check_every,
        )
        self._index = {spec.name: index for index, spec in enumerate(specs)}
        self._reducer = GradientReducer(self._comm, specs, options)
        own = self._reducer.comm
        self._check = None if own is None else StateCheck(own, check_every)
        self._parameters = parameters
        self._present = [False] * len(specs)
        self._views = self._make_views()

    def add(self, name: str, gradient: Array) -> None:
        """Add to a gradient of this step; more is to come, by `add` or by `ready`.

        Raises:
            UsageError: Unknown name, or the gradient was said to be ready in this round.
        """
        index = self._find(name)
        if self._reducer.is_ready(index):
            raise UsageError(
                f"rank {self._comm.rank}: '{name}' was said to be ready in this round; call synchronize() "
                "before the next gradient"
            )
        if self._present[index]:
            self._views[index] += gradient
        else:
            self._views[index][...] = gradient
        self._present[index] = True
        self._reducer.mark_produced(index)

    def ready(self, name: str, gradient: Array | None = None) -> None:
        """A gradient is complete and may leave.

        Args:
            name: Name of the parameter.
            gradient: Array of the parameter's shape to add; None if `add` has had everything.

        Raises:
            UsageError: Unknown name, no gradient, or said to be ready already in this round.
        """
        if gradient is not None:
            self.add(name, gradient)
        index = self._find(name)
        if not self._present[index]:
            raise UsageError(f"rank {self._comm.rank}: '{name}' is said to be ready but has no gradient yet")
        self._reducer.mark_ready(index)

    def synchronize(self) -> dict[str, Array]:
        """End the round: send what has not left, wait. Collective.

        Returns:
            The gradients that exist: reduced where any rank had a new one, as they were otherwise. The
            arrays are views of the buckets and change with the next round.

        Raises:
            MismatchError: The ranks' parameters differ.
        """
        generation = self._reducer.generation
        self._reducer.finish(self)
        if self._reducer.generation != generation:
            self._views = self._make_views()
        self._compare(active=True)
        return {name: self._views[index] for name, index in self._index.items() if self._present[index]}

    def zero(self) -> None:
        """Forget the gradients: the next `add` sets instead of adding."""
        self._present = [False] * len(self._present)

    @contextmanager
    def join(self, parameters: Mapping[str, Array]) -> Iterator[None]:
        """Context of a loop that may have fewer iterations on some ranks than on others.

        A rank that leaves it answers the rounds of the others with zeros until all have left; averages
        divide by the number of ranks that still have data. At the end all ranks take over the parameters of
        one that had data to the last. Every rank has to use it, and `synchronize` is the only collective
        inside.

        Args:
            parameters: Arrays to overwrite in the end, by name.
        """
        yield
        root = self._reducer.join(lambda result: self._compare(active=False))
        self.zero()
        self._views = self._make_views()
        broadcast_parameters(parameters, root, self._comm)

    def close(self) -> None:
        """Release the buckets. Arrays that `synchronize` returned must not be used afterwards."""
        self._views = []
        self._reducer.close()

    def store(self, index: int) -> bool:
        """Part of `GradientSource`: gradients are always in their slots."""
        return self._present[index]

    def publish(self, index: int) -> None:
        """Part of `GradientSource`: another rank had a gradient that this rank had not."""
        self._present[index] = True

    def _compare(self, *, active: bool) -> None:
        if self._check is not None and self._check.due():
            self._check.compare(self._parameters.items(), active=active)

    def _find(self, name: str) -> int:
        if name not in self._index:
            raise UsageError(f"rank {self._comm.rank}: there is no parameter '{name}'")
        return self._index[name]

    def _make_views(self) -> list[Array]:
        return [
            self._reducer.slot(index).view(spec.dtype).reshape(spec.shape)
            for index, spec in enumerate(self._reducer.specs)
        ]
