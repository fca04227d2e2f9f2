"""`multiring bench allreduce` and `collectives`: latency and bandwidth over sizes."""
