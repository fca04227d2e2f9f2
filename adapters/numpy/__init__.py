"""The reference adapter: models whose gradients are NumPy arrays.

It is the simplest user of the shared gradient machinery, useful for a hand-written model, and what the
adapters of frameworks are compared with.

    gradients = multiring.numpy.GradientBuckets(weights)
    for x, y in batches:
        gradients.zero()
        for name, gradient in backward(weights, x, y):  # last layer first
            gradients.ready(name, gradient)             # travels while the others are computed
        for name, gradient in gradients.synchronize().items():
            weights[name] -= rate * gradient
"""

from __future__ import annotations

from multiring.lazy import lazy_names as _lazy_names
from multiring.metrics import average_metrics, batch_weight
from multiring.numpy.gradient_buckets import GradientBuckets
from multiring.numpy.state_broadcast import broadcast_parameters, sync_buffers
from multiring.state.broadcast import broadcast_object

__getattr__, __dir__ = _lazy_names(__name__, {})

__all__ = [
    "GradientBuckets",
    "average_metrics",
    "batch_weight",
    "broadcast_object",
    "broadcast_parameters",
    "sync_buffers",
]
