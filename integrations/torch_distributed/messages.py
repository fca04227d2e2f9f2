"""Messages with tags, of a given source or of any, matched as torch.distributed does.

The communicator delivers the messages of a pair of ranks in the order in which they were sent, and compares
tags. Here, each message goes with a header that has its tag before it. While a receive waits that it might be
for, a thread for each source takes the next header, and then the message: into the tensor of the first
receive that it fits, or aside until one comes. Sends to a rank leave one after the other, from a thread for
each destination. A message to the rank itself is put aside, or delivered, at once.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

import numpy as np
import torch

from multiring import errors
from multiring.communicator import Communicator
from multiring.errors import MultiringError
from multiring.torch_distributed.watchers import Watchers

__all__ = ["Message", "Messenger"]

# How long a thread waits for the next header of a rank that may have nothing to say: who waits for it has a
# deadline of his own.
_FOREVER = 1e8
_TICK = 0.5


class Message:
    """A message on its way, to be waited for.

    Attributes:
        tensor: What is sent, or where it is received.
        peer: Destination or source; None: any source.
        tag: Its tag.
        source: Once it is received, the rank that has sent it; else -1.
    """

    def __init__(
        self, tensor: torch.Tensor, peer: int | None, tag: int, late: Callable[[], MultiringError]
    ) -> None:
        self.tensor = tensor
        self.peer = peer
        self.tag = tag
        self.source = -1
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


class Messenger:
    """Sends and receives the messages of a process group.

    Args:
        comm: The group's communicator.
        watchers: Where its threads come from.
        timeout: Seconds that a receive may wait.
    """

    def __init__(self, comm: Communicator, watchers: Watchers, timeout: float) -> None:
        self._comm = comm
        self._watchers = watchers
        self.timeout = timeout
        self._changed = threading.Condition()
        self._outgoing: dict[int, deque[Message]] = {}
        self._sending: set[int] = set()
        self._posted: list[Message] = []
        self._aside: dict[int, deque[tuple[int, torch.Tensor]]] = {}
        self._taking: set[int] = set()
        self._failure: MultiringError | None = None

    def send(self, tensor: torch.Tensor, destination: int, tag: int) -> Message:
        """Sends a contiguous tensor, which must not change before that is done."""
        message = Message(tensor, destination, tag, lambda: self._late("send", destination, tag))
        with self._changed:
            if self._failure is not None:
                message.end(self._failure)
                return message
            if destination == self._comm.rank:
                self._arrived(destination, tag, tensor.clone())
                message.end()
                return message
            self._outgoing.setdefault(destination, deque()).append(message)
            if destination not in self._sending:
                self._sending.add(destination)
                self._watchers.run(lambda: self._send_all(destination))
        return message

    def receive(self, tensor: torch.Tensor, source: int | None, tag: int) -> Message:
        """Receives into a tensor, from one rank or from any (None)."""
        message = Message(tensor, source, tag, lambda: self._late("recv", source, tag))
        sources = range(self._comm.size) if source is None else [source]
        with self._changed:
            if self._failure is not None:
                message.end(self._failure)
                return message
            for rank in sources:
                for index, (found, payload) in enumerate(self._aside.get(rank, ())):
                    if found == tag:
                        del self._aside[rank][index]
                        self._deliver(message, rank, payload)
                        return message
            self._posted.append(message)
            for rank in set(sources) - self._taking - {self._comm.rank}:
                self._taking.add(rank)
                self._watchers.run(lambda rank=rank: self._take_all(rank))  # type: ignore[misc]
            self._changed.notify_all()
        return message

    def close(self, error: MultiringError) -> None:
        """Ends what is on its way with an error; the communicator is closed."""
        self._fail(error)

    def _send_all(self, destination: int) -> None:
        queue = self._outgoing[destination]
        while True:
            with self._changed:
                if not queue:
                    self._sending.discard(destination)
                    return
                message = queue.popleft()
            try:
                header = np.array([message.tag], np.int64)
                self._comm.send(header, destination, timeout=self.timeout)
                self._comm.send(message.tensor, destination, timeout=self.timeout)
                message.end()
            except MultiringError as error:
                message.end(error)
                self._fail(error)

    def _take_all(self, source: int) -> None:
        try:
            while self._is_wanted(source):
                header = np.empty(1, np.int64)
                self._comm.recv(source, header, timeout=_FOREVER)
                self._take(source, int(header[0]))
        except MultiringError as error:
            self._fail(error)

    def _is_wanted(self, source: int) -> bool:
        """Whether a receive waits that a message of this rank may be for; if not, the thread ends."""
        with self._changed:
            wanted = self._failure is None and any(each.peer in (None, source) for each in self._posted)
            if not wanted:
                self._taking.discard(source)
            return wanted

    def _take(self, source: int, tag: int) -> None:
        """Receives what a header announces."""
        with self._changed:
            while not any(each.peer in (None, source) for each in self._posted):
                if self._failure is not None:
                    raise self._failure
                self._changed.wait(_TICK)  # the receive that it was asked for has got another one
            message = self._next_for(source, tag)
        if message is None:
            payload = torch.from_numpy(self._comm.recv(source, timeout=self.timeout))
            with self._changed:
                self._arrived(source, tag, payload)
            return
        try:
            self._comm.recv(source, message.tensor, timeout=self.timeout)
        except MultiringError as error:
            message.end(error)
            raise
        message.source = source
        message.end()

    def _next_for(self, source: int, tag: int) -> Message | None:
        """The first receive that such a message is for, no longer waiting."""
        for message in self._posted:
            if message.peer in (None, source) and message.tag == tag:
                self._posted.remove(message)
                return message
        return None

    def _arrived(self, source: int, tag: int, payload: torch.Tensor) -> None:
        """Gives what has come to the receive that it is for, or puts it aside until there is one."""
        message = self._next_for(source, tag)
        if message is not None:
            self._deliver(message, source, payload)
        else:
            self._aside.setdefault(source, deque()).append((tag, payload))

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
        with self._changed:
            self._failure = self._failure or error
            waiting = [*self._posted, *(each for queue in self._outgoing.values() for each in queue)]
            self._posted.clear()
            for queue in self._outgoing.values():
                queue.clear()
            self._changed.notify_all()
        for message in waiting:
            message.end(error)
