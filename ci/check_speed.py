"""Checks that an allreduce is not much slower, beside Gloo in the same run, than it was when it was measured.

Ratios are compared, not times: how many times as long as multiring Gloo takes, for each size. The committed
ones (ci/speed_ratios.json) are the lowest that many runs of the same code gave on quiet machines. A cell
fails where half of its ratio is not reached in any of several runs, so that a busy moment is not taken for a
change of the code.

    python ci/check_speed.py            compares
    python ci/check_speed.py --update   measures anew and writes the file: the lowest ratios of the runs
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from multiring import machine

FILE = Path(__file__).resolve().parent / "speed_ratios.json"
SIZES = "4,64KiB,1MiB,16MiB"
RUNS = 5
SLOWER = 0.5

Ratios = dict[str, dict[str, float]]


def measure() -> Ratios:
    """One short run; its table goes to the output. Ratio to Gloo by contender and size in bytes."""
    with tempfile.TemporaryDirectory() as directory:
        results = Path(directory) / "results.json"
        command = [sys.executable, "-m", "multiring", "bench", "allreduce", "-np", "2", "--peers", "gloo"]
        command += ["--sizes", SIZES, "--seconds", "0.1", "--format", "compact", "--json", str(results)]
        subprocess.run(command, check=True, timeout=300)
        rows = json.loads(results.read_text())["rows"]
    ratios: Ratios = {}
    for row in rows:
        ratio = row["derived"]["ratios"].get("Gloo")
        if ratio is not None:
            ratios.setdefault(row["contender"], {})[str(row["bytes"])] = ratio
    return ratios


def too_slow(best: Ratios, committed: Ratios) -> list[str]:
    """One line for each cell that has fallen."""
    return [
        f"{contender}, {size} bytes: at best {best[contender][size]:.1f} times as fast as Gloo; "
        f"it was {ratio:.1f} times, and less than {SLOWER * ratio:.1f} is a fall"
        for contender, cells in committed.items()
        for size, ratio in cells.items()
        if best[contender][size] < SLOWER * ratio
    ]


def compare() -> int:
    """Measures until every cell has been fast enough once; exit code 1 if some never are."""
    committed: Ratios = json.loads(FILE.read_text())
    best: Ratios = {contender: dict.fromkeys(cells, 0.0) for contender, cells in committed.items()}
    findings: list[str] = []
    for run in range(1, RUNS + 1):
        for contender, cells in measure().items():
            for size, ratio in cells.items():
                best[contender][size] = max(best[contender][size], ratio)
        findings = too_slow(best, committed)
        if not findings:
            print(f"speed: every ratio to Gloo reaches {SLOWER:.0%} of the committed one ({run} run(s))")
            return 0
        print(f"speed: {len(findings)} of the ratios not reached in {run} run(s)", flush=True)
    print("\n".join(findings))
    return 1


def update() -> int:
    """Writes the lowest of several runs."""
    runs = [measure() for _ in range(RUNS)]
    lowest = {
        contender: {size: round(min(run[contender][size] for run in runs), 1) for size in cells}
        for contender, cells in runs[0].items()
    }
    FILE.write_text(json.dumps(lowest, indent=2) + "\n")
    print(f"{FILE} written")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--update", action="store_true", help="measure anew and write the committed ratios")
    args = parser.parse_args()
    if machine.core_allowance() < 2:
        print("speed: not compared, for two ranks have one core here and the ratios are of two")
        return 0
    return update() if args.update else compare()


if __name__ == "__main__":
    sys.exit(main())
