"""Where gradients lie: in memory of autograd's, in their slots, or in tensors of the program."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

import torch
from multiring.errors import UsageError
from multiring.gradients.bucketing import ParameterSpec
from multiring.gradients.source import IN_SLOT, InPlace
from multiring.torch.buffers import dense_strides, overlaps_itself

__all__ = ["GradientPlaces", "Parameters"]

Tensor = torch.Tensor
Bytes = NDArray[np.uint8]
Parameters = Sequence[Tensor | None]


class _Place:
    """The slot of a gradient; what has to be looked at for each gradient that arrives."""

    __slots__ = ("address", "data", "dtype", "is_complex", "is_contiguous", "shape", "stride", "view")

    def __init__(self, parameter: Tensor, data: Bytes | None) -> None:
        self.data = data  # None for a sparse gradient, which has no slot
        self.dtype, self.shape, self.is_complex = parameter.dtype, parameter.shape, parameter.is_complex()
        self.stride = dense_strides(parameter)
        self.view = None if data is None else self.make_view(data)
        self.is_contiguous = self.view is not None and self.view.is_contiguous()
        self.address = 0 if self.view is None else self.view.data_ptr()

    def make_view(self, data: Bytes) -> Tensor:
        """The slot as a tensor. The program gets one of its own: it may change where that has its memory."""
        return torch.from_numpy(data).view(self.dtype).as_strided(self.shape, self.stride)

    def lies_here(self, gradient: Tensor | None) -> bool:
        """Whether this is the gradient in the slot."""
        return (
            self.view is not None
            and gradient is not None
            and gradient.layout is torch.strided
            and gradient.data_ptr() == self.address
            and gradient.stride() == self.stride
        )


class GradientPlaces:
    """Where the gradients of a round are, and which of them were reduced before.

    What was reduced is known by the tensor in `parameter.grad`, its memory, and its version, which grows with
    each write that Torch sees: a gradient that differs in any of them is new.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._specs: Sequence[ParameterSpec] = ()
        self._places: dict[int, _Place] = {}
        # What was reduced: the tensor (weakly, to compare with only), its address and its version; None: the
        # version counts writes to other gradients as well, and what was reduced is still in the slot.
        self._reduced: dict[int, tuple[weakref.ref[Tensor], int, int | None]] = {}
        self._round: dict[int, tuple[Tensor, int]] = {}
        self._write_back: dict[int, Tensor] = {}

    def lay_out(
        self, parameters: Parameters, specs: Sequence[ParameterSpec], slots: Mapping[int, Bytes]
    ) -> None:
        """Take over new slots, which have the contents of the old ones; gradients in them move along."""
        before, self._specs = self._places, specs
        self._places = {
            index: _Place(parameter, slots.get(index))
            for index, parameter in enumerate(parameters)
            if parameter is not None
        }
        for index, place in self._places.items():
            parameter, old = parameters[index], before.get(index)
            if parameter is None or old is None or place.view is None:
                continue
            if old.lies_here(parameter.grad):
                self._expose(index, parameter, place)

    def put(self, index: int, parameter: Tensor, *, from_autograd: bool) -> InPlace:
        """Where the gradient is to be reduced: where it lies, or in its slot, into which it is copied.

        Args:
            index: Which parameter's.
            parameter: The parameter, which has a gradient.
            from_autograd: The backward pass of this round has computed it; else it was there before.

        Raises:
            UsageError: It has another form than its parameter had.
        """
        gradient = parameter.grad
        assert gradient is not None
        place = self._places[index]
        if gradient.dtype != place.dtype or gradient.shape != place.shape or not gradient.is_cpu:
            raise self._has_become(index, gradient, place)
        view = place.view
        if view is None:
            return IN_SLOT
        if gradient.layout is not torch.strided or (not from_autograd and gradient.requires_grad):
            view.copy_(gradient.detach().to_dense())
            return self._show(index, parameter, place)
        address, version = gradient.data_ptr(), _version(gradient)
        lies_alike = (place.is_contiguous and gradient.is_contiguous()) or gradient.stride() == place.stride
        if lies_alike and address == place.address:
            self._record(index, gradient, address, version)
            return IN_SLOT
        if lies_alike and _is_alone(gradient, place.is_complex):
            known = self._reduced.get(index)
            # The local variable and what `parameter.grad` itself holds: nobody else has the tensor.
            if known is not None and known[0]() is gradient and sys.getrefcount(gradient) <= _UNSEEN:
                view.copy_(gradient)
                return self._show(index, parameter, place)
            self._record(index, gradient, address, version)
            return InPlace(address, gradient)
        view.copy_(gradient)
        if (from_autograd and version <= 0) or overlaps_itself(gradient):
            return self._show(index, parameter, place)
        self._write_back[index] = gradient
        self._round[index] = gradient, version
        return IN_SLOT

    def publish(self, index: int, parameter: Tensor) -> None:
        """Show the slot as the gradient."""
        self._expose(index, parameter, self._places[index])

    def note(self, index: int, gradient: Tensor) -> None:
        """This is a reduced gradient."""
        self._note(index, gradient)

    def _is_known(self, index: int, gradient: Tensor) -> bool:
        """Whether this is the tensor that was reduced last, which may have been written to since."""
        known = self._reduced.get(index)
        return known is not None and known[0]() is gradient and known[1] == _address(gradient)

    def is_kept(self, index: int, gradient: Tensor, *, was_added_to: bool) -> bool:
        """Whether this is what was reduced last, not zeroed since; autograd may have added to it once."""
        known = self._reduced.get(index)
        if known is None or not self._is_known(index, gradient):
            return False
        if was_added_to:
            return known[2] is not None and _version(gradient) == known[2] + 1
        return bool((gradient if gradient.layout is torch.strided else gradient.coalesce().values()).any())

    def is_new(self, index: int, gradient: Tensor) -> bool:
        """Whether the gradient is not the one that was reduced last, or was written to since."""
        known = self._reduced.get(index)
        if known is None or not self._is_known(index, gradient):
            return True
        version, view = known[2], self._places[index].view
        if version is None and view is not None:
            return not torch.equal(gradient, view)
        return version != _version(gradient)

    def find_replaced(self, parameters: Parameters) -> list[int]:
        """Gradients that are other tensors than those that were reduced last. Writes to these are edits of
        reduced gradients."""
        found = []
        for index, parameter in enumerate(parameters):
            gradient = None if parameter is None else parameter.grad
            if gradient is None:
                continue
            if not self._is_known(index, gradient):
                found.append(index)
            elif self._reduced[index][2] is not None:
                self._note(index, gradient)
            elif (view := self._places[index].view) is not None:
                view.copy_(gradient.detach())  # what tells it from a new one later
        return found

    def check(self, parameters: Parameters) -> None:
        """Raise UsageError if something has touched gradients of the round while they were reduced."""
        for index, (gradient, version) in self._round.items():
            parameter = parameters[index]
            if parameter is None:
                continue
            is_written = index not in self._write_back and _version(gradient) != version
            if parameter.grad is not gradient or is_written:
                raise self.was_replaced(index)

    def settle(self, produced: NDArray[np.bool_]) -> None:
        """The round has ended: what was reduced in slots goes back to the tensors of the program."""
        with torch.no_grad():
            for index, gradient in self._write_back.items():
                view = self._places[index].view
                if produced[index] and view is not None:
                    gradient.copy_(view)
                    self._reduced[index] = weakref.ref(gradient), gradient.data_ptr(), None
        self.forget_round()

    def forget_round(self) -> None:
        """The round has ended, or was aborted."""
        self._round, self._write_back = {}, {}

    def sent(self, parameters: Parameters) -> list[int]:
        """Gradients of the round under way that are reduced where the program still has them."""
        return [
            index
            for index, (gradient, _) in self._round.items()
            if index not in self._write_back
            and (parameter := parameters[index]) is not None
            and parameter.grad is gradient
        ]

    def move_out(self, parameters: Parameters) -> None:
        """Give gradients in slots memory of their own, but for tensors that the program has elsewhere too."""
        for index, place in self._places.items():
            parameter = parameters[index]
            gradient = None if parameter is None else parameter.grad
            if parameter is None or gradient is None or not place.lies_here(gradient):
                continue
            if sys.getrefcount(gradient) <= _UNSEEN:
                was_new = self.is_new(index, gradient)
                parameter.grad = gradient = gradient.clone()
                if not was_new:
                    self._note(index, gradient)

    def carry_on(self, other: GradientPlaces, names: Mapping[str, int]) -> None:
        """Know what `other` knows, of the parameters with these names."""
        for index, known in other._reduced.items():
            if (now := names.get(other._specs[index].name)) is not None:
                self._reduced[now] = known

    def was_replaced(self, index: int) -> UsageError:
        """What to raise where a gradient was touched while it was reduced."""
        name = self._specs[index].name
        return UsageError(
            f"rank {self._rank}: the gradient of '{name}' was replaced or taken away, or written to, while "
            "it was to be averaged, by another hook on the parameter or by DistributedDataParallel, which "
            "averages gradients itself: leave that out; change gradients after backward(), or register the "
            "other hook before multiring's",
            rank=self._rank,
            tensor=name,
        )

    def _show(self, index: int, parameter: Tensor, place: _Place) -> InPlace:
        self._expose(index, parameter, place)
        gradient = parameter.grad
        if gradient is not None:
            self._round[index] = gradient, _version(gradient)
        return IN_SLOT

    def _expose(self, index: int, parameter: Tensor, place: _Place) -> None:
        if place.data is not None:
            parameter.grad = gradient = place.make_view(place.data)
            self._note(index, gradient)

    def _record(self, index: int, gradient: Tensor, address: int, version: int) -> None:
        self._reduced[index] = weakref.ref(gradient), address, version
        self._round[index] = gradient, version

    def _note(self, index: int, gradient: Tensor) -> None:
        self._reduced[index] = weakref.ref(gradient), _address(gradient), _version(gradient)

    def _has_become(self, index: int, gradient: Tensor, place: _Place) -> UsageError:
        name = self._specs[index].name
        where = "" if gradient.is_cpu else f" on {gradient.device}"
        return UsageError(
            f"rank {self._rank}: parameter '{name}' has become {gradient.dtype} "
            f"{tuple(gradient.shape)}{where}, it was {place.dtype} {tuple(place.shape)} when "
            "its hook was registered; remove() the hooks before changing a model and register them again",
            rank=self._rank,
            tensor=name,
        )


