"""The layers that nets are made of, by kind."""
