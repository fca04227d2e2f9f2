"""Makes the scaling curve: make scaling. Takes half an hour, most of it for multiring at 1,024 ranks."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from multiring.benchmarks.scaling import report, simulation
from multiring.benchmarks.scaling.machine import CONTENDERS, MACHINE, is_left_out
from multiring.benchmarks.scaling.results import Results, load, save
from multiring.benchmarks.scaling.training import measure_profile
from multiring.errors import UsageError

_ROOT = Path(__file__).resolve().parent.parent.parent
_RESULTS = Path(__file__).with_name("results.json")


def main() -> int:
    """Simulates what the results lack, and writes table and picture."""
    parser = argparse.ArgumentParser(prog="python -m multiring.benchmarks.scaling", description=__doc__)
    parser.add_argument("--results", type=Path, default=_RESULTS, help=f"JSON file that grows [{_RESULTS}]")
    parser.add_argument("--fresh", action="store_true", help="forget what was simulated before")
    parser.add_argument("--most-ranks", type=int, default=1024, help="simulate up to so many ranks [1024]")
    parser.add_argument(
        "--only", action="append", choices=CONTENDERS, help="simulate these alone; may be repeated [all]"
    )
    parser.add_argument(
        "--page", type=Path, default=_ROOT / "docs" / "scaling.md", help="page with the tables"
    )
    parser.add_argument("--picture", type=Path, default=_ROOT / "docs" / "scaling.png", help="the picture")
    args = parser.parse_args()
    try:
        results = _simulate(args)
    except UsageError as error:
        print(f"scaling: {error}", file=sys.stderr)
        return 2
    report.write(results, args.page, args.picture)
    print(report.tables(results))
    return 0


def _simulate(args: argparse.Namespace) -> Results:
    program = simulation.build()
    if args.results.is_file() and not args.fresh:
        results = load(args.results)
        if results.machine != MACHINE:
            raise UsageError(f"{args.results} is about another machine: give --fresh")
    else:
        results = Results(MACHINE, measure_profile())
    ranks = MACHINE.ranks_per_host
    while ranks <= args.most_ranks:
        for contender in args.only or CONTENDERS:
            known = results.seconds.setdefault(contender, {})
            if ranks in known or is_left_out(contender, ranks):
                continue
            start = time.monotonic()
            known[ranks] = simulation.simulate(program, contender, ranks, MACHINE)
            print(f"{contender}, {ranks} ranks: simulated in {time.monotonic() - start:.0f} s", flush=True)
            save(results, args.results)
        ranks *= 2
    return results


if __name__ == "__main__":
    sys.exit(main())
