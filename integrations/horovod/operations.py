"""Named operations that fail one at a time, and ranks that have joined.

A `NamedQueue` breaks with the first mismatch. It finds a mismatch before any of the operation's data moves,
and all ranks run its operations one after the other, in one order: what came before is complete on every
rank, and what comes after has not begun on any. So the ranks meet, tell each other what is left, fail what
does not match, and submit the rest to a new queue.

A rank may wait in one set while another waits for it in a meeting of a second set, so ranks that wait look
after all of their sets. In a meeting they look after sets that were made before only: whatever the order in
which sets break, the first of them that is broken goes on, and then the next.

Ranks that have joined meet the others as well; see `joining`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from multiring import Communicator, errors
from multiring.horovod import timeline
from multiring.horovod.exceptions import HorovodInternalError
from multiring.horovod.joining import Joining, active_ranks, awaited, refusals
from multiring.horovod.pending import (
    LOOK_EVERY,
    Key,
    Pending,
    RankReport,
    Start,
    call_meanwhile,
    is_done,
    settle,
    whole_of,
)
from multiring.horovod.pending_table import PendingTable
from multiring.horovod.request import Request, mismatch
from multiring.work import Work

__all__ = ["NOT_YET", "Operations", "Pending", "Start"]

NOT_YET = object()
"""The result of an operation that has not ended."""

_IN_FLIGHT = (
    "Requested to allreduce, allgather, or broadcast a tensor with the same name as another tensor that is "
    "currently being processed. If you want to request another tensor, use a different tensor name."
)


class Operations:
    """The named operations of the ranks of one process set.

    Attributes:
        rank: Rank of this process in the set.
        size: Number of ranks of the set.
        host: Name of this rank's host.
        joining: Whether this rank has joined.
    """

    def __init__(self, comm: Communicator, title: str, world: Operations | None = None) -> None:
        """Collective over `comm`.

        Args:
            comm: The ranks.
            title: Name of the set in messages.
            world: The operations of all ranks; None: these are they.
        """
        self.rank, self.size, self.host = comm.rank, comm.size, comm.host
        self.joining = Joining()
        self._title = title
        self._base = whole_of(comm)
        self._queue = self._base.named_queue(title)
        self._signal = whole_of(self._base)
        self._world = world or self
        # Of this rank, in the order in which they were made.
        self._sets: list[Operations] = [] if world is None else world._sets
        self._lock = threading.RLock()
        self._pending = PendingTable()
        self._meetings = 0
        self._sets.append(self)  # last: the thread that waits meanwhile looks at it from here on

    def auto_name(self) -> str:
        """As `PendingTable.auto_name`."""
        with self._lock:
            return self._pending.auto_name(self.rank)

    def await_queued(self, x: Any, *, is_written: bool = False) -> None:
        """Wait until no operation under way writes to the contiguous array `x`, or, with `is_written`, reads
        it."""
        self._queue.await_queued(x, is_written=is_written)

    def submit(self, request: Request, start: Start) -> Pending:
        """Submits an operation. Waits for nothing but, after a mismatch, for the other ranks, and for an
        operation of the same name that was forgotten.

        Args:
            request: What is asked for.
            start: Submits it to a queue; may be called again, before any of its data has moved.

        Raises:
            ValueError: An operation of this name is in flight, or an argument is not accepted.
            HorovodInternalError: A rank is lost.
        """
        name = request.name
        with self._lock:
            before = self._pending.last_of(name)
        if before is not None and before.is_forgotten:
            with suppress(HorovodInternalError):
                self.wait(before)
        with self._lock:
            before = self._pending.last_of(name)
            if before is not None and before.request.kind == request.kind and not is_done(before):
                raise ValueError(f"{_IN_FLIGHT} (tensor '{name}', rank {self.rank})")
            pending = Pending(request, self._pending.next_key(name), start)
            try:
                pending.work = start(self._queue)
            except errors.UsageError:
                raise  # a ValueError; nothing was sent
            except errors.MultiringError as error:
                self._pending.add(pending)
                try:
                    self._recover(pending, None, error)
                except HorovodInternalError:
                    if self._drop(pending):
                        raise
            else:
                self._pending.add(pending)
            if timeline.active is not None:
                timeline.active.add(pending)
            return pending

    def is_done(self, pending: Pending) -> bool:
        """Whether `wait` would return at once. Waits for the other ranks where one of them has joined, or is
        in a meeting of any set."""
        if pending.work is not None and pending.work.done():
            return True
        if not pending.refusal and pending.work is None:
            self._recover(pending, None, errors.AbortedError("it could not be submitted"))
        if not pending.refusal and not is_done(pending):
            self._look_after(self._sets)
        return bool(pending.refusal) or is_done(pending)

    def wait(self, pending: Pending) -> Any:
        """The result of an operation.

        Raises:
            HorovodInternalError: It has failed, on all ranks.
        """
        work = pending.work
        if work is not None and not pending.refusal and not self._world._signal.is_broken:
            with suppress(errors.MultiringError):  # found again by `take`
                return self._ended(pending, work.wait(LOOK_EVERY))  # most have, by then
        while (result := self.take(pending)) is NOT_YET:
            self.look(pending, LOOK_EVERY)
        return result

    def take(self, pending: Pending) -> Any:
        """The result of an operation that has ended; NOT_YET if it has not.

        Waits for nothing but, after a mismatch or where one has joined, for the other ranks.

        Raises:
            HorovodInternalError: It has failed, on all ranks. Nothing reads or writes its memory any longer.
        """
        try:
            return self._take(pending)
        except HorovodInternalError:
            if self._drop(pending):
                raise
            return NOT_YET  # the ranks cannot meet: the queue ends what is in progress

    def _take(self, pending: Pending) -> Any:
        """As `take`, but raises also while the operation is in progress."""
        if not self.is_done(pending):
            return NOT_YET
        if pending.refusal:
            raise HorovodInternalError(pending.refusal)
        work = pending.work
        assert work is not None
        if not work.done():
            return NOT_YET  # another thread has submitted it anew since
        try:
            result = work.wait(0)
        except errors.MultiringError as error:
            self._recover(pending, work, error)
            return NOT_YET  # it was submitted anew, or refused
        return self._ended(pending, result)

    def look(self, pending: Pending, seconds: float) -> None:
        """Waits for an operation so long at most."""
        work = pending.work
        if work is not None and not pending.refusal:
            with suppress(errors.MultiringError):  # its own is found by `take`
                work.wait(seconds)

    def join(self) -> int:
        """Contributes zeros to the allreduces of the other ranks until all have joined, and takes part
        meanwhile in what other sets wait for.

        Returns:
            The rank that was the last to join.

        Raises:
            HorovodInternalError: A rank is lost.
        """
        for pending in self._pending.values():
            with suppress(HorovodInternalError):  # raised where its handle is synchronised
                self.wait(pending)
        with self._lock:
            self.joining.since = self._meetings
            if not self._signal.is_broken:
                self._signal.abort("has joined")
        while self.joining.since is not None:
            self._look_after(self._sets)
        return self.joining.last

    def meanwhile(self, call: Callable[[], Any]) -> Any:
        """The result of `call`, a collective of all ranks; takes part meanwhile in what sets wait for.

        Raises:
            HorovodInternalError: A rank is lost.
        """
        return call_meanwhile(call, lambda: self._look_after(self._sets))

    def abort(self, message: str) -> None:
        """Fail all operations of the set on all ranks, from now on, with an error of this rank."""
        self._base.abort(message)

    def close(self) -> None:
        """Ends this rank's part; what is pending fails. No collective."""
        if self in self._sets:
            self._sets.remove(self)
        self._base.close()

    def _ended(self, pending: Pending, result: Any) -> Any:
        with self._lock:
            self._pending.remove(pending)
        return result

    def _drop(self, pending: Pending) -> bool:
        """Let go of an operation that has failed, so that no meeting submits it again: its memory is the
        caller's from then on. Return whether it has ended."""
        with self._lock:
            if pending.work is not None and not pending.work.done():
                return False
            self._pending.remove(pending)
            return True

    def _has_submitted(self, key: Key) -> bool:
        """Whether this rank has submitted an operation, or zeros for it, which may have ended long ago."""
        return self._pending.has_submitted(key) or self.joining.has_given(key)

    def _look_after(self, sets: list[Operations]) -> None:
        """Meets the other ranks if one of them has joined, and those of sets that a mismatch has broken. What
        fails is raised where its handle is synchronised."""
        self._world._attend()
        for each in list(sets):
            if each is not self and each._queue.is_broken and not each._base.is_broken:
                with suppress(HorovodInternalError):
                    each._recover_any()

    def _recover_any(self) -> None:
        """Meets the other ranks where an operation has failed and no thread has waited for it yet."""
        for pending in self._pending.values():
            work = pending.work
            if work is None or not work.done():
                continue
            try:
                work.wait(0)
            except errors.MultiringError as error:
                self._recover(pending, work, error)
                return

    def _gather(self, value: Any) -> list[Any]:
        """The values of all ranks of the set, in a meeting."""
        values: list[Any] = self._meanwhile(lambda: self._base.allgather_object(value))
        return values

    def _meanwhile(self, call: Callable[[], Any]) -> Any:
        """The result of a collective of this set, in a meeting."""
        earlier = self._sets[: self._sets.index(self)] if self in self._sets else []
        if not earlier:
            return call()
        try:
            return call_meanwhile(call, lambda: self._look_after(earlier))
        except BaseException:
            # `call` may go on in its thread: it ends, and no other collective begins beside it.
            with suppress(errors.MultiringError):
                self._base.abort("a rank has left the recovery from a mismatch")
            raise

    def _attend(self) -> None:
        """Meets the other ranks if one of them has joined."""
        if self._signal.is_broken:
            with self._lock:
                if self._signal.is_broken:
                    self._meet()

    def _recover(self, pending: Pending, failed: Work | None, error: errors.MultiringError) -> None:
        """After an error: meets the other ranks if they may go on.

        Args:
            pending: The operation that has shown it.
            failed: Its work; None: it could not be submitted.
            error: What was raised.

        Raises:
            HorovodInternalError: They may not.
        """
        with self._lock:
            if pending.work is not failed or pending.refusal:
                return  # another thread was here first
            lost = errors.PeerLostError | errors.TimeoutError | errors.InternalError | errors.UsageError
            if isinstance(error, lost) or self._base.is_broken:
                raise HorovodInternalError(str(error)) from error
            self._meet()

    def _meet(self) -> None:
        """Meets the other ranks."""
        try:
            self._hold_meeting()
        except errors.MultiringError as error:
            raise HorovodInternalError(str(error)) from error

    def _hold_meeting(self) -> None:
        self._pending.prune()
        unnamed, requests = self._pending.unnamed, self._pending.requests()
        mine = RankReport(self._queue.is_broken, self.joining.since, unnamed, requests)
        reports: list[RankReport] = self._gather(mine)
        self._meetings += 1
        if any(each.is_broken for each in reports):
            for each in self._pending.values():  # the error reaches all of them
                settle(each)
            self._renew({})
            return
        if active := active_ranks(reports):
            self._serve(active, reports)
            return
        self.joining.end(reports)
        self._pending.unnamed = max(each.unnamed for each in reports)  # those that went on have counted on
        self._signal.close()
        self._signal = whole_of(self._base)

    def _serve(self, active: Mapping[int, RankReport], reports: list[RankReport]) -> None:
        """The ranks that have joined take part in what all others wait for."""
        ready = awaited(active) if self.joining.since is not None else set()
        lacking = {key for key in ready if not self._has_submitted(key)}
        wanted = sorted(set().union(*self._gather(lacking)))
        if refused := refusals(wanted, active):
            self._finish_what_can({key for each in reports for key in each.pending})
            self._renew(refused)
            return
        source = next(iter(active.values()))
        for key in wanted:
            if key in lacking:
                pending = self.joining.contribution(source.pending[key], key)
                self._pending.add(pending)
                self._restart(pending)

    def _finish_what_can(self, keys: set[Key]) -> None:
        """Waits for those operations that all ranks have submitted."""
        submitted = {key for key in keys if self._has_submitted(key)}
        everywhere = set.intersection(*self._gather(submitted))
        for pending in self._pending.values():
            if pending.key in everywhere:
                settle(pending)

    def _renew(self, refusals: Mapping[Key, str]) -> None:
        """Makes a new queue, refuses what does not match, and submits what is left.

        Called when nothing is in progress: what is pending has not begun on any rank.
        """
        for key in refusals:
            self._pending.count(key)
        self._pending.prune()
        by_rank: list[dict[Key, Request]] = self._gather(self._pending.requests())
        self._queue.close()
        self._queue = self._meanwhile(lambda: self._base.named_queue(self._title))
        for pending in self._pending.values():
            key = pending.key
            requests = {rank: each[key] for rank, each in enumerate(by_rank) if key in each}
            text = mismatch(requests) if len(requests) == self.size else ""
            pending.refusal = refusals.get(key, "") or text
            if pending.refusal:
                self._pending.remove(pending)
            else:
                self._restart(pending)

    def _restart(self, pending: Pending) -> None:
        """Submits an operation to the queue that there is now.

        Where another mismatch has broken that one already, its work stays what it was, and the ranks meet
        again when it is waited for.
        """
        with suppress(errors.MultiringError):
            pending.work = pending.start(self._queue)
