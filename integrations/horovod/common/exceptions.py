"""The errors by the name of the module that they have in Horovod."""

from multiring.horovod.elastic import HostsUpdatedInterrupt
from multiring.horovod.exceptions import HorovodInternalError

__all__ = ["HorovodInternalError", "HorovodVersionMismatchError", "HostsUpdatedInterrupt"]


class HorovodVersionMismatchError(ImportError):
    """A framework has another version than the one that a library was compiled for. Never raised here, since
    nothing is compiled for one version.

    Attributes:
        name: The framework.
        version: The version that is there.
        installed_version: The version that the library was compiled for.
    """

    def __init__(self, name: str, version: str, installed_version: str) -> None:
        super().__init__(f"{name} has version {version}; this was compiled for version {installed_version}")
        self.name, self.version, self.installed_version = name, version, installed_version
