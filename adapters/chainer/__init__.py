"""The Chainer adapter. Import it before Chainer: it makes Chainer work with a current NumPy.

import multiring.chainer
import chainer

comm = multiring.chainer.create_communicator()
optimizer = multiring.chainer.create_multi_node_optimizer(chainer.optimizers.MomentumSGD(), comm)
optimizer.setup(model)
...
optimizer.update(model, x, t)  # with gradients averaged over all ranks
"""

from __future__ import annotations

from multiring.chainer.compatibility import import_chainer
from multiring.lazy import lazy_names as _lazy_names

import_chainer()

from multiring.chainer.communicator import ChainerCommunicator, create_communicator  # noqa: E402
from multiring.chainer.factory import create_multi_node_optimizer  # noqa: E402
from multiring.chainer.optimizer import MultiNodeOptimizer  # noqa: E402
from multiring.chainer.state_broadcast import broadcast_optimizer_state, broadcast_parameters  # noqa: E402
from multiring.chainer.sync_batch_normalization import (  # noqa: E402
    SyncBatchNormalization,
    convert_sync_batch_normalization,
)
from multiring.metrics import average_metrics, batch_weight  # noqa: E402
from multiring.state.broadcast import broadcast_object  # noqa: E402

__getattr__, __dir__ = _lazy_names(__name__, {})

__all__ = [
    "ChainerCommunicator",
    "MultiNodeOptimizer",
    "SyncBatchNormalization",
    "average_metrics",
    "batch_weight",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "convert_sync_batch_normalization",
    "create_communicator",
    "create_multi_node_optimizer",
]
