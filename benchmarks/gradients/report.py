"""What `multiring bench gradients` has measured, what follows from it, and its file."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

from multiring.benchmarks.measure import NOISE, Sample
from multiring.benchmarks.results import Results, markdown, rich

__all__ = ["GradientsReport", "Memory", "StateRow", "StepRow"]


@dataclass(frozen=True)
class StepRow:
    """One kind of training step.

    Attributes:
        name: Its name.
        sample: Seconds that a step took.
    """

    name: str
    sample: Sample


@dataclass(frozen=True)
class Memory:
    """Memory of a rank in bytes, with model and gradients: after some steps, and at its highest."""

    held: int
    peak: int


@dataclass(frozen=True)
class StateRow:
    """What it costs to keep the rest of a model in step.

    Attributes:
        name: Of the model.
        buffer_bytes: Of its buffers.
        state_bytes: Of its parameters and buffers.
        buffers: Seconds in which all ranks take over the buffers of the first.
        check: Seconds of one comparison of parameters and buffers.
        interval: Steps between two comparisons; 0: there are none.
    """

    name: str
    buffer_bytes: int
    state_bytes: int
    buffers: Sample
    check: Sample
    interval: int

    @property
    def check_per_step(self) -> float:
        """Seconds that comparisons take of each step, on average."""
        return self.check.median / self.interval if self.interval else 0.0


@dataclass(frozen=True)
class GradientsReport(Results):
    """Everything that one run has measured. In each list the first row is without synchronisation.

    Attributes:
        bytes: Size of ResNet-50's gradients.
        batch: Images of a rank in a step of the training.
        gradients: Steps that write and reduce ResNet-50's gradients.
        training: Steps of the small training.
        memory: With ResNet-50's gradients, by the name of the kind.
        state: What the rest of the training state costs, by model.
    """

    kind: ClassVar[str] = "multiring bench gradients"

    bytes: int
    batch: int
    gradients: tuple[StepRow, ...]
    training: tuple[StepRow, ...]
    memory: dict[str, Memory]
    state: tuple[StateRow, ...] = ()

    def communication(self, row: StepRow) -> float:
        """Seconds that a step of `row` takes longer than one without synchronisation."""
        return row.sample.median - self.gradients[0].sample.median

    def more_memory(self, row: StepRow) -> Memory:
        """Bytes that `row` takes beyond model and gradients."""
        base = self.memory[self.gradients[0].name].held
        own = self.memory[row.name]
        return Memory(own.held - base, own.peak - base)

    def images_per_second(self, row: StepRow) -> float:
        """Of all ranks together."""
        return self.ranks * self.batch / row.sample.median

    def efficiency(self, row: StepRow) -> float:
        """Images per second over those without synchronisation."""
        return self.training[0].sample.median / row.sample.median

    def is_noisy(self, row: StepRow) -> bool:
        """Whether steps scatter by more than `row` differs from those without synchronisation.

        From the median to the tenth or the ninetieth percentile, and by more than a tenth of the median.
        """
        base = (self.gradients if row in self.gradients else self.training)[0].sample
        scatter = [
            max(sample.high - sample.median, sample.median - sample.low) for sample in (base, row.sample)
        ]
        return max(scatter) > max(abs(row.sample.median - base.median), NOISE * base.median)

    def to_json(self) -> str:
        """Everything measured and, under "derived", what follows from it."""
        derived = {
            "communication": {row.name: self.communication(row) for row in self.gradients[1:]},
            "more_memory": {row.name: asdict(self.more_memory(row)) for row in self.gradients[1:]},
            "images_per_second": {row.name: self.images_per_second(row) for row in self.training},
            "efficiency": {row.name: self.efficiency(row) for row in self.training},
            "check_per_step": {row.name: row.check_per_step for row in self.state},
        }
        return json.dumps({"kind": self.kind, **asdict(self), "derived": derived}, indent=2, allow_nan=False)

    @classmethod
    def measured_from(cls, fields: dict[str, Any]) -> dict[str, Any]:
        """As `Results`."""
        del fields["derived"]
        for name in ("gradients", "training"):
            fields[name] = tuple(StepRow(row["name"], Sample(**row["sample"])) for row in fields[name])
        for row in fields["state"]:
            row["buffers"], row["check"] = Sample(**row["buffers"]), Sample(**row["check"])
        fields["state"] = tuple(StateRow(**row) for row in fields["state"])
        return fields | {"memory": {name: Memory(**memory) for name, memory in fields["memory"].items()}}

    def render(self, style: str, columns: int | None) -> str:
        """A text to print; see `multiring.benchmarks.gradients.table`."""
        from multiring.benchmarks.gradients.table import tables

        return rich(tables(self), columns) if style == "rich" else markdown(tables(self))

    def draw(self, path: Path) -> None:
        """Writes a PNG; see `multiring.benchmarks.gradients.plot`."""
        from multiring.benchmarks.gradients.plot import draw

        draw(self, path)
