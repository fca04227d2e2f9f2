"""The results of `multiring bench gradients` as text."""

from __future__ import annotations

from multiring.benchmarks.gradients.report import GradientsReport, StepRow
from multiring.benchmarks.measure import REPEAT, Sample
from multiring.benchmarks.results import Table

__all__ = ["tables"]

MIB = 2**20


def tables(report: GradientsReport) -> list[Table]:
    """Title, columns and cells of each table."""
    return [_gradients(report), _training(report), *([_state(report)] if report.state else [])]


def _gradients(report: GradientsReport) -> Table:
    columns = ["ResNet-50's gradients", "step", "communication", "bandwidth", "memory", "peak"]
    rows = [[row.name, _milliseconds(row.sample), *_costs(report, row)] for row in report.gradients]
    return f"{report.bytes / 1e6:.1f} MB of gradients, {report.ranks} ranks", columns, rows


def _costs(report: GradientsReport, row: StepRow) -> list[str]:
    if row is report.gradients[0]:
        return ["", "", "", ""]
    seconds, more = report.communication(row), report.more_memory(row)
    # A step may come out shorter than without synchronisation where there is next to nothing to do.
    bandwidth = f"{report.bytes / seconds / 1e9:.2f} GB/s" if seconds > 0 else ""
    return [
        f"{seconds * 1e3:.1f} ms{_noise(report, row)}",
        bandwidth,
        f"{more.held / MIB:+.1f} MiB",
        f"{more.peak / MIB:+.1f} MiB",
    ]


def _training(report: GradientsReport) -> Table:
    columns = ["training of ResNet-20", "step", "images/s", "efficiency"]
    rows = [
        [
            row.name,
            _milliseconds(row.sample),
            f"{report.images_per_second(row):.0f}",
            f"{report.efficiency(row):.3f}{_noise(report, row)}",
        ]
        for row in report.training
    ]
    return f"batch {report.batch} a rank, {report.ranks} ranks", columns, rows


def _noise(report: GradientsReport, row: StepRow) -> str:
    is_base = row in (report.gradients[0], report.training[0])
    return "" if is_base or not report.is_noisy(row) else f", {REPEAT}"


def _state(report: GradientsReport) -> Table:
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
        for row in report.state
    ]
    return (
        f"buffers broadcast after each step, all compared every {report.state[0].interval} steps",
        columns,
        rows,
    )


def _milliseconds(sample: Sample, digits: int = 1) -> str:
    median, low, high = (
        f"{1e3 * seconds:.{digits}f}" for seconds in (sample.median, sample.low, sample.high)
    )
    return f"{median} ms [{low}..{high}]"
