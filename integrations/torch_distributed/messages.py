"""Messages with tags, of a given source or of any, matched as torch.distributed does.

The communicator delivers the messages of a pair of ranks in the order in which they were sent. While receives
wait, one thread probes for messages of those ranks that they may come from, and takes each into the tensor of
the first receive that it fits, or aside until one comes. Sends to a rank leave one after the other, from a
thread for each destination. A message to the rank itself is put aside, or delivered, at once.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from multiring import errors
from multiring import messages as core
from multiring.communicator import Communicator
from multiring.errors import MultiringError
from multiring.torch_distributed.tensors import span_of
from multiring.torch_distributed.watchers import Watchers

if TYPE_CHECKING:
    from multiring.torch_distributed.streams import CallerWork

__all__ = ["Message", "Messenger"]

# How long the thread waits for a message: who waits for one has a deadline of his own.
_FOREVER = 1e8
# Bytes of a message that is all here when it is found: one chunk of a mailbox. A longer one is taken by a
# thread of its own, beside which others are received.
_SHORT = 64 * 1024


class Message:
    """A message on its way, to be waited for.

    Attributes:
        tensor: What is sent, or where it is received.
        peer: Destination or source; None: any source.
        tag: Its tag.
        source: Once it is received, the rank that has sent it; else -1.
        made: What a device has to do before `tensor` has what is sent; None: it has.
        send: Sends it, where it is to be sent.
    """

    def __init__(
        self, tensor: torch.Tensor, peer: int | None, tag: int, late: Callable[[], MultiringError]
    ) -> None:
        self.tensor = tensor
        self.peer = peer
        self.tag = tag
        self.source = -1
        self.made: CallerWork | None = None
        self.send: Callable[[], None] | None = None
        self._late = late
        self._error: MultiringError | None = None
        self._ended = threading.Event()

    def done(self) -> bool:
        """Whether it has been sent or received, or cannot be."""
        return self._ended.is_set()

    def wait(self, timeout: float | None = None) -> None:
        """Waits for it.

        Args:
            timeout: Seconds; None: as long as the group's operations may take.

        Raises:
            MultiringError: What went wrong.
        """
        if not self._ended.wait(timeout):
            raise self._late()
        if self._error is not None:
            raise self._error

    def end(self, error: MultiringError | None = None) -> None:
        """Marks it as done."""
        self._error = error
        self._ended.set()


@dataclass
class _Aside:
    """A message that came before its receive."""

    tag: int
    payload: torch.Tensor | None = None  # None: still on its way
    receive: Message | None = None  # that has come meanwhile


class Messenger:
    """Sends and receives the messages of a process group.

    Args:
        comm: The group's communicator.
        watchers: Where its threads come from.
    """

    def __init__(self, comm: Communicator, watchers: Watchers) -> None:
        self._comm = comm
        self._watchers = watchers
        self._probe = comm.stoppable_probe()
        self._lock = threading.Lock()
        self._outgoing: dict[int, deque[Message]] = {}
        self._sending: set[int] = set()
        self._posted: list[Message] = []
        self._aside: dict[int, deque[_Aside]] = {}
        self._receiving = False
        self._probed: set[int | None] = set()  # sources, as of receives
        self._failure: MultiringError | None = None

    def send(self, tensor: torch.Tensor, made: CallerWork | None, destination: int, tag: int) -> Message:
        """Send a tensor of the host, as it is when the operations have ended that are queued now. It must not
        change before that is done; `made` is that of the message."""
        message = Message(tensor, destination, tag, lambda: self._late("send", destination, tag))
        message.made = made
        if destination == self._comm.rank:
            self._await(made)
            self._comm.await_queued(span_of(tensor))
        else:
            message.send = self._comm.prepared_send(tensor, destination, tag)
        with self._lock:
            if self._failure is not None:
                message.end(self._failure)
            elif destination == self._comm.rank:
                self._deliver_own(tensor.clone(), tag)
                message.end()
            else:
                queue = self._outgoing.setdefault(destination, deque())
                if destination not in self._sending:
                    self._watchers.run(lambda: self._send_all(destination))  # which waits for the lock
                    self._sending.add(destination)
                queue.append(message)
        return message

    def receive(self, tensor: torch.Tensor, source: int | None, tag: int) -> Message:
        """Receive into a tensor of the host, from one rank or from any (None), when the operations have ended
        that are queued now and use its memory."""
        message = Message(tensor, source, tag, lambda: self._late("recv", source, tag))
        self._comm.await_queued(span_of(tensor), is_written=True)
        with self._lock:
            if self._failure is not None:
                message.end(self._failure)
            elif not self._taken_from_aside(message):
                if not self._receiving:
                    self._watchers.run(self._receive_all)  # which waits for the lock
                    self._receiving = True
                elif source not in self._probed:
                    self._probe.stop()  # and begins anew
                self._posted.append(message)
        return message

    def close(self, error: MultiringError) -> None:
        """Ends what is on its way with an error; the communicator is closed."""
        self._fail(error)

    def _send_all(self, destination: int) -> None:
        queue = self._outgoing[destination]
        while True:
            with self._lock:
                if not queue:
                    self._sending.discard(destination)
                    return
                message = queue.popleft()
            try:
                self._await(message.made)
                if message.send is not None:
                    message.send()
                message.end()
            except BaseException as error:
                message.end(self._break_by(error, f"send to rank {destination}"))

    def _await(self, made: CallerWork | None) -> None:
        try:
            if made is not None:
                made.wait(self._comm.timeout, self._raise_failure)
        except errors.TimeoutError as late:
            if self._failure is None:
                self._comm.abort(str(late))  # this rank alone sees it
            raise

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _receive_all(self) -> None:
        """Takes messages as long as a receive waits for any."""
        try:
            while (sources := self._sources()) is not None:
                needed = [each for each in sources if each is not None]
                asked = () if None in sources else needed
                found = self._probe.wait(asked, needed, _FOREVER)
                if found is not None:
                    self._take(found)
        except BaseException as error:
            self._break_by(error, "receive messages")

    def _sources(self) -> set[int | None] | None:
        """Whose messages receives wait for (None among them: any); None: the thread ends."""
        with self._lock:
            self._probed = {each.peer for each in self._posted} - {self._comm.rank}
            if self._comm.size == 1:  # there are messages of its own alone
                self._probed = set()
            self._receiving = self._failure is None and bool(self._probed)
            return self._probed if self._receiving else None

    def _take(self, found: core.Message) -> None:
        with self._lock:
            receive, aside = self._next_for(found.source, found.tag), None
            if receive is None:  # keeps its place among those of its source
                aside = _Aside(found.tag)
                self._aside.setdefault(found.source, deque()).append(aside)
        if found.nbytes <= _SHORT:
            return self._collect(found, receive, aside)
        try:
            self._watchers.run(lambda: self._collect(found, receive, aside))
        except RuntimeError as error:
            self._lose(error, found, receive, aside)

    def _collect(self, found: core.Message, receive: Message | None, aside: _Aside | None) -> None:
        """Receives what was found: for a receive, or aside."""
        try:
            if receive is not None:
                self._comm._receive(found.source, receive.tensor, found.tag, None, 0)
                receive.source = found.source
                receive.end()
            elif aside is not None:
                payload = torch.from_numpy(self._comm.recv(found.source, tag=found.tag))
                with self._lock:
                    aside.payload, receive = payload, aside.receive
                if receive is not None:
                    self._deliver(receive, found.source, payload)
        except BaseException as error:
            self._lose(error, found, receive, aside)

    def _lose(
        self, error: BaseException, found: core.Message, receive: Message | None, aside: _Aside | None
    ) -> None:
        """Ends the group because what was found cannot be received."""
        # From here on no receive is for it.
        fault = self._break_by(error, f"receive the message with tag {found.tag} of rank {found.source}")
        if receive is None and aside is not None:
            receive = aside.receive
        if receive is not None:
            receive.end(fault)

    def _break_by(self, error: BaseException, what: str) -> MultiringError:
        """Ends all messages with the error of a thread, and the group if it does not know of it: nobody else
        would see it. Returns what to tell."""
        if isinstance(error, MultiringError):
            self._fail(error)
            return error
        text = f"rank {self._comm.rank} cannot {what}: {type(error).__name__}: {error}"
        fault = errors.InternalError(text, rank=self._comm.rank, host=self._comm.host)
        fault.__cause__ = error
        self._fail(fault)  # before other threads learn of the abort
        with contextlib.suppress(MultiringError):
            self._comm.abort(text)
        return fault

    # With the lock held.

    def _next_for(self, source: int, tag: int) -> Message | None:
        """The first receive that such a message is for, no longer waiting."""
        for message in self._posted:
            if message.peer in (None, source) and message.tag == tag:
                self._posted.remove(message)
                return message
        return None

    def _taken_from_aside(self, receive: Message) -> bool:
        """Whether its message has come, or is being received."""
        for source in range(self._comm.size) if receive.peer is None else [receive.peer]:
            for index, aside in enumerate(waiting := self._aside.get(source, deque())):
                if aside.tag == receive.tag:
                    del waiting[index]
                    aside.receive = receive
                    if aside.payload is not None:
                        self._deliver(receive, source, aside.payload)
                    return True
        return False

    def _deliver_own(self, payload: torch.Tensor, tag: int) -> None:
        own = self._comm.rank
        receive = self._next_for(own, tag)
        if receive is None:
            self._aside.setdefault(own, deque()).append(_Aside(tag, payload))
            return
        if receive.peer is None:
            self._probe.stop()  # which may have been for this receive alone
        self._deliver(receive, own, payload)

    # With the lock held or not.

    def _deliver(self, message: Message, source: int, payload: torch.Tensor) -> None:
        flat = payload.reshape(-1)
        if message.tensor.dtype == torch.bfloat16 and flat.dtype == torch.uint16:
            flat = flat.view(torch.bfloat16)  # NumPy has no name for it
        if flat.dtype != message.tensor.dtype or flat.numel() != message.tensor.numel():
            text = (
                f"rank {source} sent {flat.numel()} elements of {flat.dtype} with tag {message.tag}, "
                f"and rank {self._comm.rank} receives {message.tensor.numel()} of {message.tensor.dtype}"
            )
            self._comm.abort(text)  # this rank alone sees it
            message.end(errors.MismatchError(text, rank=self._comm.rank, peer=source, operation="recv"))
            return
        message.tensor.copy_(flat.view(message.tensor.shape))
        message.source = source
        message.end()

    def _late(self, what: str, peer: int | None, tag: int) -> MultiringError:
        whom = "any rank" if peer is None else f"rank {peer}"
        return errors.TimeoutError(
            f"{what} with tag {tag} on rank {self._comm.rank} ({self._comm.host}) timed out: {whom} has not "
            f"{'sent such a message' if what == 'recv' else 'received it'}. Look at the output of {whom}, or "
            "wait longer",
            rank=self._comm.rank,
            peer=peer,
            host=self._comm.host,
            operation=what,
        )

    def _fail(self, error: MultiringError) -> None:
        with self._lock:
            self._failure = self._failure or error
            waiting = [*self._posted, *(each for queue in self._outgoing.values() for each in queue)]
            self._posted.clear()
            for queue in self._outgoing.values():
                queue.clear()
        for message in waiting:
            message.end(error)
