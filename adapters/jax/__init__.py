"""The JAX adapter.

    import multiring.jax

    comm = multiring.init()
    params = multiring.jax.broadcast_parameters(params)
    optimizer = multiring.jax.distribute(optax.sgd(0.1))
    ...
    updates, state = optimizer.update(gradients, state, params)   # inside of jit

Everything but the broadcasts of state and `average_metrics` works inside of `jit`, `grad`, `vmap` and `scan`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

try:
    import jax as _jax  # noqa: F401
except ImportError as _error:
    raise ImportError("multiring.jax needs JAX: pip install 'multiring[jax]'") from _error

from multiring.jax.batch_norm import BatchStatistics, batch_statistics, sync_batch_norm
from multiring.jax.collectives import allgather, allreduce, alltoall, broadcast, reducescatter
from multiring.jax.errors import raise_errors
from multiring.jax.gradient_functions import (
    Participation,
    average_gradients,
    average_partial_gradients,
    batch_weight,
    join,
    value_and_grad,
)
from multiring.jax.state_broadcast import broadcast_parameters
from multiring.jax.state_check import check_state
from multiring.jax.trees import grouped_allreduce, sync_buffers
from multiring.lazy import lazy_names as _lazy_names
from multiring.metrics import average_metrics
from multiring.state.broadcast import broadcast_object

if TYPE_CHECKING:
    from multiring.jax.optimizer import distribute
# Which alone needs optax.
__getattr__, __dir__ = _lazy_names(__name__, {"distribute": ".optimizer"})

__all__ = [
    "BatchStatistics",
    "Participation",
    "allgather",
    "allreduce",
    "alltoall",
    "average_gradients",
    "average_metrics",
    "average_partial_gradients",
    "batch_statistics",
    "batch_weight",
    "broadcast",
    "broadcast_object",
    "broadcast_parameters",
    "check_state",
    "distribute",
    "grouped_allreduce",
    "join",
    "raise_errors",
    "reducescatter",
    "sync_batch_norm",
    "sync_buffers",
    "value_and_grad",
]
