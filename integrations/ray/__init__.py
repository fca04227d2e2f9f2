"""Starts ranks on a Ray cluster.

import multiring.ray

results = multiring.ray.run(train, num_workers=8, args=(config,))
"""

try:
    import ray as _ray  # noqa: F401
except ModuleNotFoundError as _error:
    if _error.name != "ray":
        raise
    raise ModuleNotFoundError("multiring.ray needs Ray: pip install 'multiring[ray]'", name="ray") from _error

from multiring.errors import RankError
from multiring.ray.job import run

__all__ = ["RankError", "run"]
