"""What a user runs when something is unclear or does not work: `multiring env` and `multiring doctor`."""
