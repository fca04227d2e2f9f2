"""The gradients of a model on their way between parameters and the shared reducer."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import torch
from multiring.errors import UsageError
from multiring.gradients.options import ReducerOptions
from multiring.gradients.reducer import GradientReducer
from multiring.gradients.source import Gradient, GradientSource, RoundResult
from multiring.gradients.states import GradientState
from multiring.torch.buffers import as_tensor, checksum, specification
from multiring.torch.placement import GradientPlacement
from multiring.torch.sparse import RowExchange
from multiring.torch.supported import aborted_in_use, check_one_device, frozen_meanwhile
from multiring.torch.unreduced import exchange_replaced
from torch.utils.weak import TensorWeakRef

if TYPE_CHECKING:
    from multiring import Communicator

__all__ = ["Held", "ModelGradients"]


class Held(list[torch.Tensor | None]):
    """References to the parameters, for the time of a round or longer."""

    __slots__ = ("__weakref__",)


class _Plan(NamedTuple):
    """The reducer of the parameters that require a gradient at a time."""

    reducer: GradientReducer
    numbers: list[int]  # of the parameters, by their index in the reducer
    indices: dict[int, int]  # in the reducer, by number


class ModelGradients(GradientSource):
    """Moves gradients between parameters and buckets; the reducer's `GradientSource`.

    Parameters have numbers here. The reducer knows those of them that require a gradient, by their index.
    Reducers are kept for a while, so that a program may freeze and thaw parts of a model in turns.

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
        self._required = [parameter.requires_grad for parameter in parameters.values()]
        self._comm, self._options, self._sparse = comm, options, frozenset(sparse)
        self._exchanges: dict[int, RowExchange] = {}
        self.placement = GradientPlacement(comm.rank, self._names)
        self.plain = self.placement.plain  # those that are reduced in their own memory, which hooks mark
        self._is_repeatable = options.is_repeatable(comm.size)
        self._kept: set[int] = set()  # reduced gradients that autograd is about to add to
        self._held: weakref.ref[Held] | None = None
        self._plans: dict[tuple[bool, ...], _Plan] = {}  # the last one used is the last
        self.produced_since_step = np.zeros(len(self._names), np.bool_)
        self._plan: _Plan | None = None
        self._plan = self._make_plan()

    @property
    def reducer(self) -> GradientReducer:
        """The shared machinery at work.

        Raises:
            UsageError: The buckets have been released.
        """
        return self._current.reducer

    @property
    def _current(self) -> _Plan:
        if self._plan is None:
            raise UsageError(
                f"rank {self._comm.rank}: the gradient hooks have been removed; register them again"
            )
        return self._plan

    def named(self) -> dict[str, torch.Tensor]:
        """The parameters that still exist, by name."""
        found = ((name, ref()) for name, ref in zip(self._names, self._parameters, strict=True))
        return {name: parameter for name, parameter in found if parameter is not None}

    def begin(self) -> Held:
        """Begin a round. Change the reducer if parameters were frozen or thawed since; collective then.

        A frozen parameter with a gradient takes part: optimizers apply it.

        Returns:
            What to keep until the round has ended.
        """
        held = self.hold()
        required = [
            before if parameter is None else parameter.requires_grad or parameter.grad is not None
            for parameter, before in zip(held, self._required, strict=True)
        ]
        if required != self._required and any(required):  # while all are frozen nothing is there to reduce
            self._required = required
            self._change_plan()
        return held

    def hold(self) -> Held:
        """References that need not be looked up again as long as somebody has them."""
        held = None if self._held is None else self._held()
        if held is None:
            held = Held([ref() for ref in self._parameters])
            self._held = weakref.ref(held)
        return held

    def tensor_hook(self, number: int) -> Callable[[torch.Tensor], None]:
        """Called when autograd is about to accumulate a gradient, or to return it from `autograd.grad`."""
        if self._is_repeatable:
            return self.placement.incoming_hook(number)
        return functools.partial(self._note_incoming, number)

    def begin_pass(self) -> object:
        """While the result lives, gradients that arrive may leave, and hooks mark them by themselves."""
        return self.plain.begin_pass() if self._is_repeatable else None

    def _note_incoming(self, number: int, gradient: torch.Tensor) -> None:
        self.placement.note_incoming(number, gradient)
        self._kept.discard(number)
        if self.placement.note_addition(number, self._gradient(number)):
            self._kept.add(number)

    def arrived(self, number: int) -> None:
        """Autograd has accumulated a gradient, and this round reduces it: it may leave.

        Raises:
            UsageError: It was added to a reduced one, which must not be reduced again unless gradients are
                plain averages; or its parameter was frozen since forward.
        """
        plan = self._plan or self._current
        index = plan.indices.get(number)
        if index is None or number in self._kept:
            raise self._cannot_take(number)
        plan.reducer.mark_ready(index)

    def arrived_early(self, number: int) -> None:
        """Autograd has accumulated a gradient that a later round is to contain. Raises as `arrived` does."""
        if number in self._kept or number not in self._current.indices:
            raise self._cannot_take(number)
        self.mark_pending(number)

    def _cannot_take(self, number: int) -> UsageError:
        is_kept = number in self._kept
        return self._cannot_add(number) if is_kept else frozen_meanwhile(self._comm.rank, self._names[number])

    def _cannot_add(self, number: int) -> UsageError:
        """What to raise where a backward pass has added to one of those."""
        todo = (
            "call zero_grad() after each step, put all backward passes of a step but the last into "
            "no_sync(), or use averages"
        )
        return self._options.reduced_twice(self._comm.rank, self._names[number], todo)

    def mark_pending(self, number: int) -> None:
        """A gradient was accumulated that a later round is to contain."""
        self._current.reducer.mark_pending(self._current.indices[number])

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
        plan, parameters = self._current, self.hold()
        try:
            result = plan.reducer.finish()
            self.placement.check(parameters)
            self._settle(result, exchanges)
            produced = np.zeros(len(self._names), np.bool_)
            produced[plan.numbers] = result.produced
            self.placement.settle(parameters, produced)
        finally:
            self.placement.forget_round()
        self.produced_since_step |= produced
        return result

    def cancel(self) -> None:
        """Forget the round of a backward pass that was aborted by an exception.

        Raises:
            UsageError: The program has kept gradients of it.
        """
        plan = self._current
        if plan.reducer.is_open:
            self._exchanges = {}
            states = plan.reducer.states
            there = self.placement.reduced_in_place(self.hold())
            kept = [n for n in there if states[plan.indices[n]] is GradientState.SENT]
            plan.reducer.cancel()
            self.placement.forget_round()
            if kept:
                raise aborted_in_use(self._comm.rank, self._names[kept[0]])

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
        return root

    def close(self) -> None:
        """Release the buckets. May be called twice."""
        self.placement.forget_round()
        self._plan = None
        while self._plans:
            self._plans.popitem()[1].reducer.close()

    def transfer_from(self, other: ModelGradients) -> None:
        """Know which gradients `other`, which this replaces, has reduced."""
        self.placement.transfer_from(other.placement)

    def load_residuals(self, residuals: Mapping[str, NDArray[Any]]) -> None:
        """Replace what compression has kept back by these; those of frozen parameters wait."""
        there = {spec.name for spec in self.reducer.specs}
        idle = [
            specification(name, parameter, name in self._sparse)
            for name, parameter in self.named().items()
            if name in residuals and name not in there
        ]
        self.reducer.load_residuals(residuals, idle)

    def replaced_gradients(self) -> list[int]:
        """Gradients that are other tensors than those that were reduced last."""
        is_replaced = self.placement.is_replaced
        return [
            n
            for n in range(len(self._names))
            if (gradient := self._gradient(n)) is not None and is_replaced(n, gradient)
        ]

    def find_new(self, replaced: list[int], *, is_joining: bool) -> bool:
        """Find which of the gradients that the program has replaced are still to be reduced: those that are
        not the same on all ranks, or that no round since the last step has reduced. Collective.

        Args:
            replaced: Those gradients.
            is_joining: Ranks may have joined, which answer reductions only: nothing is compared.

        Returns:
            Whether there are any, on any rank.
        """
        comm = self.reducer.comm
        gradients = {n: gradient for n in replaced if (gradient := self._gradient(n)) is not None}
        own = {n: checksum(gradient) for n, gradient in gradients.items()}
        everyone = [own] if comm is None or is_joining else exchange_replaced(comm, own, self._names)
        is_any_new = False
        for number in sorted(set().union(*everyone)):
            is_new = (
                not self.produced_since_step[number] or len({other.get(number) for other in everyone}) > 1
            )
            is_any_new |= is_new
            gradient = gradients.get(number)
            if is_new and self.produced_since_step[number] and not self._is_repeatable:
                raise self._cannot_add(number)
            if gradient is None:
                continue
            if not is_new:
                self.placement.note(number, gradient)  # the same on all ranks, made of what was reduced
            elif number in self._current.indices:
                self.mark_pending(number)
        return is_any_new

    def fetch_plain(self, indices: list[int]) -> tuple[list[int], list[object]]:
        """Part of `GradientSource`."""
        numbers = self._current.numbers
        return self.placement.fetch_plain(self.hold(), [numbers[index] for index in indices])

    def fetch(self, index: int) -> Gradient | None:
        """Part of `GradientSource`.

        A gradient of which no hook has told is new all the same if it is not what was reduced last.
        """
        plan = self._current
        number, state = plan.numbers[index], plan.reducer.states[index]
        gradient = self._gradient(number)
        if gradient is None:
            if state is GradientState.READY:
                raise self.placement.was_replaced(number)
            return None
        if state in _NOT_ANNOUNCED and self.placement.is_new(number, gradient):
            plan.reducer.mark_pending(index)
        return self.placement.fetch(number, gradient)

    def publish(self, index: int) -> None:
        """Part of `GradientSource`: another rank had a gradient where this one had none."""
        plan = self._current
        parameter = self.hold()[number := plan.numbers[index]]
        if parameter is not None:
            self.placement.publish(number, parameter, plan.reducer.slot(index))

    def _gradient(self, number: int) -> torch.Tensor | None:
        parameter = self.hold()[number]
        return None if parameter is None else parameter.grad

    def _make_plan(self) -> _Plan:
        """A reducer for the parameters that require a gradient now. Collective."""
        held = self.hold()
        numbers = [n for n, parameter in enumerate(held) if self._required[n] and parameter is not None]
        specs, devices = [], []
        for n in numbers:
            parameter, name = held[n], self._names[n]
            assert parameter is not None
            spec = specification(name, parameter, name in self._sparse)
            specs.append(spec)
            devices.append((name, parameter.device))
            self.placement.expect(n, parameter, is_sparse=spec.sparse)
        check_one_device(devices, self._comm.rank)
        reducer = GradientReducer(self._comm, specs, self._options, self, as_array=as_tensor)
        plan = _Plan(reducer, numbers, {number: index for index, number in enumerate(numbers)})
        self._plans[tuple(self._required)] = plan
        return self._follow(plan)

    def _follow(self, plan: _Plan) -> _Plan:
        """Gradients that arrive are those of this plan."""
        self.plain.follow(plan.reducer.arrivals, [plan.indices.get(n, -1) for n in range(len(self._names))])
        return plan

    def _change_plan(self) -> None:
        """Go over to a reducer for the parameters that require a gradient now. Collective."""
        before = self._current
        residuals = before.reducer.residuals()
        pending = [n for n in before.numbers if before.reducer.is_pending(before.indices[n])]
        before.reducer.cancel()
        plan = self._plans.pop(key := tuple(self._required), None)
        if plan is not None:
            self._plans[key] = plan
            self._follow(plan).reducer.check_same(self._comm)
        elif len(self._plans) == _MAX_PLANS:
            self._plans.pop(next(iter(self._plans))).reducer.close()
        self._plan = plan = plan or self._make_plan()
        plan.reducer.transfer_residuals(residuals)
        for number in pending:
            if number in plan.indices:
                self.mark_pending(number)

    def _send_rows(self, *, joined: bool) -> dict[int, RowExchange]:
        plan, exchanges = self._current, {}
        for index, spec in enumerate(plan.reducer.specs):
            if spec.sparse:
                number = plan.numbers[index]
                gradient = None if joined else self._gradient(number)
                form = self.placement.form(number)
                exchanges[index] = RowExchange(plan.reducer.comm, gradient, *form, spec.name, self._options)
        return exchanges

    def _settle(self, result: RoundResult, exchanges: dict[int, RowExchange]) -> None:
        """Wait for the sparse gradients and keep those that any rank has produced."""
        for exchange in exchanges.values():
            exchange.send_values()
        for index, exchange in exchanges.items():
            gradient, number = exchange.wait(int(result.active.sum())), self._current.numbers[index]
            parameter = self._parameters[number]()
            if result.produced[index] and parameter is not None:
                gradient = gradient.to_dense() if exchange.is_dense else gradient
                parameter.grad = gradient
                self.placement.note(number, gradient)


# Sets of parameters that a program trains in turns, as generator and discriminator or layer by layer.
_MAX_PLANS = 4
_NOT_ANNOUNCED = (GradientState.ABSENT, GradientState.REDUCED)
