"""The gradients of a link's parameters in the slots of the shared reducer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

import chainer
from multiring.arrays import STREAMING_BYTES, address_of, copy_large, without_mask
from multiring.chainer.arrays import Array, on_device, to_device
from multiring.chainer.gradient_arrays import (
    buffer_at,
    checksum_of,
    extent,
    merged,
    own_arrays,
    reference_to,
)
from multiring.chainer.parameters import specifications
from multiring.errors import UsageError
from multiring.gradients.options import ReducerOptions
from multiring.gradients.reducer import GradientReducer
from multiring.gradients.source import IN_SLOT, Gradient, GradientSource, RoundResult

if TYPE_CHECKING:
    from multiring import Communicator

__all__ = ["GradientSlots"]


class GradientSlots(GradientSource):
    """Moves gradients between parameters and buckets; the reducer's `GradientSource`.

    When the backward pass is over, gradients are reduced in the arrays that the program has, on the host or
    on a device. Those that left during it, that are read-only, that were broadcast, or whose memory a slot or
    another parameter's gradient has too are copied: on the host into their slots, of which `parameter.grad`
    is a view afterwards; on a device to new arrays, which take its place. What `parameter.grad` is then tells
    what has been reduced: any other array is new.

    Gradients may travel in another dtype than they have. They are cast to it where they lie, and back.

    Attributes:
        parameters: Those that take part.
        reducer: The shared machinery at work.
        loss_scale: What the gradients of this rank are scaled with; None: not at all.
        is_repeatable: Reducing a gradient again that is the same on all ranks changes nothing.
    """

    def __init__(
        self,
        parameters: Mapping[str, chainer.Parameter],
        comm: Communicator,
        options: ReducerOptions,
        dtype: np.dtype[Any] | None = None,
    ) -> None:
        """Compare the parameters over ranks and allocate buckets. Collective.

        Args:
            parameters: By name. Those without an array yet are compared too, but take no part.
            comm: Ranks that train together.
            options: How to reduce.
            dtype: That of the gradients on their way; None: the one that they have.

        Raises:
            UsageError: A dtype that cannot be reduced, or ChainerX arrays.
            MismatchError: The ranks have different parameters or options.
        """
        ready = {name: p for name, p in parameters.items() if p.is_initialized}
        self.parameters = list(ready.values())
        self._comm = comm
        specs = specifications(comm.rank, ready, dtype)
        self._dtypes = [parameter.array.dtype for parameter in self.parameters]
        self.reducer = GradientReducer(comm, specs, options, self)
        self.is_repeatable = options.is_repeatable(comm.size)
        self._views: list[Array] = []
        self._slots: list[tuple[int, int]] = []  # the addresses of all views
        # Weak: what the program lets go of is not to be kept until the next round.
        self._shown: list[Callable[[], Any]] = [_nothing] * len(specs)
        self._pending: dict[int, Any] = {}  # of the round under way, not in their slots yet
        self._own: set[int] = set()  # which of these may be reduced where they are
        self._in_place: dict[int, Any] = {}  # which show the average afterwards
        # On a device, in place of slots: arrays, and their memory with the stream that has made the copy.
        self._copies: dict[int, tuple[Any, Gradient]] = {}
        self._done: dict[int, int] = {}  # checksums of what an update was made with
        self.loss_scale: float | None = None
        self._refresh_views()

    @property
    def new(self) -> list[str]:
        """Names of the parameters whose gradients on this rank were not reduced yet."""
        return [spec.name for index, spec in enumerate(self.reducer.specs) if self._is_new(index)]

    def is_settled(self, *, joining: bool) -> bool:
        """Whether gradients are still what they were reduced to, or what clipping has made of that: all ranks
        have the same, bit for bit. Collective.

        Args:
            joining: Ranks may have joined, which answer reductions only: nothing is sent.

        Raises:
            UsageError: They are not, and must not be reduced now.
        """
        new = self.new
        is_settled = not new if joining else self._is_same_on_all_ranks(bool(new) and not self.is_repeatable)
        if not is_settled and (joining or not self.is_repeatable):
            name = (
                f"the gradient of '{new[0]}' was replaced" if new else "a gradient was changed on some ranks"
            )
            raise UsageError(
                f"rank {self._comm.rank}: {name} after it had been averaged; write the same values into the "
                "array on every rank (`parameter.grad[...] = value`), or call update(lossfun), which clears "
                "gradients",
                rank=self._comm.rank,
                tensor=new[0] if new else None,
            )
        return is_settled

    def _is_same_on_all_ranks(self, is_new: bool) -> bool:
        total = 0
        for index, parameter in enumerate(self.parameters):
            if parameter.grad is not None:
                total = checksum_of(parameter.grad, index ^ total)
        row = np.array([[total, is_new]], np.uint64)
        comm = self.reducer.comm
        found = row if comm is None else comm.allgather(row, name="checksum of the gradients")
        return bool((found == np.array([total, False], np.uint64)).all())

    def note_update(self) -> None:
        """An update is over: what is still there unchanged when the next gradients are reduced is not one."""
        if not self.is_repeatable:
            self._done = {
                index: checksum_of(parameter.grad)
                for index, parameter in enumerate(self.parameters)
                if parameter.grad is not None and not self._is_new(index)
            }

    def check_cleared(self) -> None:
        """Raise UsageError if a backward pass would add to what must not be reduced again."""
        for index, parameter in enumerate(self.parameters):
            if self.is_repeatable or parameter.grad is None or self._is_new(index):
                continue
            if parameter.grad.any():
                raise self._reduced_twice(index)

    def _reduced_twice(self, index: int) -> UsageError:
        todo = "clear gradients before each backward pass, or average and multiply the loss instead"
        name = self.reducer.specs[index].name
        return self.reducer.options.reduced_twice(self._comm.rank, name, todo)

    def arrived(self, index: int, gradient: Any) -> None:
        """A gradient of this round is final while the backward pass runs: put it in its slot, from where it
        may leave.

        Raises:
            UsageError: It has another shape or dtype than the parameter had, or there was one already.
        """
        if self.reducer.is_ready(index):
            name = self.reducer.specs[index].name
            raise UsageError(
                f"rank {self._comm.rank}: parameter '{name}' received a second gradient in one backward "
                "pass, as when a function runs a backward pass of its own; create the optimizer with "
                "overlap=False",
                rank=self._comm.rank,
                tensor=name,
            )
        self._check(index, gradient)
        self._put(index, gradient)
        self.reducer.mark_ready(index)

    def send(self, *, in_place: bool = True) -> None:
        """Let everything leave that has not. What was reduced before and is still there takes part as well: a
        program may have written new gradients into the same arrays.

        Args:
            in_place: They may be reduced where they are: the program does not see them until `receive`.

        Raises:
            UsageError: One of them is what was reduced before, and must not be again.
        """
        self._pending = pending = {}
        for index in range(len(self.parameters) - 1, -1, -1):
            gradient = self.parameters[index].grad
            if gradient is None or self.reducer.is_ready(index):
                continue
            self._check(index, gradient)
            if self._is_done(index, gradient):
                raise self._reduced_twice(index)
            pending[index] = gradient
        # A sum in an array that another parameter's gradient is too, in another optimizer, would be added up.
        self._own = own_arrays(pending) if in_place and self.is_repeatable else set()
        # All copies out of slots are made before any slot is written and any bucket leaves.
        for index, gradient in pending.items():
            if gradient is not self._views[index] and self._is_in_slots(gradient):
                pending[index] = gradient.copy()
                self._own.discard(index)
        for index, gradient in pending.items():
            if index not in self._own and gradient is not self._views[index]:
                self._put(index, gradient)
        try:
            for index in pending:
                self.reducer.mark_ready(index)
            self.reducer.flush()
        finally:
            self._pending = {}

    def receive(self) -> RoundResult:
        """End the round: wait, and show the averages where any rank had a new gradient. Collective."""
        try:
            result = self.reducer.finish()
        finally:
            in_place, self._in_place = self._in_place, {}
            copies, self._copies = self._copies, {}
        self._refresh_views()
        for index in np.flatnonzero(result.produced).tolist():
            reduced = copies[index][0] if index in copies else self._views[index]
            own = in_place.get(index)
            if own is None:
                self._show(index, self._placed(index, reduced))
                continue
            if not self._is_reduced_itself(index, own):
                own[...] = reduced
            self._show(index, own)
        if chainer.is_debug():
            self._check_finite(result)
        return result

    def reduce(self) -> RoundResult:
        """`send` and `receive`. Collective."""
        self.send()
        return self.receive()

    def cancel(self) -> None:
        """Forget the round of a backward pass that was aborted by an exception."""
        if self.reducer.is_open:
            self.reducer.cancel()
            self._in_place, self._copies = {}, {}
            self._refresh_views()

    def join(self, after_round: Callable[[RoundResult], None]) -> int:
        """Answer the rounds of ranks that still have data; returns one that had to the end. Collective."""
        root = self.reducer.join(after_round)
        for parameter in self.parameters:
            parameter.cleargrad()
        self._refresh_views()
        return root

    def close(self) -> None:
        """Release the buckets; gradients go on in memory of their own. May be called twice."""
        for index, parameter in enumerate(self.parameters):
            if parameter.grad is not None and parameter.grad is self._views[index]:
                parameter.grad = parameter.grad.copy()
        self._shown = [_nothing] * len(self.parameters)
        self.reducer.close()

    def fetch(self, index: int) -> Gradient | None:
        """Part of `GradientSource`: `send` has marked all gradients that there are.

        They are reduced in place, or where they are copied to. The average of the program's own arrays is to
        be in them in any case.
        """
        gradient = self._pending.get(index)
        if gradient is None and not self.reducer.is_ready(index):
            return None
        if gradient is not None and index in self._own and gradient is not self._views[index]:
            self._in_place[index] = gradient
            if self._is_reduced_itself(index, gradient):
                return buffer_at(gradient)
            self._put(index, gradient)
        found = self._copies.get(index)  # of what `arrived` and `send` have copied, too
        return IN_SLOT if found is None else found[1]

    def publish(self, index: int) -> None:
        """Part of `GradientSource`: this rank's backward pass has not told how the average is scaled.

        `receive` shows all averages at once.
        """
        self.parameters[index]._loss_scale = self.loss_scale

    def _is_done(self, index: int, gradient: Any) -> bool:
        """Whether this is, unchanged, what an update was made with."""
        if index not in self._done or gradient is not self._shown[index]():
            return False
        return self._done[index] == checksum_of(gradient) and bool(gradient.any())

    def _is_new(self, index: int) -> bool:
        gradient = self.parameters[index].grad
        return gradient is not None and gradient is not self._shown[index]()

    def _check(self, index: int, gradient: Any) -> None:
        dtype, shape = self._dtypes[index], self.reducer.specs[index].shape
        what = f"rank {self._comm.rank}: the gradient of '{(name := self.reducer.specs[index].name)}'"
        without_mask(gradient, what)
        if gradient.dtype != dtype or gradient.shape != shape:
            raise UsageError(
                f"{what} has become {gradient.dtype} "
                f"{gradient.shape}, it was {dtype} {shape} when the model was set up; set the "
                "optimizer up again after changing a model",
                rank=self._comm.rank,
                tensor=name,
            )

    def _check_finite(self, result: RoundResult) -> None:
        """In Chainer's debug mode, as ChainerMN does."""
        for index in np.flatnonzero(result.produced).tolist():
            gradient = self.parameters[index].grad
            if not chainer.backend.get_array_module(gradient).isfinite(gradient).all():
                name = self.reducer.specs[index].name
                raise ValueError(
                    f"Parameters diverged after allreduce. The averaged gradient of '{name}' is not finite."
                )

    def _is_reduced_itself(self, index: int, gradient: Any) -> bool:
        """Whether a gradient of the program's own may be given to the core as it is."""
        return bool(gradient.flags.c_contiguous and gradient.dtype == self._views[index].dtype)

    def _is_in_slots(self, gradient: Any) -> bool:
        """Return whether a gradient shares memory with slots, as it does after parameters have exchanged
        their gradients."""
        begin, end = extent(gradient)
        return any(begin < stop and start < end for start, stop in self._slots)

    def _put(self, index: int, gradient: Any) -> None:
        """Copy a gradient to where it may be reduced: its slot, or new memory of its device."""
        view = self._views[index]
        if on_device(gradient):
            with gradient.device:
                copy = gradient.astype(view.dtype, order="C", copy=True)
            self._copies[index] = copy, buffer_at(copy)
        elif view.nbytes >= STREAMING_BYTES and self._is_reduced_itself(index, gradient):
            copy_large(address_of(view), address_of(gradient), view.nbytes)
        else:
            view[...] = gradient

    def _placed(self, index: int, reduced: Any) -> Any:
        """An average as the gradient of its parameter: a view of its slot, where that is of its dtype."""
        array, dtype = self.parameters[index].array, self._dtypes[index]
        if not on_device(array):
            return reduced.astype(dtype, copy=False)
        with array.device:
            return to_device(reduced, True).astype(dtype, copy=False)

    def _show(self, index: int, shown: Any) -> None:
        parameter = self.parameters[index]
        # To set it takes Chainer longer than to look. It also forgets how the gradient was computed.
        if parameter.grad is not shown or _has_history(parameter):
            parameter.grad = shown
        self._shown[index] = reference_to(shown)

    def _refresh_views(self) -> None:
        """Views of the slots, if these have moved; gradients move along."""
        if self._views is self.reducer.views:
            return
        before: Sequence[Array | None] = self._views or [None] * len(self.parameters)
        self._views = self.reducer.views
        self._slots = merged(extent(view) for view in self._views if view.size)
        for index, parameter in enumerate(self.parameters):
            if parameter.grad is not None and parameter.grad is before[index]:
                self._show(index, self._views[index])


def _nothing() -> None:
    """A dead reference."""


def _has_history(parameter: chainer.Parameter) -> bool:
    """Whether Chainer could differentiate the gradient further."""
    known = parameter._grad_var
    return known is not None and known.creator_node is not None
