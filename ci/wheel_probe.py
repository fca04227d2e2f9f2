"""Uses an installed multiring, as a rank or alone: what `import multiring` promises, and an allreduce."""

import sys
import time

import numpy

start = time.perf_counter()
import multiring  # noqa: E402  # what is timed

took = time.perf_counter() - start
loaded = set(sys.modules)
from multiring.commands.frameworks import FRAMEWORKS  # noqa: E402

frameworks = {"ray", *(name for each in FRAMEWORKS.values() for name in each.imports)} & loaded
assert not frameworks, f"import multiring imports {frameworks}"
comm = multiring.init()
assert comm.allreduce(numpy.ones(3)).tolist() == [comm.size] * 3
print(f"import multiring: {took * 1000:.0f} ms beyond NumPy; rank {comm.rank} of {comm.size}")
