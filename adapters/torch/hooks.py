"""Gradient hooks: gradients are reduced over ranks while the backward pass still runs.

A backward call is a *pass*. The first gradient that arrives in a pass queues a callback with the autograd
engine, which runs before `backward()` returns; there the round of the shared reducer ends.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from multiring.errors import UsageError
from multiring.gradients.options import ReducerOptions
from multiring.gradients.source import RoundResult
from multiring.torch.copies import ModelGuard, forget_copy, is_hooked
from multiring.torch.model_gradients import ModelGradients
from multiring.torch.model_state import ModelState
from multiring.torch.placement import Moment
from multiring.torch.state_broadcast import broadcast_optimizer_state, broadcast_parameters
from multiring.torch.supported import check_autograd, check_module
from multiring.torch.sync_batchnorm import SyncBatchNorm
from multiring.torch.unreduced import check_hooked, check_not_given, note_round, unwatch, watch
from multiring.types import BufferMode
from torch.autograd import Variable

if TYPE_CHECKING:
    from multiring import Communicator

__all__ = ["GradientHooks"]


class _Pass:
    """One backward pass. The engine holds it until the pass has ended, or was aborted by an exception."""

    def __init__(self, hooks: GradientHooks, reduce: bool) -> None:
        self.reduce = reduce
        self._hooks = hooks
        # What is taken part with, so that the parameters need not be looked up for every gradient.
        self._held = hooks._gradients.begin()
        self._marking = hooks._gradients.begin_pass() if reduce else None
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
            try:
                step()
            except BaseException:
                self.abandon()
                raise
            self.queue()
        else:
            self._hooks._end_pass(self.reduce)

    def abandon(self) -> None:
        """An exception ends the pass. A program that keeps that keeps this object, by the traceback."""
        self._marking = None
        if self._hooks._pass is not None and self._hooks._pass() is self:
            self._hooks._pass = None


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
        # Weak, as all references to the model from here; see `ModelGradients`.
        self._module = None if module is None else weakref.ref(module)
        self._passes_per_round, self._passes = passes_per_round, 0
        self._enabled, self._is_joining = True, False
        self._pass: weakref.ref[_Pass] | None = None
        self._gradients = ModelGradients(floating, comm, options, sparse)
        self._state = (
            ModelState(comm, self._gradients, options, buffers, module, optimizer) if comm.size > 1 else None
        )
        forget_copy(floating.values())
        self._guard = (
            ModelGuard(module, comm.rank, floating.values()) if module is not None and comm.size > 1 else None
        )
        # With one rank and no scaling there is nothing to do: gradients stay where autograd puts them.
        self._is_local = comm.size == 1 and options.scale == 1.0
        self._handles = (
            []
            if self._is_local
            else [h for k, p in enumerate(floating.values()) for h in _register(self, k, p)]
        )
        self._steps_seen: weakref.WeakKeyDictionary[torch.optim.Optimizer, Moment] = (
            weakref.WeakKeyDictionary()
        )
        if optimizer is None and comm.size > 1:  # a DistributedOptimizer looks at gradients itself
            watch(self, floating.values())

    @property
    def has_unreduced(self) -> bool:
        """Whether this rank has gradients that were not reduced yet."""
        return not self._is_local and self._gradients.reducer.has_unreduced

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
            self._gradients.cancel()
        held = self._gradients.begin()
        for step in self._steps():
            step()
        del held
        self._end_pass(True)

    def synchronize_replaced(self) -> None:
        """Reduce gradients by which the program has replaced reduced ones, unless they are the same on all
        ranks, as what a program makes of reduced gradients is. Collective if there are any."""
        replaced = [] if self._is_local else self._gradients.replaced_gradients()
        if replaced and self._gradients.find_new(replaced, is_joining=self._is_joining):
            self.synchronize()

    def check_state(self) -> None:
        """Compare parameters, buffers and hyperparameters over the ranks, as the checks in between do:
        after the last step of a job nothing else does. Collective.

        Raises:
            MismatchError: The ranks differ; the message shows the first difference.
        """
        if self._state is not None:
            self._state.compare_now()

    def hold(self) -> object:
        """References to the parameters: while somebody has them, they are not looked up for each step."""
        return self._gradients.hold()

    def transfer_from(self, before: GradientHooks) -> None:
        """Know which gradients the hooks that these replace have reduced."""
        if not self._is_local:
            self._gradients.transfer_from(before._gradients)

    def begin_step(self) -> None:
        """What was reduced so far is used up: what replaces it is not made of it."""
        self._gradients.produced_since_step[:] = False

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
        self._is_joining = True
        try:
            yield
        finally:
            self._is_joining = False
        if self._is_local:
            return
        root = self._gradients.join(self._answer)
        self._passes = 0
        if self._state is not None:
            self._state.begin_handover()
        broadcast_parameters(self._gradients.named() if module is None else module, root, self._comm)
        if optimizer is not None:
            broadcast_optimizer_state(optimizer, root, self._comm)

    def residuals(self) -> dict[str, torch.Tensor]:
        """What compression has kept back of this rank's gradients: copies by the parameters' names, flat;
        also of parameters that are frozen now, whose residuals wait until they are thawed.

        Part of a checkpoint, of every rank its own; empty without compression.
        """
        kept = self._gradients.reducer.residuals() if self._handles else {}  # none with one rank, or removed
        return {name: torch.from_numpy(values) for name, values in kept.items()}

    def load_residuals(self, residuals: Mapping[str, torch.Tensor]) -> None:
        """Go on from what `residuals` gave. Raises UsageError for what does not fit the model. Local."""
        if not self._is_local:
            self._gradients.load_residuals(
                {name: kept.detach().cpu().numpy() for name, kept in residuals.items()}
            )

    def remove(self) -> None:
        """Remove the hooks and release the buckets. May be called twice."""
        if self._guard is not None:
            self._guard.remove()
        for handle in self._handles:
            handle.remove()
        self._handles = []
        unwatch(self)
        if self._state is not None:
            self._state.remove()
        self._gradients.close()

    def arrived(self, number: int, parameter: torch.Tensor) -> None:
        """The gradient of a parameter has been accumulated, which the hook has not marked by itself."""
        current = None if self._pass is None else self._pass()
        if current is None:
            current = self._begin_pass()
        try:
            self._take(current, number, parameter)
        except BaseException:
            current.abandon()
            raise

    def _take(self, current: _Pass, number: int, parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        if gradient is not None and gradient.requires_grad:
            raise UsageError(
                f"rank {self._comm.rank}: backward(create_graph=True) cannot differentiate through the "
                "reduction over ranks; use torch.autograd.grad for higher derivatives"
            )
        if current.reduce:
            self._gradients.arrived(number)
        else:
            self._gradients.arrived_early(number)

    def bucket_complete(self) -> None:
        """The hook of a parameter has marked the last gradient of a bucket."""
        self._gradients.reducer.send_complete()

    def _steps(self) -> tuple[Callable[[], None], ...]:
        """How a round ends."""
        gradients, state = self._gradients, self._state
        steps = gradients.flush, gradients.send_values, self._receive
        return steps if state is None else (*steps, state.take_over, state.compare)

    def _receive(self) -> None:
        result = self._gradients.finish()
        if self._state is not None:
            self._state.begin(result)

    def _answer(self, result: RoundResult) -> None:
        """End a round of other ranks, which still have data."""
        if self._state is not None:
            self._state.begin(result)
            self._state.take_over()
            self._state.compare()

    def check_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise UsageError if an optimizer steps with gradients of the model that no round has reduced.

        Gradients of which a hook has told are left out, as those of a no_sync() context: they may be meant.
        """
        parameters, placement, rank = self._gradients.hold(), self._gradients.placement, self._comm.rank
        if not self.has_unreduced:
            last = self._steps_seen.get(optimizer, Moment())
            check_not_given(optimizer, placement.given_since(parameters, last), rank)
        module = None if self._module is None else self._module()
        is_unused = placement.rounds == 0 and not any(p is not None and p.requires_grad for p in parameters)
        check_hooked(optimizer, module, parameters, rank, is_unused=is_unused)
        self._steps_seen[optimizer] = placement.moment(parameters)

    def _begin_pass(self) -> _Pass:
        check_autograd(self._comm.rank)
        self._gradients.cancel()
        current = _Pass(self, self._enabled and self._passes + 1 >= self._passes_per_round)
        self._pass = weakref.ref(current)
        current.queue()
        return current

    def _end_pass(self, reduce: bool) -> None:
        self._pass = None
        if reduce:
            self._passes = 0
            self.rounds += 1
            if self.rounds == 1:
                note_round(self)
        elif self._enabled:
            self._passes += 1


def _check_unhooked(rank: int, name: str, parameter: torch.Tensor) -> None:
    if is_hooked(parameter):
        raise UsageError(
            f"rank {rank}: parameter '{name}' already has gradient hooks; remove() their handle first"
        )


def _register(
    hooks: GradientHooks, number: int, parameter: torch.Tensor
) -> tuple[torch.utils.hooks.RemovableHandle, ...]:
    required = parameter.requires_grad
    parameter.requires_grad_(True)  # torch takes hooks on no others; they stay when it is switched off again
    before = parameter.register_hook(hooks._gradients.tensor_hook(number))
    after = parameter.register_post_accumulate_grad_hook(hooks._gradients.plain.arrival_hook(number, hooks))
    parameter.requires_grad_(required)
    return before, after
