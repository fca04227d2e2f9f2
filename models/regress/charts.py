"""Pictures for the report, as SVG text that goes straight into the page."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from multiring.benchmarks.gradients.training_speed import ALONE, OWN, TOGETHER, TrainingSpeed
from multiring.benchmarks.measure import Ratio
from multiring.models.regress.report import Curves

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["COLORS", "draw_curves", "draw_speeds"]

# Okabe and Ito's colours, which people with any kind of colour vision tell apart; by place in the list.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
OURS, THEIRS, BARE = "#0072B2", "#E69F00", "#b9c2cc"
_Group = tuple[str, str, list[float | None]]

# Lines that lie on each other: the first ones are wide and pale, so that the last ones do not hide them.
WIDEST, NARROWEST = 7.0, 1.2

# Room for the longest label of a legend and its mark.
_INCHES_PER_LABEL = 1.3


def draw_curves(curves: Curves, titles: Mapping[str, str]) -> str | None:
    """Loss curves of all frameworks and ranks laid over each other; None if there are none."""
    panels = [
        ("the compared training: float32, same weights, same images", "step", curves.following),
        ("training on digits", "epoch", curves.digits),
    ]
    panels = [panel for panel in panels if panel[2]]
    if not panels:
        return None
    figure = _figure(5.4 * len(panels), 3.9)
    for axes, (title, unit, lines) in zip(
        figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True
    ):
        _draw_lines(axes, lines, titles)
        axes.set_title(title, fontsize=10.5)
        axes.set_xlabel(unit)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.set_ylabel("loss")
    _explain(figure, [key for panel in panels for key in panel[2]], titles)
    return _svg(figure)


def _draw_lines(
    axes: Axes, lines: Mapping[tuple[str, int], Sequence[tuple[float, float]]], titles: Mapping[str, str]
) -> None:
    places = list(titles)
    ordered = sorted(lines, key=lambda key: (places.index(key[0]), key[1]))
    for number, (framework, ranks) in enumerate(ordered):
        share = number / max(1, len(ordered) - 1)
        x, y = zip(*lines[framework, ranks], strict=True)
        axes.plot(
            x,
            y,
            color=COLORS[places.index(framework) % len(COLORS)],
            linewidth=WIDEST + (NARROWEST - WIDEST) * share,
            alpha=0.35 + 0.6 * share,
            linestyle=_dashes(ranks),
        )
    axes.grid(visible=True, alpha=0.25)


def _dashes(ranks: int) -> Any:
    """A line style as Matplotlib has them."""
    return "-" if ranks == 1 else (0, (4.0, 1.2 * ranks))


def _explain(figure: Figure, keys: Sequence[tuple[str, int]], titles: Mapping[str, str]) -> None:
    """A legend below: colours for frameworks, dashes for numbers of ranks."""
    from matplotlib.lines import Line2D

    places = list(titles)
    handles = [
        Line2D([], [], color=COLORS[places.index(name) % len(COLORS)], linewidth=4, label=titles[name])
        for name in places
        if any(name == framework for framework, _ in keys)
    ]
    handles += [
        Line2D(
            [],
            [],
            color="#444",
            linewidth=1.6,
            linestyle=_dashes(ranks),
            label=f"{ranks} rank{'s' if ranks > 1 else ''}",
        )
        for ranks in sorted({ranks for _, ranks in keys})
    ]
    columns = min(len(handles), int(figure.get_figwidth() / _INCHES_PER_LABEL))
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, frameon=False, fontsize=9)


def draw_speeds(speeds: Mapping[tuple[str, int], TrainingSpeed], titles: Mapping[str, str]) -> str | None:
    """Efficiency and throughput of each framework, beside its own way; None if nothing was measured."""
    if not speeds:
        return None
    places = list(titles)
    keys = sorted(speeds, key=lambda key: (places.index(key[0]), key[1]))
    names = [f"{titles[framework]}, {ranks} ranks" for framework, ranks in keys]
    figure = _figure(10.8, 1.3 + 0.62 * len(keys))
    left, right = figure.subplots(1, 2, sharey=True)
    efficiencies: list[_Group] = [
        ("multiring", OURS, [_median(speeds[key].efficiency) for key in keys]),
        ("the framework's own way", THEIRS, [_median(speeds[key].own_efficiency) for key in keys]),
    ]
    _bars(left, names, efficiencies, "{:.1%}")
    left.axvline(1.0, color="#444", linewidth=1, zorder=0)
    left.set_title("scaling efficiency (1: keeping in step costs nothing)", fontsize=10.5)
    images: list[_Group] = [
        ("every rank alone", BARE, [_images(speeds[key], ALONE) for key in keys]),
        ("multiring", OURS, [_images(speeds[key], TOGETHER) for key in keys]),
        ("the framework's own way", THEIRS, [_images(speeds[key], OWN) for key in keys]),
    ]
    _bars(right, names, images, "{:.0f}")
    right.set_title("images per second, all ranks together", fontsize=10.5)
    left.invert_yaxis()
    handles, labels = right.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    return _svg(figure)


def _median(ratio: Ratio | None) -> float | None:
    return None if ratio is None else ratio.median


def _images(speed: TrainingSpeed, kind: str) -> float | None:
    return speed.images_per_second(kind) if kind in speed.seconds else None


def _bars(axes: Axes, names: Sequence[str], groups: Sequence[_Group], form: str) -> None:
    height = 0.8 / len(groups)
    for number, (label, color, values) in enumerate(groups):
        positions = [place - 0.4 + height * (number + 0.5) for place in range(len(names))]
        bars = axes.barh(
            positions, [value or 0.0 for value in values], height * 0.92, color=color, label=label
        )
        texts = ["" if value is None else form.format(value) for value in values]
        # A line behind the number would strike it through.
        under = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}
        axes.bar_label(bars, texts, padding=3, fontsize=8.5, bbox=under)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(-0.6, len(names) - 0.4)
    axes.margins(x=0.16)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right"]].set_visible(False)


def _figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _svg(figure: Figure) -> str:
    stream = io.StringIO()
    # Without the date the same figures give the same file.
    figure.savefig(stream, format="svg", metadata={"Date": None})
    text = stream.getvalue()
    return text[text.index("<svg") :]
