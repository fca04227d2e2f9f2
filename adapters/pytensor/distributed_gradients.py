"""The gradients of a model, reduced inside compiled functions."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple, Unpack

import numpy as np

import pytensor.tensor as pt
from multiring.derived import resolve
from multiring.errors import UsageError
from multiring.gradients.bucketing import ParameterSpec
from multiring.gradients.options import ReducerKeywords, ReducerOptions
from multiring.pytensor.gradient_ops import Begin, Finish, Ready, Round
from multiring.pytensor.state_broadcast import broadcast_parameters, names_of
from multiring.reductions import explain_arguments
from pytensor.compile.sharedvalue import SharedVariable
from pytensor.gradient import DisconnectedType
from pytensor.graph.basic import Variable

if TYPE_CHECKING:
    from multiring import Communicator

__all__ = ["DistributedGradients", "Reduced"]

_memories = itertools.count()


class Reduced(NamedTuple):
    """What `DistributedGradients.reduce` gives.

    Attributes:
        gradients: The reduced gradients, in the order of the parameters; zeros where no rank had one.
        produced: Which of them any rank has had, bool (parameters,).
    """

    gradients: list[Variable]
    produced: Variable


class DistributedGradients:
    """The gradients of one model, reduced over the ranks inside functions. Creation is collective."""

    @explain_arguments
    def __init__(
        self,
        params: Sequence[SharedVariable] | Mapping[str, SharedVariable],
        comm: Communicator | None = None,
        **options: Unpack[ReducerKeywords],
    ) -> None:
        """Compare the model over ranks and allocate the buckets.

        Args:
            params: Shared variables of dtype float16, float32 or float64 in the order in which the model uses
                them, the same on every rank; or these by name. Only names, shapes and dtypes are looked at.
            comm: Ranks that train together; the world by default.
            options: How to reduce: fields of `multiring.ReducerOptions`, or `average`. `check_every` compares
                the parameters; with `distribute_updates`, all that is computed from gradients.

        Raises:
            UsageError: No parameters, not shared variables, or a dtype that cannot be reduced.
            MismatchError: The ranks pass different names, shapes, dtypes or options.
        """
        self._comm = resolve(comm)
        self._params = list(params.values() if isinstance(params, Mapping) else params)
        found = names_of(self._params, self._comm.rank)
        self._names = list(params) if isinstance(params, Mapping) else found
        specs = [
            ParameterSpec(name, param.get_value(borrow=True).shape, param.type.dtype)
            for name, param in zip(self._names, self._params, strict=True)
        ]
        self._round = Round(self._comm, specs, ReducerOptions.of(options))
        self._round.state.update(zip(self._names, self._params, strict=True))
        self._memory = pt.constant(np.array(next(_memories), dtype=np.int64))

    def reduce(self, gradients: Sequence[Variable | None]) -> Reduced:
        """The reduced gradients, as part of a graph.

        Running a function that contains the result is collective. The ranks may run different functions:
        where one has a gradient and another has None, None counts as zeros.

        Args:
            gradients: For each parameter its gradient on this rank, of the parameter's shape, or None.

        Raises:
            UsageError: Not one for each parameter, or another dtype or number of axes.
        """
        if len(gradients) != len(self._params):
            raise UsageError(
                f"rank {self._comm.rank}: {len(gradients)} gradients for {len(self._params)} parameters; "
                "pass None for a parameter without one"
            )
        label = f"{self._names[0]} and {len(self._names) - 1} more"
        begun = Begin(label, self._round)()
        ready: dict[int, Variable] = {}
        for index, (name, gradient) in enumerate(zip(self._names, gradients, strict=True)):
            if gradient is not None and not isinstance(gradient.type, DisconnectedType):
                self._check(index, gradient)
                self._refuse_reduced(name, gradient)
                ready[index] = Ready(name, self._round, index)(gradient, begun, self._memory)
        # In the order of the parameters: PyTensor computes the inputs of a node from the last to the first,
        # so gradients leave as the backward pass makes them.
        finish = Finish(label, self._round, list(ready))
        outputs = finish(*ready.values(), self._memory, begun, return_list=True)
        return Reduced(outputs[: len(self._params)], outputs[-2])

    @contextmanager
    def join(self, state: Sequence[SharedVariable] | None = None) -> Iterator[None]:
        """Context of a loop that may have fewer iterations on some ranks than on others.

        A rank that leaves it answers the reductions of the others with zeros until all have left; averages
        divide by the number of ranks that still have data. At the end all ranks take over the values of one
        that had data to the last. Every rank has to use it, and the reduction of these gradients has to be
        the only collective inside.

        Args:
            state: Shared variables to take over; the parameters by default. Name the optimizer's and the
                running statistics too where there are some.
        """
        yield
        root = self._round.reducer.join(lambda result: self._round.compare(active=False))
        broadcast_parameters(self._params if state is None else state, root, self._comm)

    def close(self) -> None:
        """Release the buckets; functions that use them raise UsageError from now on. May be called twice."""
        self._round.close()

    def watch(self, state: Sequence[SharedVariable]) -> None:
        """Compare these shared variables too: what the optimizer computes from the gradients, such as
        velocities. The same on every rank."""
        known = {id(shared) for shared in self._round.state.values()}
        for index, shared in enumerate(state):
            if id(shared) not in known:
                self._round.state[f"state[{index}] {shared.name or ''}".rstrip()] = shared

    def _refuse_reduced(self, name: str, gradient: Variable) -> None:
        """Refuse what comes right out of a reduction; what is computed from it cannot be told from others."""
        op = None if gradient.owner is None else gradient.owner.op
        if isinstance(op, Finish) and op.current.comm is self._comm and self._comm.size > 1:
            raise UsageError(
                f"rank {self._comm.rank}: the gradient of '{name}' has been reduced over these ranks "
                "already, and would be once more; pass what pytensor.grad gives, or use the reduced "
                "gradients as they are",
                rank=self._comm.rank,
                tensor=name,
            )

    def _check(self, index: int, gradient: Variable) -> None:
        spec, kind = self._round.specs[index], gradient.type
        if getattr(kind, "dtype", None) != spec.dtype or kind.ndim != len(spec.shape):
            raise UsageError(
                f"rank {self._comm.rank}: the gradient of '{spec.name}' is {kind}, but the parameter is "
                f"{spec.dtype} of shape {spec.shape}",
                rank=self._comm.rank,
                tensor=spec.name,
            )
