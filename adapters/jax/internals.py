"""The one place that touches what JAX does not promise to keep.

Collectives need an *ordered effect*: JAX then threads a token through everything that a program, its loops
and the programs after it submit, so that all ranks submit in the same order. JAX has no public
way to define one.
"""

from __future__ import annotations

from typing import Any

import jax
from multiring.errors import UsageError

try:
    from jax._src import core, dispatch, effects
except ImportError as _error:  # pragma: no cover - another JAX
    raise UsageError(
        f"multiring.jax does not know JAX {jax.__version__} ({_error}); install a JAX that it was tested "
        "with: pip install 'jax>=0.6,<0.11'"
    ) from _error

__all__ = ["COLLECTIVE", "abstract_token", "forget_failed_programs"]

abstract_token: Any = core.abstract_token


class _CollectiveEffect(effects.Effect):
    def __str__(self) -> str:
        return "multiring"


COLLECTIVE = _CollectiveEffect()
for _allowed in (
    effects.ordered_effects,
    effects.lowerable_effects,
    effects.control_flow_allowed_effects,
    effects.custom_derivatives_allowed_effects,
    effects.remat_allowed_effects,
):
    _allowed.add_type(_CollectiveEffect)


def forget_failed_programs() -> None:
    """Forget the token of the last program of this thread, which carries its error on to the next one."""
    dispatch.runtime_tokens.current_tokens.pop(COLLECTIVE, None)
    dispatch.runtime_tokens.output_runtime_tokens.clear()
