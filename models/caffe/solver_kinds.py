"""Solvers of one kind each, whatever kind a prototxt names; and the one that it names."""

from __future__ import annotations

from pathlib import Path

from multiring.models.caffe.solver import Solver

__all__ = [
    "AdaDeltaSolver",
    "AdaGradSolver",
    "AdamSolver",
    "NesterovSolver",
    "RMSPropSolver",
    "SGDSolver",
    "get_solver",
]


class SGDSolver(Solver):
    """`Solver` with Caffe's momentum whatever the prototxt says."""

    type = "SGD"


class NesterovSolver(Solver):
    """`Solver` with Caffe's Nesterov momentum."""

    type = "Nesterov"


class AdaGradSolver(Solver):
    """`Solver` with Caffe's AdaGrad."""

    type = "AdaGrad"


class RMSPropSolver(Solver):
    """`Solver` with Caffe's RMSProp."""

    type = "RMSProp"


class AdaDeltaSolver(Solver):
    """`Solver` with Caffe's AdaDelta."""

    type = "AdaDelta"


class AdamSolver(Solver):
    """`Solver` with Caffe's Adam."""

    type = "Adam"


def get_solver(solver_file: str | Path) -> Solver:
    """The solver of a prototxt, of the type that it names."""
    return Solver(solver_file)
