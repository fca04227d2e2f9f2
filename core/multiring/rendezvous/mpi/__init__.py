"""MPI as the engine of a job: its ranks, their meeting point, and the bytes that go between hosts.

The package has no MPI compiled in. `multiring build mpi` compiles one small file, the *bridge*, against the
user's; where it is not built, communicators of mpi4py still tell who the ranks are, and TCP carries the
bytes.
"""
