"""The parameters that take part, and their gradients in the slots of the shared reducer."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

import torch
from multiring.errors import UsageError
from multiring.gradient_reducer import GradientReducer
from multiring.gradient_source import InPlace, ReducerOptions, RoundResult
from multiring.torch.buffers import as_tensor, gradient_view, specification
from multiring.torch.sparse import RowExchange
from torch.utils.weak import TensorWeakRef

if TYPE_CHECKING:
    from multiring import Communicator

__all__ = ["ParameterSlots"]


class _Place:
    """The slot of a gradient; what has to be looked at for each gradient that arrives."""

    __slots__ = ("dtype", "is_complex", "is_contiguous", "shape", "view")

    def __init__(self, view: torch.Tensor) -> None:
        self.view, self.dtype, self.shape = view, view.dtype, view.shape
        self.is_contiguous, self.is_complex = view.is_contiguous(), view.is_complex()


class ParameterSlots:
    """Moves gradients between parameters and buckets; the reducer's `GradientSource`.

    Autograd computes a gradient in memory of its own, and it is reduced there. A gradient that the program
    keeps for the next backward pass to add to (`zero_grad(set_to_none=False)`) moves into its slot in
    symmetric memory, once: from then on `parameter.grad` is a view of the slot, and nothing is copied to or
    from the peers. So does one whose elements lie in another order than those of the parameter.

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
        self._views: dict[int, torch.Tensor] = {}
        self._places: dict[int, _Place] = {}
        # What was reduced where it lay. Only to compare tensors with: to use one would take a TensorWeakRef.
        self._last: dict[int, weakref.ref[torch.Tensor]] = {}
        self._placed: list[tuple[int, InPlace]] = []  # what this round reduces where it lies
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

    def follow_trainable(self) -> None:
        """Plan anew if parameters were frozen or thawed since. Collective then."""
        if self._requirements() != self._required:
            self._plan()

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
        self.reducer.flush(self)
        self._exchanges = self._send_rows(joined=False)

    def send_values(self) -> None:
        """Second step: send the values of sparse gradients, now that the rows of all ranks are known."""
        for exchange in self._exchanges.values():
            exchange.send_values()

    def finish(self) -> None:
        """Last step: wait for everything."""
        exchanges, self._exchanges = self._exchanges, {}
        try:
            result = self.reducer.finish(self)
        finally:
            placed, self._placed = self._placed, []
        for index, place in placed:
            parameter = self._trainable[index]()
            if parameter is not None and parameter.grad is not place.owner:
                raise self._was_replaced(index)
        self._settle(result, exchanges)
        self._refresh_views()

    def cancel(self) -> None:
        """Forget the round of a backward pass that was aborted by an exception.

        Raises:
            UsageError: The program has kept gradients of it.
        """
        if self.reducer.is_open:
            self._exchanges = {}
            kept = [index for index in self.reducer.sent() if self._is_kept(index)]
            self.reducer.cancel()
            self._placed = []
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

    def join(self) -> int:
        """Answer the rounds of ranks that still have data; returns one that had to the end. Collective."""
        root = self.reducer.join(lambda result: self._settle(result, self._send_rows(joined=True)))
        for parameter in self.named().values():
            parameter.grad = None
        self._refresh_views()
        return root

    def close(self) -> None:
        """Release the buckets; gradients go on in memory of their own. May be called twice."""
        if self._reducer is None:
            return
        views = {id(view) for view in self._views.values()}
        for parameter in self.named().values() if self._comm.size > 1 else ():
            if parameter.grad is not None and id(parameter.grad) in views:
                parameter.grad = parameter.grad.clone()
        self._views.clear()
        self._places.clear()
        self._last.clear()
        self._reducer.close()
        self._reducer = None

    def load_residuals(self, residuals: Mapping[str, NDArray[Any]]) -> None:
        """Put these in the place of what compression has kept back; those of frozen parameters wait."""
        there = {spec.name for spec in self.reducer.specs}
        resting = [
            specification(name, parameter, name in self._sparse)
            for name, parameter in self.named().items()
            if name in residuals and name not in there
        ]
        self.reducer.load_residuals(residuals, resting)

    def store(self, index: int) -> InPlace | bool:
        """Part of `GradientSource`: where the gradient is, if there is one."""
        parameter = self._trainable[index]()
        gradient = None if parameter is None else parameter.grad
        if parameter is None or gradient is None:
            return False
        place = self._places.get(index)
        if place is None or gradient is place.view:  # sparse, or there already
            return True
        view, dtype, shape = place.view, place.dtype, place.shape
        if gradient.dtype != dtype or gradient.shape != shape:
            name = self.reducer.specs[index].name
            raise UsageError(
                f"rank {self._comm.rank}: parameter '{name}' has become {gradient.dtype} "
                f"{tuple(gradient.shape)}, it was {view.dtype} {tuple(view.shape)} when its hook was "
                "registered; remove() the hooks before changing a model and register them again"
            )
        last = self._last.get(index)
        if (last is None or last() is not gradient) and _is_plain(gradient, place):
            self._last[index] = weakref.ref(gradient)
            return InPlace(gradient.data_ptr(), gradient)
        view.copy_(gradient if gradient.layout == torch.strided else gradient.to_dense())
        parameter.grad = view
        return True

    def _locate(self, indices: list[int]) -> list[tuple[int, InPlace]]:
        found = [(index, self.store(index)) for index in indices]
        for index, place in found:
            if place is False:
                raise self._was_replaced(index)
        places = [(index, place) for index, place in found if isinstance(place, InPlace)]
        self._placed += places
        return places

    def _was_replaced(self, index: int) -> UsageError:
        name = self.reducer.specs[index].name
        return UsageError(
            f"rank {self._comm.rank}: the gradient of '{name}' was replaced or taken away while it was to be "
            "averaged, by another hook on the parameter; change gradients after backward(), or register that "
            "hook before multiring's",
            rank=self._comm.rank,
            tensor=name,
        )

    def _is_kept(self, index: int) -> bool:
        """Whether the gradient is still where it was reduced."""
        parameter, last = self._trainable[index](), self._last.get(index)
        gradient = None if parameter is None else parameter.grad
        if gradient is None or gradient.layout != torch.strided:
            return False
        return gradient is self._views.get(index) or (last is not None and gradient is last())

    def publish(self, index: int) -> None:
        """Part of `GradientSource`: another rank had a gradient where this one had none."""
        parameter = self._trainable[index]()
        if parameter is not None and index in self._views:
            parameter.grad = self._views[index]

    def _plan(self) -> None:
        """Make a reducer for the parameters that require a gradient now. Collective."""
        self._required = self._requirements()
        alive = self.named()
        places = [k for k, name in enumerate(self._names) if self._required[k] and name in alive]
        parameters = {self._names[place]: alive[self._names[place]] for place in places}
        specs = [specification(name, p, name in self._sparse) for name, p in parameters.items()]
        unreduced: set[str] = set()
        residuals: dict[str, NDArray[Any]] = {}
        if self._reducer is not None:
            old = self._reducer
            residuals = old.residuals()
            unreduced = {spec.name for index, spec in enumerate(old.specs) if old.is_produced(index)}
            self.close()
        # Weak: a cycle would keep the buckets of a dropped model until the garbage collector comes.
        locate = weakref.WeakMethod(self._locate)
        self._reducer = GradientReducer(
            *(self._comm, specs, self._options),
            as_array=as_tensor,
            locate=lambda indices: () if (method := locate()) is None else method(indices),
        )
        self._index = {place: index for index, place in enumerate(places)}
        self._trainable = [self._parameters[place] for place in places]
        self._forms = [(parameter.shape, parameter.dtype) for parameter in parameters.values()]
        self._generation, self._views = -1, {}
        self._refresh_views()
        self._reducer.carry_on(residuals)
        for index, spec in enumerate(specs):
            if spec.name in unreduced:
                self._reducer.mark_produced(index)

    def _requirements(self) -> list[bool]:
        """Per parameter: it requires a gradient. One that exists no more counts as it did."""
        return [
            before if (parameter := ref()) is None else parameter.requires_grad
            for ref, before in zip(self._parameters, self._required, strict=True)
        ]

    def _refresh_views(self) -> None:
        """Views of the slots, if these have moved; gradients move along."""
        if self._generation == self.reducer.generation:
            return
        self._generation = self.reducer.generation
        parameters, before = self.named(), self._views
        self._views = {
            index: gradient_view(self.reducer.slot(index), parameters[spec.name])
            for index, spec in enumerate(self.reducer.specs)
            if not spec.sparse and spec.name in parameters
        }
        self._places = {index: _Place(view) for index, view in self._views.items()}
        for index, view in self._views.items():
            parameter = parameters[self.reducer.specs[index].name]
            if parameter.grad is not None and parameter.grad is before.get(index):
                parameter.grad = view

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


def _is_plain(gradient: torch.Tensor, place: _Place) -> bool:
    """Whether the elements lie in memory as they do in the slot, and belong to this gradient alone."""
    return (
        gradient.layout is torch.strided
        and ((place.is_contiguous and gradient.is_contiguous()) or gradient.stride() == place.view.stride())
        and not gradient.is_neg()
        and not (place.is_complex and gradient.is_conj())
        and _storage_users(gradient) == _ALONE
    )


# Private; a Torch without it costs the copy into the slot.
_use_count: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)


def _storage_users(tensor: torch.Tensor) -> int:
    """References to the memory, of which there are more where autograd needs it for other gradients still; 0
    if this Torch does not tell."""
    return 0 if _use_count is None else _use_count(tensor.untyped_storage()._cdata)


_ALONE = _storage_users(torch.zeros(1)) or -1
