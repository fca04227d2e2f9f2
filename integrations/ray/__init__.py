"""Starts ranks on a Ray cluster.

import multiring.ray

results = multiring.ray.run(train, num_workers=8, args=(config,))
"""

from multiring.ray.job import run
from multiring.ray.outcome import RankError

__all__ = ["RankError", "run"]
