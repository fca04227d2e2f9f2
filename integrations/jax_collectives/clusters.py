"""`jax.distributed.initialize()` without arguments, in ranks of any launcher that multiring recognises."""

from __future__ import annotations

import hashlib
import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Sequence
from types import ModuleType

from multiring.errors import UsageError
from multiring.rendezvous import launch_environment

__all__ = ["prepare"]

_MODULE = "jax._src.clusters"
# Systems give none of these to programs that ask for any.
_PORTS = range(16384, 32768)


def prepare() -> None:
    """Let JAX find the place of this rank; called while jaxlib is being imported."""
    if _MODULE in sys.modules:
        _add_cluster(sys.modules[_MODULE])
    else:
        sys.meta_path.insert(0, _Finder())


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the module of JAX's clusters as the other finders do, and adds ours when it has run."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(importlib.abc.Loader):
    def __init__(self, loader: importlib.abc.Loader) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        _add_cluster(module)


def _add_cluster(clusters: ModuleType) -> None:
    """Define a cluster of JAX's, which is asked before those that JAX has itself."""

    class MultiringCluster(clusters.ClusterEnv):  # type: ignore[name-defined,misc]
        """A job whose launcher multiring recognises, if the ranks know where the first of them is."""

        name = "multiring"

        @classmethod
        def is_env_present(cls) -> bool:
            return bool(_coordinator())

        @classmethod
        def get_coordinator_address(
            cls, timeout_secs: int | None, override_coordinator_port: str | None
        ) -> str:
            host, _, port = _coordinator().rpartition(":")
            return f"{host}:{override_coordinator_port or port}"

        @classmethod
        def get_process_count(cls) -> int:
            return launch_environment.detect().size

        @classmethod
        def get_process_id(cls) -> int:
            return launch_environment.detect().rank

        @classmethod
        def get_local_process_id(cls) -> int | None:
            return launch_environment.detect().local_rank

    known = clusters.ClusterEnv._cluster_types
    known.insert(0, known.pop(known.index(MultiringCluster)))


def _coordinator() -> str:
    """Return where the first rank serves JAX's coordinator; empty: that is not known.

    `multiring run` tells. Elsewhere the port follows from the name of the job, and the host is known if it is
    the only one, or by MASTER_ADDR.
    """
    try:
        place = launch_environment.detect()
    except UsageError:  # not for JAX to say
        return ""
    host = os.environ.get("MASTER_ADDR", "")
    if place.launcher == "multiring" and host and "MASTER_PORT" in os.environ:
        return f"{host}:{os.environ['MASTER_PORT']}"
    # JAX knows a job of Slurm itself, on several hosts, too.
    if place.launcher in ("none", "slurm") or (place.is_spread and not host):
        return ""
    port = _PORTS[int.from_bytes(hashlib.sha256(place.job_id.encode()).digest()[:4]) % len(_PORTS)]
    return f"{host or '127.0.0.1'}:{port}"
