"""How the core scales to a thousand ranks: its allreduce on a simulated machine."""
