"""The collectives by the name of the module that they have in Horovod."""

from multiring.horovod.basics import *  # noqa: F403
from multiring.horovod.common.basics import HorovodBasics
from multiring.horovod.reduce_ops import Adasum, Average, Max, Min, Product, Sum
from multiring.horovod.tensorflow.collectives import *  # noqa: F403

__all__ = ["Adasum", "Average", "Max", "Min", "Product", "Sum"]

_basics = HorovodBasics()
