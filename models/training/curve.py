"""The curve of a training as a picture: loss and accuracy side by side, throughput below."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["plot_curve"]

Records = list[dict[str, Any]]

# Label and colour of the lines.
TRAINING = ("training", "#1f4e9c")
TEST = ("test", "#d1600a")
THROUGHPUT = ("all ranks", "#2c7a4b")


def plot_curve(
    records: Records,
    path: Path,
    title: str,
    one_rank_speed: float | None = None,
    unsynchronised_speed: float | None = None,
) -> None:
    """Draw loss, accuracy and throughput over the epochs into a PNG.

    Args:
        records: Records of a `metrics.jsonl`.
        path: The picture.
        title: Headline.
        one_rank_speed: Images per second of one rank with the same share of the host, to compare with.
        unsynchronised_speed: Images per second of as many ranks that do not wait for one another.
    """
    # The picture needs no display, and the caller's own figures are left alone.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 7), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    panels = figure.subplot_mosaic(
        [["loss", "accuracy"], ["speed", "speed"]], gridspec_kw={"height_ratios": [5, 3]}
    )
    epochs = [record for record in records if record["kind"] == "epoch"]
    tests = [record for record in epochs if "test_loss" in record]
    _loss(panels["loss"], [record for record in records if record["kind"] == "step"], epochs, tests)
    _accuracy(panels["accuracy"], epochs, tests)
    alone = {
        "as many ranks that do not wait for one another": (unsynchronised_speed, "#999999", ":"),
        "one rank alone, on its share of this host": (one_rank_speed, "#666666", "--"),
    }
    _throughput(panels["speed"], epochs, alone)
    end = max((record["position"] for record in records), default=1.0)
    for axes in panels.values():
        axes.set_xlim(0, 1.02 * end)
    figure.savefig(path, dpi=120)


def _loss(axes: Axes, steps: Records, epochs: Records, tests: Records) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter

    if steps:
        position = [record["position"] for record in steps]
        values = [record["loss"] for record in steps]
        alone = "." if len(steps) == 1 else ""  # a line needs two points to be seen
        axes.plot(position, values, color="#b8c4d6", linewidth=1, marker=alone, label="training, steps")
    _line(axes, epochs, [record["train_loss"] for record in epochs], TRAINING)
    _line(axes, tests, [record["test_loss"] for record in tests], TEST)
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_minor_formatter(NullFormatter())
    _label(axes, "loss", "cross-entropy per image, log scale")


def _accuracy(axes: Axes, epochs: Records, tests: Records) -> None:
    _line(axes, epochs, [100 * record["train_accuracy"] for record in epochs], TRAINING)
    _line(axes, tests, [100 * record["test_accuracy"] for record in tests], TEST)
    # In the title, where no line passes.
    reached = f": {100 * tests[-1]['test_accuracy']:.2f} % of the test images at the end" if tests else ""
    axes.set_ylim(0, 102)  # so that a line at 100 is seen whole
    _label(axes, f"accuracy{reached}", "right answers, %")


def _throughput(axes: Axes, epochs: Records, alone: dict[str, tuple[float | None, str, str]]) -> None:
    timed = [record for record in epochs if "images_per_second" in record]
    _line(axes, timed, [record["images_per_second"] for record in timed], THROUGHPUT)
    speeds = [record["images_per_second"] for record in timed]
    for label, (speed, colour, style) in alone.items():
        if speed is not None:
            axes.axhline(speed, color=colour, linestyle=style, label=label)
            speeds.append(speed)
    _label(axes, "throughput of the training steps", "images/s")
    axes.set_ylim(0, 1.15 * max(speeds, default=0.0) or 1.0)


def _line(axes: Axes, records: Records, values: list[float], style: tuple[str, str]) -> None:
    if records:
        label, color = style
        position = [record["position"] for record in records]
        axes.plot(position, values, color=color, linewidth=2, marker="o", markersize=3.5, label=label)


def _label(axes: Axes, title: str, unit: str) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axes.set_title(title)
    axes.set_xlabel("epoch")
    axes.set_ylabel(unit)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(visible=True, which="major", alpha=0.4)
    if axes.lines:
        axes.legend()
