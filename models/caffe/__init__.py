"""A Caffe-style solver: reads Caffe's prototxt files, computes with Torch, and has pycaffe's Python shape.

    solver = SGDSolver("solver.prototxt")
    solver.add_callback(*multiring.caffe.SolverCallback(solver))
    solver.solve()

Real Caffe is packaged for no current system; this runs its nets where their layers are among those that a
ResNet needs. Everything else is refused with its line.
"""

from __future__ import annotations

from multiring.models.caffe.blob import Blob
from multiring.models.caffe.device import set_device, set_mode_cpu, set_mode_gpu
from multiring.models.caffe.layer import (
    set_random_seed,
    set_solver_count,
    set_solver_rank,
    solver_count,
    solver_rank,
)
from multiring.models.caffe.layers.python_layer import PythonLayer as Layer
from multiring.models.caffe.net import Net
from multiring.models.caffe.prototxt import PrototxtError
from multiring.models.caffe.schema import TEST, TRAIN
from multiring.models.caffe.solver import Solver
from multiring.models.caffe.solver_kinds import (
    AdaDeltaSolver,
    AdaGradSolver,
    AdamSolver,
    NesterovSolver,
    RMSPropSolver,
    SGDSolver,
    get_solver,
)

__all__ = [
    "TEST",
    "TRAIN",
    "AdaDeltaSolver",
    "AdaGradSolver",
    "AdamSolver",
    "Blob",
    "Layer",
    "NesterovSolver",
    "Net",
    "PrototxtError",
    "RMSPropSolver",
    "SGDSolver",
    "Solver",
    "get_solver",
    "set_device",
    "set_mode_cpu",
    "set_mode_gpu",
    "set_multiprocess",
    "set_random_seed",
    "set_solver_count",
    "set_solver_rank",
    "solver_count",
    "solver_rank",
]


def set_multiprocess(multiprocess: bool) -> None:
    """Nothing to decide here: every rank is a process."""
