"""Which way allreduces across hosts go, by their size: measured by `multiring tune`, kept in a file."""
