"""What the tests of the PyTensor adapter share: a model, modes that compile fast, and odd schedules."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt
from numpy.typing import NDArray
from pytensor.compile.mode import Mode
from pytensor.graph.basic import Apply
from pytensor.graph.fg import FunctionGraph
from pytensor.link.vm import VMLinker

Array = NDArray[Any]
SMALL: dict[str, Any] = {"bucket_bytes": 64}


def shared(**values: Any) -> list[Any]:
    return [pytensor.shared(np.array(value, copy=True), name=name) for name, value in values.items()]


def data(rank: int, step: int = 0, rows: int = 4) -> Array:
    return np.random.default_rng([rank, step]).standard_normal((rows, 3))


def linear() -> tuple[Any, Any, list[Any]]:
    """Images, cost and parameters of a model whose gradients are easily written down."""
    x = pt.matrix("x")
    w, b = shared(w=np.arange(3.0), b=1.0)
    return x, ((x @ w + b) ** 2).mean(), [w, b]


def fast_run() -> Mode:
    """All rewrites and PyTensor's C loop, without a C compiler for the ops."""
    return Mode(VMLinker(use_cloop=True, c_thunks=False), "fast_run")


def scheduled(seed: int) -> Mode:
    """Runs the nodes in a random one of the orders that their dependencies allow."""

    def schedule(fgraph: FunctionGraph) -> list[Apply]:
        draw = np.random.default_rng(seed)
        before: dict[Apply, set[Apply]] = {
            node: {v.owner for v in node.inputs if v.owner is not None} for node in fgraph.apply_nodes
        }
        for node, nodes in fgraph.orderings().items():
            before[node] |= set(nodes)
        waiting = fgraph.toposort()  # the same list on every run, unlike the set of nodes
        order: list[Apply] = []
        while waiting:
            free = [node for node in waiting if before[node] <= set(order)]
            order.append(free[draw.integers(len(free))])
            waiting.remove(order[-1])
        return order

    return Mode(VMLinker(use_cloop=False, c_thunks=False, schedule=schedule), "fast_run")


def collectives_in(function: Any) -> list[str]:
    """The nodes of a compiled function that talk to other ranks, in the order in which it runs them."""
    nodes = [str(node.op) for node in function.maker.fgraph.toposort()]
    return [name for name in nodes if name.startswith("multiring.")]
