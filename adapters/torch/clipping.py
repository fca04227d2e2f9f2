"""Clipping of reduced gradients."""

from __future__ import annotations

from collections.abc import Iterable

import torch

__all__ = ["clip_grad_norm_"]


def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0
) -> torch.Tensor:
    """Scale gradients in place so that their common norm is at most `max_norm`.

    To be called after backward, when gradients are reduced: they then have the same bits on every rank, and
    so have the norm and the result; nothing is sent. Unlike `torch.nn.utils.clip_grad_norm_`, which it is
    otherwise the same as, it takes sparse gradients too.

    Args:
        parameters: Parameters whose gradients are clipped; those without a gradient are skipped.
        max_norm: Largest norm.
        norm_type: Which norm; `float("inf")` for the largest absolute value.

    Returns:
        The norm of all gradients before clipping. Shape ().
    """
    parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    values = []
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is not None and gradient.is_sparse:
            parameter.grad = gradient = gradient.coalesce()
        if gradient is not None:
            values.append(gradient.values() if gradient.is_sparse else gradient)
    norm = torch.nn.utils.get_total_norm(values, norm_type)
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for value in values:
        value.mul_(factor.to(value.dtype))
    return norm
