"""Gradient hooks: gradients are reduced over ranks while the backward pass still runs.

A backward call is a *pass*. The first gradient that arrives in a pass queues a callback with the autograd
engine, which runs before `backward()` returns; there the round of the shared reducer ends.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from multiring.errors import UsageError
from multiring.gradients.options import ReducerOptions
from multiring.gradients.source import RoundResult
from multiring.torch.copies import Arrival, ModelGuard, forget_copy, is_hooked
from multiring.torch.model_state import ModelState
from multiring.torch.slots import ParameterSlots
from multiring.torch.state import broadcast_optimizer_state, broadcast_parameters
from multiring.torch.supported import check_module
from multiring.torch.sync_batchnorm import SyncBatchNorm
from multiring.types import BufferMode
from torch.autograd import Variable

if TYPE_CHECKING:
    from multiring import Communicator

__all__ = ["GradientHooks"]


class _Pass:
    """One backward pass. The engine holds it until the pass has ended, or was aborted by an exception."""

    def __init__(self, hooks: GradientHooks, position: int, reduce: bool) -> None:
        self.reduce = reduce
        self._hooks = hooks
        # What is taken part with, so that the parameters need not be looked up for every gradient.
        self._held = hooks._slots.begin()
        self.kept = hooks._slots.find_kept(position)
        # Callbacks of other models run in between, so that all have sent before any waits.
        self._steps = iter(hooks._steps() if reduce else ())
        self._inner: torch.utils.hooks.RemovableHandle | None = None

    def queue(self, *_: object) -> None:
        """Have the engine call this object at the end of the backward pass."""
        if self._inner is not None:
            self._inner.remove()  # the node may live on, but this object must not if the pass is aborted
            self._inner = None
        Variable._execution_engine.queue_callback(self)

    def __call__(self) -> None:
        node = torch._C._current_autograd_node()
        if node is not None:
            # Only a backward pass inside of another has ended (a checkpoint with use_reentrant=True), whose
            # node is still at work; from that node's post hook the callback reaches the outer pass.
            self._inner = node.register_hook(self.queue)
        elif (step := next(self._steps, None)) is not None:
            step()
            self.queue()
        else:
            self._hooks._end_pass(self.reduce)


class GradientHooks:
    """Handle of the gradient hooks on the parameters of a model; see `register_gradient_hooks`.

    Attributes:
        rounds: Number of times that gradients were reduced.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.Tensor],
        comm: Communicator,
        options: ReducerOptions,
        *,
        sparse: Collection[str] = (),
        passes_per_round: int = 1,
        module: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        buffers: BufferMode = "broadcast",
    ) -> None:
        """Compare the model over ranks, allocate buckets, register hooks. Collective.

        Args:
            parameters: Parameters by name, in the same order on every rank. Those that do not require a
                gradient are watched: they take part as soon as they do, on all ranks.
            comm: Ranks that train together.
            options: How to reduce.
            sparse: Names of the parameters whose gradients stay sparse.
            passes_per_round: Backward passes whose gradients are added up before they are reduced.
            module: The model, whose buffers are made the same, and whose state `join` hands to ranks that ran
                out of data.
            optimizer: The optimizer of the parameters, whose hyperparameters are compared.
            buffers: What happens to buffers after a reduction.
        """
        if passes_per_round < 1:
            raise UsageError(
                f"rank {comm.rank}: {passes_per_round} backward passes per step; at least 1 is needed"
            )
        floating = {name: p for name, p in parameters.items() if p.is_floating_point() or p.is_complex()}
        for name, parameter in floating.items():
            _check_unhooked(comm.rank, name, parameter)
        if module is not None and comm.size > 1:
            check_module(module, comm.rank)
        self.rounds = 0
        self._comm = comm
        # Weak, as all references to the model from here; see `ParameterSlots`.
        self._module = None if module is None else weakref.ref(module)
        self._passes_per_round, self._passes = passes_per_round, 0
        self._enabled = True
        self._pass: weakref.ref[_Pass] | None = None
        self._slots = ParameterSlots(floating, comm, options, sparse)
        self._state = (
            ModelState(comm, self._slots, options, buffers, module, optimizer) if comm.size > 1 else None
        )
        forget_copy(floating.values())
        self._guard = (
            ModelGuard(module, comm.rank, floating.values()) if module is not None and comm.size > 1 else None
        )
        # With one rank and no scaling there is nothing to do: gradients stay where autograd puts them.
        self._is_local = comm.size == 1 and options.scale == 1.0
        self._handles = (
            [] if self._is_local else [_register(self, k, p) for k, p in enumerate(floating.values())]
        )

    @property
    def has_unreduced(self) -> bool:
        """Whether this rank has gradients that were not reduced yet."""
        return not self._is_local and self._slots.reducer.has_unreduced

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context of backward calls whose gradients stay local; the next call outside reduces their sum."""
        before, self._enabled = self._enabled, False
        try:
            yield
        finally:
            self._enabled = before

    def synchronize(self) -> None:
        """Reduce what gradients there are. Collective.

        Only needed where no backward call does it: after `no_sync()`, or on a rank whose loss did not
        involve the model while that of other ranks did.
        """
        if self._is_local:
            return
        if self._pass is None or self._pass() is None:
            self._slots.cancel()
        held = self._slots.begin()
        for step in self._steps():
            step()
        del held
        self._end_pass(True)

    def synchronize_replaced(self) -> None:
        """Reduce gradients that the program has put in the place of reduced ones, unless they are the same on
        all ranks, as what a program makes of reduced gradients is. Collective if there are any."""
        replaced = [] if self._is_local else self._slots.replaced_gradients()
        if replaced and self._slots.find_new(replaced):
            self.synchronize()

    def hold(self) -> object:
        """References to the parameters: while somebody has them, they are not looked up for each step."""
        return self._slots.hold()

    def carry_on(self, before: GradientHooks) -> None:
        """Know which gradients the hooks in whose place these come have reduced."""
        if not self._is_local:
            self._slots.carry_on(before._slots)

    def begin_step(self) -> None:
        """What was reduced so far is used up: what replaces it is not made of it."""
        self._slots.produced_since_step[:] = False

    def begin_group(self) -> None:
        """The program has cleared gradients: backward passes are counted anew."""
        self._passes = 0

    def note_step(self, *, is_common: bool) -> None:
        """The optimizer has stepped; see `ModelState.note_step`."""
        if self._state is not None:
            self._state.note_step(is_common)

    @contextmanager
    def join(self, optimizer: torch.optim.Optimizer | None = None) -> Iterator[None]:
        """Context of a loop that may have fewer iterations on some ranks than on others.

        A rank that leaves it answers the backward passes of the others with zeros until all have left;
        averages divide by the number of ranks that still have data. Then all ranks take over parameters and
        buffers (and optimizer state, if given) from one that had data to the last. Every rank has to enter
        it; gradients that were not reduced when a rank leaves are dropped. Other collectives must not be
        used inside.

        Args:
            optimizer: Optimizer whose state to hand over as well.

        Raises:
            UsageError: The model has synchronised batch normalisation, which needs all ranks in every
                iteration.
        """
        module = None if self._module is None else self._module()
        if module is not None and any(isinstance(part, SyncBatchNorm) for part in module.modules()):
            raise UsageError(
                f"rank {self._comm.rank}: join() cannot be used with SyncBatchNorm, whose statistics need "
                "all ranks in every iteration; give ranks without data empty batches instead"
            )
        yield
        if self._is_local:
            return
        root = self._slots.join(self._answer)
        self._passes = 0
        if self._state is not None:
            self._state.forget_step()
        broadcast_parameters(self._slots.named() if module is None else module, root, self._comm)
        if optimizer is not None:
            broadcast_optimizer_state(optimizer, root, self._comm)

    def residuals(self) -> dict[str, torch.Tensor]:
        """What compression has kept back of this rank's gradients: copies by the parameters' names, flat;
        also of parameters that are frozen now, whose residuals wait until they are thawed.

        Part of a checkpoint, of every rank its own; empty without compression.
        """
        kept = self._slots.reducer.residuals() if self._handles else {}  # none with one rank, or removed
        return {name: torch.from_numpy(values) for name, values in kept.items()}

    def load_residuals(self, residuals: Mapping[str, torch.Tensor]) -> None:
        """Go on from what `residuals` gave. Raises UsageError for what does not fit the model. Local."""
        if not self._is_local:
            self._slots.load_residuals(
                {name: kept.detach().cpu().numpy() for name, kept in residuals.items()}
            )

    def remove(self) -> None:
        """Remove the hooks and release the buckets. May be called twice."""
        if self._guard is not None:
            self._guard.remove()
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._slots.close()

    def arrived(self, position: int, parameter: torch.Tensor) -> None:
        """The gradient of a parameter has been accumulated."""
        current = None if self._pass is None else self._pass()
        if current is None:
            current = self._begin_pass(position)
        if position in current.kept:
            raise self._slots.cannot_add(position)
        gradient = parameter.grad
        if gradient is not None and gradient.requires_grad:
            raise UsageError(
                f"rank {self._comm.rank}: backward(create_graph=True) cannot differentiate through the "
                "reduction over ranks; use torch.autograd.grad for higher derivatives"
            )
        del gradient  # whether others have it is looked at below
        if current.reduce:
            self._slots.mark_ready(position)
        else:
            self._slots.mark_produced(position)

    def _steps(self) -> tuple[Callable[[], None], ...]:
        """How a round ends."""
        slots, state = self._slots, self._state
        steps = slots.flush, slots.send_values, self._receive
        return steps if state is None else (*steps, state.take_over, state.compare)

    def _receive(self) -> None:
        result = self._slots.finish()
        if self._state is not None:
            self._state.begin(result)

    def _answer(self, result: RoundResult) -> None:
        """End a round of other ranks, which still have data."""
        if self._state is not None:
            self._state.begin(result)
            self._state.take_over()
            self._state.compare()

    def _begin_pass(self, position: int) -> _Pass:
        if _is_autograd_compiled():
            raise UsageError(
                f"rank {self._comm.rank}: gradients are not reduced in a backward pass that compiled "
                "autograd has rewritten; leave out torch._dynamo.config.compiled_autograd (torch.compile of "
                "the model works without it)"
            )
        self._slots.cancel()
        current = _Pass(self, position, self._enabled and self._passes + 1 >= self._passes_per_round)
        self._pass = weakref.ref(current)
        current.queue()
        return current

    def _end_pass(self, reduce: bool) -> None:
        self._pass = None
        if reduce:
            self._passes = 0
            self.rounds += 1
        elif self._enabled:
            self._passes += 1


def _is_autograd_compiled() -> bool:
    compiled = sys.modules.get("torch._dynamo.compiled_autograd")  # not imported by us: it takes a second
    return compiled is not None and compiled.in_compiled_autograd_region


def _check_unhooked(rank: int, name: str, parameter: torch.Tensor) -> None:
    if is_hooked(parameter):
        raise UsageError(
            f"rank {rank}: parameter '{name}' already has gradient hooks; remove() their handle first"
        )


def _register(
    hooks: GradientHooks, position: int, parameter: torch.Tensor
) -> torch.utils.hooks.RemovableHandle:
    required = parameter.requires_grad
    parameter.requires_grad_(True)  # torch takes hooks on no others; they stay when it is switched off again
    handle: torch.utils.hooks.RemovableHandle
    handle = parameter.register_post_accumulate_grad_hook(Arrival(hooks, position))  # type: ignore[no-untyped-call]
    parameter.requires_grad_(required)
    return handle
