"""The errors by the name of the module that they have in Horovod."""

from multiring.horovod.elastic import HostsUpdatedInterrupt
from multiring.horovod.exceptions import HorovodInternalError

__all__ = ["HorovodInternalError", "HostsUpdatedInterrupt"]
