"""Jobs that torchrun has started on several hosts."""
