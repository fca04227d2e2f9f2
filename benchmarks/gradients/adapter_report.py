"""What `multiring bench gradients --framework F` has measured, what follows from it, and how it is shown."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from multiring.benchmarks.gradients.plot import save_bars
from multiring.benchmarks.gradients.training_speed import ALONE, LIMIT, OWN, TOGETHER, TrainingSpeed
from multiring.benchmarks.measure import REPEAT, Ratio, Sample
from multiring.benchmarks.results import Results, Table, markdown, rich

__all__ = ["AdapterReport"]


@dataclass(frozen=True)
class AdapterReport(Results):
    """Everything that one run has measured.

    Attributes:
        framework: Its title.
        bytes: Size of ResNet-50's gradients.
        core: Seconds of an allreduce of as many bytes by the core, in each round.
        adapter: Seconds of the reduction through the adapter, in each round.
        training: The small training.
    """

    kind: ClassVar[str] = "multiring bench gradients --framework"

    framework: str
    bytes: int
    core: tuple[float, ...]
    adapter: tuple[float, ...]
    training: TrainingSpeed

    @property
    def overhead(self) -> Ratio:
        """Time through the adapter over the core's."""
        return Ratio.of(self.adapter, self.core)

    def to_json(self) -> str:
        """Everything measured and, under "derived", what follows from it."""
        fields = asdict(self) | {"training": json.loads(self.training.to_json())}
        return json.dumps(
            {"kind": self.kind, **fields, "derived": {"overhead": asdict(self.overhead)}}, indent=2
        )

    @classmethod
    def measured_from(cls, fields: dict[str, Any]) -> dict[str, Any]:
        """As `Results`."""
        del fields["derived"]
        fields |= {name: tuple(fields[name]) for name in ("core", "adapter")}
        return fields | {"training": TrainingSpeed.from_dict(fields["training"])}

    def tables(self) -> list[Table]:
        """Title, columns and cells of each table."""
        return [self._gradients(), self._training()]

    def _gradients(self) -> Table:
        rows = [
            ["core", _milliseconds(self.core), _bandwidth(self.bytes, self.core), ""],
            [
                "adapter",
                _milliseconds(self.adapter),
                _bandwidth(self.bytes, self.adapter),
                self.overhead.text(2),
            ],
        ]
        columns = [f"ResNet-50's gradients, {self.framework}", "reduction", "bandwidth", "overhead"]
        return f"{self.bytes / 1e6:.1f} MB of gradients, {self.ranks} ranks", columns, rows

    def _training(self) -> Table:
        speed = self.training
        names = {
            ALONE: "every rank alone",
            LIMIT: "limit: alone, waiting for the slowest",
            TOGETHER: "multiring",
            OWN: speed.own_way or OWN,
        }
        rows = [
            [
                names[kind],
                _milliseconds(speed.seconds[kind]),
                f"{speed.images_per_second(kind):.0f}",
                "" if ratio is None or kind == ALONE else ratio.text(3),
            ]
            for kind, ratio in ((kind, speed.ratio(ALONE, kind)) for kind in speed.seconds)
        ]
        if speed.over_own_way is not None:
            rows.append([f"multiring against {speed.own_way}", "", "", speed.over_own_way.text(3)])
        if speed.own_way_missing is not None:
            rows.append([f"{speed.own_way}: {speed.own_way_missing}", "", "", ""])
        columns = [f"training of ResNet-20, {self.framework}", "step", "images/s", "efficiency"]
        return f"batch {speed.batch} a rank, {self.ranks} ranks", columns, rows

    def render(self, style: str, columns: int | None) -> str:
        """A text to print: tables for a terminal of so many columns, or in Markdown."""
        tables = self.tables()
        return rich(tables, columns, wrap=True) if style == "rich" else markdown(tables)

    def draw(self, path: Path) -> None:
        """Writes a PNG: time of the reduction, and images per second of the training."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(10, 3.6), layout="constrained")
        figure.suptitle(f"{self.framework}, {self.ranks} ranks on {self.machine.processor}")
        left, right = figure.subplots(1, 2)
        # Labels compare the bars that they stand at: the medians. The tables have the ratios within rounds.
        core, adapter = (float(np.median(times)) for times in (self.core, self.adapter))
        bars = left.barh(["core", "adapter"], [core * 1e3, adapter * 1e3])
        left.bar_label(bars, ["", f"{adapter / core:.2f} x{_noise(self.overhead)}"], padding=3)
        left.set_title(f"reduction of {self.bytes / 1e6:.0f} MB of gradients")
        left.set_xlabel("ms, less is better")
        speed = self.training
        kinds = list(speed.seconds)
        rates = [speed.images_per_second(kind) for kind in kinds]
        bars = right.barh(kinds, rates)
        alone = speed.images_per_second(ALONE)
        noise = [_noise(speed.ratio(ALONE, kind)) for kind in kinds]
        labels = [f"{rate / alone:.1%}{word}" for rate, word in zip(rates, noise, strict=True)]
        right.bar_label(bars, labels, padding=3)
        right.set_title(f"training of ResNet-20, batch {speed.batch} a rank")
        right.set_xlabel("images/s, more is better")
        save_bars(figure, path)


def _noise(ratio: Ratio | None) -> str:
    return f", {REPEAT}" if ratio is not None and ratio.is_noisy else ""


def _milliseconds(seconds: tuple[float, ...] | list[float]) -> str:
    sample = Sample.of(np.array(seconds))
    return f"{sample.median * 1e3:.1f} ms [{sample.low * 1e3:.1f}..{sample.high * 1e3:.1f}]"


def _bandwidth(size: int, seconds: tuple[float, ...]) -> str:
    return f"{size / float(np.median(seconds)) / 1e9:.2f} GB/s"
