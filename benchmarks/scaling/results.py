"""What was simulated and measured, as a JSON file that grows with every simulation."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from multiring.benchmarks.scaling.machine import Machine
from multiring.benchmarks.scaling.training import Profile

__all__ = ["Results", "load", "save"]


@dataclass
class Results:
    """The outcome of simulations on one machine.

    Attributes:
        machine: What was simulated.
        profile: When gradients are ready.
        seconds: Of an allreduce between hosts, by contender, number of ranks and bytes.
    """

    machine: Machine
    profile: Profile
    seconds: dict[str, dict[int, dict[int, float]]] = field(default_factory=dict)


def load(path: Path) -> Results:
    """Reads what `save` has written."""
    found = json.loads(path.read_text())
    seconds = {
        contender: {
            int(ranks): {int(size): value for size, value in sizes.items()}
            for ranks, sizes in by_ranks.items()
        }
        for contender, by_ranks in found["seconds"].items()
    }
    return Results(Machine(**found["machine"]), Profile(**found["profile"]), seconds)


def save(results: Results, path: Path) -> None:
    """Writes `results`, replacing the file as a whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    made = path.with_suffix(".tmp")
    made.write_text(json.dumps(asdict(results), indent=1) + "\n")
    made.replace(path)
