"""Draws the bars of the README from docs/measurements: python -m multiring.benchmarks.overview."""

from __future__ import annotations

import argparse
import csv
import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["Bar", "Chart", "Record", "charts", "draw", "read_record"]

ROOT = Path(__file__).resolve().parent.parent
MEASUREMENTS = ROOT / "docs" / "measurements"
PICTURE = ROOT / "docs" / "overview.png"
ALLREDUCE, GRADIENTS = "allreduce-one-host-2-ranks.csv", "gradients-torch-2-ranks.csv"

_SIZE = "64 MiB"
_OURS, _ORDINARY, _SYMMETRIC = "multiring", "multiring,\nordinary arrays", "multiring,\nsymmetric memory"
_COLORS = {_OURS: "#1f4e9c", _ORDINARY: "#1f4e9c", _SYMMETRIC: "#8fb0dd"}
_OTHER = "#9a9a9a"


@dataclass(frozen=True)
class Record:
    """A file of docs/measurements.

    Attributes:
        notes: What its comment lines say, by their first word ("command", "date", "machine").
        rows: Its rows by the names of the columns.
    """

    notes: dict[str, str]
    rows: list[dict[str, str]]


@dataclass(frozen=True)
class Bar:
    """A bar from 0 to `value`, and from where to where the runs scatter."""

    name: str
    value: float
    label: str
    low: float
    high: float


@dataclass(frozen=True)
class Chart:
    """Bars of one unit."""

    title: str
    unit: str
    bars: Sequence[Bar]


def read_record(name: str) -> Record:
    """Reads a file of docs/measurements."""
    lines = (MEASUREMENTS / name).read_text(encoding="utf-8").splitlines()
    notes: dict[str, str] = {}
    for line in lines:
        if line.startswith("#"):
            word, _, text = line[1:].partition(":")
            notes.setdefault(word.strip(), text.strip())
    rows = csv.DictReader(line for line in lines if not line.startswith("#"))
    return Record(notes, list(rows))


def charts() -> list[Chart]:
    """What the records say."""
    allreduce = next(row for row in read_record(ALLREDUCE).rows if row["size"] == _SIZE)
    columns = {
        _ORDINARY: "ordinary_us",
        _SYMMETRIC: "symmetric_us",
        "Open MPI": "open_mpi_us",
        "Gloo": "gloo_us",
    }
    times = {name: float(allreduce[column]) / 1000 for name, column in columns.items()}
    rows = read_record(GRADIENTS).rows
    both = {_OURS: "multiring", "DDP\nover Gloo": "DDP over Gloo"}
    gradients = [_range(name, _values(rows, f"communication, {key}")) for name, key in both.items()]
    training = [
        _median(name, [100 * each for each in _values(rows, f"training, efficiency of {key}")])
        for name, key in both.items()
    ]
    return [
        Chart(
            f"Allreduce of {_SIZE}",
            "ms (shorter is better)",
            [
                Bar(name, time, f"{time:.3g}" if time >= 10 else f"{time:.2f}", time, time)
                for name, time in times.items()
            ],
        ),
        Chart("Gradients of ResNet-50", "ms (shorter is better)", gradients),
        Chart(
            "Training of ResNet-20",
            "speed in % (longer is better)",
            [Bar("not\nsynchronised", 100.0, "100", 100.0, 100.0), *training],
        ),
    ]


def draw(path: Path) -> None:
    """Writes the PNG; what it shows is also in it as text ("Charts")."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shown = charts()
    figure = Figure(figsize=(10.5, 2.9), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(shown), squeeze=False)[0]
    for axes, chart in zip(panels, shown, strict=True):
        _draw(axes, chart)
    found = read_record(GRADIENTS).notes
    machine = found["machine"].partition(" (")[0]
    figure.supxlabel(f"two ranks, float32, ResNets in PyTorch; {machine}; {found['date']}", fontsize=9)
    figure.savefig(path, dpi=100, format="png", metadata={"Charts": text_of(shown)})


def text_of(shown: Sequence[Chart]) -> str:
    """The charts as JSON."""
    return json.dumps([asdict(chart) for chart in shown])


def _values(rows: Sequence[dict[str, str]], quantity: str) -> list[float]:
    """The values of all runs; of ranges ("15.2 to 19.1 ms") both ends."""
    texts = [row["value"].removesuffix(" ms") for row in rows if row["quantity"] == quantity]
    return [float(end) for text in texts for end in text.split(" to ")]


def _range(name: str, values: Sequence[float]) -> Bar:
    """A bar to the middle of a range, for records without medians."""
    low, high = min(values), max(values)
    return Bar(name, (low + high) / 2, f"{low:.0f} to {high:.0f}", low, high)


def _median(name: str, values: Sequence[float]) -> Bar:
    middle = statistics.median(values)
    return Bar(name, middle, f"{middle:.1f}", min(values), max(values))


def _draw(axes: Axes, chart: Chart) -> None:
    places = range(len(chart.bars))
    values = [bar.value for bar in chart.bars]
    colors = [_COLORS.get(bar.name, _OTHER) for bar in chart.bars]
    axes.barh(places, values, color=colors, height=0.7)
    for place, bar in zip(places, chart.bars, strict=True):
        if bar.low < bar.high:
            ends = [[bar.value - bar.low], [bar.high - bar.value]]
            axes.errorbar([bar.value], [place], xerr=ends, color="black", capsize=3, linewidth=1)
        axes.annotate(bar.label, (bar.high, place), (5, 0), textcoords="offset points", va="center")
    axes.set_yticks(places, [bar.name for bar in chart.bars])
    axes.invert_yaxis()
    axes.set_title(chart.title, fontsize=11)
    axes.set_xlabel(chart.unit)
    axes.set_xlim(0, 1.3 * max(bar.high for bar in chart.bars))
    axes.spines[["top", "right"]].set_visible(False)


def main() -> None:
    """Draws the picture."""
    parser = argparse.ArgumentParser(prog="python -m multiring.benchmarks.overview", description=__doc__)
    parser.add_argument("--picture", type=Path, default=PICTURE, help=f"the PNG [{PICTURE}]")
    draw(parser.parse_args().picture)


if __name__ == "__main__":
    main()
