"""Each framework's own way to train on several processes, to compare with: `make_trainer` in each module."""
