"""The training job: options, the loop, checkpoints, and what it shows and leaves."""
