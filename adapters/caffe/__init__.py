"""The Caffe adapter: a solver callback for pycaffe, and for everything of pycaffe's shape.

import multiring.caffe

comm = multiring.init()
solver = caffe.SGDSolver("solver.prototxt")
solver.add_callback(*multiring.caffe.SolverCallback(solver))
solver.step(1000)   # weights come from rank 0, gradients are averaged over all ranks
"""

from __future__ import annotations

from multiring.caffe.callback import SolverCallback
from multiring.caffe.solver_state import broadcast_parameters
from multiring.lazy import lazy_names as _lazy_names
from multiring.metrics import average_metrics, batch_weight
from multiring.state.broadcast import broadcast_object

__getattr__, __dir__ = _lazy_names(__name__, {})

__all__ = ["SolverCallback", "average_metrics", "batch_weight", "broadcast_object", "broadcast_parameters"]
