"""Fixtures for all tests."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from multiring.benchmarks.emulation.hosts import EmulatedHosts, why_not
from tests.nursery import Nursery
from tests.on_ranks import run_on_ranks
from tests.rank_pool import RankPool, RankProcesses
from tests.tiers import check, is_left_out, mark, sort, worker_of


def pytest_configure() -> None:
    check()
    # A shell that starts the tests in the background has them ignore these, and so would all that they start.
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    # What ends a test run from outside (`timeout`, a CI system) should let fixtures tidy up, as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return True if is_left_out(collection_path, config.option.markexpr) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    mark(items, whole=not any("::" in argument for argument in config.args))
    if os.environ.get("PYTEST_XDIST_WORKER"):
        sort(items)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    # pytest-xdist's own groups (--dist loadgroup) do not work with pytest 9.
    config.option.loadscopereorder = False  # the order is that of `sort`
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return worker_of(nodeid)

    return Scheduling(config, log)


@pytest.fixture(scope="session")
def spread() -> Iterator[Callable[[int, int], RankPool]]:
    """Gives `spread(n, hosts)`: a pool of n ranks that take themselves to be on so many hosts."""
    processes = RankProcesses(4)  # as many as a test of `make test` needs

    def pool(n: int, hosts: int) -> RankPool:
        return RankPool(n, hosts=hosts, processes=processes)

    yield pool
    processes.close()


@pytest.fixture(scope="session")
def ranks(spread: Callable[[int, int], RankPool]) -> Callable[[int], RankPool]:
    """Gives `ranks(n)`: a pool of n ranks."""
    return lambda n: spread(n, 1)


@pytest.fixture
def comm(request: pytest.FixtureRequest) -> RankPool:
    """The pool of a test on ranks (tests/on_ranks.py), which gets the communicator of its rank."""
    size = getattr(request, "param", 2)
    pool: RankPool = request.getfixturevalue("spread")(*(size if isinstance(size, tuple) else (size, 1)))
    return pool


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if not isinstance(pyfuncitem.funcargs.get("comm"), RankPool):
        return None
    run_on_ranks(pyfuncitem)
    return True


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    """Ranks to be forked, for scenarios that set up, or end, a job of their own."""
    with contextlib.closing(Nursery()) as started:
        yield started


@pytest.fixture
def emulate() -> Iterator[Callable[..., EmulatedHosts]]:
    """Gives `emulate(count, rates)`, which makes emulated hosts; skips where there can be none."""
    if reason := why_not():
        pytest.skip(reason)
    with contextlib.ExitStack() as made:
        yield lambda *given: made.enter_context(EmulatedHosts(*given))


@pytest.fixture(scope="module")
def hosts() -> Iterator[EmulatedHosts]:
    """Two emulated hosts that a module's tests share; skips where there can be none."""
    if reason := why_not():
        pytest.skip(reason)
    with EmulatedHosts(2) as made:
        yield made
