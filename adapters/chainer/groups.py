"""Which ranks a call is about."""

from __future__ import annotations

from typing import Any, TypeAlias

import multiring
from multiring import Communicator
from multiring.errors import UsageError

__all__ = ["Group", "plain_communicator"]

Group: TypeAlias = Any
"""A communicator of `create_communicator`, a `multiring.Communicator`, or None for the world."""


def plain_communicator(comm: Group) -> Communicator:
    """The communicator of the core behind whatever a program passes.

    Raises:
        UsageError: It is none of what `Group` names.
    """
    if comm is None:
        return multiring.world()
    plain = getattr(comm, "plain", comm)
    if isinstance(plain, Communicator):
        return plain
    raise UsageError(
        f"{type(comm).__module__}.{type(comm).__name__} is no communicator of multiring; make one with "
        "multiring.chainer.create_communicator()"
    )
