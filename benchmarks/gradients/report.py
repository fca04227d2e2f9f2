"""What `multiring bench gradients` has measured, and what follows from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from multiring.benchmarks.gradients.training_speed import ALONE, LIMIT, OWN, TOGETHER, TrainingSpeed
from multiring.benchmarks.measure import NOISE, REPEAT, Ratio, Sample
from multiring.benchmarks.plot import Bars, Panel
from multiring.benchmarks.results import Results
from multiring.benchmarks.table import Table

__all__ = ["AdapterReport", "GradientsReport", "Memory", "StateRow", "StepRow"]

MIB = 2**20
GRADIENTS, TRAINING = "ResNet-50's gradients", "training of ResNet-20"


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


@dataclass(frozen=True, kw_only=True)
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

    @property
    def what(self) -> str:
        """As `Results`."""
        return "gradients of Torch"

    def derived(self) -> dict[str, Any]:
        """As `Results`."""
        derived = {
            "communication": {row.name: self.communication(row) for row in self.gradients[1:]},
            "more_memory": {row.name: asdict(self.more_memory(row)) for row in self.gradients[1:]},
            "images_per_second": {row.name: self.images_per_second(row) for row in self.training},
            "efficiency": {row.name: self.efficiency(row) for row in self.training},
            "check_per_step": {row.name: row.check_per_step for row in self.state},
        }
        return {"derived": derived}

    def tables(self, *, compact: bool) -> Sequence[Table]:
        """As `Results`; there is no shorter form."""
        columns = [GRADIENTS, "step", "communication", "bandwidth", "memory", "peak"]
        rows = [[row.name, _milliseconds(row.sample), *self._costs(row)] for row in self.gradients]
        tables = [Table(columns, rows, columns[:1], f"{self.bytes / 1e6:.1f} MB of gradients")]
        columns = [TRAINING, "step", "images/s", "efficiency"]
        rows = [
            [
                row.name,
                _milliseconds(row.sample),
                f"{self.images_per_second(row):.0f}",
                f"{self.efficiency(row):.3f}{self._noise(row)}",
            ]
            for row in self.training
        ]
        tables.append(Table(columns, rows, columns[:1], f"batch {self.batch} a rank"))
        return [*tables, self._state()] if self.state else tables

    def _costs(self, row: StepRow) -> list[str]:
        if row is self.gradients[0]:
            return ["", "", "", ""]
        seconds, more = self.communication(row), self.more_memory(row)
        # A step may come out shorter than without synchronisation where there is next to nothing to do.
        bandwidth = _bandwidth(self.bytes, seconds) if seconds > 0 else ""
        memory = [f"{more.held / MIB:+.1f} MiB", f"{more.peak / MIB:+.1f} MiB"]
        return [f"{seconds * 1e3:.1f} ms{self._noise(row)}", bandwidth, *memory]

    def _noise(self, row: StepRow) -> str:
        is_base = row in (self.gradients[0], self.training[0])
        return "" if is_base or not self.is_noisy(row) else f", {REPEAT}"

    def _state(self) -> Table:
        columns = ["state of", "buffers", "a step", "state", "a check", "of each step"]
        rows = [
            [
                row.name,
                f"{row.buffer_bytes / 1e3:.0f} kB",
                _milliseconds(row.buffers, 2),
                f"{row.state_bytes / 1e6:.1f} MB",
                _milliseconds(row.check, 2),
                f"{row.check_per_step * 1e3:.3f} ms",
            ]
            for row in self.state
        ]
        interval = self.state[0].interval
        title = f"buffers broadcast after each step, all compared every {interval} steps"
        return Table(columns, rows, columns[:1], title)

    def panels(self) -> Sequence[Sequence[Panel]]:
        """Communication of ResNet-50's gradients, and images per second of the training."""
        costs = [(row.name, 1e3 * self.communication(row)) for row in self.gradients[1:]]
        rates = [
            (row.name, self.images_per_second(row), f"{self.efficiency(row):.1%}{self._noise(row)}")
            for row in self.training
        ]
        left = [(name, cost, f"{cost:.1f} ms") for name, cost in costs]
        return [_panels(self.bytes, "communication", left, self.batch, rates)]


