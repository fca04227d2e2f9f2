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
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from multiring import Communicator, errors
from multiring.horovod import timeline
from multiring.horovod.exceptions import HorovodInternalError
from multiring.horovod.joining import Joining, active_ranks, awaited, refusals
from multiring.horovod.pending import (
    LOOK_EVERY,
    UNNAMED,
    Key,
    Pending,
    RankReport,
    Start,
    auto_number,
    call_meanwhile,
    is_done,
    settle,
    whole_of,
)
from multiring.horovod.request import Request, mismatch
from multiring.work import Work

__all__ = ["NOT_YET", "Operations", "Pending", "Start"]

NOT_YET = object()
"""The result of an operation that has not ended."""

_PRUNE_AT = 64
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
        self._pending: dict[Key, Pending] = {}
        self._counts: Counter[str] = Counter()  # of those with a name
        self._unnamed = 0
        self._of_last_number: set[Key] = set()  # operations whose names have the number `_unnamed`
        self._meetings = 0
        self._sets.append(self)  # last: the thread that waits meanwhile looks at it from here on

    def auto_name(self) -> str:
        """Return a name for an operation that has none: a counter, the same on ranks that call the same.

        Names of several operations of one call may begin with it: `f"{name}.{k}"`.
        """
        with self._lock:
            self._unnamed += 1
            self._of_last_number.clear()
            return f"{UNNAMED}{self._unnamed}"

    def await_queued(self, x: Any) -> None:
        """Wait until no operation under way writes to the contiguous array `x`."""
        self._queue.await_queued(x)

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
        if (forgotten := self._last_of(name)) is not None and forgotten.is_forgotten:
            with suppress(HorovodInternalError):
                self.wait(forgotten)
        with self._lock:
            before = self._last_of(name)
            if before is not None and before.request.kind == request.kind and not is_done(before):
                raise ValueError(f"{_IN_FLIGHT} (tensor '{name}', rank {self.rank})")
            if len(self._pending) >= _PRUNE_AT:
                self._prune()
            pending = Pending(request, (name, self._counts[name]), start)
            try:
                pending.work = start(self._queue)
            except errors.UsageError:
                raise  # a ValueError; nothing was sent
            except errors.MultiringError as error:
                self._add(pending)
                try:
                    self._recover(pending, None, error)
                except HorovodInternalError:
                    if self._drop(pending):
                        raise
            else:
                self._add(pending)
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
        for pending in list(self._pending.values()):
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

    def _last_of(self, name: str) -> Pending | None:
        """Return the last operation of a name; None: there was none, or its result was taken."""
        with self._lock:
            return self._pending.get((name, self._counts[name] - 1))

    def _add(self, pending: Pending) -> None:
        self._pending[pending.key] = pending
        number = auto_number(pending.key[0])
        if number is None:  # the others come once each, and would be counted for ever
            self._counts[pending.key[0]] += 1
        elif number == self._unnamed:
            self._of_last_number.add(pending.key)

    def _ended(self, pending: Pending, result: Any) -> Any:
        with self._lock:
            self._pending.pop(pending.key, None)
        return result

    def _drop(self, pending: Pending) -> bool:
        """Let go of an operation that has failed, so that no meeting submits it again: its memory is the
        caller's from then on. Return whether it has ended."""
        with self._lock:
            if pending.work is not None and not pending.work.done():
                return False
            if self._pending.get(pending.key) is pending:
                del self._pending[pending.key]
            return True

    def _has_submitted(self, key: Key) -> bool:
        """Whether this rank has submitted an operation, which may have ended long ago."""
        name, before = key
        number = auto_number(name)
        if number is not None:
            is_submitted = number < self._unnamed or key in self._of_last_number
            return is_submitted or self.joining.has_given(key)
        return self._counts[name] > before

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
        for pending in list(self._pending.values()):
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

    def _prune(self) -> None:
        """Forgets what has ended well."""
        for key, pending in list(self._pending.items()):
            if not is_done(pending):
                continue
            assert pending.work is not None
            with suppress(errors.MultiringError):
                pending.work.wait()
                del self._pending[key]

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
        self._prune()
        pending = {key: each.request for key, each in self._pending.items()}
        mine = RankReport(self._queue.is_broken, self.joining.since, self._unnamed, pending)
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
        self._unnamed = max(each.unnamed for each in reports)  # those that went on have counted on
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
                self._add(pending)
                self._restart(pending)

    def _finish_what_can(self, keys: set[Key]) -> None:
        """Waits for those operations that all ranks have submitted."""
        submitted = {key for key in keys if self._has_submitted(key)}
        everywhere = set.intersection(*self._gather(submitted))
        for key in everywhere & self._pending.keys():
            settle(self._pending[key])

    def _renew(self, refusals: Mapping[Key, str]) -> None:
        """Makes a new queue, refuses what does not match, and submits what is left.

        Called when nothing is in progress: what is pending has not begun on any rank.
        """
        self._prune()
        left = {key: each.request for key, each in self._pending.items()}
        by_rank: list[dict[Key, Request]] = self._gather(left)
        self._queue.close()
        self._queue = self._meanwhile(lambda: self._base.named_queue(self._title))
        for key, pending in list(self._pending.items()):
            requests = {rank: each[key] for rank, each in enumerate(by_rank) if key in each}
            text = mismatch(requests) if len(requests) == self.size else ""
            pending.refusal = refusals.get(key, "") or text
            if pending.refusal:
                del self._pending[key]
            else:
                self._restart(pending)

    def _restart(self, pending: Pending) -> None:
        """Submits an operation to the queue that there is now.

        Where another mismatch has broken that one already, its work stays what it was, and the ranks meet
        again when it is waited for.
        """
        with suppress(errors.MultiringError):
            pending.work = pending.start(self._queue)
