"""How the ranks of a job find their places and each other."""
