"""Allreduce of arrays on a GPU, beside that of arrays on the host and the limit that copies set.

    multiring run -np 2 benchmarks/devices.py [--json FILE] [--max-mib 256] [--samples 7]

All ranks share the first GPU, which gives their processes turns; with "alone" rank 0 has an array on the GPU
and the others have theirs on the host. Needs PyTorch with CUDA; CuPy is measured where it is installed. The
limit of a size is what the slowest part would take if all parts ran at once: the copy to the host, the
allreduce of arrays on the host, the copy back, each with the same ranks at work. Kinds of arrays take turns;
a time is the median of the samples, each that of the slowest rank.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import multiring

KIB, MIB = 1 << 10, 1 << 20
SIZES = [4, KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB]
COPIED = [64 * KIB, MIB, 16 * MIB, 256 * MIB]


def seconds_of(comm: multiring.Communicator, body: Callable[[], object], repeats: int) -> float:
    """Seconds of one of `repeats` calls, on the slowest rank, until the device is idle."""
    comm.barrier()
    began = time.perf_counter()
    for _ in range(repeats):
        body()
    torch.cuda.synchronize()
    spent = np.array((time.perf_counter() - began) / repeats)
    return float(comm.allreduce(spent, "max"))


def medians(
    comm: multiring.Communicator, bodies: dict[str, Callable[[], object]], nbytes: int, samples: int
) -> dict[str, float]:
    """Median seconds of each body; they take turns."""
    repeats = 100 if nbytes <= 64 * KIB else 20 if nbytes <= 4 * MIB else 3
    for body in bodies.values():
        seconds_of(comm, body, max(repeats // 5, 2))
    found: dict[str, list[float]] = {name: [] for name in bodies}
    for _ in range(samples):
        for name, body in bodies.items():
            found[name].append(seconds_of(comm, body, repeats))
    return {name: statistics.median(times) for name, times in found.items()}


def copies(
    comm: multiring.Communicator, nbytes: int, samples: int, kinds: tuple[str, ...] = ("pinned", "pageable")
) -> dict[str, float]:
    """Seconds of a copy between host and device, all ranks at once; "alone": of pinned memory, by rank 0."""
    device = torch.zeros(nbytes, dtype=torch.uint8, device="cuda")
    bodies: dict[str, Callable[[], object]] = {}
    for name in kinds:
        host = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=name != "pageable")
        copy = comm.rank == 0 or name != "alone"
        bodies[f"{name} to host"] = partial(host.copy_, device, non_blocking=True) if copy else _nothing
        bodies[f"{name} to device"] = partial(device.copy_, host, non_blocking=True) if copy else _nothing
    return medians(comm, bodies, nbytes, samples)


def _nothing() -> None:
    pass


def allreduces(comm: multiring.Communicator, nbytes: int, samples: int) -> dict[str, float]:
    """Seconds of an allreduce in place of float32."""
    count = nbytes // 4
    arrays: dict[str, Any] = {"host": np.ones(count, np.float32), "torch": torch.ones(count, device="cuda")}
    if importlib.util.find_spec("cupy"):
        arrays["cupy"] = importlib.import_module("cupy").ones(count, np.float32)
    on_device = arrays["cupy" if "cupy" in arrays else "torch"]
    arrays["alone"] = on_device if comm.rank == 0 else np.ones(count, np.float32)
    bodies: dict[str, Callable[[], object]] = {
        name: partial(comm.allreduce, x, "average", x) for name, x in arrays.items()
    }
    return medians(comm, bodies, nbytes, samples)


def main() -> None:
    """Measures, prints, and writes what was measured."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--max-mib", type=int, default=256, help="largest array")
    parser.add_argument("--samples", type=int, default=7)
    options = parser.parse_args()
    comm = multiring.init()
    rows, bandwidths = [], []
    say = print if comm.rank == 0 else lambda *_: None
    say(f"{torch.cuda.get_device_name()}, {comm.size} ranks on one GPU")
    say(f"{'bytes':>10}  GB/s of a rank: pinned to host, to device; pageable to host, to device")
    for nbytes in [size for size in COPIED if size <= options.max_mib * MIB]:
        spent = copies(comm, nbytes, options.samples)
        bandwidths.append({"bytes": nbytes, **{name: nbytes / s / 1e9 for name, s in spent.items()}})
        say(f"{nbytes:10}", *(f"{nbytes / s / 1e9:8.1f}" for s in spent.values()))
    kinds = ["torch", "cupy", "alone"]
    say(f"{'bytes':>10}  us: host; limit, torch, cupy; limit, alone.  Share of the limit: torch, cupy, alone")
    for nbytes in [size for size in SIZES if size <= options.max_mib * MIB]:
        copied = copies(comm, nbytes, max(options.samples // 2, 3), ("pinned", "alone"))
        spent = allreduces(comm, nbytes, options.samples)
        limit, limit_alone = (
            max(copied[f"{kind} to host"], copied[f"{kind} to device"], spent["host"])
            for kind in ("pinned", "alone")
        )
        rows.append({"bytes": nbytes, **copied, **spent, "limit": limit, "limit alone": limit_alone})
        limits = {name: limit_alone if name == "alone" else limit for name in kinds if name in spent}
        times = [
            spent["host"],
            limit,
            *(spent[n] for n in limits if n != "alone"),
            limit_alone,
            spent["alone"],
        ]
        shares = [least / spent[name] for name, least in limits.items()]
        say(f"{nbytes:10}", *(f"{s * 1e6:10.1f}" for s in times), *(f"{share:6.2f}" for share in shares))
    if options.json is not None and comm.rank == 0:
        record = {
            "device": torch.cuda.get_device_name(),
            "ranks": comm.size,
            "gigabytes_per_second": bandwidths,
            "seconds": rows,
        }
        options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
