"""What a process finds out from its environment about its place in the job."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from multiring.rendezvous import launch_environment
from multiring.rendezvous.launch_environment import Placement


def detect(environ: Mapping[str, str], launcher_process: str = "boot 12 34") -> Placement:
    return launch_environment.detect(environ, lambda variable: launcher_process)


def numbers(place: Placement) -> tuple[int, ...]:
    return dataclasses.astuple(place)[:6]
