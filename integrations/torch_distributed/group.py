"""The process group: what torch.distributed calls, as operations of one communicator."""

# The stubs of torch have overloads, and other names of arguments in every version; torch passes by position.
# mypy: disable-error-code="override,assignment"

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from multiring import errors
from multiring.communicator import Communicator
from multiring.errors import MultiringError, UsageError
from multiring.initialization import adopt, release
from multiring.torch_distributed import BACKEND, operations
from multiring.torch_distributed.failures import as_torch_error, describe_group
from multiring.torch_distributed.messages import Messenger
from multiring.torch_distributed.tensors import as_payload, only
from multiring.torch_distributed.watchers import Watchers
from multiring.torch_distributed.work import GroupWork, Part

__all__ = ["ProcessGroup"]

Tensor = torch.Tensor
Tensors = Sequence[torch.Tensor]


class ProcessGroup(dist.ProcessGroup):
    """A process group whose ranks communicate through multiring; made by torch.distributed.

    Its methods are those that torch calls, by the names of all its versions. Every one submits its operations
    and returns a `Work` at once; all but messages run in the order in which they were submitted, which has to
    be the same on all ranks.

    Args:
        comm: The ranks, connected; belongs to the group from now on.
        given: What torch has given to the backend's creator.

    Attributes:
        comm: The communicator.
        watchers: Threads of the group.
    """

    def __init__(self, comm: Communicator, given: Any) -> None:
        super().__init__(comm.rank, comm.size)  # type: ignore[call-arg]
        self.comm = comm
        self.watchers = Watchers(f"multiring {given.group_id}")
        self._timeout: float = given.timeout.total_seconds()
        self._messenger = Messenger(comm, self.watchers, self._timeout)
        self._name, self._description = str(given.group_id), "undefined"
        self._ranks = list(given.global_ranks_in_group)
        self._store = given.store  # served by rank 0 as long as it is there
        self._coalesced: list[GroupWork] | None = None
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
        """What `init_process_group` calls the backend."""
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

    name = getBackendName
    _get_backend_name = getBackendName

    def __repr__(self) -> str:
        return f"<multiring process group {self._name!r}, rank {self.comm.rank} of {self.comm.size}>"

    # Collectives.

    def allreduce(self, tensors: Tensors | Tensor, opts: Any = None, timeout: timedelta | None = None) -> Any:
        """Reduces a tensor over all ranks, in place."""
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else tensors
        return self._reduced([only(tensors, "allreduce")], opts, timeout)

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> Any:
        """Reduces several tensors; small ones travel together."""
        return self._reduced(tensors, opts, None)

    def _reduced(self, tensors: Tensors, opts: Any, timeout: timedelta | None) -> Any:
        op = _op(opts)
        return self._start(
            lambda: [operations.allreduce(self.comm, tensor, op) for tensor in tensors],
            tensors,
            timeout or opts,
        )

    def reduce(self, tensors: Tensors, opts: Any) -> Any:
        """Reduces a tensor to the rank `opts.rootRank`; costs as much as an allreduce."""
        tensor = only(tensors, "reduce")
        return self._start(
            lambda: [operations.reduce(self.comm, tensor, opts.reduceOp, opts.rootRank)], tensors, opts
        )

    def broadcast(self, tensors: Tensors | Tensor, opts: Any = None, timeout: timedelta | None = None) -> Any:
        """Gives every rank the tensor of the rank `opts.rootRank` (or `opts` itself, an integer)."""
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else tensors
        root = opts if isinstance(opts, int) else getattr(opts, "rootRank", 0)
        tensor = only(tensors, "broadcast")
        return self._start(lambda: [operations.broadcast(self.comm, tensor, root)], tensors, timeout or opts)

    def allgather(self, outputs: Sequence[Tensors], tensors: Tensors, opts: Any = None) -> Any:
        """Gives every rank the tensors of all, in a list."""
        tensor, targets = only(tensors, "allgather"), _only_list(outputs, "allgather")
        return self._start(lambda: [operations.allgather(self.comm, targets, tensor)], targets, opts)

    def allgather_coalesced(self, outputs: Sequence[Tensors], tensors: Tensors, opts: Any = None) -> Any:
        """Several allgathers: `outputs[r][i]` is for tensor i of rank r."""
        columns = list(zip(*outputs, strict=True))
        return self._start(
            lambda: [
                operations.allgather(self.comm, column, tensor)
                for column, tensor in zip(columns, tensors, strict=True)
            ],
            [target for targets in outputs for target in targets],
            opts,
        )

    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> Any:
        """Joins the tensors of all ranks in one."""
        return self.all_gather_single_coalesced([output], [tensor], opts)

    def all_gather_single_coalesced(self, outputs: Tensors, tensors: Tensors, opts: Any = None) -> Any:
        """Several at once."""
        return self._start(
            lambda: [
                operations.allgather_single(self.comm, output, tensor)
                for output, tensor in zip(outputs, tensors, strict=True)
            ],
            outputs,
            opts,
        )

    def reduce_scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any = None) -> Any:
        """Reduces a list of tensors; each rank gets the one with its number."""
        output, sources = only(outputs, "reduce_scatter"), _only_list(inputs, "reduce_scatter")
        op = _op(opts)
        return self._start(lambda: [operations.reduce_scatter(self.comm, output, sources, op)], outputs, opts)

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> Any:
        """Reduces a tensor; each rank gets its block."""
        return self.reduce_scatter_single_coalesced([output], [tensor], opts)

    def reduce_scatter_single_coalesced(self, outputs: Tensors, tensors: Tensors, opts: Any = None) -> Any:
        """Several at once."""
        op = _op(opts)
        return self._start(
            lambda: [
                operations.reduce_scatter_single(self.comm, output, tensor, op)
                for output, tensor in zip(outputs, tensors, strict=True)
            ],
            outputs,
            opts,
        )

    def all_to_all_single(
        self,
        output: Tensor,
        tensor: Tensor,
        output_sizes: Any = None,
        input_sizes: Any = None,
        opts: Any = None,
    ) -> Any:
        """Sends rows of a tensor to all ranks."""
        return self._start(
            lambda: [
                operations.alltoall_single(self.comm, output, tensor, output_sizes or [], input_sizes or [])
            ],
            [output],
            opts,
        )

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Any:
        """Sends a tensor to each rank."""
        return self._start(lambda: [operations.alltoall(self.comm, outputs, inputs)], outputs, opts)

    def gather(self, outputs: Sequence[Tensors], tensors: Tensors, opts: Any) -> Any:
        """Brings the tensors of all ranks to the rank `opts.rootRank`."""
        tensor, root = only(tensors, "gather"), opts.rootRank
        targets = _only_list(outputs, "gather") if self.comm.rank == root else []
        return self._start(lambda: [operations.gather(self.comm, targets, tensor, root)], targets, opts)

    def scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any) -> Any:
        """Gives each rank its tensor of a list of the rank `opts.rootRank`."""
        output, root = only(outputs, "scatter"), opts.rootRank
        sources = _only_list(inputs, "scatter") if self.comm.rank == root else []
        return self._start(lambda: [operations.scatter(self.comm, output, sources, root)], outputs, opts)

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> Any:
        """Ends when all ranks have come."""
        return self._start(lambda: [Part(self.comm.barrier_async())], [], timeout or opts)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """A barrier that names the ranks that have not come; every barrier of this backend does."""
        limit = self._timeout if timeout is None else timeout.total_seconds()
        try:
            self.comm.barrier(limit)
        except MultiringError as error:
            raise self.explained(error) from error

    # The names that other versions of torch have: up to 2.12, and of its C++ code.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # Messages.

    def send(self, tensors: Tensors, destination: int, tag: int = 0) -> Any:
        """Sends a tensor to a rank."""
        return self._start(lambda: [self._sent(only(tensors, "send"), destination, tag)], [], None)

    def _sent(self, tensor: Tensor, destination: int, tag: int) -> Part:
        self._require_other(destination, "send")
        return Part(self._messenger.send(as_payload(tensor, "send").contiguous(), destination, tag))

    def recv(self, tensors: Tensors, source: int, tag: int = 0) -> Any:
        """Receives a tensor from a rank."""
        self._require_other(source, "recv")
        return self._received(tensors, source, tag)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> Any:
        """Receives a tensor from the first rank that sends one."""
        return self._received(tensors, None, tag)

    def _received(self, tensors: Tensors, source: int | None, tag: int) -> Any:
        def start() -> list[Part]:
            target = as_payload(only(tensors, "recv"), "recv")
            landing = target if target.is_contiguous() else torch.empty(target.shape, dtype=target.dtype)
            finish = None if landing is target else lambda _: target.copy_(landing)
            return [Part(self._messenger.receive(landing, source, tag), finish)]

        return self._start(start, tensors, timedelta(seconds=self._timeout))

    def _require_other(self, rank: int, what: str) -> None:
        if rank == self.comm.rank or not 0 <= rank < self.comm.size:
            text = f"{what}: rank {rank} is not another rank of this group of {self.comm.size}"
            raise self.explained(UsageError(text, rank=self.comm.rank, operation=what))

    # Coalescing: operations run as they come, and are waited for together.

    def _start_coalescing(self, device: Any = None) -> None:
        self._coalesced = []

    def _end_coalescing(self, device: Any = None) -> Any:
        works, self._coalesced = self._coalesced or [], None
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

    def set_timeout(self, timeout: timedelta) -> NoReturn:
        """Not supported: the deadline of a group is fixed when it is made."""
        raise NotImplementedError(
            "the timeout of a process group of the backend 'multiring' is fixed when it is made: pass "
            "timeout= to init_process_group() or new_group(), or wait(timeout) on the work"
        )

    def _start(self, start: Callable[[], list[Part]], outputs: Tensors, options: Any) -> Any:
        try:
            parts = start()
        except MultiringError as error:
            raise self.explained(error) from error
        work = GroupWork(self, parts, outputs, _seconds(options))
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work


def _op(opts: Any) -> Any:
    """The reduction in options; or `opts` is one itself, or nothing."""
    return ReduceOp.SUM if opts is None else getattr(opts, "reduceOp", opts)


def _seconds(options: Any) -> float | None:
    """The timeout in options, if one is set there; or `options` is one itself."""
    timeout = options if isinstance(options, timedelta) else getattr(options, "timeout", None)
    return timeout.total_seconds() if isinstance(timeout, timedelta) and timeout > timedelta(0) else None


def _only_list(lists: Sequence[Tensors], what: str) -> Tensors:
    if len(lists) != 1:
        raise UsageError(f"{what} takes one list of tensors, and was given {len(lists)}")
    return lists[0]
