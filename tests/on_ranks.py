"""Tests that are functions of a rank: those whose argument is `comm` run on every rank of a pool.

    @on_ranks(1, 3)  # two, where nothing is said
    def test_sums(comm: Communicator) -> None:
        assert comm.allreduce(np.array(1)) == comm.size

    @all_raise(MismatchError, r"on rank 1")
    def test_shapes_that_differ(comm: Communicator) -> None:
        comm.allreduce(np.zeros(comm.rank))

What such a test returns has to be the same on all ranks. Other fixtures (`tmp_path`) and parameters travel to
the ranks, so they have to be picklable. `tests/conftest.py` has the fixture and the hook.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from types import UnionType
from typing import Any

import pytest

from multiring import Communicator, MultiringError
from tests.rank_pool import RankPool

Pool = Callable[[int], RankPool]
"""What the fixture `ranks` gives: the pool of so many ranks."""


def on_ranks(*sizes: int | tuple[int, int]) -> pytest.MarkDecorator:
    """Runs the test on pools of these numbers of ranks, or of (ranks, hosts that they pretend to be on)."""
    return pytest.mark.parametrize("comm", sizes, indirect=True, ids=str)


def all_raise(
    kind: type[BaseException] | UnionType, /, *texts: str, **text_of: Mapping[Any, str | None]
) -> pytest.MarkDecorator:
    """Expects the test to raise an error of `kind` on every rank, in which each regular expression is found.

    `what={"shape": "not of the same shape"}` runs the test with each of these values of its parameter `what`,
    and expects the text beside it as well; None: no error.
    """
    if not text_of:
        return pytest.mark.all_raise.with_args(kind, *texts)  # not a call, which would mark a lone class
    ((name, table),) = text_of.items()
    rows = [
        value if text is None else pytest.param(value, marks=all_raise(kind, *texts, text))
        for value, text in table.items()
    ]
    return pytest.mark.parametrize(name, rows)


def run_on_ranks(item: pytest.Function) -> None:
    """Runs a test that has `comm` on the ranks of the pool that the fixture `comm` is."""
    arguments = {name: item.funcargs[name] for name in item._fixtureinfo.argnames}
    pool: RankPool = arguments.pop("comm")
    expected = item.get_closest_marker("all_raise")
    if expected is None:
        results = pool.run(item.obj, **arguments)
        assert all(result == results[0] for result in results), f"ranks differ: {results}"
        return
    kind, *texts = expected.args
    for error in pool.run_expecting_errors(item.obj, **arguments):
        assert isinstance(error, kind), f"{error!r} is no {kind}"
        for text in texts:
            assert re.search(text, str(error), re.DOTALL), f"no {text!r} in: {error}"


def same_everywhere(comm: Communicator, value: object) -> bool:
    """Whether all ranks have given equal values. Collective."""
    return comm.allgather_object(value) == [value] * comm.size


def check_fields(error: MultiringError, comm: Communicator, tensor: str) -> None:
    """Fails unless the error of an allreduce of two ranks, which do not agree, tells what is known of it."""
    assert (error.rank, error.peer, error.host) == (comm.rank, 1 - comm.rank, comm.host)
    assert (error.operation, error.tensor) == ("allreduce", tensor)
    assert error.nbytes is not None
    assert error.elapsed is not None


def refuses(
    kind: type[Exception] | tuple[type[Exception], ...],
    text: str,
    call: Callable[..., Any],
    /,
    *args: Any,
    **options: Any,
) -> None:
    """Fails unless the call raises an error of that kind in which that regular expression is found."""
    with pytest.raises(kind, match=text):
        call(*args, **options)
