"""`multiring.run`: calls a Python function on every rank of a job, from a program or a notebook."""