@dataclass(frozen=True, kw_only=True)
class AdapterReport(Results):
    """Everything that one run with `--framework` has measured.

    Attributes:
        framework: Its title.
        bytes: Size of ResNet-50's gradients.
        core: Seconds of an allreduce of as many bytes by the core, in each round.
        adapter: Seconds of the reduction through the adapter, in each round.
        training: The small training.
    """

    framework: str
    bytes: int
    core: tuple[float, ...]
    adapter: tuple[float, ...]
    training: TrainingSpeed

    @property
    def what(self) -> str:
        """As `Results`."""
        return f"gradients of {self.framework}"

    @property
    def overhead(self) -> Ratio:
        """Time through the adapter over the core's."""
        return Ratio.of(self.adapter, self.core)

    def derived(self) -> dict[str, Any]:
        """As `Results`."""
        speed = self.training
        ratios = {
            "overhead": self.overhead,
            "efficiency": speed.efficiency,
            "limit": speed.limit,
            "own_efficiency": speed.own_efficiency,
            "over_own_way": speed.over_own_way,
        }
        rates = {"images_per_second": {kind: speed.images_per_second(kind) for kind in speed.seconds}}
        return {"derived": {name: ratio and asdict(ratio) for name, ratio in ratios.items()} | rates}

    def tables(self, *, compact: bool) -> Sequence[Table]:
        """As `Results`; there is no shorter form."""
        rows = [
            [name, _milliseconds(_sample(times)), _bandwidth(self.bytes, float(np.median(times))), overhead]
            for name, times, overhead in (
                ("core", self.core, ""),
                ("adapter", self.adapter, self.overhead.text(2)),
            )
        ]
        columns = [f"{GRADIENTS}, {self.framework}", "reduction", "bandwidth", "overhead"]
        reduction = Table(columns, rows, columns[:1], f"{self.bytes / 1e6:.1f} MB of gradients")
        return [reduction, self._training()]

    def _training(self) -> Table:
        speed = self.training
        names = {
            ALONE: "every rank alone",
            LIMIT: "limit: alone, waiting for the slowest",
            TOGETHER: TOGETHER,
        }
        names[OWN] = speed.own_way or OWN
        rows = []
        for kind, seconds in speed.seconds.items():
            ratio = speed.ratio(ALONE, kind)
            efficiency = "" if ratio is None or kind == ALONE else ratio.text(3)
            rate = f"{speed.images_per_second(kind):.0f}"
            rows.append([names[kind], _milliseconds(_sample(seconds)), rate, efficiency])
        if speed.over_own_way is not None:
            rows.append([f"multiring against {speed.own_way}", "", "", speed.over_own_way.text(3)])
        columns = [f"{TRAINING}, {self.framework}", "step", "images/s", "efficiency"]
        return Table(columns, rows, columns[:1], f"batch {speed.batch} a rank")

    def panels(self) -> Sequence[Sequence[Panel]]:
        """Time of the reduction, and images per second of the training."""
        # Labels compare the bars that they stand at: the medians. The tables have the ratios within rounds.
        core, adapter = (1e3 * float(np.median(times)) for times in (self.core, self.adapter))
        times = [("core", core, ""), ("adapter", adapter, f"{adapter / core:.2f} x{_noise(self.overhead)}")]
        speed = self.training
        alone = speed.images_per_second(ALONE)
        rates = []
        for kind in speed.seconds:
            rate, noise = speed.images_per_second(kind), _noise(speed.ratio(ALONE, kind))
            rates.append((kind, rate, f"{rate / alone:.1%}{noise}"))
        return [_panels(self.bytes, "reduction", times, speed.batch, rates)]


_Bars = Sequence[tuple[str, float, str]]


def _panels(nbytes: int, what: str, times: _Bars, batch: int, rates: _Bars) -> Sequence[Panel]:
    left = Bars(f"{what} of {nbytes / 1e6:.0f} MB of gradients", "ms, less is better", times)
    return [left, Bars(f"{TRAINING}, batch {batch} a rank", "images/s, more is better", rates)]


def _noise(ratio: Ratio | None) -> str:
    return f", {REPEAT}" if ratio is not None and ratio.is_noisy else ""


def _sample(seconds: Sequence[float]) -> Sample:
    return Sample.of(np.array(seconds))


def _bandwidth(nbytes: int, seconds: float) -> str:
    return f"{nbytes / seconds / 1e9:.2f} GB/s"


def _milliseconds(sample: Sample, digits: int = 1) -> str:
    median, low, high = (f"{1e3 * each:.{digits}f}" for each in (sample.median, sample.low, sample.high))
    return f"{median} ms [{low}..{high}]"
