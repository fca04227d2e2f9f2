"""The pool of ranks that other tests use."""

from __future__ import annotations

import importlib
import os
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from multiring import Communicator
from multiring.errors import MultiringError
from tests.on_ranks import Pool, on_ranks
from tests.rank_pool import RankPool, RanksFailed, RanksTimedOut
from tests.support import process_exists, wait_until


def total(comm: Communicator, offset: float, *, factor: float = 1.0) -> tuple[int, float]:
    return os.getpid(), float(comm.allreduce(np.array([comm.rank + offset]))[0]) * factor


def fail_on_rank_1(comm: Communicator) -> int:
    if comm.rank == 1:
        raise ValueError("only here")
    comm.barrier()
    return comm.rank


def refuse(comm: Communicator) -> int:
    if comm.rank == 1:
        raise LookupError("refused")
    return comm.rank


def hang_or_end(comm: Communicator, ends: bool) -> None:
    if comm.rank == 0:
        os._exit(3) if ends else time.sleep(600)
    time.sleep(600 * ends)


def test_every_rank_runs_the_function_in_a_process_that_stays(ranks: Pool) -> None:
    first = ranks(2).run(total, 1.0)
    second = ranks(2).run(partial(total, offset=2.0), factor=10.0)
    assert [value for _, value in first] == [3.0, 3.0]
    assert [value for _, value in second] == [50.0, 50.0]
    assert [pid for pid, _ in first] == [pid for pid, _ in second] == ranks(2).pids()


@pytest.mark.parametrize("offset", [5])
@on_ranks(1, (2, 2))
def test_all_ranks_run_a_test(comm: Communicator, offset: int) -> None:
    assert comm.allgather(np.array([comm.rank + offset])).tolist() == [*range(offset, offset + comm.size)]
    assert comm.cross_size == comm.size


def test_a_failure_shows_every_rank_and_the_pool_goes_on(ranks: Pool) -> None:
    pids = ranks(3).pids()
    with pytest.raises(RanksFailed, match="ValueError: only here") as caught:
        ranks(3).run(fail_on_rank_1)
    assert isinstance(caught.value.__cause__, ValueError)
    assert sorted(caught.value.errors) == [0, 1, 2]
    assert isinstance(caught.value.errors[0], MultiringError)
    found = ranks(3).run_expecting_errors(refuse)
    assert [found[0], found[2]] == [0, 2]
    assert isinstance(found[1], LookupError)
    assert [value for _, value in ranks(3).run(total, 0.0)] == [3.0] * 3
    assert ranks(3).pids() == pids


def test_a_function_that_ranks_cannot_import_is_refused(ranks: Pool) -> None:
    with pytest.raises(TypeError, match="top level"):
        ranks(2).run(lambda comm: None)


def test_a_module_that_ranks_cannot_import_shows_its_first_error_each_time(
    ranks: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "import os\nassert 'MULTIRING_RANK' not in os.environ, 'not on ranks'\ndef call(comm): pass\n"
    (tmp_path / "not_on_ranks.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    function = importlib.import_module("not_on_ranks").call
    for _ in range(2):
        with pytest.raises(RanksFailed, match=r"import not_on_ranks failed on 2 of 2 ranks[^$]*not on ranks"):
            ranks(2).run_expecting_errors(function)
    assert [value for _, value in ranks(2).run(total, 0.0)] == [1.0, 1.0]


def test_a_rank_that_hangs_or_ends_is_told_and_the_pool_starts_anew() -> None:
    with RankPool(2) as pool:
        pids = pool.pids()
        with pytest.raises(RanksTimedOut, match="no answer from rank 0 of 2") as caught:
            pool.run(hang_or_end, ends=False, timeout=2.0)
        assert "in hang_or_end" in str(caught.value)
        wait_until(lambda: not any(map(process_exists, pids)), "the end of ranks that were killed")
        assert [value for _, value in pool.run(total, 0.0)] == [1.0, 1.0]
        with pytest.raises(AssertionError, match="failed with exit code 3"):
            pool.run(hang_or_end, ends=True)
        assert [value for _, value in pool.run(total, 0.0)] == [1.0, 1.0]
