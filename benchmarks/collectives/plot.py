"""The results of `multiring bench allreduce` and `collectives` as a picture."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from multiring.benchmarks.collectives.results import LIMIT, LIMIT_BYTES, OURS, Report, Row
from multiring.benchmarks.collectives.table import describe, size_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw"]

# Colour, marker and dash of the lines; peers take theirs in turn. The colours differ in lightness, too.
OWN_STYLES = {OURS[0]: ("#1f4e9c", "o", "-"), OURS[1]: ("#5b9bd5", "s", "-"), LIMIT: ("black", "", "--")}
PEER_STYLES = (("#d1600a", "^", "-"), ("#2e8b57", "D", "-"), ("#8e44ad", "v", "-"))
MOST_LABELS = 9  # on the axis of sizes


def draw(report: Report, path: Path) -> None:
    """Draws latency and algorithm bandwidth over the size, side by side for each collective, into a PNG.

    Bands reach from the 10th to the 90th percentile. The limit begins where it is one, at 64 KiB.

    Args:
        report: The results.
        path: The picture.
    """
    # The picture needs no display, and the caller's own figures are left alone.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    parts = report.parts()
    figure = Figure(figsize=(13, 5.6 * len(parts)), layout="constrained")
    FigureCanvasAgg(figure)
    first, second, _ = describe(report)
    figure.suptitle(f"{first}\n{second}", fontsize=11)
    pairs = figure.subplots(len(parts), 2, squeeze=False)
    for part, (latency, bandwidth) in zip(parts, pairs, strict=True):
        _lines(latency, part, lambda row, seconds: seconds * 1e6)
        _dress(latency, part, "latency", "us, lower is better")
        _lines(bandwidth, part, lambda row, seconds: row.bytes / seconds / 1e9)
        _dress(bandwidth, part, "algorithm bandwidth", "GB/s, higher is better")
    handles, labels = pairs[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=max(1, len(labels)))
    figure.savefig(path, dpi=120, format="png")


def _lines(axes: Axes, report: Report, value: Callable[[Row, float], float]) -> None:
    peers = iter(PEER_STYLES * len(report.peers))
    for name in report.contenders:
        rows = [row for row in report.rows if row.contender == name]
        if name == LIMIT:
            rows = [row for row in rows if row.bytes >= LIMIT_BYTES]
        if not rows:
            continue
        rows.sort(key=lambda row: row.bytes)
        color, marker, dash = OWN_STYLES.get(name) or next(peers)
        sizes = [row.bytes for row in rows]
        axes.fill_between(
            sizes,
            [value(row, row.sample.low) for row in rows],
            [value(row, row.sample.high) for row in rows],
            color=color,
            alpha=0.15,
            linewidth=0,
        )
        axes.plot(
            sizes,
            [value(row, row.sample.median) for row in rows],
            color=color,
            marker=marker,
            linestyle=dash,
            markersize=5,
            zorder=4 if name == LIMIT else 3,  # the limit stays visible where another line reaches it
            label=name,
        )


def _dress(axes: Axes, report: Report, title: str, unit: str) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter, NullLocator

    axes.set_title(", ".join((*report.rows[0].labels, title)))
    axes.set_xlabel(report.size_meaning)
    axes.set_ylabel(unit)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    sizes = sorted(report.sizes)
    step = -(-len(sizes) // MOST_LABELS)
    axes.xaxis.set_major_locator(FixedLocator(sizes[::step]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda size, _: size_text(round(size))))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.9f}".rstrip("0").rstrip(".")))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.tick_params(axis="x", labelrotation=30)
    axes.grid(visible=True, which="major", alpha=0.4)
    axes.grid(visible=True, which="minor", axis="y", alpha=0.12)
