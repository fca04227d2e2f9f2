"""What is common to all operations of a process group: how they begin, and how the group ends."""

# The stubs of torch have overloads, and other names of arguments in every version; torch passes by position.
# mypy: disable-error-code="override,assignment"

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from multiring import errors
from multiring.communicator import Communicator
from multiring.config import AS_GLOO
from multiring.errors import MultiringError, UsageError
from multiring.initialization import adopt, release
from multiring.torch_distributed import BACKEND, DEVICES, old_torch
from multiring.torch_distributed.arguments import Tensors, seconds_of
from multiring.torch_distributed.backend import GroupBackend
from multiring.torch_distributed.failures import as_torch_error, describe_group
from multiring.torch_distributed.late import LateResults, parts_of
from multiring.torch_distributed.messages import Messenger
from multiring.torch_distributed.streams import why_captured
from multiring.torch_distributed.tensors import (
    is_copied_at_once,
    only_cuda_device,
    require_apart,
    resolved,
)
from multiring.torch_distributed.watchers import Watchers
from multiring.torch_distributed.work import GroupWork, Part

__all__ = ["GroupBase", "Outputs", "Start"]

# Seconds, for those who ask for a group's timeout where it is infinite.
_NEVER = 1e9
# Functional collectives wait for each tensor of these by itself.
_MESSAGES = {"send", "recv"}
_WAITED_FOR_BY_OUTPUT = {"allreduce_coalesced", "all_gather_single", "reduce_scatter_single"}

Outputs = Callable[[], Tensors]
Start = Callable[[Communicator, Tensors], list[Part]]


class TimedCommunicator:
    """A communicator whose asynchronous operations have a timeout of their own.

    Args:
        comm: It.
        timeout: Seconds.
    """

    def __init__(self, comm: Communicator, timeout: float) -> None:
        self._comm = comm
        self._timeout = timeout

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._comm, name)
        return functools.partial(found, timeout=self._timeout) if name.endswith("_async") else found


