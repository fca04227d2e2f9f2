"""The gradients of one model, reduced over ranks while the backward pass still runs.

An adapter tells which parameters there are (`ParameterSpec`) and when a gradient is there (`mark_ready`). The
reducer sends a bucket as soon as its last gradient is there, but never before the buckets in front of it: the
order of collectives is the same on every rank whatever the timing. When a bucket leaves, the adapter is asked
for each of its gradients (`GradientSource.fetch`). One pass over all buckets is a *round*; `finish` ends it.
A gradient that a rank lacks counts as zeros.

After the first round the buckets are planned anew in the order in which gradients really arrived on rank 0.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from multiring import _core
from multiring.arrays import multiply
from multiring.errors import InternalError
from multiring.gradients.bucket_exchange import wait_for
from multiring.gradients.bucket_memory import BucketMemory, Bytes, numpy_array
from multiring.gradients.bucketing import Bucket, ParameterSpec
from multiring.gradients.departure import Departure
from multiring.gradients.model_check import check_same
from multiring.gradients.options import ReducerOptions, check_interval, check_parameters
from multiring.gradients.participation import answer_rounds
from multiring.gradients.refusals import cleared_too_late, second_gradient
from multiring.gradients.round import Round
from multiring.gradients.same_data import SameDataCheck
from multiring.gradients.source import IN_SLOT, Gradient, GradientSource, RoundResult
from multiring.gradients.states import GradientState, GradientStates
from multiring.gradients.top_k import TopKExchange, make_exchange

if TYPE_CHECKING:
    from multiring.communicator import Communicator
    from multiring.work import Work

__all__ = ["GradientReducer"]

_COMPLETE, _SECOND = 1, 2  # what `Arrivals.mark` finds


class GradientReducer:
    """Plans buckets in symmetric memory and reduces them. Creation and `close` are collective.

    The reducer works on a communicator of its own, so that several models, and whatever else the program
    sends meanwhile, cannot get between its buckets. With one rank nothing is sent.

    Attributes:
        specs: The parameters.
        options: How they are reduced.
        states: Of this rank's gradients, to be read.
        plan: The current buckets.
        generation: Grows when the buckets are planned anew; slots have moved then, with their contents.
    """

    def __init__(
        self,
        comm: Communicator,
        specs: Sequence[ParameterSpec],
        options: ReducerOptions,
        source: GradientSource,
        *,
        as_array: Callable[[Bytes, str], Any] = numpy_array,
    ) -> None:
        """Compare the model over ranks and allocate the buckets.

        Args:
            comm: Ranks that train together.
            specs: The parameters, in the same order on every rank.
            options: How to reduce.
            source: The adapter, which keeps the reducer. It is asked for gradients when their bucket leaves:
                one after the other they take half as long as each in the middle of a backward pass, which
                fills the caches with others.
            as_array: Makes an array that `comm.allreduce` accepts of bytes and a dtype.

        Raises:
            UsageError: No parameters, names that repeat, a dtype that cannot be reduced, an impossible scale.
            MismatchError: The ranks have different parameters or options.
        """
        self.options = options
        self.specs = tuple(specs)
        check_parameters(comm.rank, self.specs, options)
        self.check_same(comm)
        self._rank, self._size = comm.rank, comm.size
        self._comm = comm.split(0) if comm.size > 1 else None
        self._as_array = as_array
        # A cycle would keep the buckets of a dropped model until the garbage collector comes.
        self._source = weakref.ref(source)
        self.states = GradientStates(len(self.specs))
        self._arrivals = _core.Arrivals(self.states.all)
        self._is_first_round = True  # which has not sent all
        self._round: Round | None = None
        # Layers are usually registered in forward order, so gradients arrive last to first.
        self.plan = options.plan(self.specs, range(len(self.specs) - 1, -1, -1), self._size)
        self.generation = 0
        self._memory = BucketMemory(self._comm, self.plan, self.specs, options, as_array)
        self._arrivals.set_buckets(self._memory.members)
        self._departure = Departure(comm.rank, self.specs, self.states, self._arrivals, self._memory)
        self._exchange = make_exchange(self._comm, self._memory, self.specs, options)
        self._same_data = SameDataCheck(self._comm, check_interval(comm.rank, options.check_every))

    def check_same(self, comm: Communicator) -> None:
        """Raise MismatchError unless all ranks have the same parameters and options here. Collective."""
        entries = [(spec.name, spec.describe()) for spec in self.specs]
        check_same(comm, [*entries, ("options", repr(asdict(self.options)))], "parameters of the model")

    @property
    def comm(self) -> Communicator | None:
        """The reducer's own communicator; None with one rank."""
        return self._comm

    @property
    def arrivals(self) -> _core.Arrivals:
        """What native hooks mark."""
        return self._arrivals

    @property
    def is_open(self) -> bool:
        """Whether a round has begun and not ended."""
        return self._round is not None

    @property
    def has_unreduced(self) -> bool:
        """Whether this rank has gradients that no finished round contains."""
        return self.states.has_new

    def slot(self, index: int) -> Bytes:
        """Memory of one gradient. Valid until `generation` changes. Shape (nbytes,)."""
        return self._memory.slot(index)

    @property
    def views(self) -> list[NDArray[Any]]:
        """All slots as NumPy arrays of the parameters' shapes; another list when `generation` has changed."""
        return self._memory.views

    def is_pending(self, index: int) -> bool:
        """Whether this rank has a gradient that a later round is to contain."""
        return self.states[index] is GradientState.PENDING

    def is_ready(self, index: int) -> bool:
        """Whether the gradient is ready or sent in the round under way: its slot may be in use."""
        return self.states.is_ready(index)

    def mark_pending(self, index: int) -> None:
        """A gradient was accumulated, that a later round is to contain, which asks for it."""
        if not self.is_ready(index):
            self.states[index] = GradientState.PENDING

    def mark_ready(self, index: int) -> None:
        """The gradient is final for this round. Sends the buckets that are complete.

        Args:
            index: Which parameter's.

        Raises:
            UsageError: It has already been sent in this round, or two gradients of a bucket that leaves are
                one array.
        """
        if self._round is None:
            self._begin()
        found = self._arrivals.mark(index)
        if found == _COMPLETE:
            self.send_complete()
        elif found == _SECOND:
            raise second_gradient(self._rank, self.specs[index].name)

    def send_complete(self) -> None:
        """Send the buckets that are complete, where a native hook has marked the last gradient of one."""
        current, count = self._round or self._begin(), len(self.plan.buckets)
        while len(current.works) < count and self._arrivals.is_complete(len(current.works)):
            self._send(current, joined=False)

    def flush(self, *, joined: bool = False) -> None:
        """Send all buckets that have not left, with what the source has for them.

        A program with several reducers flushes all before it finishes one: ranks may then finish them in
        any order.

        Args:
            joined: This rank has no data any more and contributes zeros.
        """
        current = self._round or self._begin()
        for _ in self.plan.buckets[len(current.works) :]:
            self._send(current, joined=joined)
        if self._comm is not None and self._is_first_round:
            arrived = self._arrivals.order()
            rest = sorted(set(range(len(self.specs))) - set(arrived), reverse=True)
            order = np.array([*arrived, *rest], dtype=np.int64)
            name = f"{self.options.name}: order of arrival"
            current.order = (order, self._comm.broadcast_async(order, root=0, out=order, name=name))
        self._is_first_round = False
        self._arrivals.stop_recording()
        self._same_data.send()

    def finish(self, *, joined: bool = False) -> RoundResult:
        """End the round: `flush` and wait for all buckets. Collective.

        Afterwards slots hold reduced gradients; where no rank had a new gradient, what this rank had is
        unchanged.

        Args:
            joined: As for `flush`.

        Raises:
            MultiringError: The communication failed; the round is over and the gradients are undefined.
        """
        try:
            self.flush(joined=joined)
            current = self._round or self._begin()
            result = self._collect(current)
        finally:
            self._round = None
            self._arrivals.end()
            self.states.forget_new()
        self.states.set_reduced(result.produced)
        self._same_data.end_round()
        for index, kept in current.kept.items():
            if not result.produced[index]:
                self._memory.write(index, current.elsewhere, kept)
        source = None if joined else self._source()
        if source is not None:
            for index in current.absent:
                if result.produced[index]:
                    source.publish(index)
        if current.order is not None:
            self._follow(*current.order, current.elsewhere)
        return result

    def join(self, after_round: Callable[[RoundResult], None] | None = None) -> int:
        """Answer the rounds of the ranks that still have data, with zeros, until no rank has. Collective.

        Args:
            after_round: Called after each round, to answer what the adapter itself sends then.

        Returns:
            A rank that had data to the end: the one to copy the state from. The same on every rank.
        """
        if self._comm is None:
            return 0

        def answer() -> NDArray[np.bool_]:
            result = self.finish(joined=True)
            if after_round is not None:
                after_round(result)
            return result.active

        return answer_rounds(self._comm, answer)

    def cancel(self) -> None:
        """Forget the gradients of an aborted backward pass, so that the next one starts afresh.

        Buckets that have already left are waited for: their memory is in use until then.
        """
        current, self._round = self._round, None
        self.states.forget_new()
        self._arrivals.end()
        self._arrivals.clear_order()
        if current is None:
            return
        wait_for(current.works)
        if current.order is not None:
            self._follow(*current.order, current.elsewhere)

    def clear(self) -> None:
        """The program has cleared its gradients.

        Raises:
            UsageError: One of them was ready in the round under way, and may have left.
        """
        if (index := self.states.first_ready()) is not None:
            raise cleared_too_late(self._rank, self.specs[index].name)
        self.states.clear()

    @property
    def has_arrived(self) -> bool:
        """Whether nothing that was sent is on its way any more."""
        last = None if self._round is None else self._round.last
        return last is None or last.done()

    def await_sent(self, timeout: float) -> None:
        """Wait for what has been sent, and leave it where it is. Raises MultiringError: the communication
        failed, or (TimeoutError) `timeout` seconds have passed."""
        last = None if self._round is None else self._round.last
        if last is not None:
            last.wait(timeout)

    def residuals(self) -> dict[str, NDArray[Any]]:
        """What compression has kept back of this rank's gradients, times prescale: copies by the parameters'
        names, flat, in the order of the elements in the slots. Empty before the first round."""
        exchange = self._exchange
        return exchange.kept() if isinstance(exchange, TopKExchange) else {}

    def load_residuals(
        self, residuals: Mapping[str, NDArray[Any]], idle: Sequence[ParameterSpec] = ()
    ) -> None:
        """Replace all residuals by what `residuals` has given. Local; not while a round is open.

        Args:
            residuals: By the parameters' names.
            idle: Parameters of the model that take no part now, whose residuals wait in `residuals`.

        Raises:
            UsageError: A parameter is not known, or has another number of elements.
        """
        if isinstance(self._exchange, TopKExchange):
            self._exchange.load(residuals, idle)

    def transfer_residuals(self, residuals: Mapping[str, NDArray[Any]]) -> None:
        """Begin with the residuals of the reducer before this one: what fits, and of parameters that this one
        does not have. Local."""
        if isinstance(self._exchange, TopKExchange):
            self._exchange.transfer_residuals(residuals)

    def close(self) -> None:
        """Release the communicator and the buckets. May be called twice."""
        self._round = None
        self._arrivals.end()
        comm, self._comm = self._comm, None
        if comm is not None:
            self._exchange = None
            del self._memory, self._departure
            comm.close()

    def _begin(self) -> Round:
        self._round = Round()
        self._arrivals.begin()
        self._same_data.begin_round()
        return self._round

    def _send(self, current: Round, *, joined: bool) -> None:
        """Let the next bucket leave."""
        number, options = len(current.works), self.options
        bucket = self.plan.buckets[number]
        source = None if joined else self._source()
        if source is None and not joined:
            raise InternalError(f"rank {self._rank}: the source of the gradients is gone before its reducer")
        produced = self._departure.fetch(current, number, source)
        self._same_data.add(self._memory.read(slot.index, current.elsewhere) for slot in bucket.slots)
        if self._exchange is None:
            self._memory.raise_flags(number, produced, not joined)
            if options.scale != 1.0:
                self._multiply(current, bucket, options.scale)
            current.works.append(None)
            return
        work = self._exchange.send(number, current.elsewhere, produced, not joined, current.kept)
        current.works.append(work)

    def _multiply(self, current: Round, bucket: Bucket, factor: float) -> None:
        for slot in bucket.slots:
            data = self._memory.read(slot.index, current.elsewhere)
            multiply(self._as_array(data, bucket.dtype), factor)
            if current.elsewhere.get(slot.index, IN_SLOT).device >= 0:
                self._memory.write(slot.index, current.elsewhere, data)

    def _collect(self, current: Round) -> RoundResult:
        """Wait for the buckets, read their flags, and correct the average where ranks have joined."""
        produced = np.zeros(len(self.specs), dtype=np.bool_)
        active = np.ones(self._size, dtype=np.bool_)
        wait_for(current.works)
        for number, (bucket, work) in enumerate(zip(self.plan.buckets, current.works, strict=True)):
            if self._exchange is None or work is None:
                slots, active = self._memory.read_flags(number)
            else:
                slots, active = self._exchange.receive(number, current.elsewhere, work)
            produced[self._memory.indices[number]] = slots
            count = int(np.count_nonzero(active))
            if self.options.op == "average" and 0 < count < self._size:
                # The core divided by the number of all ranks.
                self._multiply(current, bucket, self._size / count)
        return RoundResult(produced, active)

    def _follow(self, order: NDArray[np.int64], work: Work, elsewhere: Mapping[int, Gradient]) -> None:
        """After the first round: order the buckets as gradients arrived on rank 0."""
        work.wait()
        plan = self.options.plan(self.specs, order.tolist(), self._size)
        if plan != self.plan:
            self.plan = plan
            self.generation += 1
            self._memory.rearrange(plan, unused=elsewhere.keys())
            self._arrivals.set_buckets(self._memory.members)
