"""ChainerMN's communicator over the core, without MPI."""

from __future__ import annotations

import logging
import weakref
from typing import Any, SupportsFloat

import chainermn
import numpy as np

import chainer
import multiring
from multiring import Communicator
from multiring.chainer import array_collectives as arrays
from multiring.chainer.gradient_slots import GradientSlots
from multiring.chainer.groups import Group, plain_communicator
from multiring.chainer.messages import Mailbox
from multiring.chainer.parameters import fill_with_zeros, identities, named_parameters
from multiring.chainer.state_broadcast import broadcast_arrays, forget_copies, parameter_arrays
from multiring.chainer.without_mpi import ObjectCommunicator, keep_mpi_out
from multiring.errors import UsageError
from multiring.gradients.options import ReducerOptions
from multiring.metrics import average_metrics

__all__ = ["ChainerCommunicator", "as_chainer_communicator", "create_communicator"]


# Those of ChainerMN of all releases that average gradients.
_NAMES = ("pure_nccl", "hierarchical", "two_dimensional", "single_node", "flat", "non_cuda_aware", "naive")

_log = logging.getLogger("multiring")


def create_communicator(
    comm: Group | str = None,
    mpi_comm: Any = None,
    *,
    communicator_name: str | None = None,
    batched_copy: bool = True,
    allreduce_grad_dtype: Any = None,
) -> ChainerCommunicator:
    """A communicator for everything in `chainermn`; takes the place of `chainermn.create_communicator`.

    Args:
        comm: Ranks that train together; the world by default, which is initialised if it is not yet. Or the
            name of a communicator, as ChainerMN has it here.
        mpi_comm: A communicator of mpi4py with the same ranks, for the program's own use: it is kept as
            `mpi_comm` and split along. Nothing of multiring needs it. If None, `mpi_comm` has the methods of
            mpi4py for Python objects, without MPI.
        communicator_name: A name that ChainerMN knows. It chooses nothing: there is one kind of communicator,
            for any network and array, which a line of the log says.
        batched_copy: Accepted as by ChainerMN, and kept in the configuration; there is no other way of
            copying here.
        allreduce_grad_dtype: float16 to cast gradients to it before they are reduced, and back: sums are of
            float32, and the average is rounded. None or float32, which are the same: gradients of float16 are
            added up in float32, others in their own dtype. An optimizer takes it over when it is set up.

    Raises:
        UsageError: An argument is of another kind, or `mpi_comm` has other ranks.
    """
    if isinstance(comm, str):
        if communicator_name is not None:
            raise UsageError(f"create_communicator got two names, {comm!r} and {communicator_name!r}")
        comm, communicator_name = None, comm
    _check_name(communicator_name)
    _check_dtype(allreduce_grad_dtype)
    keep_mpi_out()
    if comm is None:
        comm = multiring.init()
    communicator = ChainerCommunicator(plain_communicator(comm), mpi_comm)
    communicator.set_config("batched_copy", batched_copy)
    communicator.set_config("allreduce_grad_dtype", allreduce_grad_dtype)
    if communicator_name is not None and communicator.rank == 0:
        _log.warning(
            "create_communicator(%r): multiring has one kind of communicator, which is used: %d ranks on %d "
            "host(s); leave the name out",
            *(communicator_name, communicator.size, communicator.inter_size),
        )
    return communicator


def as_chainer_communicator(communicator: Group) -> ChainerCommunicator:
    """A communicator of ChainerMN's kind; another one is made into it."""
    if isinstance(communicator, ChainerCommunicator):
        return communicator
    return create_communicator(communicator)


def _check_name(name: str | None) -> None:
    if name == "dummy":
        raise UsageError("create_communicator('dummy'): there is no communicator here that sends nothing")
    if name is not None and name not in _NAMES:
        raise UsageError(
            f"create_communicator({name!r}): ChainerMN has no such communicator; leave the name out (there "
            f"is one kind here), or keep one of {', '.join(_NAMES)}"
        )


def _check_dtype(dtype: Any) -> None:
    """Raise UsageError unless gradients can be averaged in this dtype, or more precisely."""
    if dtype is not None and np.dtype(dtype) not in (np.float16, np.float32):
        raise UsageError(
            f"allreduce_grad_dtype={np.dtype(dtype).name}: gradients are added up in their own dtype, or in "
            "float32; leave it out"
        )


