"""An optimizer that updates with gradients averaged over ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import chainermn
import numpy as np
from numpy.typing import NDArray

import chainer
from multiring.chainer.communicator import ChainerCommunicator, as_chainer_communicator
from multiring.chainer.gradient_slots import GradientSlots
from multiring.chainer.groups import Group
from multiring.chainer.overlap import watched_gradients
from multiring.chainer.parameters import fill_with_zeros, identities, named_parameters, specifications
from multiring.chainer.state_broadcast import (
    broadcast_optimizer_state,
    broadcast_parameters,
    state_digest,
    sync_buffers,
    training_state,
)
from multiring.chainer.sync_batch_normalization import SyncBatchNormalization
from multiring.errors import UsageError
from multiring.gradients.model_check import check_same
from multiring.gradients.options import ReducerOptions, check_parameters
from multiring.state.buffer_sync import check_mode
from multiring.state.check import StateCheck, compare_state
from multiring.types import BufferMode

__all__ = ["MultiNodeOptimizer"]

Residuals = dict[str, NDArray[Any]]


class MultiNodeOptimizer:
    """Wraps a Chainer optimizer; made by `create_multi_node_optimizer`.

    Everything that is not defined here is the wrapped optimizer's own, to read and to set: `target`, `lr`,
    `add_hook`, `serialize`, `new_epoch`, `loss_scaling` and so on.

    Attributes:
        actual_optimizer: The wrapped optimizer.
        communicator: Communicator of the ranks that train together.
        zero_fill: Whether parameters that have a gradient on no rank get one of zeros before an update.
        overlap: Whether `update(lossfun, ...)` reduces gradients while its backward pass runs.
        needs_broadcast: Whether the next update compares parameters and the optimizer's state over the ranks,
            and broadcasts them if they differ; set at the start and when parameters were added or
            initialised.
    """

    # What is declared here (and in subclasses) belongs to the wrapper, everything else to what it wraps.
    actual_optimizer: chainer.Optimizer
    communicator: ChainerCommunicator
    zero_fill: bool
    overlap: bool
    needs_broadcast: bool
    _options: ReducerOptions
    _buffers: BufferMode
    _check: StateCheck | None  # of the ranks' states; made anew with the buckets
    _slots: GradientSlots | None
    _known: list[tuple[str, int, bool]]  # the parameters that the buckets were made for
    _incomplete: bool  # some of them have no shape yet
    _rounds: int  # reductions, and how many there had been at the last update
    _updated_at: int
    _joining: bool
    _failed: bool  # the last backward pass ended with an exception
    _residuals: list[Residuals]  # what compression has kept back, of each set of buckets that was released

    def __init__(
        self,
        actual_optimizer: chainer.Optimizer,
        communicator: Group,
        options: ReducerOptions,
        *,
        zero_fill: bool,
        overlap: bool,
        buffers: BufferMode = "broadcast",
    ) -> None:
        """See `create_multi_node_optimizer`."""
        if hasattr(actual_optimizer, "actual_optimizer"):
            raise UsageError(
                f"{type(actual_optimizer).__name__} is a multi-node optimizer already: gradients would be "
                "reduced twice; wrap the optimizer of Chainer itself"
            )
        self.actual_optimizer = actual_optimizer
        self.communicator = as_chainer_communicator(communicator)
        check_mode(self.communicator.rank, buffers)
        self._buffers, self._check = buffers, None
        self.zero_fill, self.overlap, self.needs_broadcast = zero_fill, overlap, True
        self._options = options
        self._slots = None
        self._known = []
        self._incomplete = False
        self._rounds, self._updated_at = 0, 0
        self._joining = self._failed = False
        self._residuals = []
        if getattr(actual_optimizer, "target", None) is not None:
            self._plan()

    def setup(self, link: chainer.Link) -> MultiNodeOptimizer:
        """Set the wrapped optimizer up with a link, compared over the ranks. Collective.

        Raises:
            UsageError: A dtype that cannot be reduced.
            MismatchError: The ranks have different parameters or options; names the first difference.
        """
        self.actual_optimizer.setup(link)
        self.close()
        self._residuals = []  # of another model, perhaps
        self._plan()
        return self

    def update(self, lossfun: Any = None, *args: Any, **kwds: Any) -> None:
        """Update the parameters with gradients averaged over ranks. Collective.

        With `lossfun` forward and backward pass are part of it, and gradients are reduced while the backward
        pass runs; without it, what gradients there are (unless `synchronize` has reduced them).

        Where the ranks turn out to hold different parameters or optimizer states (at the first update, or
        when parameters were initialised or added since), all take over those of rank 0, and nothing is
        updated this time: the gradients were those of different models.

        Args:
            lossfun: Computes the loss, a scalar variable, from `args` and `kwds`.
            args: Its arguments.
            kwds: Its keyword arguments.

        Raises:
            MismatchError: The ranks hold different states (see `check_every`).
        """
        loss = None if lossfun is None else lossfun(*args, **kwds)
        if loss is not None:
            self._updated_at = self._rounds  # what synchronize() may have reduced is cleared, too
            if getattr(self.actual_optimizer, "_use_cleargrads", True):
                self.target.cleargrads()
            else:
                self.target.zerograds()
        stale = self._prepare()
        if loss is not None:
            self._backward(loss, overlap=self.overlap and not stale)
            del loss
        if not stale:
            self._step()
        self._updated_at = self._rounds

    def backward(self, loss: chainer.Variable) -> None:
        """Run a backward pass of a loop of one's own, and reduce gradients while it runs. Collective.

        Like `loss.backward()` and `synchronize()`: gradients are added to those that there are, and are
        averages afterwards.

        Args:
            loss: A scalar variable.
        """
        self._prepare_for_gradients()
        if self._slots is not None:
            self._slots.check_cleared()
        self._backward(loss, overlap=self.overlap)
        self._reduce()

    def synchronize(self) -> None:
        """Reduce gradients now: afterwards `parameter.grad` is the average. Collective.

        Only needed where gradients are looked at before `update()`, which reduces them otherwise. Gradients
        that exist on no rank stay None.

        Change them in place afterwards, as in clipping: what is another array counts as new.
        """
        self._prepare_for_gradients()
        if self._slots is not None and not self._slots.is_repeatable and self._rounds != self._updated_at:
            raise UsageError(
                f"rank {self.communicator.rank}: gradients were reduced since the last update, and may hold "
                f"sums; with op='{self._options.op}' and scales use backward(loss), or average and multiply "
                "the loss instead",
                rank=self.communicator.rank,
            )
        self._reduce()

    @contextmanager
    def join(self) -> Iterator[None]:
        """Context of a loop that may have fewer iterations on some ranks than on others. Collective.

        A rank that leaves it answers the updates of the others with zeros until all have left; averages
        divide by the number of ranks that still have data. Then all ranks take over parameters, persistent
        values and the optimizer's state from one that had data to the last. Every rank has to enter it, and
        no other collective may be used inside.

        Raises:
            UsageError: Parameters are not initialised, or the model has synchronised batch normalisation,
                which needs all ranks in every iteration.
        """
        self._check_joinable()
        self._prepare()
        self._joining = True
        try:
            yield
        finally:
            self._joining = False
        if self.communicator.size == 1 or self._slots is None:
            return
        slots = self._slots
        root = slots.join(lambda result: self._keep_equal(slots, result.active.tolist()))
        broadcast_parameters(self.target, root, self.communicator)
        broadcast_optimizer_state(self.actual_optimizer, root, self.communicator)
        if self._check is not None:
            self._check.compare_next()

    def check_state(self) -> None:
        """Compare the state of the ranks, which nothing else does after the last update of a job. Collective.

        Raises:
            MismatchError: They differ.
        """
        state = training_state(self.actual_optimizer, buffers=self._buffers != "local")
        compare_state(self.communicator.plain, state, "this call of check_state()")

    def close(self) -> None:
        """Release the buckets; gradients go on in memory of their own. May be called twice.

        An update after that makes new buckets, and is collective in that; what compression has kept back is
        sent by it.
        """
        self._release()
        self._known = []

    def __getattr__(self, name: str) -> Any:
        if _is_own(type(self), name):
            raise AttributeError(name)
        return getattr(self.actual_optimizer, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Settings are the wrapped optimizer's: `optimizer.lr = 0.1` reaches it."""
        if _is_own(type(self), name):
            object.__setattr__(self, name, value)
        else:
            setattr(self.actual_optimizer, name, value)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.actual_optimizer!r})"

    def __getstate__(self) -> dict[str, Any]:
        raise UsageError("a multi-node optimizer cannot be copied or pickled; serialize() it instead")

    def _step(self) -> None:
        """Make sure that gradients are reduced, and update."""
        is_reduced = self._rounds != self._updated_at
        if is_reduced and self._slots is not None:
            is_reduced = self._slots.is_settled(joining=self._joining)
        if not is_reduced:
            self._reduce()
        self._update_parameters()
        if self._slots is not None:
            self._slots.note_update()

    def _reduce(self) -> None:
        if self._slots is not None:
            self._slots.loss_scale = self.actual_optimizer._loss_scale
            result = self._slots.reduce()
            self._keep_equal(self._slots, result.active.tolist())
        self._rounds += 1

    def _keep_equal(self, slots: GradientSlots, active: list[bool]) -> None:
        """After a reduction: synchronise buffers, and compare the ranks if it is time to. Collective."""
        comm = slots.reducer.comm
        if self._check is None or comm is None or not any(active):
            return
        sync_buffers(self.target, comm, self._buffers, active)
        if self._check.due():
            state = training_state(self.actual_optimizer, buffers=self._buffers != "local")
            self._check.compare(state, active=active[self.communicator.rank])

    def _update_parameters(self) -> None:
        if self.zero_fill:
            fill_with_zeros(named_parameters(self.target))
        self.actual_optimizer.update(None)

    def _backward(self, loss: chainer.Variable, *, overlap: bool) -> None:
        scale = self.actual_optimizer._loss_scale
        watched: Any = nullcontext()
        if overlap and self._slots is not None:
            watched = watched_gradients(loss, self._slots.parameters, self._slots.arrived, scale)
        try:
            with watched:
                loss.backward(loss_scale=scale)
        except BaseException:
            self._failed = True
            raise

    def _prepare(self) -> bool:
        """Follow changes of the model; True if the parameters had to be broadcast. Collective on changes."""
        self._prepare_for_gradients()
        if not self.needs_broadcast:
            return False
        self.needs_broadcast = False
        plain = self.communicator.plain
        digests = plain.allgather_object(state_digest(self.actual_optimizer), name="optimizer state")
        if len(set(digests)) == 1:
            return False
        self.communicator.bcast_data(self.target)
        broadcast_optimizer_state(self.actual_optimizer, 0, plain)
        self._broadcast_buffers()
        return True

    def _broadcast_buffers(self) -> None:
        """All ranks begin with those of rank 0."""
        plain = self.communicator.plain
        if self._buffers != "local" and plain.size > 1:
            sync_buffers(self.target, plain, "broadcast", [True] * plain.size)

    def _prepare_for_gradients(self) -> None:
        if getattr(self.actual_optimizer, "target", None) is None:
            raise UsageError(f"rank {self.communicator.rank}: call setup(link) before the first update")
        if self._failed and self._slots is not None:
            self._slots.cancel()  # what a backward pass that was aborted by an exception has left
        self._failed = False
        changed = identities(named_parameters(self.target)) != self._known
        if changed and self._joining:
            raise UsageError(f"rank {self.communicator.rank}: the model must not change inside of join()")
        if self._incomplete and not self._joining:
            # Ranks may differ in what they have initialised; that is to be an error, and no hang.
            flag = np.array(changed, np.int8)
            changed = bool(self.communicator.plain.allreduce(flag, op="max", name="parameters initialised"))
        if changed:
            self._plan()

    def _plan(self) -> None:
        """Compare the model over ranks and make buckets for what is initialised. Collective."""
        plain = self.communicator.plain
        parameters = named_parameters(self.target)
        if not parameters or any(parameter.is_initialized for parameter in parameters.values()):
            specs = specifications(plain.rank, parameters, self.communicator.dtype_of_gradients)
            check_parameters(plain.rank, specs, self._options)
        entries = [(name, _describe(parameter)) for name, parameter in parameters.items()]
        check_same(plain, entries, "parameters of the model")
        self._broadcast_buffers()
        self._make_slots(parameters)
        own = None if self._slots is None else self._slots.reducer.comm
        self._check = None if own is None else StateCheck(own, self._options.check_every)
        self._known = identities(parameters)
        self._incomplete = not all(known for _, _, known in self._known)
        self.needs_broadcast = True

    def _make_slots(self, parameters: dict[str, chainer.Parameter]) -> None:
        self._release()
        # With one rank and no scaling there is nothing to do: gradients stay where Chainer puts them.
        is_local = self.communicator.size == 1 and self._options.scale == 1.0
        if not is_local and any(parameter.is_initialized for parameter in parameters.values()):
            (self._slots,) = self._new_slots(parameters, 1)

    def _new_slots(self, parameters: dict[str, chainer.Parameter], count: int) -> list[GradientSlots]:
        """Sets of buckets that go on from what compression has kept back in those before them."""
        plain, dtype = self.communicator.plain, self.communicator.dtype_of_gradients
        made = [GradientSlots(parameters, plain, self._options, dtype) for _ in range(count)]
        for slots, residuals in zip(made, self._residuals, strict=False):
            slots.reducer.transfer_residuals(residuals)
        self._residuals = []
        return made

    def _release(self) -> None:
        """Close all buckets, but keep what compression has kept back."""
        slots, self._slots = self._slots, None
        self._close_all([] if slots is None else [slots])

    def _close_all(self, every: Sequence[GradientSlots]) -> None:
        if every:
            self._residuals = [slots.reducer.residuals() for slots in every]
        for slots in every:
            slots.close()

    def _check_joinable(self) -> None:
        rank = self.communicator.rank
        synchronised = SyncBatchNormalization | chainermn.links.MultiNodeBatchNormalization
        if any(isinstance(link, synchronised) for link in self.target.links()):
            raise UsageError(
                f"rank {rank}: join() cannot be used with synchronised batch normalisation, whose statistics "
                "need all ranks in every iteration; give ranks without data empty batches instead"
            )
        if waiting := [name for name, p in named_parameters(self.target).items() if not p.is_initialized]:
            raise UsageError(
                f"rank {rank}: '{waiting[0]}' has no shape yet; run a batch through the model before join()"
            )


def _is_own(kind: type, name: str) -> bool:
    return any(name in vars(base).get("__annotations__", ()) for base in kind.__mro__)


def _describe(parameter: chainer.Parameter) -> str:
    if not parameter.is_initialized:
        return "not initialised"
    return f"{parameter.dtype} {tuple(parameter.shape)}"
