"""Small functions by the name of the module that they have in Horovod."""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

from multiring.horovod import basics
from multiring.horovod.submissions import is_power_of_2 as num_rank_is_power_2

__all__ = [
    "ccl_built",
    "check_extension",
    "check_installed_version",
    "ddl_built",
    "env",
    "extension_available",
    "gloo_built",
    "gpu_available",
    "is_iterable",
    "mpi_built",
    "nccl_built",
    "num_rank_is_power_2",
    "split_list",
]


_cache = functools.cache


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Whether a framework is installed that has Horovod's API here: "torch" or "tensorflow"."""
    return (
        find_spec(ext_base_name) is not None and find_spec(f"multiring.horovod.{ext_base_name}") is not None
    )


def check_extension(ext_name: str, ext_env_var: str, pkg_path: str, *args: str) -> None:
    """Raises ImportError where `extension_available` is False for "horovod.torch" or another name."""
    if not extension_available(ext_name.rpartition(".")[2]):
        raise ImportError(f"there is no {ext_name}: its framework is not installed, or has no Horovod here")


def check_installed_version(name: str, version: str, exception: Exception | None = None) -> None:
    """Does nothing: nothing was compiled for one version of a framework."""


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:
    """False: no library for GPUs is built in; tensors there are reduced through the host."""
    return False


def mpi_built(verbose: bool = False) -> bool:
    """As hvd.mpi_built(); so are the following."""
    return basics.mpi_built()


def gloo_built(verbose: bool = False) -> bool:
    """Whether Gloo is built in."""
    return basics.gloo_built()


def nccl_built(verbose: bool = False) -> int:
    """Number of the NCCL release that is built in."""
    return basics.nccl_built()


def ddl_built(verbose: bool = False) -> bool:
    """Whether IBM's DDL is built in."""
    return basics.ddl_built()


def ccl_built(verbose: bool = False) -> bool:
    """Whether Intel's oneCCL is built in."""
    return basics.ccl_built()


@contextmanager
def env(**kwargs: str | None) -> Iterator[None]:
    """Context in which these variables of the environment are set; None: left as it is."""
    wanted = {name: value for name, value in kwargs.items() if value is not None}
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def split_list(items: Sequence[Any], count: int) -> list[Any]:
    """So many parts of a list, of sizes that differ by one at most, the larger ones first."""
    size, extra = divmod(len(items), count)
    ends = [size * k + min(k, extra) for k in range(count + 1)]
    return [items[i:j] for i, j in itertools.pairwise(ends)]


def is_iterable(value: object) -> bool:
    """Whether `iter(value)` works."""
    try:
        iter(value)  # type: ignore[call-overload]
    except TypeError:
        return False
    return True
