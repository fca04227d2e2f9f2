"""Results as pictures: bars, and lines over sizes or ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

__all__ = ["Bars", "Line", "Lines", "Panel", "draw"]

MAX_LABELS = 9  # on the axis of sizes


@dataclass(frozen=True)
class Bars:
    """A chart of bars, the first one on top.

    Attributes:
        title: Above it.
        unit: Below it.
        bars: Name, length and label of each.
    """

    title: str
    unit: str
    bars: Sequence[tuple[str, float, str]]


@dataclass(frozen=True)
class Line:
    """A line.

    Attributes:
        name: In the legend.
        style: Colour, marker and dash.
        x: Where the values are.
        y: The values.
        band: From where to where they scatter; None: not shown.
    """

    name: str
    style: tuple[str, str, str]
    x: Sequence[float]
    y: Sequence[float]
    band: tuple[Sequence[float], Sequence[float]] | None = None


@dataclass(frozen=True)
class Lines:
    """A chart of lines. What they are over is logarithmic.

    Attributes:
        title: Above it.
        over: What they are over.
        unit: Of the values.
        lines: The later ones lie over the earlier ones.
        x_text: Writes what they are over.
        most: The axis of values ends there and begins at 0; None: it is logarithmic.
    """

    title: str
    over: str
    unit: str
    lines: Sequence[Line]
    x_text: Callable[[float], str]
    most: float | None = None


Panel = Bars | Lines


def draw(title: str, rows: Sequence[Sequence[Panel]], path: Path) -> None:
    """Writes a PNG with the panels of each row side by side."""
    # The picture needs no display, and the caller's own figures are left alone.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    height = 5.6 if any(isinstance(panel, Lines) for row in rows for panel in row) else 4.0
    figure = Figure(figsize=(13, height * len(rows)), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=11)
    named: dict[str, Artist] = {}
    for axes_row, row in zip(figure.subplots(len(rows), len(rows[0]), squeeze=False), rows, strict=True):
        for axes, panel in zip(axes_row, row, strict=True):
            axes.set_title(panel.title)
            if isinstance(panel, Bars):
                _bars(axes, panel)
            else:
                _lines(axes, panel)
                handles, labels = axes.get_legend_handles_labels()
                named |= dict(zip(labels, handles, strict=True))
    if named:
        figure.legend(list(named.values()), list(named), loc="outside lower center", ncols=len(named))
    figure.savefig(path, dpi=120, format="png")


def _bars(axes: Axes, panel: Bars) -> None:
    names, lengths, labels = zip(*panel.bars, strict=True)
    axes.bar_label(axes.barh(names, lengths), labels, padding=3)
    axes.set_xlabel(panel.unit)
    axes.invert_yaxis()
    axes.margins(x=0.4)


def _lines(axes: Axes, panel: Lines) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter, NullLocator

    for line in panel.lines:
        color, marker, dash = line.style
        if line.band is not None:
            axes.fill_between(line.x, *line.band, color=color, alpha=0.15, linewidth=0)
        axes.plot(line.x, line.y, color=color, marker=marker, linestyle=dash, markersize=5, label=line.name)
    axes.set_xlabel(panel.over)
    axes.set_ylabel(panel.unit)
    axes.set_xscale("log", base=2)
    known = sorted({x for line in panel.lines for x in line.x})
    axes.xaxis.set_major_locator(FixedLocator(known[:: -(-len(known) // MAX_LABELS)]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: panel.x_text(x)))
    axes.tick_params(axis="x", labelrotation=30)
    axes.grid(visible=True, alpha=0.4)
    if panel.most is not None:
        axes.set_ylim(0, panel.most)
        return
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.9f}".rstrip("0").rstrip(".")))
    axes.yaxis.set_minor_formatter(NullFormatter())
