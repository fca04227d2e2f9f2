"""The Torch adapter.

import multiring.torch

comm = multiring.init()
multiring.torch.broadcast_parameters(model)
multiring.torch.register_gradient_hooks(model)
...
loss.backward()   # p.grad is now the average over all ranks
optimizer.step()
"""

from __future__ import annotations

try:
    import torch as _torch  # noqa: F401
except ModuleNotFoundError as _error:
    if _error.name != "torch":
        raise
    raise ModuleNotFoundError(
        "multiring.torch needs PyTorch: pip install 'multiring[torch]'", name="torch"
    ) from _error

from multiring.lazy import lazy_names as _lazy_names
from multiring.metrics import average_metrics, batch_weight
from multiring.state.broadcast import broadcast_object
from multiring.torch.clipping import clip_grad_norm_
from multiring.torch.copies import local_copy
from multiring.torch.hooks import GradientHooks
from multiring.torch.optimizer import DistributedOptimizer
from multiring.torch.registration import register_gradient_hooks
from multiring.torch.state_broadcast import broadcast_optimizer_state, broadcast_parameters
from multiring.torch.sync_batchnorm import SyncBatchNorm, convert_sync_batchnorm

__getattr__, __dir__ = _lazy_names(__name__, {})

__all__ = [
    "DistributedOptimizer",
    "GradientHooks",
    "SyncBatchNorm",
    "average_metrics",
    "batch_weight",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "clip_grad_norm_",
    "convert_sync_batchnorm",
    "local_copy",
    "register_gradient_hooks",
]
