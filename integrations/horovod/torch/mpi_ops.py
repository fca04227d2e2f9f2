"""The collectives by the name of the module that they have in Horovod."""

from __future__ import annotations

from multiring.horovod.basics import *  # noqa: F403
from multiring.horovod.common.basics import HorovodBasics
from multiring.horovod.reduce_ops import Adasum, Average, Max, Min, Product, Sum
from multiring.horovod.submissions import barrier, join
from multiring.horovod.torch.collectives import *  # noqa: F403
from multiring.horovod.torch.handles import poll, synchronize
from multiring.horovod.torch.moves import *  # noqa: F403
from multiring.horovod.torch.reduces import *  # noqa: F403

__all__ = ["Adasum", "Average", "Max", "Min", "Product", "Sum", "barrier", "join", "poll", "synchronize"]

_basics = HorovodBasics()
