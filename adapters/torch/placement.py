"""Where the gradients of a round are reduced, and which gradients were reduced before.

A gradient is reduced in its own memory if nothing else has that, and its elements lie as the parameter's do.
Else it is copied. What a backward pass has made gets memory of its own, for the memory that it came in may be
that of another gradient, or of a constant of the graph. What the program has put into `parameter.grad` is
copied back, for the program may look for it where it was.

No gradient that the program sees lies in a bucket, which the next round overwrites.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

import torch
from multiring.arrays import require_memory
from multiring.errors import UsageError
from multiring.gradients.source import IN_SLOT, Gradient
from multiring.torch.buffers import dense_strides, overlaps_itself
from multiring.torch.counts import is_reducible_in_place, plain_gradients, version
from multiring.torch.streams import wait_for_stream

__all__ = ["GradientPlacement", "Moment", "Parameters", "is_replaceable"]

Tensor = torch.Tensor
_STRIDED = torch.strided
Bytes = NDArray[np.uint8]
Parameters = Sequence[Tensor | None]
ParameterList = list[Tensor | None]


@dataclass(frozen=True, slots=True)
class _Form:
    """What the gradient of a parameter looks like."""

    device: torch.device
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    is_contiguous: bool
    is_sparse: bool

    @classmethod
    def of(cls, parameter: Tensor, *, is_sparse: bool) -> _Form:
        shape, stride = parameter.shape, dense_strides(parameter)
        is_contiguous = torch.empty_strided(shape, stride, device="meta").is_contiguous()
        device, dtype = parameter.device, parameter.dtype
        return cls(device, dtype, shape, stride, is_contiguous, is_sparse)

    def empty(self) -> Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)

    def copy_of(self, slot: Bytes) -> Tensor:
        values = torch.from_numpy(slot).view(self.dtype).as_strided(self.shape, self.stride)
        return values.to(self.device, copy=True)

    def buffer_at(self, gradient: Tensor) -> Gradient:
        """Memory of a gradient of this form, made by the current stream."""
        if gradient.is_cpu:
            return Gradient(gradient.data_ptr(), gradient)
        stream = torch.cuda.current_stream(gradient.device).cuda_stream
        return Gradient(gradient.data_ptr(), gradient, gradient.device.index, int(stream))


class _Copy(NamedTuple):
    """A gradient of the round under way that is not reduced in its own memory."""

    gradient: Tensor
    values: Tensor  # which are reduced
    is_written_back: bool  # else they replace the gradient


class _Reduced(NamedTuple):
    """What was reduced: known by its tensor, its memory and its version, which grows with each write that
    Torch sees."""

    tensor: weakref.ref[Tensor]  # to compare with only
    address: int
    version: int | None  # None: it counts writes to other gradients as well
    values: Tensor | None  # then these are what was reduced

    def is_tensor(self, gradient: Tensor) -> bool:
        """Whether this is the tensor, which may have been written to since."""
        return self.tensor() is gradient and self.address == _address(gradient)


def is_replaceable(gradient: Tensor, incoming: int | None) -> bool:
    """Whether a reduced copy may take the place of a gradient.

    Otherwise the program may look for the result in the memory that it has put into `parameter.grad`.

    Args:
        gradient: What the parameter has.
        incoming: Address of what autograd has accumulated: a gradient there was made by autograd.
    """
    is_usable = gradient.layout is _STRIDED and not gradient.requires_grad
    return not is_usable or overlaps_itself(gradient) or incoming == _address(gradient)


class Moment(NamedTuple):
    """When an optimizer steps.

    Attributes:
        rounds: Number of rounds before it.
        writes: Number of writes to the gradients that there are.
    """

    rounds: int = 0
    writes: int = 0


class GradientPlacement:
    """The gradients of a model, by the numbers of its parameters.

    Attributes:
        rounds: Number of rounds that have ended well.
    """

    def __init__(self, rank: int, names: Sequence[str]) -> None:
        self._rank, self._names = rank, names
        self._forms: dict[int, _Form] = {}
        # The usual ones. What is said below of a number is so if nothing is said of it there.
        self.plain = plain_gradients(len(names))
        self._reduced: dict[int, _Reduced] = {}
        self._emptied: set[int] = set()  # reduced ones that were zero when this round first added to them
        self.rounds = 0
        self._was_produced = np.zeros(len(names), np.bool_)  # gradients that some round has reduced
        # Of the round under way: those that are reduced in their own memory, and their versions; the others.
        self._in_place: dict[int, tuple[Tensor, int]] = {}
        self._copies: dict[int, _Copy] = {}
        self._incoming: dict[int, int] = {}
        self._streams: dict[int, torch.cuda.Stream] = {}  # on which autograd makes the gradients of the round

    def expect(self, number: int, parameter: Tensor, *, is_sparse: bool) -> None:
        """The gradients of this parameter will look like it."""
        # Parameters that look alike share a form: less to bring into the caches in each round.
        form = _Form.of(parameter, is_sparse=is_sparse)
        self._forms[number] = next((known for known in self._forms.values() if known == form), form)
        is_usual = parameter.is_cpu and not is_sparse
        self.plain.expect(number, form.empty() if is_usual else None, form.stride)

    def incoming_hook(self, number: int) -> Callable[[Tensor], None]:
        """`note_incoming` of a number."""
        hook: Callable[[Tensor], None]
        hook = self.plain.incoming_hook(number, functools.partial(self.note_incoming, number))
        return hook

    def note_incoming(self, number: int, gradient: Tensor) -> None:
        """Autograd is about to accumulate this. What has its memory afterwards is what autograd has made."""
        self._incoming[number] = gradient.data_ptr() if gradient.layout is _STRIDED else 0
        if gradient.is_cuda:
            self._streams[number] = torch.cuda.current_stream(gradient.device)

    def form(self, number: int) -> tuple[torch.Size, torch.dtype]:
        """Shape and dtype of a gradient."""
        return self._forms[number].shape, self._forms[number].dtype

    def fetch_plain(self, parameters: ParameterList, numbers: list[int]) -> tuple[list[int], list[object]]:
        """The addresses of gradients that are alone in their memory, and lie as their parameters do, and the
        gradients; 0: `fetch` finds out more."""
        addresses, gradients = self.plain.fetch(parameters, numbers)
        if self._reduced:
            for number, address in zip(numbers, addresses, strict=True):
                if address:
                    self._reduced.pop(number, None)
        return addresses, gradients

    def fetch(self, number: int, gradient: Tensor) -> Gradient:
        """Where the gradient is to be reduced. The current stream of its device waits for the one on which
        autograd has made it.

        Args:
            number: Which parameter's.
            gradient: What the parameter has.

        Raises:
            UsageError: It has another form than its parameter had.
        """
        form = self._forms[number]
        if gradient.dtype is not form.dtype or gradient.shape != form.shape or gradient.device != form.device:
            raise self._has_become(number, gradient)
        if form.is_sparse:
            return IN_SLOT
        _require_memory(gradient)
        if self._streams and (made_on := self._streams.get(number)) is not None:
            wait_for_stream(made_on)
        if is_reducible_in_place(gradient) and (
            gradient.is_contiguous() if form.is_contiguous else gradient.stride() == form.stride
        ):
            buffer, now = form.buffer_at(gradient), version(gradient)
            self._remember(number, _Reduced(weakref.ref(gradient), buffer.address, now, None))
            self._in_place[number] = gradient, now
            return buffer
        incoming = self.plain.incoming(number) or self._incoming.get(number)
        is_own = is_replaceable(gradient, incoming)
        known = None if is_own else self._known(number)
        values = form.empty() if known is None or known.values is None else known.values
        values.copy_(gradient.detach().to_dense())
        self._copies[number] = _Copy(gradient, values, is_written_back=not is_own)
        return form.buffer_at(values)

    def publish(self, number: int, parameter: Tensor, slot: Bytes) -> None:
        """Another rank had a gradient, which is in the slot."""
        form = self._forms[number]
        if not form.is_sparse:
            parameter.grad = gradient = form.copy_of(slot)
            self.note(number, gradient)

    def note(self, number: int, gradient: Tensor) -> None:
        """This is a reduced gradient."""
        self._remember(number, _Reduced(weakref.ref(gradient), _address(gradient), version(gradient), None))

    def _remember(self, number: int, reduced: _Reduced) -> None:
        self.plain.forget(number)
        self._reduced[number] = reduced

    def _known(self, number: int) -> _Reduced | None:
        """What was reduced last."""
        plain = self.plain.reduced(number)
        if plain is None:
            return self._reduced.get(number)
        tensor, address, now = plain
        return _Reduced(tensor, address, now, None)

    def note_addition(self, number: int, gradient: Tensor | None) -> bool:
        """Note that a pass is about to add to a gradient, or to make it. Return whether it is the tensor that
        was reduced last, and was not zero when a pass of this round first added to it."""
        if gradient is None or number in self._emptied or self._is_other(number, gradient):
            return False
        if (gradient if gradient.layout is torch.strided else gradient.coalesce().values()).any():
            return True
        self._emptied.add(number)
        return False

    def _is_other(self, number: int, gradient: Tensor) -> bool:
        """Return whether this is another tensor than that which was reduced last."""
        known = self._known(number)
        return known is None or not known.is_tensor(gradient)

    def is_new(self, number: int, gradient: Tensor) -> bool:
        """Whether the gradient is not the one that was reduced last, or was written to since."""
        known = self._known(number)
        if known is None or not known.is_tensor(gradient):
            return True
        if known.values is not None:
            return not torch.equal(gradient, known.values)
        return known.version != version(gradient) or known.version < 0

    def is_replaced(self, number: int, gradient: Tensor) -> bool:
        """Whether this is another tensor than that which was reduced last. Writes to that one are edits of a
        reduced gradient."""
        known = self._known(number)
        if known is None or not known.is_tensor(gradient):
            return True
        if known.values is None:
            self.note(number, gradient)
        else:
            known.values.copy_(gradient.detach())  # what tells it from a new one later
        return False

    def moment(self, parameters: Parameters) -> Moment:
        """Return the moment at which an optimizer steps."""
        gradients = [g for p in parameters if p is not None and (g := p.grad) is not None]
        try:
            writes = sum(gradient._version for gradient in gradients)
        except RuntimeError:  # one was made in inference mode
            writes = sum(map(version, gradients))
        return Moment(self.rounds, writes)

    def given_since(self, parameters: Parameters, step: Moment) -> dict[int, str]:
        """Return the names of the parameters, by their identity, with gradients that the program has given
        and no round has reduced.

        Where there was a round after the last step, the program may have made gradients of reduced ones: only
        those of parameters are looked at that no round has reduced yet.

        Args:
            parameters: All of them.
            step: When the optimizer made its last step.
        """
        had_round = self.rounds > step.rounds
        unseen = np.flatnonzero(~self._was_produced).tolist() if had_round else range(len(self._names))
        given = {
            number: gradient
            for number in unseen
            if (parameter := parameters[number]) is not None and (gradient := parameter.grad) is not None
        }
        if had_round or self.moment(parameters) == step:  # nothing was written to between the steps
            given = {n: gradient for n, gradient in given.items() if self._is_other(n, gradient)}
        else:
            given = {n: gradient for n, gradient in given.items() if self.is_new(n, gradient)}
        return {id(parameters[number]): self._names[number] for number in given}

    def check(self, parameters: ParameterList) -> None:
        """Raise UsageError if something has touched gradients of the round while they were reduced."""
        if (changed := self.plain.find_changed(parameters)) is not None:
            raise self.was_replaced(changed)
        for number, (gradient, before) in self._in_place.items():
            parameter = parameters[number]
            if parameter is not None and (parameter.grad is not gradient or version(gradient) != before):
                raise self.was_replaced(number)
        for number, copy in self._copies.items():
            parameter = parameters[number]
            if parameter is not None and parameter.grad is not copy.gradient:
                raise self.was_replaced(number)

    def settle(self, parameters: Parameters, produced: NDArray[np.bool_]) -> None:
        """The round has ended: show what was reduced elsewhere.

        Args:
            parameters: All of them.
            produced: Per parameter, any rank had a new gradient. Shape (parameters,).
        """
        with torch.no_grad():
            for number, (gradient, values, is_written_back) in self._copies.items():
                parameter = parameters[number]
                if parameter is None or not produced[number]:
                    continue
                if is_written_back:
                    gradient.copy_(values)
                    known = _Reduced(weakref.ref(gradient), _address(gradient), None, values)
                    self._remember(number, known)
                else:
                    parameter.grad = values
                    self.note(number, values)
        self.rounds += 1
        self._was_produced |= produced
        self.forget_round()

    def forget_round(self) -> None:
        """The round has ended, or was aborted."""
        self.plain.end_round()
        self._emptied.clear()
        self._in_place, self._copies, self._incoming, self._streams = {}, {}, {}, {}

    def reduced_in_place(self, parameters: ParameterList) -> list[int]:
        """Gradients of the round under way that are reduced where the program still has them."""
        return self.plain.in_place(parameters) + [
            number
            for number, (gradient, _) in self._in_place.items()
            if (parameter := parameters[number]) is not None and parameter.grad is gradient
        ]

    def transfer_from(self, other: GradientPlacement) -> None:
        """Know what `other` knows, of the parameters with these names."""
        numbers = {name: number for number, name in enumerate(self._names)}
        for before, name in enumerate(other._names):
            known, number = other._known(before), numbers.get(name)
            if known is not None and number is not None:
                self._remember(number, known)

    def was_replaced(self, number: int) -> UsageError:
        """What to raise where a gradient was touched while it was reduced."""
        name = self._names[number]
        return UsageError(
            f"rank {self._rank}: the gradient of '{name}' was replaced or taken away, or written to, while "
            "it was to be averaged, by another hook on the parameter or by DistributedDataParallel, which "
            "averages gradients itself: leave that out; change gradients after backward(), or register the "
            "other hook before multiring's",
            rank=self._rank,
            tensor=name,
        )

    def _has_become(self, number: int, gradient: Tensor) -> UsageError:
        name, form = self._names[number], self._forms[number]
        where = "" if gradient.device == form.device else f" on {gradient.device}"
        return UsageError(
            f"rank {self._rank}: parameter '{name}' has become {gradient.dtype} "
            f"{tuple(gradient.shape)}{where}, it was {form.dtype} {tuple(form.shape)} when "
            "its hook was registered; remove() the hooks before changing a model and register them again",
            rank=self._rank,
            tensor=name,
        )


def _require_memory(gradient: Tensor) -> None:
    """Raise UsageError if the storage of a gradient was given back."""
    if gradient.layout is _STRIDED and not gradient.is_conj():
        plain = gradient.detach()
        require_memory(torch.view_as_real(plain) if plain.is_complex() else plain)


def _address(tensor: Tensor) -> int:
    return tensor.data_ptr() if tensor.layout is torch.strided else 0
