"""The algorithm of allreduces across hosts, by their size: measured by `multiring tune`, kept in a file."""
