"""Explicit gradient arrays in symmetric buckets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Unpack

from multiring.derived import resolve
from multiring.errors import UsageError
from multiring.gradients.bucketing import ParameterSpec
from multiring.gradients.options import ReducerKeywords, ReducerOptions
from multiring.gradients.reducer import GradientReducer
from multiring.gradients.refusals import check_gradient
from multiring.gradients.source import IN_SLOT, Gradient, GradientSource
from multiring.gradients.states import GradientState
from multiring.numpy.state_broadcast import broadcast_parameters
from multiring.reductions import explain_arguments
from multiring.state.check import StateCheck, compare_state
from numpy.typing import NDArray

if TYPE_CHECKING:
    from multiring import Communicator

__all__ = ["GradientBuckets"]

Array = NDArray[Any]


class GradientBuckets(GradientSource):
    """The gradients of one model, reduced while others are still computed. Creation is collective."""

    @explain_arguments
    def __init__(
        self,
        parameters: Mapping[str, Array],
        comm: Communicator | None = None,
        **options: Unpack[ReducerKeywords],
    ) -> None:
        """Allocate the buckets.

        Args:
            parameters: Arrays of dtype float16, float32 or float64 by name, in the same order on every rank.
                What the mapping holds is compared over ranks (`check_every`): put new arrays in it, or
                update those that are there.
            comm: Ranks that train together; the world by default.
            options: How to reduce: fields of `multiring.ReducerOptions`, or `average`.

        Raises:
            UsageError: No parameters, or a dtype that cannot be reduced.
            MismatchError: The ranks pass different names, shapes, dtypes or options.
        """
        self._comm = resolve(comm)
        specs = [ParameterSpec(name, a.shape, a.dtype.name) for name, a in parameters.items()]
        self._index = {spec.name: index for index, spec in enumerate(specs)}
        self._reducer = GradientReducer(self._comm, specs, ReducerOptions.of(options), self)
        own = self._reducer.comm
        self._check = None if own is None else StateCheck(own, options.get("check_every"))
        self._parameters = parameters

    def add(self, name: str, gradient: Array) -> None:
        """Add to a gradient of this step; more is to come, by `add` or by `ready`.

        Raises:
            UsageError: Unknown name, an array of another shape, of complex numbers or with a mask, the
                gradient was said to be ready in this round, or what was reduced is still there and would be
                summed or scaled again.
        """
        index = self._find(name)
        check_gradient(self._comm.rank, self._reducer.specs[index], gradient)
        state = self._reducer.states[index]
        if state == GradientState.REDUCED and not self._reducer.options.is_repeatable(self._comm.size):
            todo = "call zero() after each step, or use averages"
            raise self._reducer.options.reduced_twice(self._comm.rank, name, todo)
        if self._reducer.is_ready(index):
            raise UsageError(
                f"rank {self._comm.rank}: '{name}' was said to be ready in this round; call synchronize() "
                "before the next gradient"
            )
        view = self._reducer.views[index]
        if state == GradientState.ABSENT:
            view[...] = gradient
        else:
            view += gradient
        self._reducer.mark_pending(index)

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
        if not self._has(index):
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
        self._reducer.finish()
        self._compare(active=True)
        views = self._reducer.views
        return {name: views[index] for name, index in self._index.items() if self._has(index)}

    def zero(self) -> None:
        """Forget the gradients: the next `add` sets instead of adding.

        Raises:
            UsageError: One was said to be ready since the last `synchronize`, and may have left.
        """
        self._reducer.clear()

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
        broadcast_parameters(parameters, root, self._comm)

    def check_state(self) -> None:
        """Compare the parameters over the ranks, as the checks in between do: after the last step of a job
        nothing else does. Collective.

        Raises:
            MismatchError: The ranks differ; the message shows the first difference.
        """
        compare_state(self._comm, self._parameters.items(), "this call of check_state()")

    def close(self) -> None:
        """Release the buckets. Arrays that `synchronize` returned must not be used afterwards."""
        self._reducer.close()

    def fetch(self, index: int) -> Gradient | None:
        """Part of `GradientSource`: gradients are always in their slots."""
        return IN_SLOT if self._has(index) else None

    def publish(self, index: int) -> None:
        """Part of `GradientSource`: the reducer knows which gradients there are."""

    def _has(self, index: int) -> bool:
        return self._reducer.states[index] != GradientState.ABSENT

    def _compare(self, *, active: bool) -> None:
        if self._check is not None and self._check.due():
            self._check.compare(self._parameters.items(), active=active)

    def _find(self, name: str) -> int:
        if name not in self._index:
            raise UsageError(f"rank {self._comm.rank}: there is no parameter '{name}'")
        return self._index[name]
