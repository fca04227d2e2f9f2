"""What a program must not do with its gradients: the errors that say so."""

from __future__ import annotations

from multiring.errors import UsageError

__all__ = ["cleared_too_late", "one_array", "second_gradient"]


def one_array(rank: int, first: str, second: str) -> UsageError:
    """Two gradients of a round have one memory."""
    return _refusal(
        rank,
        second,
        f"parameters '{first}' and '{second}' have the same array as their gradients, which would be "
        "averaged twice; give each a copy of its own",
    )


def second_gradient(rank: int, name: str) -> UsageError:
    """A gradient is ready that has already been sent in this round."""
    return _refusal(
        rank,
        name,
        f"parameter '{name}' received a second gradient after the first one had been sent; put all backward "
        "passes of a step but the last into no_sync(), and checkpoint a part that occurs several times with "
        "use_reentrant=False",
    )


def cleared_too_late(rank: int, name: str) -> UsageError:
    """Gradients are cleared in a round that may have sent one of them."""
    return _refusal(
        rank,
        name,
        f"gradients are to be forgotten, but that of '{name}' was said to be ready and may have left; end "
        "the round first (synchronize)",
    )


def _refusal(rank: int, name: str, text: str) -> UsageError:
    return UsageError(f"rank {rank}: {text}", rank=rank, tensor=name)
