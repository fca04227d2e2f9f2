"""The algorithms of collectives across hosts, by size: measured by `multiring tune`, kept in a file."""
