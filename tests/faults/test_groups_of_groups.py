"""What is split from a split belongs to the world as well: it ends with it, even if no rank still holds what
lies between."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from multiring import AbortedError, Communicator, MismatchError
from tests.rank_pool import RankPool


def close_the_root(comm: Communicator) -> None:
    root = comm.split(0)
    assert root is not None
    group = root.split(0)
    assert group is not None
    pair = group.split(0)
    assert pair is not None
    del group
    comm.barrier()
    root.close()
    with pytest.raises(AbortedError, match="closed"):
        pair.allreduce(np.ones(3))


def test_closing_a_communicator_closes_all_that_was_split_from_it(ranks: Callable[[int], RankPool]) -> None:
    ranks(2).run(close_the_root)


def reduce_transposed(comm: Communicator) -> None:
    comm.reduce_scatter(np.ones((3, 4) if comm.rank == 0 else (4, 3)), name="x")


def test_blocks_of_other_rows_are_a_mismatch(ranks: Callable[[int], RankPool]) -> None:
    for error in ranks(2).run_expecting_errors(reduce_transposed):
        assert isinstance(error, MismatchError)
        assert "float64[3, 4]" in str(error)
        assert "float64[4, 3]" in str(error)
