"""Training state beside gradients: broadcast from one rank, synchronised, and compared over ranks."""