class ChainerCommunicator(chainermn.CommunicatorBase):
    """The contract of `chainermn.CommunicatorBase`; made by `create_communicator`.

    Semantics are ChainerMN's, with these differences:

    - What does not fit together is an error on every rank that names ranks and arrays, and no call hangs.
    - Arrays may be of any dtype of the core (bool, integers, float16 to float64); sums have the same bits on
      every rank and in every run.
    - Where ranks differ in which parameters have a gradient, those that lack one count as zeros.
    - Arrays of CuPy stay on their device: the core copies them through pinned host memory.

    Attributes:
        rank: Rank of this process in the communicator.
        size: Number of ranks.
        intra_rank: Rank among those on this host.
        intra_size: Number of ranks on this host.
        inter_rank: Number of this host.
        inter_size: Number of hosts.
        plain: The `multiring.Communicator` at work.
        mpi_comm: What was passed for it, or mpi4py's methods for Python objects and its barrier.
        batched_copy: What was passed for it.
    """

    # In the place of properties of the base class.
    rank = size = intra_rank = intra_size = inter_rank = inter_size = 0

    def __init__(self, comm: Communicator, mpi_comm: Any = None, *, owned: bool = False) -> None:
        super().__init__()
        self.rank, self.size = comm.rank, comm.size
        self.intra_rank, self.intra_size = comm.local_rank, comm.local_size
        self.inter_rank, self.inter_size = comm.cross_rank, comm.cross_size
        if mpi_comm is not None and (mpi_comm.size, mpi_comm.rank) != (comm.size, comm.rank):
            raise UsageError(
                f"rank {comm.rank} of {comm.size} is rank {mpi_comm.rank} of {mpi_comm.size} in mpi_comm; "
                "pass one with the same ranks"
            )
        self.plain = comm
        self._mailbox = Mailbox(comm)
        self._objects = ObjectCommunicator(comm, self._mailbox)
        self.mpi_comm = self._objects if mpi_comm is None else mpi_comm
        self._owned = owned
        self._configs: dict[str, Any] = {}  # of this object; the base class has one dictionary for all
        self.set_config("batched_copy", True)
        self.set_config("allreduce_grad_dtype", None)
        self._slots: weakref.WeakKeyDictionary[chainer.Link, _ModelSlots] = weakref.WeakKeyDictionary()

    def set_config(self, name: str, value: Any = True, **kwargs: Any) -> None:
        """Keep a setting, which is an attribute: "batched_copy" or "allreduce_grad_dtype", see
        `create_communicator`.

        Raises:
            ValueError: There is no such setting, or no such value.
        """
        if name == "allreduce_grad_dtype":
            _check_dtype(value)
            value = None if value is None else np.dtype(value)
        elif name != "batched_copy":
            super().set_config(name, **kwargs)
        with self.config_scope():  # what is set in here is a setting
            setattr(self, name, value)

    def get_config(self, name: str | None = None) -> Any:
        """The setting of that name; all settings by name if None.

        Raises:
            KeyError: There is no such setting.
        """
        # The base class keeps its own note of being in a `config_scope` among them.
        settings = {key: getattr(self, key) for key in self._configs if not key.startswith("_")}
        return settings if name is None else settings[name]

    def split(self, color: int | None, key: int) -> ChainerCommunicator | None:
        """One communicator for each color, with the same settings, as `MPI_Comm_split`; None where `color` is
        None or negative, as `MPI.UNDEFINED` is. Collective."""
        color = None if color is not None and color < 0 else color
        child = self.plain.split(color, key)
        mpi_child = None if self.mpi_comm is self._objects else _split_mpi(self.mpi_comm, color, key)
        if child is None:
            return None
        made = ChainerCommunicator(child, mpi_child, owned=True)
        with made.config_scope():
            for name, value in self.get_config().items():
                setattr(made, name, value)
        return made

    def finalize(self) -> None:
        """Release buckets, and the ranks' connections if this communicator comes from `split`."""
        for slots in self._slots.values():
            slots.slots.close()
        self._slots.clear()
        if self._owned:
            self.plain.close()

    @property
    def dtype_of_gradients(self) -> np.dtype[Any] | None:
        """What gradients are cast to before they are averaged; None: they travel as they are, or not at
        all."""
        dtype: np.dtype[Any] | None = self.allreduce_grad_dtype
        return dtype if dtype == np.float16 and self.size > 1 else None

    # Arrays.

    def alltoall(self, xs: Any) -> tuple[Any, ...]:
        """Send `xs[i]` to rank i; the tuple of what the ranks have sent. Shapes may differ."""
        return arrays.alltoall(self.plain, xs)

    def send(self, data: Any, dest: int, tag: int = 0) -> None:
        """Send an array, or a tuple of arrays of one dtype, to rank `dest`, which has to call `recv`."""
        self._mailbox.send_arrays(data, dest, tag)

    def recv(self, source: int, tag: int | None = None) -> Any:
        """Receive what `source` has sent with `tag` (with any tag if None): an array or a tuple of them."""
        return self._mailbox.receive_arrays(source, None if tag is None or tag < 0 else tag)

    def bcast(self, x: Any, root: int = 0) -> Any:
        """The array of `root`, on every rank; what others pass is ignored."""
        return arrays.bcast(self.plain, x, root)

    def gather(self, x: Any, root: int = 0) -> tuple[Any, ...] | None:
        """The arrays of all ranks on `root`, None elsewhere. Shapes may differ."""
        return arrays.gather(self.plain, x, root)

    def allgather(self, x: Any) -> tuple[Any, ...]:
        """The arrays of all ranks on every rank. Shapes may differ."""
        return arrays.allgather(self.plain, x)

    def allreduce(self, x: Any) -> Any:
        """Sum of the arrays of all ranks, which are of the same shape and dtype."""
        return arrays.allreduce(self.plain, x)

    def scatter(self, xs: Any, root: int = 0) -> Any:
        """Array i of `root`'s tuple, or row i of its array, on rank i; what others pass is ignored."""
        return arrays.scatter(self.plain, xs, root)

    # Objects, which have to be picklable.

    def send_obj(self, obj: Any, dest: int, tag: int = 0) -> None:
        """Send an object to rank `dest`, which has to call `recv_obj`."""
        self._mailbox.send_object(obj, dest, tag)

    def recv_obj(self, source: int, status: Any = None, tag: int | None = None) -> Any:
        """Receive the object that `source` has sent with `tag` (with any tag if None or negative).

        `status` is told the source, the tag and the number of bytes: one of mpi4py, or any object that takes
        the attributes `source`, `tag` and `count`.
        """
        return self._mailbox.receive_object(source, None if tag is None or tag < 0 else tag, status)

    def bcast_obj(self, obj: Any, max_buf_len: int | None = None, root: int = 0) -> Any:
        """The object of `root`, on every rank; there is no limit that `max_buf_len` would serve."""
        return self._objects.bcast(obj, root)

    def gather_obj(self, obj: Any, root: int = 0) -> list[Any] | None:
        """The objects of all ranks on `root`, None elsewhere."""
        return self._objects.gather(obj, root)

    def allreduce_obj(self, obj: Any) -> Any:
        """Sum (`+`) of the objects of all ranks, in the order of the ranks."""
        return self._objects.allreduce(obj)

    def scatter_obj(self, objs: Any, root: int = 0) -> Any:
        """Object i of `root`'s sequence on rank i; what others pass is ignored."""
        return self._objects.scatter(objs, root)

    # Models.

    def bcast_data(self, model: chainer.Link) -> None:
        """Give all ranks the parameters of rank 0. Collective.

        Raises:
            MismatchError: The ranks have different parameters, or have initialised others.
        """
        broadcast_arrays(parameter_arrays(model), 0, self)
        forget_copies(model)

    def multi_node_mean_grad(self, model: chainer.Link, zero_fill: bool = False) -> None:
        """Average the gradients of a model over ranks. Collective.

        Gradients are averaged where they are. Those that are read-only, or whose memory another parameter's
        gradient has too, become views of buckets, which the next call for the same model overwrites.

        Args:
            model: The model, with the same parameters on every rank.
            zero_fill: Give parameters that have a gradient on no rank one of zeros; otherwise they are left
                alone. Parameters that have one on some ranks are averaged in any case.

        Raises:
            MismatchError: The ranks have different parameters.
        """
        parameters, dtype = named_parameters(model), self.dtype_of_gradients
        found = self._slots.get(model)
        if found is None or not found.fits(parameters, dtype):
            if found is not None:
                found.slots.close()
            found = self._slots[model] = _ModelSlots(parameters, self.plain, dtype)
        if self.size > 1:
            scales = (p._loss_scale for p in parameters.values() if p.grad is not None)
            found.slots.loss_scale = next(scales, None)
            found.slots.reduce()
        if zero_fill:
            fill_with_zeros(parameters)

    def average_metrics(self, metrics: dict[str, SupportsFloat], count: float) -> dict[str, float]:
        """Average metrics over ranks, weighted by `count` samples. Collective."""
        return average_metrics(metrics, count, self)

    def _multi_node_mean(self, sendbuf: Any, recvbuf: Any) -> None:
        """What ChainerMN's batch normalisation and its extension for running statistics call."""
        arrays.mean(self.plain, sendbuf, recvbuf)

    def __reduce__(self) -> tuple[Any, ...]:
        raise UsageError("a communicator cannot be pickled or copied; keep it out of what is saved")

    def __deepcopy__(self, memo: dict[int, Any]) -> ChainerCommunicator:
        """A copy of a link that holds the communicator refers to the same one."""
        return self


def _split_mpi(mpi_comm: Any, color: int | None, key: int) -> Any:
    from mpi4py import MPI  # the program has it, or there would be no communicator of it

    return mpi_comm.Split(MPI.UNDEFINED if color is None else color, key)


class _ModelSlots:
    """Buckets for the gradients of a model, and what they were made for."""

    def __init__(
        self, parameters: dict[str, chainer.Parameter], comm: Communicator, dtype: np.dtype[Any] | None
    ) -> None:
        self.slots = GradientSlots(parameters, comm, ReducerOptions(), dtype)
        self._known = identities(parameters), dtype

    def fits(self, parameters: dict[str, chainer.Parameter], dtype: np.dtype[Any] | None) -> bool:
        return self._known == (identities(parameters), dtype)