def _is_alone(gradient: Tensor, is_complex: bool) -> bool:
    """Whether the memory belongs to this gradient alone, and holds its values as they are."""
    return (
        not gradient.is_neg()
        and not (is_complex and gradient.is_conj())
        and _storage_users(gradient) == _ALONE
    )


def _address(tensor: Tensor) -> int:
    return tensor.data_ptr() if tensor.layout is torch.strided else 0


def _version(tensor: Tensor) -> int:
    """Grows with each write that Torch sees; -1 where it does not count them."""
    try:
        return tensor._version
    except RuntimeError:  # made in inference mode
        return -1


# Private; a Torch without it costs the copy into the slot.
_use_count: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)


def _storage_users(tensor: Tensor) -> int:
    """References to the memory, of which there are more where autograd needs it for other gradients still; 0
    if this Torch does not tell."""
    return 0 if _use_count is None else _use_count(tensor.untyped_storage()._cdata)


def _references(parameter: Tensor) -> int:
    """References to a gradient that nobody but the parameter has, seen from a function with a variable."""
    gradient = parameter.grad
    return sys.getrefcount(gradient)


_ALONE = _storage_users(torch.zeros(1)) or -1
_parameter = torch.zeros(1, requires_grad=True)
_parameter.grad = torch.zeros(1)
_UNSEEN = _references(_parameter)
