"""Training steps: what the driver needs of a framework, and that of every framework."""
