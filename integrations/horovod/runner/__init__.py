"""Starting jobs as Horovod does: `run` calls a function on every rank, `python -m multiring.horovod.runner`
takes the options of Horovod's command `horovodrun`."""

from __future__ import annotations

from multiring.horovod.runner.functions import run

__all__ = ["run"]
