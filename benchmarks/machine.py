"""Where something was measured, and with what."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from multiring import machine

__all__ = ["Machine"]


@dataclass(frozen=True)
class Machine:
    """Where it was measured, and with what.

    Attributes:
        processor: The processor's name.
        cores: Processors that the ranks had together.
        memory: Bytes of memory, or of what a container may use; None if unknown.
        kernel: System and release.
        python: Version.
        versions: Versions of libraries by their names.
    """

    processor: str
    cores: int
    memory: int | None
    kernel: str
    python: str
    versions: dict[str, str]

    @classmethod
    def here(cls, cores: int, *, mpi: bool, others: Mapping[str, str] | None = None) -> Machine:
        """This machine.

        Args:
            cores: Processors that the ranks have together.
            mpi: Whether MPI is loaded, and its version wanted.
            others: Versions of libraries in other environments.
        """
        return cls(
            processor=machine.processor_name(),
            cores=cores,
            memory=machine.memory_limit() or machine.memory_total(),
            kernel=f"{platform.system()} {platform.release()}",
            python=platform.python_version(),
            versions={**_versions(mpi=mpi), **(others or {})},
        )


def _versions(*, mpi: bool) -> dict[str, str]:
    found = {}
    for name in ("multiring", "numpy", "torch"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    if mpi:
        from mpi4py import MPI

        vendor, number = MPI.get_vendor()
        found[vendor] = ".".join(map(str, number))
    return found
