"""
The native core of multiring. Use the multiring package instead.
"""

from __future__ import annotations

import collections.abc
import typing

import numpy
import numpy.typing

__all__: list[str] = [
    "AlgorithmRow",
    "ArrayReduction",
    "Arrivals",
    "Channel",
    "Cluster",
    "CommDtype",
    "Communicator",
    "CostModel",
    "DeviceLibrary",
    "Group",
    "Interface",
    "JobSettings",
    "LinkCost",
    "LinkTraffic",
    "MpiSession",
    "NamedQueue",
    "OpKind",
    "Operation",
    "Order",
    "Plan",
    "PlanRequest",
    "Probe",
    "RankTraffic",
    "ReduceOp",
    "Result",
    "StandardFloatMode",
    "Step",
    "TensorGradients",
    "TensorPass",
    "Work",
    "WorldOptions",
    "address_of",
    "adds",
    "after_fork",
    "algorithm_letters",
    "algorithm_table",
    "assumed_memory",
    "before_fork",
    "bytes_of",
    "check_mode",
    "check_tuning",
    "checksum",
    "choose_algorithm",
    "collective_names",
    "connect",
    "copy_from_device",
    "copy_streaming",
    "copy_to_device",
    "device_of",
    "device_row",
    "documented_algorithms",
    "dtype_size",
    "export_device_memory",
    "fail_waits",
    "find_device_libraries",
    "has_plans",
    "import_device_memory",
    "interface_addresses",
    "is_arrival_hook",
    "keep_times",
    "mpi_library",
    "own_addresses",
    "pair_addresses",
    "plan_limit",
    "predict_steps",
    "program_calls",
    "require_memory",
    "tell_sites",
    "waits",
]

class Result:
    """
    Memory that the core allocated for a result.
    """
    def __dlpack__(
        self,
        *,
        stream: typing.Any = None,
        max_version: typing.Any = None,
        dl_device: typing.Any = None,
        copy: typing.Any = None,
    ) -> typing.Any: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...
    def numpy(self) -> numpy.ndarray:
        """
        A NumPy array over the memory; bfloat16 as uint16.
        """
    @property
    def dtype(self) -> str: ...
    @property
    def on_device(self) -> bool:
        """
        Whether the memory is that of a device.
        """
    @property
    def received(self) -> list[int]:
        """
        Rows that came from each rank.
        """
    @property
    def shape(self) -> list[int]: ...

class DeviceLibrary:
    """
    A library for devices, and why none can be used.
    """
    @property
    def devices(self) -> int: ...
    @property
    def name(self) -> str: ...
    @property
    def origin(self) -> str: ...
    @property
    def pairs_without_access(self) -> list[tuple[int, int]] | None: ...
    @property
    def path(self) -> str: ...
    @property
    def version(self) -> str: ...
    @property
    def why(self) -> str: ...

