"""Hosts that are emulated on one machine, and what leaves them."""