class GroupBase(dist.ProcessGroup):
    """A process group without its operations.

    Args:
        comm: The ranks, connected; belongs to the group from now on.
        given: What torch has given to the backend's creator.

    Attributes:
        comm: The communicator.
        backend_name: What the program calls the backend: "multiring", or "gloo" after `as_gloo`.
        watchers: Threads of the group.
        kept: Works that are held until somebody waits for them.
    """

    def __init__(self, comm: Communicator, given: Any) -> None:
        super().__init__(comm.rank, comm.size)  # type: ignore[call-arg]
        self.comm = comm
        self.backend_name = BACKEND
        self.watchers = Watchers(f"multiring {given.group_id}")
        self._messenger = Messenger(comm, self.watchers)
        self._name, self._description = str(given.group_id), "undefined"
        self._ranks = list(given.global_ranks_in_group)
        self._store = given.store  # served by rank 0 as long as it is there
        self.kept: set[GroupWork] = set()
        self._coalesced: deque[GroupWork] | None = None
        self._late = LateResults()
        self._closing = threading.Lock()
        self._closed = False
        adopt(comm, self.shutdown)

    # What torch asks about it.

    def rank(self) -> int:
        """This rank in the group."""
        return self.comm.rank

    def size(self) -> int:
        """Number of ranks."""
        return self.comm.size

    def getBackendName(self) -> str:  # noqa: N802
        """Return "multiring": torch's C++ takes who says "gloo" here for its own class."""
        return BACKEND

    @property
    def group_name(self) -> str:
        """What torch calls the group."""
        return self._name

    @property
    def group_desc(self) -> str:
        """What the user calls the group."""
        return self._description

    def _set_group_name(self, name: str) -> None:
        self._name = str(name)

    def _set_group_desc(self, description: str) -> None:
        self._description = str(description)

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(kind) for kind in DEVICES]

    def _get_backend(self, device: torch.device | str) -> GroupBackend:
        kind = torch.device(device).type
        if kind not in DEVICES:
            text = f"no backend for {kind}: the backend 'multiring' takes tensors of {' and '.join(DEVICES)}"
            raise self.explained(UsageError(text, rank=self.comm.rank))
        return GroupBackend(self, timedelta(seconds=min(self.comm.timeout, _NEVER)))

    name = getBackendName

    def _get_backend_name(self) -> str:
        return self.backend_name

    def __repr__(self) -> str:
        return f"<multiring process group {self._name!r}, rank {self.comm.rank} of {self.comm.size}>"

    def set_timeout(self, timeout: timedelta) -> None:
        """Sets the deadline of the operations that begin from now on.

        Raises:
            UsageError: It is none.
        """
        try:
            self.comm.timeout = timeout.total_seconds()
        except MultiringError as error:
            raise self.explained(error) from error

    # Its operations.

    def _start(
        self,
        what: str,
        outputs: Outputs,
        start: Start,
        *options: Any,
        inputs: Iterable[Any] = (),
        deadline: float | None = None,
    ) -> Any:
        """Submits operations.

        Args:
            what: The function that was called.
            outputs: Gives the tensors that get the results.
            start: Submits them to a communicator, with memory for these tensors.
            options: Which may have a timeout of the operations: they have to end in it, also those that wait
                for others, or that run together with others that have more time.
            inputs: Tensors, for the outputs do not always tell on which device the operation is; lists of
                them, too.
            deadline: Seconds in which they have to end where there is none.
        """
        timeout = seconds_of(*options)
        comm = self.comm if timeout is None else cast("Communicator", TimedCommunicator(self.comm, timeout))
        is_message = what in _MESSAGES
        try:
            given = list(outputs())
            for output in given:
                require_apart(output, what)
            tensors = [*given, *_all_tensors(inputs)]
            device = self._device_of(tensors, what)
            self._settle(tensors)
            # Torch exports tensors of the current device alone.
            with nullcontext() if device is None else torch.cuda.device(device):
                targets = [resolved(output) for output in given]
                parts = start(comm, targets)
        except MultiringError as error:
            raise self.explained(error) from error
        copies = [pair for pair in zip(given, targets, strict=True) if pair[0] is not pair[1]]
        if copies and parts:
            parts[-1] = parts[-1].followed_by(lambda: [out.detach().copy_(copy) for out, copy in copies])
        devices = [] if device is None else [device]
        work = GroupWork(self, parts, given, deadline if timeout is None else timeout, devices)
        if given and not is_message and any(part.finish is not None for part in parts):
            self._late.add(given, work.wait, lambda: work.has_ended)
        if self._coalesced is not None:
            # Those that have ended are let go of: a block that raises has no end that would do it.
            while self._coalesced and self._coalesced[0].is_success():
                self._coalesced.popleft()
            self._coalesced.append(work)
        return _handed_out(work, what, given)

    def _joined(self, what: str, works: Iterable[GroupWork], outputs: Tensors) -> Any:
        """Return the operations of one call as one. They were begun one after the other, because some tensors
        are copied, and each of them may use what one before it has made."""
        return _handed_out(GroupWork.joined(self, works, outputs), what, outputs)

    def _settle(self, tensors: Tensors) -> None:
        """Wait until tensors hold what operations before this one have made of them, where the core does not
        see to that: results that are copied after the operation, and tensors that are copied before it."""
        self._late.settle(tensors)
        for tensor in tensors:
            if is_copied_at_once(tensor):
                for part in parts_of(tensor):
                    self.comm.await_queued(part)

    def _device_of(self, tensors: Tensors, what: str) -> torch.device | None:
        """The CUDA device of an operation of these tensors; None: it has none.

        Raises:
            UsageError: They cannot be given to the core, and nothing was done with them.
        """
        device = only_cuda_device(tensors, what)
        if device is not None:
            # As torch writes it: "cpu:multiring,cuda:nccl".
            made_as = distributed_c10d._world.pg_backend_config.get(self, "")
            owner = dict(each.split(":") for each in made_as.split(",") if ":" in each).get("cuda", BACKEND)
            if owner != BACKEND:
                without = "" if self.backend_name == BACKEND else f", or run without {AS_GLOO}"
                raise UsageError(
                    f"{what} of a tensor on {device}: this group was made as {made_as!r}, and torch "
                    f"{torch.__version__} gives all its tensors to the backend 'multiring'. Make a second "
                    f"group for those on devices: dist.new_group(backend={owner!r}){without}"
                )
            if (reason := why_captured(device)) is not None:
                raise UsageError(f"{what}: {reason}")
        return device

    # Coalescing: operations run as they come, and are waited for together.

    def _start_coalescing(self, device: Any = None) -> None:
        self._coalesced = deque()

    def _end_coalescing(self, device: Any = None) -> Any:
        works, self._coalesced = self._coalesced or (), None
        return GroupWork.joined(self, works)

    start_coalescing = _start_coalescing
    end_coalescing = _end_coalescing

    # Its end.

    def shutdown(self) -> None:
        """Leaves the group: what is pending fails, and peers that still need this rank are told. Idempotent,
        and no collective; `destroy_process_group` calls it."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
        self.comm.close()
        text = f"rank {self.comm.rank} has left the process group {self._name!r}"
        self._messenger.close(errors.AbortedError(text, rank=self.comm.rank))
        self.watchers.close()
        self.kept.clear()
        self._late.clear()
        release(self.comm)

    def abort(self) -> None:
        """Fails what is pending, on all ranks, and leaves the group."""
        self.comm.abort("ProcessGroup.abort() was called")
        self.shutdown()

    def break_by(self, error: MultiringError) -> MultiringError:
        """Breaks the group on all ranks: an operation has not ended in the time that it was given, and other
        ranks may take it to have succeeded. Returns what to raise."""
        reason = str(error).partition("; it goes on")[0]
        text = (
            f"{reason}. The process group is broken on all ranks; look at the output of those that are late"
        )
        self.comm.abort(text)
        return errors.TimeoutError(
            text, rank=self.comm.rank, peer=error.peer, host=self.comm.host, operation=error.operation
        )

    def explained(self, error: MultiringError) -> MultiringError:
        """An error as it leaves the group."""
        return as_torch_error(error, describe_group(self._name, self.comm.rank, self._ranks))


def _handed_out(work: GroupWork, what: str, given: Tensors) -> Any:
    """Return the work as torch gets it from a function of the group."""
    if old_torch.WORK_IS_COLLECTED and len(given) > 1 and what in _WAITED_FOR_BY_OUTPUT:
        return old_torch.kept_by_torch(work)
    return work


def _all_tensors(given: Iterable[Any]) -> Iterator[torch.Tensor]:
    """The tensors in lists, and in lists of those; what is none is refused where it is used."""
    for each in given:
        if isinstance(each, torch.Tensor):
            yield each
        elif isinstance(each, list | tuple):
            yield from _all_tensors(each)