class OpKind:
    """
    Members:

      SEND

      RECV

      ALLREDUCE

      REDUCE_SCATTER

      ALLGATHER

      BROADCAST

      ALLTOALL

      GATHER

      SCATTER

      BARRIER
    """

    ALLGATHER: typing.ClassVar[OpKind]
    ALLREDUCE: typing.ClassVar[OpKind]
    ALLTOALL: typing.ClassVar[OpKind]
    BARRIER: typing.ClassVar[OpKind]
    BROADCAST: typing.ClassVar[OpKind]
    GATHER: typing.ClassVar[OpKind]
    RECV: typing.ClassVar[OpKind]
    REDUCE_SCATTER: typing.ClassVar[OpKind]
    SCATTER: typing.ClassVar[OpKind]
    SEND: typing.ClassVar[OpKind]
    __members__: typing.ClassVar[dict[str, OpKind]]
    @typing.overload
    def __eq__(self, other: OpKind) -> bool: ...
    @typing.overload
    def __eq__(self, other: typing.Any) -> bool: ...
    def __getstate__(self) -> int: ...
    def __hash__(self) -> int: ...
    def __index__(self) -> int: ...
    def __init__(self, value: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    def __int__(self) -> int: ...
    @typing.overload
    def __ne__(self, other: OpKind) -> bool: ...
    @typing.overload
    def __ne__(self, other: typing.Any) -> bool: ...
    def __repr__(self) -> str: ...
    def __setstate__(self, state: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    def __str__(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def value(self) -> int: ...

class ReduceOp:
    """
    Members:

      SUM

      AVERAGE

      MIN

      MAX

      PRODUCT

      BITWISE_AND

      BITWISE_OR

      BITWISE_XOR
    """

    AVERAGE: typing.ClassVar[ReduceOp]
    BITWISE_AND: typing.ClassVar[ReduceOp]
    BITWISE_OR: typing.ClassVar[ReduceOp]
    BITWISE_XOR: typing.ClassVar[ReduceOp]
    MAX: typing.ClassVar[ReduceOp]
    MIN: typing.ClassVar[ReduceOp]
    PRODUCT: typing.ClassVar[ReduceOp]
    SUM: typing.ClassVar[ReduceOp]
    __members__: typing.ClassVar[dict[str, ReduceOp]]
    @typing.overload
    def __eq__(self, other: ReduceOp) -> bool: ...
    @typing.overload
    def __eq__(self, other: typing.Any) -> bool: ...
    def __getstate__(self) -> int: ...
    def __hash__(self) -> int: ...
    def __index__(self) -> int: ...
    def __init__(self, value: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    def __int__(self) -> int: ...
    @typing.overload
    def __ne__(self, other: ReduceOp) -> bool: ...
    @typing.overload
    def __ne__(self, other: typing.Any) -> bool: ...
    def __repr__(self) -> str: ...
    def __setstate__(self, state: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    def __str__(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def value(self) -> int: ...

class CommDtype:
    """
    As what float32 crosses from host to host.

    Members:

      DEFAULT

      FLOAT32

      FLOAT16

      BFLOAT16
    """

    BFLOAT16: typing.ClassVar[CommDtype]
    DEFAULT: typing.ClassVar[CommDtype]
    FLOAT16: typing.ClassVar[CommDtype]
    FLOAT32: typing.ClassVar[CommDtype]
    __members__: typing.ClassVar[dict[str, CommDtype]]
    @typing.overload
    def __eq__(self, other: CommDtype) -> bool: ...
    @typing.overload
    def __eq__(self, other: typing.Any) -> bool: ...
    def __getstate__(self) -> int: ...
    def __hash__(self) -> int: ...
    def __index__(self) -> int: ...
    def __init__(self, value: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    def __int__(self) -> int: ...
    @typing.overload
    def __ne__(self, other: CommDtype) -> bool: ...
    @typing.overload
    def __ne__(self, other: typing.Any) -> bool: ...
    def __repr__(self) -> str: ...
    def __setstate__(self, state: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    def __str__(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def value(self) -> int: ...

class Order:
    """
    In which order an allreduce or a reduce_scatter adds.

    Members:

      DEFAULT

      CANONICAL

      ANY
    """

    ANY: typing.ClassVar[Order]
    CANONICAL: typing.ClassVar[Order]
    DEFAULT: typing.ClassVar[Order]
    __members__: typing.ClassVar[dict[str, Order]]
    @typing.overload
    def __eq__(self, other: Order) -> bool: ...
    @typing.overload
    def __eq__(self, other: typing.Any) -> bool: ...
    def __getstate__(self) -> int: ...
    def __hash__(self) -> int: ...
    def __index__(self) -> int: ...
    def __init__(self, value: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    def __int__(self) -> int: ...
    @typing.overload
    def __ne__(self, other: Order) -> bool: ...
    @typing.overload
    def __ne__(self, other: typing.Any) -> bool: ...
    def __repr__(self) -> str: ...
    def __setstate__(self, state: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    def __str__(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def value(self) -> int: ...

class ArrayReduction:
    """
    Reduces arrays element by element into every output, as a collective does, but without ranks.
    """
    def __call__(self) -> None: ...
    def __init__(
        self,
        inputs: collections.abc.Sequence[typing.Any],
        outputs: collections.abc.Sequence[typing.Any],
        op: ReduceOp,
        postscale: typing.SupportsFloat | typing.SupportsIndex = 1.0,
    ) -> None: ...

class StandardFloatMode:
    """
    Context in which this thread rounds to nearest even and keeps denormals.
    """
    def __enter__(self) -> None: ...
    def __exit__(self, kind: typing.Any, error: typing.Any, traceback: typing.Any) -> None: ...
    def __init__(self) -> None: ...

class Operation:
    """
    One collective call being put together.
    """
    def __init__(
        self, kind: OpKind, name: str = "", root: typing.SupportsInt | typing.SupportsIndex = -1
    ) -> None: ...
    def result(self) -> Result: ...
    def set_expected(self, rows: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex]) -> None:
        """
        How many rows of an alltoall are to come from each rank.
        """
    def set_input(self, array: typing.Any, is_copied: bool = False) -> bool:
        """
        is_copied: when the operation begins, because it writes to that memory.
        False: the array is on a device and not contiguous, nothing was done.
        """
    def set_inputs(
        self,
        arrays: collections.abc.Sequence[typing.Any],
        shape: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex],
    ) -> None:
        """
        Arrays in host memory that are the input, one after the other, as an array of this shape.
        """
    def set_output(self, array: typing.Any) -> bool: ...
    def set_outputs(self, arrays: collections.abc.Sequence[typing.Any]) -> None:
        """
        Arrays in host memory that get the output, one after the other.
        """
    def set_pieces(
        self,
        dtype: str,
        addresses: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex],
        nbytes: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex],
        owners: typing.Any,
        devices: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex],
        streams: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex],
    ) -> None:
        """
        One array, to be reduced in place, that lies in pieces; devices: none, or -1 for the host.
        """
    def set_reduction(
        self,
        op: ReduceOp,
        prescale: typing.SupportsFloat | typing.SupportsIndex,
        postscale: typing.SupportsFloat | typing.SupportsIndex,
        crossing: tuple[CommDtype, Order],
    ) -> None: ...
    def set_splits(
        self, splits: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex]
    ) -> None: ...
    @property
    def rows(self) -> int:
        """
        Extent of the input along axis 0.
        """

class Interface:
    """
    A network interface: bytes per second, latency in seconds.
    """
    def __init__(
        self,
        bytes_per_second: typing.SupportsFloat | typing.SupportsIndex,
        latency: typing.SupportsFloat | typing.SupportsIndex,
    ) -> None: ...
    @property
    def bytes_per_second(self) -> float: ...
    @property
    def latency(self) -> float: ...

class Cluster:
    """
    Hosts that are alike but for their numbers of ranks.
    """
    def __init__(
        self,
        ranks_per_host: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex],
        interfaces: collections.abc.Sequence[Interface],
        *,
        memory_rate: typing.SupportsFloat | typing.SupportsIndex = 20000000000.0,
        memory_latency: typing.SupportsFloat | typing.SupportsIndex = 1e-06,
        memory_rewriting: typing.SupportsFloat | typing.SupportsIndex = 0.0,
        round_robin: bool = False,
        host_links: str = "switch",
    ) -> None: ...
    @property
    def aligned(self) -> bool: ...
    @property
    def ranks(self) -> list[list[int]]:
        """
        The ranks of each host.
        """
    @property
    def size(self) -> int: ...

class Group:
    """
    Ranks that reduce or share elements [begin, end) with each other.
    """
    @property
    def begin(self) -> int: ...
    @property
    def channel(self) -> int: ...
    @property
    def end(self) -> int: ...
    @property
    def ranks(self) -> list[int]: ...

class Step:
    """
    What all groups of a dimension do at the same time.
    """
    @property
    def algorithm(self) -> str: ...
    @property
    def dimension(self) -> int: ...
    @property
    def groups(self) -> list[Group]: ...
    @property
    def hops(self) -> int: ...
    @property
    def parts(self) -> int: ...
    @property
    def phase(self) -> str: ...

class LinkTraffic:
    """
    Bytes and messages through one interface of a host.
    """
    @property
    def host(self) -> int: ...
    @property
    def interface(self) -> int: ...
    @property
    def messages(self) -> int: ...
    @property
    def received(self) -> int: ...
    @property
    def sent(self) -> int: ...

class RankTraffic:
    """
    Bytes and messages that a rank sends.
    """
    @property
    def messages(self) -> int: ...
    @property
    def sent(self) -> int: ...
    @property
    def sent_in_memory(self) -> int: ...

class PlanRequest:
    """
    What a plan is for, and what of it is forced.
    """

    collective: str
    dtype: str
    mode: str
    nccl: str
    order: str
    def __init__(self) -> None: ...
    @property
    def channels(self) -> int: ...
    @channels.setter
    def channels(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    @property
    def count(self) -> int: ...
    @count.setter
    def count(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    @property
    def segment(self) -> int: ...
    @segment.setter
    def segment(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> None: ...

class Channel:
    """
    One way through the network that all hosts take together.
    """
    @property
    def bytes_per_second(self) -> float: ...
    @property
    def interface(self) -> int: ...

class Plan:
    """
    Steps of one collective.
    """
    def __init__(self, cluster: Cluster, request: PlanRequest) -> None: ...
    def traffic(
        self, step: typing.SupportsInt | typing.SupportsIndex | None = None
    ) -> tuple[list[LinkTraffic], list[RankTraffic]]:
        """
        Traffic of all interfaces and of all ranks in one step, or in all of them.
        """
    @property
    def channels(self) -> list[Channel]: ...
    @property
    def count(self) -> int: ...
    @property
    def element_bytes(self) -> int: ...
    @property
    def mode(self) -> str: ...
    @property
    def order(self) -> str: ...
    @property
    def partial_bytes(self) -> int: ...
    @property
    def parts_across_hosts(self) -> int: ...
    @property
    def sizes(self) -> list[int]:
        """
        Of the dimensions, from the inside out.
        """
    @property
    def steps(self) -> list[Step]: ...

class LinkCost:
    """
    Seconds of latency, and bytes per second of a host.
    """
    def __init__(
        self,
        latency: typing.SupportsFloat | typing.SupportsIndex,
        bytes_per_second: typing.SupportsFloat | typing.SupportsIndex,
    ) -> None: ...
    @property
    def bytes_per_second(self) -> float: ...
    @property
    def latency(self) -> float: ...

class CostModel:
    """
    What a plan costs besides the speeds of its cluster.
    """
    def __init__(self) -> None: ...
    @property
    def call_seconds(self) -> float: ...
    @call_seconds.setter
    def call_seconds(self, arg0: typing.SupportsFloat | typing.SupportsIndex) -> None: ...
    @property
    def dimensions(self) -> list[LinkCost]: ...
    @dimensions.setter
    def dimensions(self, arg0: collections.abc.Sequence[LinkCost]) -> None: ...
    @property
    def interface_message_seconds(self) -> float: ...
    @interface_message_seconds.setter
    def interface_message_seconds(self, arg0: typing.SupportsFloat | typing.SupportsIndex) -> None: ...
    @property
    def message_seconds(self) -> float: ...
    @message_seconds.setter
    def message_seconds(self, arg0: typing.SupportsFloat | typing.SupportsIndex) -> None: ...
    @property
    def reduction_bytes_per_second(self) -> float: ...
    @reduction_bytes_per_second.setter
    def reduction_bytes_per_second(self, arg0: typing.SupportsFloat | typing.SupportsIndex) -> None: ...
    @property
    def shared_bytes_per_second(self) -> float: ...
    @shared_bytes_per_second.setter
    def shared_bytes_per_second(self, arg0: typing.SupportsFloat | typing.SupportsIndex) -> None: ...
    @property
    def shared_message_seconds(self) -> float: ...
    @shared_message_seconds.setter
    def shared_message_seconds(self, arg0: typing.SupportsFloat | typing.SupportsIndex) -> None: ...

class AlgorithmRow:
    """
    An algorithm of a collective, and its costs.
    """
    @property
    def excluded(self) -> str: ...
    @property
    def hops(self) -> int: ...
    @property
    def is_chosen(self) -> bool: ...
    @property
    def is_compared(self) -> bool: ...
    @property
    def name(self) -> str: ...
    @property
    def needs(self) -> str: ...
    @property
    def rank_bytes(self) -> int: ...
    @property
    def seconds(self) -> float: ...
    @property
    def segments(self) -> int: ...

class Work:
    """
    An asynchronous operation in progress.
    """
    def done(self) -> bool: ...
    def result(self) -> Result: ...
    def times(self) -> tuple[int, int, int, int]:
        """
        Made, queued, begun, ended; 0: not kept. To be called when it is done.
        """
    def wait(self, timeout: typing.SupportsFloat | typing.SupportsIndex) -> None: ...

class Communicator:
    """
    A group of ranks.
    """
    def abandon(self) -> None:
        """
        To be called in a forked child.
        """
    def abort(self, message: str) -> None: ...
    def algorithm_rows(
        self, collective: str, nbytes: typing.SupportsInt | typing.SupportsIndex, order: str
    ) -> list[AlgorithmRow]:
        """
        The table of algorithms of a collective of float32, with what is used as the chosen one.
        An empty order is the default one.
        """
    def allreduce(
        self,
        x: typing.Any,
        out: typing.Any,
        op: ReduceOp,
        name: str,
        prescale: typing.SupportsFloat | typing.SupportsIndex,
        postscale: typing.SupportsFloat | typing.SupportsIndex,
        timeout: typing.SupportsFloat | typing.SupportsIndex,
        crossing: tuple[CommDtype, Order],
    ) -> bool:
        """
        False: an array is not contiguous, nothing was done.
        """
    def await_queued(self, last: typing.SupportsInt | typing.SupportsIndex) -> None:
        """
        Waits until the queued operations up to this number have ended.
        """
    def close(self) -> None: ...
    def fit_costs(
        self,
        measured: collections.abc.Sequence[
            tuple[str, typing.SupportsInt | typing.SupportsIndex, typing.SupportsFloat | typing.SupportsIndex]
        ],
    ) -> str:
        """
        The line of a tuning with the costs that explain (algorithm, bytes, seconds) best.
        """
    def last_conflict(self, operation: Operation) -> int:
        """
        The number of the last queued operation that has to end before this one; 0: none.
        """
    def lost_rank(self) -> typing.Any:
        """
        An error that names a rank which has died or left, as far as is known; None: there is none.
        """
    def native_address(self) -> int:
        """
        The mr_communicator* of the C ABI, valid until the process ends. Each call makes another one.
        """
    def plain_allreduce(self) -> typing.Any:
        """
        A quicker allreduce for C-ordered arrays of NumPy and DLPack's exchange API, as a function:
        (x, out, op, name, prescale, postscale, timeout, crossing) -> bool.
        False: an argument is not plain enough, nothing was done.
        """
    def recv(
        self,
        operation: Operation,
        tag: typing.SupportsInt | typing.SupportsIndex,
        timeout: typing.SupportsFloat | typing.SupportsIndex,
        after: typing.SupportsInt | typing.SupportsIndex | None = None,
    ) -> None: ...
    def run(self, operation: Operation, timeout: typing.SupportsFloat | typing.SupportsIndex) -> None: ...
    def send(
        self,
        operation: Operation,
        tag: typing.SupportsInt | typing.SupportsIndex,
        timeout: typing.SupportsFloat | typing.SupportsIndex,
        after: typing.SupportsInt | typing.SupportsIndex | None = None,
    ) -> None:
        """
        after: what `last_conflict` told when the program asked for it; None: what it tells now.
        """
    def set_tuning(self, tuning: str) -> None:
        """
        Collectives from here on go as a tuning says; called between the same operations on all ranks.
        """
    def split(
        self,
        color: typing.SupportsInt | typing.SupportsIndex,
        key: typing.SupportsInt | typing.SupportsIndex,
        timeout: typing.SupportsFloat | typing.SupportsIndex,
    ) -> Communicator | None: ...
    def submit(
        self,
        operation: Operation,
        priority: typing.SupportsInt | typing.SupportsIndex,
        timeout: typing.SupportsFloat | typing.SupportsIndex,
    ) -> Work: ...
    def symmetric_empty(
        self,
        shape: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex],
        dtype: numpy.dtype[typing.Any],
        timeout: typing.SupportsFloat | typing.SupportsIndex,
    ) -> numpy.ndarray: ...
    def symmetric_peer(
        self, array: numpy.ndarray, rank: typing.SupportsInt | typing.SupportsIndex
    ) -> numpy.ndarray: ...
    @property
    def comm_dtype(self) -> CommDtype:
        """
        As what float32 crosses from host to host where an allreduce does not say.
        """
    @property
    def host(self) -> str: ...
    @property
    def hosts(self) -> list[int]:
        """
        For each rank the number of its host.
        """
    @property
    def is_broken(self) -> bool: ...
    @property
    def name(self) -> str: ...
    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def timeout(self) -> float:
        """
        Seconds that an operation waits for other ranks where it does not say.
        """
    @timeout.setter
    def timeout(self, arg1: typing.SupportsFloat | typing.SupportsIndex) -> None: ...
    @property
    def tuning(self) -> str:
        """
        What algorithms are chosen from, as a text.
        """

class Probe:
    """
    Waits for messages in one thread; any thread may stop it.
    """
    def __init__(self, communicator: Communicator) -> None: ...
    def stop(self) -> None:
        """
        Ends the wait, or if there is none the next.
        """
    def wait(
        self,
        sources: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex],
        needed: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex],
        timeout: typing.SupportsFloat | typing.SupportsIndex,
    ) -> tuple[int, int, str, list[int]] | None:
        """
        Source, tag, dtype and shape of a message that can be received; None: it was stopped.
        """

class NamedQueue:
    """
    Operations matched by name.
    """
    @staticmethod
    def kept_error(
        address: typing.SupportsInt | typing.SupportsIndex, number: typing.SupportsInt | typing.SupportsIndex
    ) -> typing.Any:
        """
        The error that the queue at an address keeps under a number, or None.
        """
    def __init__(
        self, communicator: Communicator, name: str, timeout: typing.SupportsFloat | typing.SupportsIndex
    ) -> None:
        """
        Collective.
        """
    def abandon(self) -> None:
        """
        To be called in a forked child.
        """
    def abort(self, message: str) -> None: ...
    def await_queued(self, operation: Operation) -> None:
        """
        Waits until no submitted operation conflicts with this one.
        """
    def close(self) -> None: ...
    def submit(
        self,
        name: str,
        operation: Operation,
        priority: typing.SupportsInt | typing.SupportsIndex,
        step: typing.SupportsInt | typing.SupportsIndex,
    ) -> Work: ...
    @property
    def address(self) -> int:
        """
        The mr_queue* of the C ABI, good until the process ends.
        """
    @property
    def is_broken(self) -> bool: ...
    @property
    def is_closed(self) -> bool: ...
    @property
    def name(self) -> str: ...
    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...

class MpiSession:
    """
    An MPI library, and a communicator of its own among the ranks of a job.
    """
    def __init__(self, bridge: str, communicator: typing.SupportsInt | typing.SupportsIndex = 0) -> None:
        """
        Loads a bridge and duplicates the MPI_Comm at an address (0: all ranks). Collective.
        """
    def broadcast(
        self,
        value: bytes,
        root: typing.SupportsInt | typing.SupportsIndex,
        timeout: typing.SupportsFloat | typing.SupportsIndex,
    ) -> bytes:
        """
        What `root` has, at most 4096 bytes, on all ranks. Collective.
        """
    def finalize(self) -> None:
        """
        Ends MPI if this session has initialised it. Collective.
        """
    @property
    def library(self) -> str: ...
    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...

class JobSettings:
    """
    What a user may set for a job.
    """

    comm_dtype: str
    host: str
    host_links: str
    mode: str
    nccl: str
    order: str
    peer_memory: bool
    tcp_congestion: str
    transport: str
    tuning: str
    def __init__(self) -> None: ...
    @property
    def heartbeat(self) -> float: ...
    @heartbeat.setter
    def heartbeat(self, arg0: typing.SupportsFloat | typing.SupportsIndex) -> None: ...
    @property
    def interfaces(self) -> list[str]: ...
    @interfaces.setter
    def interfaces(self, arg0: collections.abc.Sequence[str]) -> None: ...
    @property
    def spin_microseconds(self) -> float: ...
    @spin_microseconds.setter
    def spin_microseconds(self, arg0: typing.SupportsFloat | typing.SupportsIndex) -> None: ...
    @property
    def staging_bytes(self) -> int: ...
    @staging_bytes.setter
    def staging_bytes(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    @property
    def stall_warning(self) -> float: ...
    @stall_warning.setter
    def stall_warning(self, arg0: typing.SupportsFloat | typing.SupportsIndex) -> None: ...
    @property
    def timeout(self) -> float: ...
    @timeout.setter
    def timeout(self, arg0: typing.SupportsFloat | typing.SupportsIndex) -> None: ...

class WorldOptions(JobSettings):
    """
    Who this rank is, and the settings of its job.
    """

    job: str
    mpi: MpiSession
    secret: bytes
    socket_directory: str
    spread: bool
    warn: typing.Any
    def __init__(self, settings: JobSettings) -> None: ...
    @property
    def hosts(self) -> list[str]: ...
    @hosts.setter
    def hosts(self, arg0: collections.abc.Sequence[str]) -> None: ...
    @property
    def rank(self) -> int: ...
    @rank.setter
    def rank(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    @property
    def size(self) -> int: ...
    @size.setter
    def size(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> None: ...

class Arrivals:
    """
    Which gradients of a round have arrived.
    """
    def __init__(self, states: typing.Annotated[numpy.typing.ArrayLike, numpy.uint8]) -> None:
        """
        states: of GradientState, shared.
        """
    def are_ready(self, bucket: typing.SupportsInt | typing.SupportsIndex) -> bool:
        """
        All are, and have not been sent.
        """
    def begin(self) -> None: ...
    def clear_order(self) -> None: ...
    def end(self) -> None: ...
    def is_complete(self, bucket: typing.SupportsInt | typing.SupportsIndex) -> bool: ...
    def mark(self, index: typing.SupportsInt | typing.SupportsIndex) -> int:
        """
        A gradient is final: 0, 1 if it was the last of its bucket, 2 if its bucket has left.
        """
    def order(self) -> list[int]:
        """
        In which order gradients have arrived.
        """
    def set_buckets(
        self,
        buckets: collections.abc.Sequence[
            collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex]
        ],
    ) -> None:
        """
        The indices of each bucket.
        """
    def set_sent(self, bucket: typing.SupportsInt | typing.SupportsIndex) -> None:
        """
        All leave.
        """
    def stop_recording(self) -> None: ...

class TensorPass:
    """
    A backward pass.
    """

class TensorGradients:
    """
    The gradients of a model that are reduced in their own memory, by number.
    """
    def __init__(
        self, count: typing.SupportsInt | typing.SupportsIndex, count_users: typing.Any, alone: typing.Any
    ) -> None:
        """
        count_users: how many share a storage, by its _cdata, or None; alone: a tensor that shares nothing.
        """
    def arrival_hook(
        self, number: typing.SupportsInt | typing.SupportsIndex, adapter: typing.Any
    ) -> typing.Any:
        """
        A function that marks a parameter's gradient. It calls adapter.bucket_complete() where that was the
        last of a bucket, and adapter.arrived(number, parameter) where there is more to do.
        """
    def begin_pass(self) -> TensorPass:
        """
        While the result lives, gradients that arrive are marked.
        """
    def end_round(self) -> None: ...
    def expect(
        self,
        number: typing.SupportsInt | typing.SupportsIndex,
        like: typing.Any,
        strides: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex],
    ) -> None:
        """
        What a gradient will look like: a tensor of its dtype and shape, and strides; None: not to be
        described.
        """
    def fetch(
        self,
        parameters: list[typing.Any | None],
        numbers: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex],
    ) -> tuple[list[int], list[typing.Any]]:
        """
        The addresses of gradients that look so, are alone in their memory, and are reduced there from now
        on, and the gradients; 0 for one that is not like that.
        """
    def find_changed(self, parameters: list[typing.Any | None]) -> int | None:
        """
        The first of the round that its parameter does not have any more, or that was written to.
        """
    def follow(
        self, arrivals: Arrivals, indices: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex]
    ) -> None:
        """
        Whose arrivals are marked; for each number the index there, or -1.
        """
    def forget(self, number: typing.SupportsInt | typing.SupportsIndex) -> None:
        """
        Another one is the last that was reduced.
        """
    def in_place(self, parameters: list[typing.Any | None]) -> list[int]:
        """
        Those of the round that their parameters still have.
        """
    def incoming(self, number: typing.SupportsInt | typing.SupportsIndex) -> int:
        """
        Where the gradient was that autograd has accumulated in this round; 0: not known here.
        """
    def incoming_hook(
        self, number: typing.SupportsInt | typing.SupportsIndex, adapter: typing.Any
    ) -> typing.Any:
        """
        A function that notes where a tensor is, or calls `adapter` with it.
        """
    def reduced(self, number: typing.SupportsInt | typing.SupportsIndex) -> typing.Any:
        """
        What was reduced last: a weak reference, address and version; None: nothing, or not here.
        """

def address_of(array: numpy.ndarray) -> int:
    """
    Address of the first element.
    """

def adds(collective: str) -> bool:
    """
    Whether a collective adds anything.
    """

def after_fork() -> None:
    """
    To be called after it, in parent and child.
    """

def algorithm_letters() -> str:
    """
    What the letters of a mode mean.
    """

def algorithm_table(
    cluster: Cluster,
    request: PlanRequest,
    model: CostModel,
    staging_bytes: typing.SupportsInt | typing.SupportsIndex = 262144,
) -> list[AlgorithmRow]:
    """
    All algorithms of a collective across hosts, or of one that adds within one.
    """

def assumed_memory(
    ranks: typing.SupportsInt | typing.SupportsIndex, oversubscribed: bool
) -> tuple[float, float, float]:
    """
    The memory of a single host of so many ranks, as the arguments of Cluster.
    """

def before_fork() -> None:
    """
    To be called before each fork.
    """

def bytes_of(array: typing.Any) -> numpy.ndarray:
    """
    The memory of a contiguous array on the host, shape (nbytes,), which it keeps alive.
    """

def check_mode(text: str) -> None:
    """
    Raises UsageError for what MULTIRING_MODE cannot be, whatever ranks there are.
    """

def check_tuning(text: str) -> None:
    """
    Raises UsageError with the number of the line that is wrong.
    """

def checksum(
    address: typing.SupportsInt | typing.SupportsIndex,
    nbytes: typing.SupportsInt | typing.SupportsIndex,
    seed: typing.SupportsInt | typing.SupportsIndex = 0,
) -> int:
    """
    A number that changes with every bit of the memory, at the speed of memory.
    """

def choose_algorithm(
    cluster: Cluster,
    request: PlanRequest,
    model: CostModel,
    staging_bytes: typing.SupportsInt | typing.SupportsIndex = 262144,
) -> tuple[AlgorithmRow, Plan | None]:
    """
    The row of the algorithm that a job on several hosts takes, and its plan; None: it is none.
    """

def collective_names() -> list[str]:
    """
    The collectives that have a table of algorithms.
    """

def connect(store: typing.Any, options: WorldOptions) -> Communicator:
    """
    Joins the ranks through shared memory, and through TCP between hosts, and returns the world. Collective.
    """

def copy_from_device(
    address: typing.SupportsInt | typing.SupportsIndex,
    nbytes: typing.SupportsInt | typing.SupportsIndex,
    device: typing.SupportsInt | typing.SupportsIndex,
    stream: typing.SupportsInt | typing.SupportsIndex,
) -> numpy.typing.NDArray[numpy.uint8]:
    """
    Memory of a device as bytes, after the work that the stream has now.
    """

def copy_streaming(
    to: typing.SupportsInt | typing.SupportsIndex,
    source: typing.SupportsInt | typing.SupportsIndex,
    nbytes: typing.SupportsInt | typing.SupportsIndex,
) -> None:
    """
    Copies memory, given by addresses, past the caches.
    """

def copy_to_device(
    address: typing.SupportsInt | typing.SupportsIndex,
    data: typing.Annotated[numpy.typing.ArrayLike, numpy.uint8],
    device: typing.SupportsInt | typing.SupportsIndex,
    stream: typing.SupportsInt | typing.SupportsIndex,
) -> None:
    """
    Writes bytes to memory of a device, after the work that the stream has now.
    """

def device_of(address: typing.SupportsInt | typing.SupportsIndex) -> int:
    """
    The device whose memory an address is of; -1: memory of the host.
    """

def device_row(cluster: Cluster, request: PlanRequest, has_mode: bool, is_rounded: bool) -> AlgorithmRow:
    """
    The row of what a job on several hosts runs for arrays on devices, a device for each rank.
    """

def documented_algorithms() -> list[dict[str, str]]:
    """
    What the documentation says of each algorithm of a mode.
    """

def dtype_size(dtype: str) -> int:
    """
    Bytes of an element of a type by its name.
    """

def export_device_memory(device: typing.SupportsInt | typing.SupportsIndex) -> tuple[bytes, int]:
    """
    2 MiB for another process to have, until this one ends: its handle, and its address here.
    """

def fail_waits(communicators: collections.abc.Sequence[str], message: str) -> None:
    """
    Breaks communicators with names that `waits` has told, on all of their ranks, by a mismatch.
    """

def find_device_libraries(sites: collections.abc.Sequence[str]) -> list[DeviceLibrary]:
    """
    Opens the libraries for devices; sites: folders that wheels are installed in.
    """

def has_plans(collective: str) -> bool:
    """
    Whether plans are among its algorithms.
    """

def import_device_memory(handle: bytes, device: typing.SupportsInt | typing.SupportsIndex) -> int:
    """
    The address of memory of another process, for what works on `device`.
    """

def interface_addresses(interfaces: collections.abc.Sequence[str]) -> list[tuple[str, str, int]]:
    """
    Interface, address and network bits of all that ranks on other hosts are reached by.
    """

def is_arrival_hook(hook: typing.Any) -> bool: ...
def keep_times(kept: bool) -> None:
    """
    Whether work that is made from now on keeps its times.
    """

def mpi_library(bridge: str) -> str:
    """
    Name and version of the MPI library that a bridge was built with. Loads it, without initialising.
    """

def own_addresses(interfaces: collections.abc.Sequence[str]) -> list[str]:
    """
    Addresses that other hosts reach this one by, as MULTIRING_INTERFACES chooses.
    """

def pair_addresses(
    caller: collections.abc.Sequence[tuple[str, str, typing.SupportsInt | typing.SupportsIndex]],
    listener: collections.abc.Sequence[tuple[str, str, typing.SupportsInt | typing.SupportsIndex]],
) -> list[tuple[int, int]]:
    """
    Which of the caller's addresses calls which of the listener's (indices).
    """

def plan_limit(plan: Plan, model: CostModel) -> float:
    """
    Seconds that no plan that treats all hosts alike can go below.
    """

def predict_steps(plan: Plan, model: CostModel) -> list[float]:
    """
    Predicted seconds of each step in which chunks go whole.
    """

def program_calls() -> tuple[int, int, int]:
    """
    The threads that have communicated, the calls that they have begun, and the number of the communicator for
    which the last call waits; 0: that is not known, or the call has ended.
    """

def require_memory(array: typing.Any) -> None:
    """
    Raises a usage error if the memory of an array does not hold its elements, or it has none.
    """

def tell_sites() -> None:
    """
    Lets libraries for devices be found in the folders of sys.path; for arrays of native code.
    """

def waits() -> list[tuple[int, str, str, tuple[str, str, int], list[tuple[str, str, int]]]]:
    """
    The operations in progress, each as number and name of its communicator, its text, the name, host and
    process of this rank, and the same of the ranks that are awaited.
    """

_interpreter: typing.Any
