"""The PyTensor adapter.

import multiring.pytensor

comm = multiring.init()
multiring.pytensor.broadcast_parameters(params)
grads = multiring.pytensor.grad(cost, params)   # averaged over all ranks
train = pytensor.function([x, y], cost, updates=sgd(params, grads))
"""

from __future__ import annotations

try:
    import pytensor as _pytensor  # noqa: F401
except ImportError as error:
    raise ImportError(
        "multiring.pytensor needs PyTensor, which does not import; install it with "
        f"pip install 'multiring[pytensor]' ({error})"
    ) from error

from multiring.lazy import lazy_names as _lazy_names
from multiring.metrics import average_metrics, batch_weight
from multiring.pytensor import in_place as _in_place  # noqa: F401  # registers itself
from multiring.pytensor import numba_calls as _numba_calls  # noqa: F401  # registers itself
from multiring.pytensor.collectives import allgather, allreduce, broadcast, grouped_allreduce
from multiring.pytensor.distributed_gradients import DistributedGradients, Reduced
from multiring.pytensor.state_broadcast import broadcast_parameters, sync_buffers
from multiring.pytensor.updates import distribute_updates, grad
from multiring.state.broadcast import broadcast_object

__getattr__, __dir__ = _lazy_names(__name__, {})

__all__ = [
    "DistributedGradients",
    "Reduced",
    "allgather",
    "allreduce",
    "average_metrics",
    "batch_weight",
    "broadcast",
    "broadcast_object",
    "broadcast_parameters",
    "distribute_updates",
    "grad",
    "grouped_allreduce",
    "sync_buffers",
]
