"""The parameters that take part, and their gradients in the slots of the shared reducer."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

import torch
from multiring.errors import UsageError
from multiring.gradients.options import ReducerOptions
from multiring.gradients.reducer import GradientReducer
from multiring.gradients.source import InPlace, RoundResult
from multiring.torch.buffers import as_tensor, checksum, specification
from multiring.torch.placement import GradientPlaces
from multiring.torch.sparse import RowExchange
from torch.utils.weak import TensorWeakRef

if TYPE_CHECKING:
    from multiring import Communicator

__all__ = ["Held", "ParameterSlots"]


class Held(list[torch.Tensor | None]):
    """References to the parameters that take part, for the time of a round or longer.

    Attributes:
        watched: References to all parameters.
    """

    __slots__ = ("__weakref__", "watched")

    watched: list[torch.Tensor | None]


class ParameterSlots:
    """Moves gradients between parameters and buckets; the reducer's `GradientSource`.

    Autograd computes a gradient in memory of its own, and it is reduced there. A gradient that the program
    keeps for the next backward pass to add to (`zero_grad(set_to_none=False)`) moves into its slot in
    symmetric memory, once: from then on `parameter.grad` is a view of the slot, and nothing is copied to or
    from the peers. What the program has put into `parameter.grad` stays there: where its memory is shared, or
    its elements lie in another order than those of the parameter, the average is copied back into it.

    Parameters are referred to weakly: their hooks lead here, through memory that the garbage collector
    cannot see, so a strong reference would keep a dropped model for ever.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.Tensor],
        comm: Communicator,
        options: ReducerOptions,
        sparse: Collection[str],
    ) -> None:
        """Compare the model over ranks and allocate buckets for what requires a gradient. Collective."""
        self._names = list(parameters)
        self._parameters = [TensorWeakRef(parameter) for parameter in parameters.values()]
        self._required = [True] * len(self._names)
        self._exchanges: dict[int, RowExchange] = {}
        self._places = GradientPlaces(comm.rank)
        self._held: weakref.ref[Held] | None = None
        self._comm, self._options, self._sparse = comm, options, frozenset(sparse)
        self._reducer: GradientReducer | None = None
        self._plan()

    @property
    def reducer(self) -> GradientReducer:
        """The shared machinery at work.

        Raises:
            UsageError: The slots have been released.
        """
        if self._reducer is None:
            raise UsageError(
                f"rank {self._comm.rank}: the gradient hooks have been removed; register them again"
            )
        return self._reducer

    def named(self) -> dict[str, torch.Tensor]:
        """The parameters that still exist, by name."""
        found = ((name, ref()) for name, ref in zip(self._names, self._parameters, strict=True))
        return {name: parameter for name, parameter in found if parameter is not None}

    def begin(self) -> Held:
        """Begin a round. Plan anew if parameters were frozen or thawed since; collective then.

        Returns:
            What to keep until the round has ended.
        """
        held = self.hold()
        required = self._requirements(held.watched)
        if required != self._required and any(required):  # while all are frozen nothing is there to reduce
            self._plan()
            held = self.hold()
        return held

    def hold(self) -> Held:
        """References that need not be looked up again as long as somebody has them."""
        held = None if self._held is None else self._held()
        if held is None:
            watched = [ref() for ref in self._parameters]
            held = Held([watched[position] for position in self._index])
            held.watched = watched
            self._held = weakref.ref(held)
        return held

    def find_kept(self, arrived: int) -> frozenset[int]:
        """Positions of reduced gradients that the program has not zeroed, when a backward pass begins. What
        it adds to them must not be reduced together with them again, unless gradients are plain averages.

        Args:
            arrived: The position whose gradient has come already.
        """
        if self._options.is_repeatable(self._comm.size):
            return frozenset()
        parameters, places = self.hold(), self._places
        return frozenset(
            position
            for position, index in self._index.items()
            if (parameter := parameters[index]) is not None
            and parameter.grad is not None
            and places.is_kept(index, parameter.grad, was_added_to=position == arrived)
        )

    def cannot_add(self, position: int) -> UsageError:
        """What to raise where a backward pass has added to one of those."""
        todo = (
            "call zero_grad() after each step, put all backward passes of a step but the last into "
            "no_sync(), or use averages"
        )
        return self._options.reduced_twice(self._comm.rank, self._names[position], todo)

    def mark_produced(self, position: int) -> None:
        """A gradient was accumulated that a later round is to contain."""
        self.reducer.mark_produced(self._index[position])

    def mark_ready(self, position: int) -> None:
        """A gradient of this round is in `parameter.grad`: it may leave."""
        self.reducer.mark_ready(self._index[position])

    def flush(self) -> None:
        """First step of the end of a round: send what has not left, and the rows of sparse gradients.

        With several models, all take a step before any takes the next; their order does not matter.
        """
        self.reducer.flush()
        self._exchanges = self._send_rows(joined=False)

    def send_values(self) -> None:
        """Second step: send the values of sparse gradients, now that the rows of all ranks are known."""
        for exchange in self._exchanges.values():
            exchange.send_values()

    def finish(self) -> RoundResult:
        """Third step: wait for the gradients."""
        exchanges, self._exchanges = self._exchanges, {}
        parameters = self.hold()
        try:
            result = self.reducer.finish()
            self._places.check(parameters)
            self._refresh_views()
            self._settle(result, exchanges)
            self._places.settle(result.produced)
        finally:
            self._places.forget_round()
        self.produced_since_step |= result.produced
        return result

    def cancel(self) -> None:
        """Forget the round of a backward pass that was aborted by an exception.

        Raises:
            UsageError: The program has kept gradients of it.
        """
        if self.reducer.is_open:
            self._exchanges = {}
            sent = set(self.reducer.sent())
            kept = [index for index in self._places.sent(self.hold()) if index in sent]
            self.reducer.cancel()
            self._places.forget_round()
            self._refresh_views()
            if kept:
                name = self.reducer.specs[kept[0]].name
                raise UsageError(
                    f"rank {self._comm.rank}: a backward pass ended with an exception while the gradient of "
                    f"'{name}' was on its way, which may have overwritten what the program has done to it "
                    "since; call zero_grad(set_to_none=True) after such an exception",
                    rank=self._comm.rank,
                    tensor=name,
                )

    def join(self, after_round: Callable[[RoundResult], None]) -> int:
        """Answer the rounds of ranks that still have data; returns one that had to the end. Collective.

        Args:
            after_round: Called at the end of each round.
        """

        def settle(result: RoundResult) -> None:
            self._settle(result, self._send_rows(joined=True))
            after_round(result)

        root = self.reducer.join(settle)
        for parameter in self.named().values():
            parameter.grad = None
        self._refresh_views()
        return root

    def close(self) -> None:
        """Release the buckets; gradients go on in memory of their own. May be called twice."""
        if self._reducer is None:
            return
        self._places.forget_round()
        if self._comm.size > 1:
            self._places.move_out(self.hold())
        self._reducer.close()
        self._reducer = None

    def carry_on(self, other: ParameterSlots) -> None:
        """Know which gradients `other`, in whose place this comes, has reduced."""
        names = {spec.name: index for index, spec in enumerate(self.reducer.specs)}
        self._places.carry_on(other._places, names)

    def load_residuals(self, residuals: Mapping[str, NDArray[Any]]) -> None:
        """Put these in the place of what compression has kept back; those of frozen parameters wait."""
        there = {spec.name for spec in self.reducer.specs}
        resting = [
            specification(name, parameter, name in self._sparse)
            for name, parameter in self.named().items()
            if name in residuals and name not in there
        ]
        self.reducer.load_residuals(residuals, resting)

    def replaced_gradients(self) -> list[int]:
        """Gradients that are other tensors than those that were reduced last."""
        return self._places.find_replaced(self.hold())

    def find_new(self, replaced: list[int]) -> bool:
        """Find which of the gradients that the program has replaced are still to be reduced: those that are
        not the same on all ranks, or that no round since the last step has reduced. Collective.

        Returns:
            Whether there are any, on any rank.
        """
        parameters, comm = self.hold(), self.reducer.comm
        gradients = {index: p.grad for index in replaced if (p := parameters[index]) is not None}
        own = {index: checksum(gradient) for index, gradient in gradients.items() if gradient is not None}
        everyone = [own] if comm is None else comm.allgather_object(own)
        is_any_new = False
        for index in sorted(set().union(*everyone)):
            is_new = not self.produced_since_step[index] or len({other.get(index) for other in everyone}) > 1
            is_any_new |= is_new
            gradient = gradients.get(index)
            if gradient is not None and is_new:
                self.reducer.mark_produced(index)
            elif gradient is not None:
                self._places.note(index, gradient)  # the same on all ranks, made of what was reduced
        return is_any_new

    def locate(self, index: int, is_ready: bool) -> InPlace | None:
        """Part of `GradientSource`: where the gradient is, if there is one.

        One of which no hook has told is new all the same if it is not what was reduced last.
        """
        parameter = self.hold()[index]
        if parameter is None or parameter.grad is None:
            if is_ready:
                raise self._places.was_replaced(index)
            return None
        reducer = self.reducer
        if not (is_ready or reducer.is_produced(index)) and self._places.is_new(index, parameter.grad):
            reducer.mark_produced(index)
        return self._places.put(index, parameter, from_autograd=is_ready)

    def publish(self, index: int) -> None:
        """Part of `GradientSource`: another rank had a gradient where this one had none."""
        parameter = self.hold()[index]
        if parameter is not None:
            self._places.publish(index, parameter)

    def _plan(self) -> None:
        """Make a reducer for the parameters that require a gradient now. Collective."""
        alive = [ref() for ref in self._parameters]
        self._required = self._requirements(alive)
        positions = [k for k, p in enumerate(alive) if self._required[k] and p is not None]
        parameters = {self._names[k]: p for k in positions if (p := alive[k]) is not None}
        specs = [specification(name, p, name in self._sparse) for name, p in parameters.items()]
        unreduced: set[str] = set()
        residuals: dict[str, NDArray[Any]] = {}
        if self._reducer is not None:
            old = self._reducer
            residuals = old.residuals()
            unreduced = {spec.name for index, spec in enumerate(old.specs) if old.is_produced(index)}
            self.close()
        self._reducer = GradientReducer(self._comm, specs, self._options, self, as_array=as_tensor)
        self._index = {position: index for index, position in enumerate(positions)}
        self._trainable = [self._parameters[position] for position in positions]
        self._held = None
        self._forms = [(parameter.shape, parameter.dtype) for parameter in parameters.values()]
        before, self._places = self._places, GradientPlaces(self._comm.rank)
        self._generation = -1
        self._refresh_views()
        self._places.carry_on(before, {spec.name: index for index, spec in enumerate(specs)})
        self.produced_since_step = np.zeros(len(specs), dtype=np.bool_)
        self._reducer.carry_on(residuals)
        for index, spec in enumerate(specs):
            if spec.name in unreduced:
                self._reducer.mark_produced(index)

    def _requirements(self, parameters: Sequence[torch.Tensor | None]) -> list[bool]:
        """Per parameter: it requires a gradient. One that exists no more counts as it did."""
        return [
            before if parameter is None else parameter.requires_grad
            for parameter, before in zip(parameters, self._required, strict=True)
        ]

    def _refresh_views(self) -> None:
        """Views of the slots, if these have moved; gradients move along."""
        if self._generation == self.reducer.generation:
            return
        self._generation = self.reducer.generation
        parameters, specs = self.hold(), self.reducer.specs
        slots = {k: self.reducer.slot(k) for k, spec in enumerate(specs) if not spec.sparse}
        self._places.lay_out(parameters, specs, slots)

    def _send_rows(self, *, joined: bool) -> dict[int, RowExchange]:
        exchanges = {}
        for index, spec in enumerate(self.reducer.specs):
            if spec.sparse:
                parameter = self._trainable[index]()
                gradient = None if parameter is None or joined else parameter.grad
                form = self._forms[index]
                exchanges[index] = RowExchange(self.reducer.comm, gradient, *form, spec.name, self._options)
        return exchanges

    def _settle(self, result: RoundResult, exchanges: dict[int, RowExchange]) -> None:
        """Wait for the sparse gradients and keep those that any rank has produced."""
        for exchange in exchanges.values():
            exchange.send_values()
        for index, exchange in exchanges.items():
            gradient = exchange.wait(int(result.active.sum()))
            parameter = self._trainable[index]()
            if result.produced[index] and parameter is not None:
                parameter.grad = gradient
                self._places.note(index, gradient)
