"""`multiring bench`: what this machine gives, beside the libraries that one could use instead."""
