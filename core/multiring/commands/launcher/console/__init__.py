"""What the launcher makes of the output of ranks: lines with tags, and each error once."""
