"""Horovod's API over multiring: `multiring.horovod.torch` takes the place of `horovod.torch`.

import multiring.horovod.torch as hvd

hvd.init()
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

`multiring run --horovod` and `python -m multiring.horovod` run scripts that say `import horovod.torch`;
`multiring.horovod.install()` has a notebook import it.
docs/horovod.md says what is there and what differs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from multiring.horovod.exceptions import HorovodInternalError
from multiring.lazy import lazy_names as _lazy_names

if TYPE_CHECKING:
    from multiring.horovod.installation import install
    from multiring.horovod.runner import run

# Not every rank needs what starts ranks.
__getattr__, __dir__ = _lazy_names(__name__, {"install": ".installation", "run": ".runner"})

__all__ = ["HorovodInternalError", "install", "run"]

__version__ = "0.28.1"
"""The release of Horovod whose API this is."""
