"""What `multiring bench gradients --framework jax` measures does what it says."""

from __future__ import annotations

from multiring import Communicator
from multiring.benchmarks.gradients.frameworks.jax import make_reduction
from tests.on_ranks import on_ranks


@on_ranks(1, 2)
def test_gradients_become_averages(comm: Communicator) -> None:
    reduction = make_reduction([(3, 4), (5,), (), (0, 2)], comm)
    for step in range(2):
        reduction.run(comm.rank + step, comm.barrier)
        assert reduction.check((comm.size - 1) / 2 + step)
        assert not reduction.check(-1.0)
    reduction.close()
