"""Errors of the training job."""

from __future__ import annotations

from multiring.errors import MultiringError

__all__ = ["CheckpointError", "DataError", "DivergenceError"]


class DataError(MultiringError):
    """A data set is missing, empty or damaged; the message names the path."""


class CheckpointError(MultiringError):
    """A checkpoint cannot be read, or belongs to another job; the message names the path."""


class DivergenceError(MultiringError):
    """Training broke a promise: ranks hold different bits, or the loss is not finite."""
