"""`multiring plan`: how an allreduce over several hosts is divided, drawn and predicted."""
