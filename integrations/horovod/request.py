"""What a rank asks for by one named operation, and what is wrong with what several ranks ask for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import zip_longest

from multiring.reductions import ScaleKeywords

__all__ = ["Request", "Source", "join_refusal", "mismatch", "reduction_request"]

# Kinds whose first extents may differ over ranks.
_UNEVEN = frozenset({"allgather", "alltoall"})
_REDUCTIONS = frozenset({"allreduce", "reducescatter"})


@dataclass(frozen=True)
class Source:
    """The variable whose gradient, or value, an operation is about.

    Attributes:
        number: Position in the list of variables, from 1.
        count: Length of that list.
        kind: The part of the variable's name that is the same in every process.
        is_present: Whether this rank has a gradient; otherwise it is None.
        title: The variable's name in this process. The ranks do not compare it.
        what: "gradient" or "value".
    """

    number: int
    count: int
    kind: str
    is_present: bool
    title: str = field(compare=False)
    what: str = "gradient"

    @property
    def asked(self) -> str:
        """All that has to be the same on all ranks, as one text."""
        return f"{self.what if self.is_present else 'None'} {self.number}/{self.count} {self.kind}"

    def __str__(self) -> str:
        article = "a" if self.is_present else "no"
        return f"{article} {self.what} of variable '{self.title}' ({self.number} of {self.count})"


@dataclass(frozen=True)
class Request:
    """One operation as a rank asks for it.

    Attributes:
        kind: "allreduce", "allgather", "broadcast", "alltoall", "reducescatter" or "barrier".
        name: What it is matched by.
        dtype: Name of the elements' type, as "float32".
        shape: Of the tensor on this rank.
        op: Of a reduction: "average", "sum", "adasum", "min", "max" or "product".
        prescale: Factor for each input.
        postscale: Factor for the result.
        root: Of a broadcast, as a rank of the job.
        group: What the other operations of a grouped call are; all of them fail together.
        sources: Variables, if the tensors of the call are their gradients or values.
    """

    kind: str
    name: str
    dtype: str = ""
    shape: tuple[int, ...] = ()
    op: str = ""
    prescale: float = 1.0
    postscale: float = 1.0
    root: int = -1
    group: str = ""
    sources: tuple[Source, ...] = ()

    def reduction(self, size: int) -> tuple[str, ScaleKeywords]:
        """The reduction over `size` ranks that gives the result, and its factors.

        The average of integers is scaled as Horovod does it: their sum is multiplied by postscale / size, and
        truncated once.
        """
        op, postscale = self.op, self.postscale
        if op == "average" and postscale != 1.0 and "int" in self.dtype:
            op, postscale = "sum", postscale / size
        return op, ScaleKeywords(prescale=self.prescale, postscale=postscale)

    @property
    def extents(self) -> tuple[int, ...]:
        """The shape as far as it has to be the same on all ranks; a first extent that may differ is -1."""
        return (-1, *self.shape[1:]) if self.kind in _UNEVEN and self.shape else self.shape

    @cached_property
    def asked(self) -> str:
        """All that has to be the same on all ranks besides kind and dtype, as one text."""
        scale = f" x{self.prescale!r} x{self.postscale!r}" if self.kind in _REDUCTIONS else ""
        root = f" from {self.root}" if self.kind == "broadcast" else ""
        group = f" of {self.group}" if self.group else ""
        sources = "".join(f" {source.asked}" for source in self.sources)
        return f"{self.name} {list(self.extents)} {self.op}{scale}{root}{group}{sources}"


@lru_cache(4096)
def reduction_request(
    name: str, dtype: str, shape: tuple[int, ...], asked: tuple[str, float, float], group: str
) -> Request:
    """A request for an allreduce. The same gradients come in every step: theirs are made once."""
    return Request("allreduce", name, dtype, shape, *asked, group=group)


def _sources(one: Request, other: Request) -> str:
    for mine, theirs in zip_longest(one.sources, other.sources):
        if mine != theirs:
            what = (mine or theirs or Source(1, 1, "", True, "")).what
            hint = " (zeros, if need be)" if what == "gradient" else " in the same order"
            return (
                f"Mismatched {what}s: One rank has {mine or 'none'}, but another rank has "
                f"{theirs or 'none'}; give every rank {what}s of the same variables{hint}"
            )
    return ""


def _kinds(one: Request, other: Request) -> str:
    if one.kind == other.kind:
        return ""
    return (
        f"Mismatched collective operations: One rank did an {one.kind}, but another rank did an {other.kind}"
    )


def _types(one: Request, other: Request) -> str:
    if one.dtype == other.dtype:
        return ""
    return f"Mismatched data types: One rank had type {one.dtype}, but another rank had type {other.dtype}"


def _reductions(one: Request, other: Request) -> str:
    if one.op == other.op:
        return ""
    return f"Mismatched {one.kind} operations: One rank had op {one.op}, but another rank had op {other.op}"


def _scales(one: Request, other: Request) -> str:
    if (one.prescale, one.postscale) == (other.prescale, other.postscale):
        return ""
    return (
        f"Mismatched prescale and/or postscale factors: One rank sent factors ({one.prescale}, "
        f"{one.postscale}), but another rank sent factors ({other.prescale}, {other.postscale})"
    )


def _shapes(one: Request, other: Request) -> str:
    if one.extents == other.extents:
        return ""
    first = f"Mismatched {one.kind} tensor shapes: One rank sent a tensor of"
    if one.kind not in _UNEVEN:
        return f"{first} shape {list(one.shape)}, but another rank sent a tensor of shape {list(other.shape)}"
    if len(one.shape) != len(other.shape):
        return f"{first} rank {len(one.shape)}, but another rank sent a tensor of rank {len(other.shape)}"
    axis = next(k for k, extent in enumerate(one.extents) if extent != other.extents[k])
    return (
        f"{first.removesuffix(' of')} with dimension {axis} equal to {one.shape[axis]}, but another rank "
        f"sent a tensor with dimension {axis} equal to {other.shape[axis]}"
    )


def _roots(one: Request, other: Request) -> str:
    if one.root == other.root:
        return ""
    return (
        f"Mismatched broadcast root ranks: One rank specified root rank {one.root}, but another rank "
        f"specified root rank {other.root}"
    )


def _groups(one: Request, other: Request) -> str:
    if one.group == other.group:
        return ""
    return f"Mismatched grouped {one.kind}: One rank has {one.group}, but another rank has {other.group}"


_CHECKS: tuple[Callable[[Request, Request], str], ...] = (
    *(_sources, _kinds, _types, _reductions, _scales, _shapes, _roots, _groups),
)


def mismatch(requests: Mapping[int, Request]) -> str:
    """What is wrong with the requests of these ranks for one name; empty: nothing."""
    first = min(requests)
    for rank, request in sorted(requests.items()):
        for check in _CHECKS:
            text = check(requests[first], request)
            if text:
                return f"{text} (tensor '{request.name}': ranks {first} and {rank} of the process set)."
    return ""


def join_refusal(request: Request) -> str:
    """Why ranks that have joined cannot take part in an operation; empty: they can."""
    if request.kind == "allreduce" and request.op != "adasum":
        return ""
    kind = "Adasum" if request.op == "adasum" else request.kind.capitalize()
    return f"{kind} is not supported with Join at this time."
