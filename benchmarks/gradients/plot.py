"""The results of `multiring bench gradients` as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from multiring.benchmarks.gradients.report import GradientsReport
from multiring.benchmarks.measure import REPEAT

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["draw", "save_bars"]


def draw(report: GradientsReport, path: Path) -> None:
    """Writes a PNG: communication of ResNet-50's gradients, and images per second of the training."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    figure.suptitle(f"{report.ranks} ranks on {report.machine.processor}, {report.machine.cores} cores")
    left, right = figure.subplots(1, 2)
    kinds = report.gradients[1:]
    bars = left.barh([row.name for row in kinds], [report.communication(row) * 1e3 for row in kinds])
    left.bar_label(bars, fmt="%.1f ms", padding=3)
    left.set_title(f"communication of {report.bytes / 1e6:.0f} MB of gradients")
    left.set_xlabel("ms, less is better")
    bars = right.barh(
        [row.name for row in report.training], [report.images_per_second(row) for row in report.training]
    )
    labels = [f"{report.efficiency(row):.1%}" for row in report.training]
    for place, row in enumerate(report.training[1:], start=1):
        labels[place] += f", {REPEAT}" if report.is_noisy(row) else ""
    right.bar_label(bars, labels, padding=-4, label_type="center")
    right.set_title(f"training of ResNet-20, batch {report.batch} a rank")
    right.set_xlabel("images/s, more is better")
    save_bars(figure, path)


def save_bars(figure: Figure, path: Path) -> None:
    """Writes a PNG of charts of bars: the first bar on top, and room for labels."""
    for axes in figure.axes:
        axes.invert_yaxis()
        axes.margins(x=0.25)
    figure.savefig(path, format="png", dpi=150)
