"""What a job says on its own: a line at its start, and how an error that ends a rank is shown."""
